//! The weights that training starts from: random initialization, a pretrained model, or a checkpoint.

use dataset::CancelToken;
use model::hugging_face::PretrainedWeights;
use model::{ModelShape, initialization};
use run_config::ResolvedRun;

use crate::{
    checkpoint::{BaseModel, Checkpoint},
    engine::Engine,
    error::Result,
};

/// The source of the weights before the next step.
pub(super) enum StartingPoint<'a> {
    Random { seed: u64 },
    Pretrained { weights: &'a Pretrained, seed: u64 },
    Checkpoint(&'a Checkpoint),
}

impl<'a> StartingPoint<'a> {
    /// Selects the checkpoint that is resumed from, or the pretrained weights, or else random ones drawn from the seed.
    pub(super) fn new(resumed: Option<&'a Checkpoint>, pretrained: Option<&'a Pretrained>, seed: u64) -> Self {
        match (resumed, pretrained) {
            (Some(checkpoint), _) => Self::Checkpoint(checkpoint),
            (None, Some(weights)) => Self::Pretrained { weights, seed },
            (None, None) => Self::Random { seed },
        }
    }

    /// Returns the record of the model that adapters train beside; None without adapters.
    ///
    /// # Errors
    /// [`crate::TrainerError::Checkpoint`] if the checkpoint's record is corrupted.
    pub(super) fn base_record(&self) -> Result<Option<BaseModel>> {
        Ok(match self {
            Self::Checkpoint(checkpoint) => checkpoint.base_record()?,
            Self::Pretrained { weights, .. } => weights.base.clone(),
            Self::Random { .. } => None,
        })
    }
}

/// The checked weights that a new run starts from.
pub(super) struct Pretrained {
    model: PretrainedWeights,
    /// The record of `model`, where adapters train beside it.
    base: Option<BaseModel>,
    /// The adapters of `lora.init_from`, if set.
    adapters: Option<PretrainedWeights>,
}

/// Fills the engine's weights and optimizer state from the starting point.
pub(super) fn fill(engine: &mut Engine, shape: &ModelShape, start: &StartingPoint, cancel: &CancelToken) -> Result<()> {
    let pool = engine.pool();
    let Engine { decoder, optimizer, .. } = engine;
    pool.install(|| match start {
        StartingPoint::Random { seed } => {
            optimizer.fill_low_bits(|low_bits| Ok(initialization::fill(shape, *seed, decoder.weights_mut(), low_bits)?))
        }
        StartingPoint::Pretrained { weights: Pretrained { model, adapters, .. }, seed } => {
            let (cancelled, weights) = (|| cancel.is_cancelled(), decoder.weights_mut());
            optimizer.fill_low_bits(|mut low_bits| {
                model.read(weights, low_bits.as_deref_mut(), &cancelled, None)?;
                if let Some(adapters) = adapters {
                    return Ok(adapters.read(weights, low_bits, &cancelled, None)?);
                }
                Ok(initialization::fill_adapters(shape, *seed, weights, low_bits.as_deref())?)
            })
        }
        StartingPoint::Checkpoint(checkpoint) => {
            checkpoint.weights(shape, decoder.weights_mut(), cancel)?;
            Ok(checkpoint.optimizer(shape, optimizer.state_mut(), cancel)?)
        }
    })
}

/// Opens and checks the weights of `model.init_from` and `lora.init_from` for a new run; None for a resumed one.
pub(super) fn pretrained_weights(
    run: &ResolvedRun,
    shape: &ModelShape,
    is_resumed: bool,
    notes: &mut Vec<String>,
    cancel: &CancelToken,
) -> Result<Option<Pretrained>> {
    let Some(directory) = run.config.model.init_from.as_deref().filter(|_| !is_resumed) else {
        return Ok(None);
    };
    let checkpoint = Checkpoint::open(directory)?;
    let (model, base) = match &shape.lora {
        Some(_) => checkpoint.pretrained_base(shape, cancel).map(|(weights, base)| (weights, Some(base)))?,
        None => (checkpoint.pretrained_weights(shape, cancel)?, None),
    };
    notes.push(format!("training starts from the weights in {}", directory.display()));
    let adapters = match run.config.lora.init_from.as_deref().filter(|_| shape.lora.is_some()) {
        Some(adapters) => {
            notes.push(format!("adapters start from those in {}", adapters.display()));
            let checkpoint = Checkpoint::open(adapters)?;
            checkpoint.check_base(directory, cancel)?;
            Some(checkpoint.pretrained_adapters(shape, cancel)?)
        }
        None => None,
    };
    Ok(Some(Pretrained { model, base, adapters }))
}
