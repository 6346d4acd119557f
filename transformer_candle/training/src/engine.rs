//! The training engine: decoder, optimizer and micro-batch over counted buffers. It computes steps and knows no
//! data, checkpoints or metrics.
//!
//! A step launches everything it needs and waits once, at its end, for three numbers
//! (docs/decisions/011-one-wait-per-step.md).

mod gradient_exchange;
mod micro_batch;
mod optimizer;
mod parts;
mod settings;
mod shard;
mod sharding;
mod synthetic;
mod tree_reduction;

use std::{collections::VecDeque, sync::Arc};

use dataset::Batch;
use kernels::{Device, counter_hash::mix, memory};
use model::{Decoder, Generator, initialization};
use rayon::ThreadPool;
use run_config::RunConfig;

pub(crate) use self::settings::StepOf;
pub(crate) use self::synthetic::SyntheticSteps;
pub(crate) use self::{
    gradient_exchange::share_after_backward,
    optimizer::muon_flops,
    parts::{Parts, StageEngine, fp8_block},
    shard::largest_shard,
};
pub use self::{
    micro_batch::MicroBatch,
    optimizer::{
        Optimizer, ParameterGroup, StateLayout, StateTensor, StepOutcome, SumOverRanks, UpdateRule, parameter_groups,
    },
    settings::{EngineSettings, model_shape},
    shard::{Shard, shards},
    sharding::Sharding,
    synthetic::synthetic,
    tree_reduction::TreeReduction,
};
use crate::{error::Result, pool, stop::StopSignal};

/// A model in training, without data, checkpoints and metrics.
pub struct Engine {
    /// Weights, gradients and activations.
    pub decoder: Decoder,
    /// The optimizer, over the decoder's weights and gradients.
    pub optimizer: Optimizer,
    /// The micro-batch on the device: token ids, targets and document starts.
    pub micro_batch: MicroBatch,
    /// The shards of the ranks, and the exchange of gradients and weights between them.
    pub sharding: Sharding,
    /// Sums a step in an order that does not depend on the number of ranks; none without `deterministic_reduction`.
    pub reduction: Option<TreeReduction>,
    /// Continues `runtime.evaluation.prompts` with the current weights; none without prompts.
    pub generator: Option<Generator>,
    /// Decoder and micro-batch of each later stage, in order, in the same memory.
    later_stages: VecDeque<StageEngine>,
    /// The current stage, from 0.
    stage: usize,
    device: Device,
    pool: Arc<ThreadPool>,
    /// The run's seed, from which dropout masks are drawn.
    seed: u64,
}

