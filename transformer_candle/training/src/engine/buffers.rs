//! The memory plan of training and evaluation: every buffer.

use kernels::{DeviceKind, memory::Plan};
use model::{Decoder, DecoderPlan, DecoderSettings, GeneratorPlan, ModelShape, dtype_of};
use run_config::{ActivationRecompute, RunConfig};

use super::{
    micro_batch::MicroBatchPlan,
    optimizer::OptimizerPlan,
    settings::{EngineSettings, StepOf},
    sharding::ShardingPlan,
    tree_reduction::TreeReductionPlan,
};
use crate::ranks::RankInfo;

/// Every buffer of a training run.
#[derive(Debug)]
pub struct RunBuffers {
    /// Every buffer.
    pub plan: Plan,
    /// The decoder's buffers.
    pub decoder: DecoderPlan,
    /// The optimizer's buffers.
    pub optimizer: OptimizerPlan,
    /// The micro-batch's buffers.
    pub micro_batch: MicroBatchPlan,
    /// The ranks' shards, and the staging buffer of their gradient exchange.
    pub sharding: ShardingPlan,
    /// The buffers of the tree reduction; none without `runtime.deterministic_reduction`.
    pub reduction: Option<TreeReductionPlan>,
    /// The buffers that generate the texts written after evaluations; none without prompts.
    pub generator: Option<GeneratorPlan>,
}

impl RunBuffers {
    /// Plans the buffers of a run.
    pub fn new(config: &RunConfig, shape: &ModelShape, settings: EngineSettings) -> Self {
        let mut plan = Plan::new();
        let (decoder, micro_batch) = forward_buffers(config, shape, settings, true, &mut plan);
        let optimizer = OptimizerPlan::add_to(&mut plan, decoder.layout(), config, settings);
        let sharding = ShardingPlan::add_to(&mut plan, decoder.layout(), settings);
        let reduction = config.runtime.deterministic_reduction.map(|virtual_shards| {
            TreeReductionPlan::add_to(&mut plan, decoder.layout(), virtual_shards, settings.rank_info)
        });
        let generator = generation_buffers(config, shape, settings, &mut plan);
        Self { plan, decoder, optimizer, micro_batch, sharding, reduction, generator }
    }
}

/// The buffers of a run in stages, which share their memory: each buffer is as large as the largest that any stage
/// needs.
#[derive(Debug)]
pub struct StagedBuffers {
    /// Every buffer, in the size that is allocated.
    pub plan: Plan,
    /// The settings and the buffers of each stage, in order; at least one.
    pub stages: Vec<(EngineSettings, RunBuffers)>,
}

impl StagedBuffers {
    /// Plans the buffers of the stages of a run; a run without stages has one.
    pub(crate) fn new(stages: &[StepOf<'_>]) -> Self {
        let buffers = |stage: &StepOf<'_>| (stage.settings, RunBuffers::new(stage.config, stage.shape, stage.settings));
        let stages: Vec<_> = stages.iter().map(buffers).collect();
        Self { plan: Plan::largest(stages.iter().map(|(_, buffers)| &buffers.plan)), stages }
    }
}

/// Tokens reserved for a prompt beside those of its text, which has at most one token per byte.
const PROMPT_MARGIN: usize = 16;

/// Plans the buffers that continue `runtime.evaluation.prompts`; none without prompts.
fn generation_buffers(
    config: &RunConfig,
    shape: &ModelShape,
    settings: EngineSettings,
    plan: &mut Plan,
) -> Option<GeneratorPlan> {
    let evaluation = &config.runtime.evaluation;
    let longest = evaluation.prompts.iter().map(String::len).max()?;
    let tokens = longest + PROMPT_MARGIN + evaluation.prompt_tokens;
    Some(GeneratorPlan::new(shape, dtype_of(config.runtime.precision), tokens, settings.device, plan))
}

/// Every buffer of a stand-alone evaluation, without gradients, optimizer and saved activations.
#[derive(Debug)]
pub struct EvaluationBuffers {
    /// Every buffer.
    pub plan: Plan,
    /// The decoder's buffers.
    pub decoder: DecoderPlan,
    /// The micro-batch's buffers.
    pub micro_batch: MicroBatchPlan,
}

impl EvaluationBuffers {
    /// Plans the buffers of an evaluation, `micro_batch` sequences at a time.
    pub fn new(config: &RunConfig, shape: &ModelShape, micro_batch: usize, device: DeviceKind) -> Self {
        let mut plan = Plan::new();
        let (activation_recompute, rank_info) = (ActivationRecompute::None, RankInfo::default());
        let settings = EngineSettings { micro_batch, activation_recompute, device, rank_info };
        let (decoder, micro_batch) = forward_buffers(config, shape, settings, false, &mut plan);
        Self { plan, decoder, micro_batch }
    }
}

/// Plans the buffers of the decoder and of its micro-batches.
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
