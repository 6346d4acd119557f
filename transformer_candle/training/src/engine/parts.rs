//! What owns the buffers of an engine. Its constructors run twice: to count the buffers, and with memory.

use std::collections::VecDeque;

use kernels::{
    DeviceKind,
    fp8::ScaleBlock,
    memory::{Arena, Plan, count},
};
use model::{Decoder, DecoderSettings, Generator, ModelShape};
use run_config::{ActivationRecompute, Precision, RunConfig, RuntimeConfig};

use super::{
    micro_batch::MicroBatch,
    optimizer::Optimizer,
    settings::{EngineSettings, StepOf},
    sharding::Sharding,
    synthetic::synthetic,
    tree_reduction::TreeReduction,
};
use crate::{device::scale_block, error::Result, ranks::RankInfo};

/// Tokens reserved for a prompt beside those of its text, which has at most one token per byte.
const PROMPT_MARGIN: usize = 16;

/// Everything of an engine that owns buffers.
pub(crate) struct Parts {
    /// One for each stage of the run, at least one, in the same memory.
    pub(super) stages: VecDeque<StageEngine>,
    pub(crate) optimizer: Optimizer,
    pub(super) sharding: Sharding,
    /// None without `runtime.deterministic_reduction`.
    pub(super) reduction: Option<TreeReduction>,
    /// None without prompts.
    pub(super) generator: Option<Generator>,
}

impl Parts {
    /// Takes the buffers of a run; a run without stages has one.
    ///
    /// # Panics
    /// If there is no stage.
    pub(super) fn new(stages: &[StepOf<'_>], arena: &mut Arena) -> Result<Self> {
        let (first, later) = stages.split_first().expect("there is at least one stage");
        let StepOf { config, settings, .. } = *first;
        let engine = StageEngine::new(*first, true, arena)?;
        let optimizer = Optimizer::new(&engine.decoder, config, settings, arena)?;
        let sharding = Sharding::new(engine.decoder.layout(), settings, arena);
        let reduction = config.runtime.deterministic_reduction.map(|virtual_shards| {
            TreeReduction::new(&engine.decoder, sharding.own_shard(), virtual_shards, settings.rank_info, arena)
        });
        let generator = generator(*first, &engine.decoder, arena)?;
        let mut engines = VecDeque::from([engine]);
        for stage in later {
            arena.rewind();
            engines.push_back(StageEngine::new(*stage, true, arena)?);
        }
        Ok(Self { stages: engines, optimizer, sharding, reduction: reduction.transpose()?, generator })
    }

    /// Counts the buffers of a run.
    pub(crate) fn count(stages: &[StepOf<'_>]) -> (Self, Plan) {
        count(|arena| Self::new(stages, arena)).expect("buffers without memory are never refused")
    }
}

impl StepOf<'_> {
    /// Bytes of the buffers of a run that consists of such steps.
    pub(crate) fn bytes(self) -> u64 {
        Parts::count(&[self]).1.bytes()
    }
}

/// The elements of an operand that share a scale; None where matmuls are not in fp8.
pub(crate) fn fp8_block(runtime: &RuntimeConfig) -> Option<ScaleBlock> {
    (runtime.precision == Precision::Fp8).then(|| scale_block(runtime.fp8_recipe))
}

/// Continues `runtime.evaluation.prompts`; None without prompts.
fn generator(stage: StepOf<'_>, decoder: &Decoder, arena: &mut Arena) -> Result<Option<Generator>> {
    let StepOf { config, shape, settings } = stage;
    let evaluation = &config.runtime.evaluation;
    let Some(longest) = evaluation.prompts.iter().map(String::len).max() else { return Ok(None) };
    let tokens = longest + PROMPT_MARGIN + evaluation.prompt_tokens;
    Ok(Some(Generator::take(shape, decoder.weights(), tokens, settings.device, arena)?))
}

/// The part of an engine that differs between the stages of a run.
pub(crate) struct StageEngine {
    pub(crate) decoder: Decoder,
    pub(crate) micro_batch: MicroBatch,
}

impl StageEngine {
    /// Takes the buffers of a stand-alone evaluation, `micro_batch` sequences at a time, without gradients and saved
    /// activations.
    pub(crate) fn for_evaluation(
        config: &RunConfig,
        shape: &ModelShape,
        micro_batch: usize,
        device: DeviceKind,
        arena: &mut Arena,
    ) -> Result<Self> {
        let (activation_recompute, rank_info) = (ActivationRecompute::None, RankInfo::default());
        let settings = EngineSettings { micro_batch, activation_recompute, device, rank_info };
        Self::new(StepOf { config, shape, settings }, false, arena)
    }

    /// Takes the buffers of a stage.
    fn new(StepOf { config, shape, settings }: StepOf<'_>, training: bool, arena: &mut Arena) -> Result<Self> {
        let (batch, sequence_length, device) = (settings.micro_batch, config.data.sequence_length, settings.device);
        let decoder_settings = DecoderSettings {
            batch,
            sequence_length,
            precision: config.runtime.precision,
            fp8: fp8_block(&config.runtime),
            recompute: settings.activation_recompute,
            training,
            device,
            z_loss: config.optimizer.z_loss as f32,
        };
        let decoder = Decoder::new(shape, &decoder_settings, arena)?;
        let sizes = [batch, sequence_length];
        let micro_batch = MicroBatch::new(sizes, config.data.packing, shape.vocab_size, device, arena)?;
        Ok(Self { decoder, micro_batch })
    }

    /// Runs every operation of forward, backward and an evaluation; with several ranks also the backward pass in parts.
    pub(super) fn warm_up(decoder: &mut Decoder, micro_batch: &mut MicroBatch, has_ranks: bool) -> Result<()> {
        let sequences = micro_batch.sequences();
        let batch = synthetic(sequences, decoder.sequence_length(), decoder.shape().vocab_size);
        micro_batch.upload(&batch, 0..sequences)?;
        let scale = 1.0 / batch.target_count as f32;
        micro_batch.train(decoder, scale)?;
        if has_ranks {
            micro_batch.train_in_parts(decoder, scale, |_, _| Ok(()))?;
        }
        micro_batch.evaluate(decoder)?;
        Ok(())
    }
}
