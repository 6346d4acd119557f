//! Where a run would be trained, as far as its memory and its speed go.

use kernels::{
    Device, DeviceKind,
    cuda::{Card, Cuda, Memory},
};
use run_config::RunConfig;

use super::{cpu_speed::CpuSpeed, work};
use crate::{
    device::{self, refusal},
    error::{Result, TrainerError},
};

/// Where a run would be trained.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Place {
    /// This machine's CPU, and how fast it is where somebody has measured.
    Cpu(Option<CpuSpeed>),
    /// A card of this machine.
    Card(CardMemory),
    /// The card that the presets are made for, on some other machine.
    AssumedCard,
}

/// A card's memory, and how fast it is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CardMemory {
    pub(crate) name: String,
    /// In bytes.
    pub(crate) total: u64,
    /// What is left beside the context of this program and whatever else runs there; none before the card is opened.
    pub(crate) free: Option<u64>,
    /// Nominal BF16 operations a second.
    pub(crate) peak: Option<f64>,
}

impl CardMemory {
    /// Of a card that could not be opened.
    pub(crate) fn unopened(card: &Card) -> Self {
        let peak = card.nominal_bf16_flops();
        Self { name: card.name.clone(), total: card.total_bytes, free: None, peak }
    }

    /// Of a card that is open.
    pub(crate) fn now(card: &Cuda) -> kernels::Result<Self> {
        let Memory { free, total } = card.memory()?;
        Ok(Self { name: card.name().to_owned(), total, free: Some(free), peak: card.nominal_bf16_flops() })
    }
}

impl Place {
    /// Where a run is meant to be trained: the card that it names or finds, one that is assumed if it is meant for a card and
    /// there is none here, else the CPU.
    ///
    /// # Errors
    /// [`TrainerError::Request`] where the run names a card and a card does not take it.
    pub(super) fn of(
        config: &RunConfig,
        cards: &[Card],
        look: impl Fn(&Card) -> CardMemory,
        measure: impl Fn(&RunConfig) -> Result<CpuSpeed>,
    ) -> Result<Self> {
        let refusal = refusal(config)?;
        let found = |ordinal| cards.iter().find(|card| card.ordinal == ordinal && card.refusal().is_none());
        let place = |card: Option<&Card>| card.map_or(Self::AssumedCard, |card| Self::Card(look(card)));
        match (config.runtime.device, refusal) {
            (run_config::Device::Cpu, _) | (run_config::Device::Auto, Some(_)) => Ok(Self::Cpu(Some(measure(config)?))),
            (run_config::Device::Cuda(ordinal), None) => Ok(place(found(ordinal))),
            (named @ run_config::Device::Cuda(_), Some(clause)) => {
                Err(TrainerError::Request(device::refused(named, &clause)))
            }
            (run_config::Device::Auto, None) => match found(0) {
                None => {
                    let speed = measure(config)?;
                    let too_long = work(config)?.is_too_long_for_cpu(speed);
                    Ok(if too_long { Self::AssumedCard } else { Self::Cpu(Some(speed)) })
                }
                card => Ok(place(card)),
            },
        }
    }

    /// A device at hand; a CPU's speed is not measured.
    pub(super) fn here(device: &Device) -> Result<Self> {
        match device {
            Device::Cpu => Ok(Self::Cpu(None)),
            Device::Cuda(card) => Ok(Self::Card(CardMemory::now(card)?)),
        }
    }

    pub(super) fn kind(&self) -> DeviceKind {
        match self {
            Self::Cpu(_) => DeviceKind::Cpu,
            Self::Card(_) | Self::AssumedCard => DeviceKind::Cuda,
        }
    }
}
