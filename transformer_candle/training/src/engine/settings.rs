//! What an engine's buffers follow from besides the config.

use kernels::DeviceKind;
use model::{LoraShape, ModelShape};
use run_config::{ActivationRecompute, RunConfig};

use crate::{
    error::{Result, TrainerError},
    ranks::RankInfo,
};

/// What the buffers of a run of one config still depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineSettings {
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// What is computed again in the backward pass.
    pub activation_recompute: ActivationRecompute,
    /// Where it computes.
    pub device: DeviceKind,
    /// Which rank of the run it belongs to.
    pub rank_info: RankInfo,
}

/// A step of a run or of one of its stages: what its buffers and its time follow from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepOf<'a> {
    /// The run's config, or the stage's.
    pub(crate) config: &'a RunConfig,
    pub(crate) shape: &'a ModelShape,
    pub(crate) settings: EngineSettings,
}

/// The model of a config whose vocabulary is known, with the adapters that are to train.
///
/// # Errors
/// [`TrainerError::Request`] if it is not.
pub fn model_shape(config: &RunConfig) -> Result<ModelShape> {
    let vocab_size = config.model.vocab_size.ok_or_else(|| {
        TrainerError::Request(
            "model.vocab_size is not known: name a tokenizer in tokenizer.tokenizer_json, or give the number".into(),
        )
    })?;
    Ok(ModelShape::new(&config.model, vocab_size).with_lora(LoraShape::from_config(&config.lora)))
}