impl Engine {
    /// Allocates every buffer of a run with these stages (at least one); the first one is the current stage. All
    /// weights are zero: fill them, then [`Engine::warm_up`].
    ///
    /// # Errors
    /// [`crate::TrainerError::Kernel`] if the device has too little memory, [`crate::TrainerError::Request`] if the threads
    /// cannot be started.
    pub(crate) fn allocate(config: &RunConfig, stages: &[StepOf<'_>], device: &Device) -> Result<Self> {
        let parts = memory::allocate(device, |arena| Parts::new(stages, arena))?;
        let Parts { stages: mut later_stages, optimizer, sharding, reduction, generator } = parts;
        let StageEngine { decoder, micro_batch } = later_stages.pop_front().expect("there is at least one stage");
        Ok(Self {
            decoder,
            optimizer,
            micro_batch,
            sharding,
            reduction,
            generator,
            later_stages,
            stage: 0,
            device: device.clone(),
            pool: Arc::new(pool::from_config(config)?),
            seed: config.runtime.seed,
        })
    }

    /// Fills the weights with the initial values of a run of this seed, and warms up. Zeros would falsify measurements
    /// and the choice of algorithms: a GPU computes them faster.
    pub fn initialize(&mut self, seed: u64) -> Result<()> {
        let Self { pool, decoder, optimizer, .. } = self;
        let shape = decoder.shape().clone();
        pool.install(|| {
            optimizer.fill_low_bits(|low_bits| Ok(initialization::fill(&shape, seed, decoder.weights_mut(), low_bits)?))
        })?;
        self.warm_up()
    }

    /// Runs every operation of a step and of an evaluation on a GPU, in this stage and in later ones, so that kernels
    /// are loaded, the fastest algorithm of each matmul is found and the CUDA graphs of later stages are captured
    /// before the first step is measured. Weights and optimizer stay as they are.
    pub fn warm_up(&mut self) -> Result<()> {
        if self.device.as_cuda().is_none() {
            return Ok(());
        }
        let Self { pool, decoder, optimizer, micro_batch, sharding, later_stages, .. } = self;
        let has_ranks = sharding.ranks().exchange().is_some();
        pool.install(|| {
            optimizer.warm_up()?;
            for StageEngine { decoder, micro_batch } in later_stages.iter_mut() {
                // The first pass runs eagerly, the second one captures the graph.
                (0..2).try_for_each(|_| StageEngine::warm_up(decoder, micro_batch, has_ranks))?;
            }
            StageEngine::warm_up(decoder, micro_batch, has_ranks)
        })
    }

    /// Exchanges gradients and weights with the other ranks once, so that NCCL has allocated its memory before the
    /// first step. Weights, which are the same on all ranks, stay as they are.
    pub fn warm_up_exchange(&mut self) -> Result<()> {
        if self.device.as_cuda().is_none() {
            return Ok(());
        }
        let Self { pool, decoder, sharding, device, .. } = self;
        // Moves the exclusive borrow: a captured graph is not to be shared between threads.
        pool.install(move || {
            sharding.begin_reduction().finish(decoder)?;
            sharding.gather_weights(decoder)?;
            Ok(device.synchronize()?)
        })
    }

    /// Makes `stage` (from 0) the current one, if it is not an earlier one. Allocates nothing.
    pub fn enter_stage(&mut self, stage: usize) {
        while self.stage < stage
            && let Some(StageEngine { decoder, micro_batch }) = self.later_stages.pop_front()
        {
            (self.decoder, self.micro_batch) = (decoder, micro_batch);
            self.decoder.invalidate_memory();
            self.stage += 1;
        }
    }

    /// Runs forward and backward of this rank's micro-batches, then the update. None if the signal was raised before
    /// the last micro-batch: then the weights are as before. With several ranks all see the signal or none.
    pub fn step(
        &mut self,
        batch: &Batch,
        step: u64,
        learning_rate: f64,
        stop: &StopSignal,
    ) -> Result<Option<StepOutcome>> {
        let Self { pool, decoder, optimizer, micro_batch, sharding, reduction, seed, .. } = self;
        pool.install(|| {
            optimizer.prepare(step, learning_rate)?;
            // The mean is over the targets of the whole batch, however it is cut.
            let scale = 1.0 / batch.target_count as f32;
            let rank_info = sharding.ranks().rank_info();
            let world_size = rank_info.world_size;
            let virtual_shards = reduction.as_ref().map_or(world_size, TreeReduction::virtual_shards);
            let own = rank_info.share(virtual_shards);
            let mut ahead = micro_batch.cut(batch, &own, virtual_shards);
            if let Some(first) = ahead.next() {
                micro_batch.send(batch, first)?;
            }
            let mut exchange = sharding.begin_reduction();
            for shard in own.clone() {
                decoder.begin_accumulation()?;
                let pieces = micro_batch.cut(batch, &(shard..shard + 1), virtual_shards);
                if pieces.len() == 0 {
                    // A small batch leaves nothing for this shard.
                    decoder.gradients_mut().zero()?;
                }
                for sequences in pieces {
                    micro_batch.receive()?;
                    if stop.requested().is_some() {
                        return Ok(None);
                    }
                    let first_token = sequences.start * batch.sequence_length;
                    decoder.set_dropout(step_seed(*seed, step), first_token as u64);
                    let next = ahead.next();
                    // Virtual shards are summed before anything is exchanged.
                    if next.is_none() && reduction.is_none() && world_size > 1 {
                        micro_batch
                            .train_in_parts(decoder, scale, |decoder, part| exchange.after_part(decoder, part))?;
                    } else {
                        micro_batch.train(decoder, scale)?;
                    }
                    if let Some(next) = next {
                        micro_batch.send(batch, next)?;
                    }
                }
                if let Some(reduction) = reduction.as_mut() {
                    reduction.add(decoder, shard, &own)?;
                }
            }
            exchange.finish(decoder)?;
            let has_ranks = sharding.ranks().exchange().is_some();
            let mut sum_over_ranks = |numbers: &mut [f64]| sharding.meter_mut().sum(numbers);
            optimizer.update(decoder, has_ranks.then_some(&mut sum_over_ranks), reduction.as_mut())?;
            sharding.gather_weights(decoder)?;
            decoder.trained_weights_have_changed();
            optimizer.outcome(decoder).map(Some)
        })
    }

    /// The device that the engine runs on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The thread pool that computes on a CPU and launches on a GPU: run work on the engine's buffers inside it.
    pub fn pool(&self) -> Arc<ThreadPool> {
        Arc::clone(&self.pool)
    }
}

/// Returns the seed of a step's dropout masks, a hash of the run's seed and the step.
fn step_seed(seed: u64, step: u64) -> u64 {
    mix(mix(seed) ^ step)
}
