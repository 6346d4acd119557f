//! How much memory a run may take.

use std::{fmt, thread};

use kernels::Device;
use run_config::{ByteSize, RunConfig};
use serde::Serialize;

use super::{
    CardMemory, Place,
    display::bytes,
    machine::{Available, available_memory},
};
use crate::error::{Result, TrainerError};

/// What CUDA reports, 31.37 GiB; `nvidia-smi` says 32,607 MiB, of which a program never gets the last 485.
pub(crate) const RTX_5090: ByteSize = ByteSize(32_122 << 20);
/// Share of a card's memory that its driver and the page tables leave.
const USABLE_SHARE_OF_CARD: f64 = 0.98;
/// What a CUDA context with its libraries takes of a card, assumed; what is free on an open card is measured beside it.
const CUDA_CONTEXT_BYTES: u64 = 600_000_000;
/// Left free of what an open card has free: graphs, kernels loaded later, and a little for whatever else draws on the card.
const CARD_MARGIN_BYTES: u64 = 256 << 20;
/// What the program takes on a CPU besides its planned buffers: code, tokenizer, threads.
const HOST_BASE_BYTES: u64 = 256 << 20;

/// What a program takes that loads a model and asks it: threads and what they reserve. Code and tokenizer are there already.
const PROGRAM_BYTES: u64 = 64 << 20;

/// Threads that a program has besides those that compute and those that read.
const OTHER_THREADS: usize = 3;

fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Refuses what a CPU has no memory for, before it is allocated; cards refuse by themselves.
///
/// # Errors
/// [`TrainerError::NoRoom`] that names the purpose.
pub(crate) fn require_room(needed: u64, device: &Device, purpose: impl FnOnce() -> String) -> Result<()> {
    match Budget::of_program() {
        Some(budget) if device.as_cuda().is_none() && budget.bytes < needed => {
            Err(TrainerError::NoRoom { purpose: purpose(), needed, budget })
        }
        _ => Ok(()),
    }
}

/// An amount of memory and where the number comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Budget {
    /// What the planned buffers may take.
    pub bytes: u64,
    /// Such as `runtime.memory_limit: 24GB`.
    pub origin: String,
    /// What the data stream needs of the same memory, and what there would be without it.
    #[serde(skip)]
    pub(super) data_stream: Option<(u64, u64)>,
}

impl Budget {
    /// What a plan may take at a place: `runtime.memory_limit` where it is given, and never more than a card that is there has; on a
    /// CPU without a limit what this machine has free. None where the system does not tell.
    pub(super) fn planned(config: &RunConfig, place: &Place) -> Option<Self> {
        match (config.runtime.memory_limit, place) {
            (Some(limit), Place::Cpu(_)) => Some(Self::of_limit(limit)),
            (Some(limit), Place::AssumedCard) => Some(Self::of_card_limit(limit)),
            (None, Place::AssumedCard) => {
                Some(Self::less_context(RTX_5090, &format!("an RTX 5090, assumed: {RTX_5090}")))
            }
            (_, Place::Cpu(_) | Place::Card(_)) => Self::here(config, place),
        }
    }

    /// What a trainer may take at a place that is at hand: the least of the limit, of what there is, and of what is free.
    pub(super) fn here(config: &RunConfig, place: &Place) -> Option<Self> {
        let limit = config.runtime.memory_limit;
        let bounds: Vec<Self> = match place {
            Place::Cpu(_) | Place::AssumedCard => {
                limit.map(Self::of_limit).into_iter().chain(Self::of_machine(config)).collect()
            }
            Place::Card(card) => {
                let of_limit =
                    limit.into_iter().flat_map(|limit| [Self::of_card_limit(limit), Self::left_of_limit(limit, card)]);
                of_limit.chain(Self::of_card(card)).collect()
            }
        };
        bounds.into_iter().min_by_key(|budget| budget.bytes)
    }

    fn new(bytes: u64, origin: String) -> Self {
        Self { bytes, origin, data_stream: None }
    }

    /// What a card has, and what it has free.
    fn of_card(card: &CardMemory) -> Vec<Self> {
        let &CardMemory { ref name, total, free, .. } = card;
        let whole = Self::less_context(ByteSize(total), &format!("{name} with {}", bytes(total)));
        let free = free.map(|free| {
            let origin = format!("{name} with {} free of {}, less a margin", bytes(free), bytes(total));
            Self::new(free.saturating_sub(CARD_MARGIN_BYTES), origin)
        });
        [whole].into_iter().chain(free).collect()
    }

    fn of_card_limit(limit: ByteSize) -> Self {
        Self::less_context(limit, &format!("runtime.memory_limit: {limit}"))
    }

    /// The limit holds for everything that is taken of a card, by others too.
    fn left_of_limit(limit: ByteSize, card: &CardMemory) -> Self {
        let taken = card.free.map_or(0, |free| card.total.saturating_sub(free));
        let bytes = limit.bytes().saturating_sub(taken);
        Self::new(bytes, format!("runtime.memory_limit: {limit}, less what is taken of {} already", card.name))
    }

    fn less_context(memory: ByteSize, origin: &str) -> Self {
        let usable = (memory.bytes() as f64 * USABLE_SHARE_OF_CARD) as u64;
        let bytes = usable.saturating_sub(CUDA_CONTEXT_BYTES);
        Self::new(bytes, format!("{origin}, less what the driver and its libraries take"))
    }

    fn of_limit(limit: ByteSize) -> Self {
        Self::new(limit.bytes(), format!("runtime.memory_limit: {limit}"))
    }

    fn of_machine(config: &RunConfig) -> Option<Self> {
        let threads = config.runtime.threads.unwrap_or_else(cores) + config.data.num_workers + OTHER_THREADS;
        let Available { bytes, origin } = available_memory(threads)?;
        Some(Self::beside_the_data(bytes, origin, dataset::memory_bound(&config.data)))
    }

    /// What a data stream that needs `needed` bytes leaves of what is free.
    pub(super) fn beside_the_data(free: u64, origin: &str, needed: u64) -> Self {
        let without = free.saturating_sub(HOST_BASE_BYTES);
        let origin = format!("{origin}, less what the data stream needs");
        Self { bytes: without.saturating_sub(needed), origin, data_stream: Some((needed, without)) }
    }

    /// What a model that is asked something may take on this machine's CPU, where no data are streamed.
    fn of_program() -> Option<Self> {
        let Available { bytes, origin } = available_memory(cores() + OTHER_THREADS)?;
        let origin = format!("{origin}, less what the program needs");
        Some(Self::new(bytes.saturating_sub(PROGRAM_BYTES), origin))
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", bytes(self.bytes), self.origin)
    }
}
