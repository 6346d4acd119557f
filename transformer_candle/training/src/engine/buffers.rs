//! The memory plan of training and evaluation: every buffer.

use kernels::{DeviceKind, memory::Plan};
use model::{Decoder, DecoderPlan, DecoderSettings, ModelShape};
use run_config::{ActivationRecompute, RunConfig};

use super::{micro_batch::MicroBatchPlan, optimizer::OptimizerPlan, settings::EngineSettings};

/// Every buffer of a training run.
#[derive(Debug)]
pub struct RunBuffers {
    /// Every buffer.
    pub plan: Plan,
    /// The decoder's.
    pub decoder: DecoderPlan,
    /// The optimizer's.
    pub optimizer: OptimizerPlan,
    /// The micro-batch's.
    pub micro_batch: MicroBatchPlan,
}

impl RunBuffers {
    /// Plans the buffers of a run.
    pub fn new(config: &RunConfig, shape: &ModelShape, settings: EngineSettings) -> Self {
        let mut plan = Plan::new();
        let (decoder, micro_batch) = forward_buffers(config, shape, settings, true, &mut plan);
        let optimizer = OptimizerPlan::add_to(
            &mut plan,
            decoder.layout(),
            &config.optimizer,
            config.runtime.precision,
            settings.device,
        );
        Self { plan, decoder, optimizer, micro_batch }
    }
}

/// Every buffer of a stand-alone evaluation, without gradients, optimizer and saved activations.
#[derive(Debug)]
pub struct EvaluationBuffers {
    /// Every buffer.
    pub plan: Plan,
    /// The decoder's.
    pub decoder: DecoderPlan,
    /// The micro-batch's.
    pub micro_batch: MicroBatchPlan,
}

impl EvaluationBuffers {
    /// Plans the buffers of an evaluation, `micro_batch` sequences at a time.
    pub fn new(config: &RunConfig, shape: &ModelShape, micro_batch: usize, device: DeviceKind) -> Self {
        let mut plan = Plan::new();
        let settings = EngineSettings { micro_batch, activation_recompute: ActivationRecompute::None, device };
        let (decoder, micro_batch) = forward_buffers(config, shape, settings, false, &mut plan);
        Self { plan, decoder, micro_batch }
    }
}

/// The buffers of the decoder and of its micro-batches.
fn forward_buffers(
    config: &RunConfig,
    shape: &ModelShape,
    settings: EngineSettings,
    training: bool,
    plan: &mut Plan,
) -> (DecoderPlan, MicroBatchPlan) {
    let decoder_settings = DecoderSettings {
        batch: settings.micro_batch,
        sequence_length: config.data.sequence_length,
        precision: config.runtime.precision,
        recompute: settings.activation_recompute,
        training,
        device: settings.device,
        z_loss: config.optimizer.z_loss as f32,
    };
    let decoder = Decoder::plan(shape, &decoder_settings, plan);
    let tokens = settings.micro_batch * config.data.sequence_length;
    (decoder, MicroBatchPlan::add_to(plan, tokens, config.data.packing, shape.vocab_size, settings.device))
}
