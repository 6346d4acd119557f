//! The settings that, with the config, determine an engine's buffers.

use kernels::DeviceKind;
use model::{LoraShape, ModelShape};
use run_config::{ActivationRecompute, RunConfig};

use crate::{
    error::{Result, TrainerError},
    ranks::RankInfo,
};

/// The settings that, beside the config, determine the buffers of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineSettings {
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Which activations the backward pass recomputes.
    pub activation_recompute: ActivationRecompute,
    /// The kind of device that the engine runs on.
    pub device: DeviceKind,
    /// The rank that the engine belongs to.
    pub rank_info: RankInfo,
}

/// Config, model and settings of an optimizer step, of a run or of a stage: they decide its buffers and its time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepOf<'a> {
    /// The run's config, or the stage's.
    pub(crate) config: &'a RunConfig,
    pub(crate) shape: &'a ModelShape,
    pub(crate) settings: EngineSettings,
}

/// Returns the model shape of a config whose vocabulary size is known, with the adapters that are to train.
///
/// # Errors
/// [`TrainerError::Request`] if the vocabulary size is not known.
pub fn model_shape(config: &RunConfig) -> Result<ModelShape> {
    let vocab_size = config.model.vocab_size.ok_or_else(|| {
        TrainerError::Request(
            "model.vocab_size is not known: name a tokenizer in tokenizer.tokenizer_json, or give the number".into(),
        )
    })?;
    let lora = LoraShape::from_config(&config.lora, config.runtime.precision);
    Ok(ModelShape::new(&config.model, vocab_size).with_lora(lora))
}
