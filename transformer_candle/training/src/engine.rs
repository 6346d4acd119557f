//! What computes a step: decoder, optimizer and micro-batch over the planned buffers, without data, checkpoints and
//! metrics.
//!
//! A step asks for everything it needs and waits once, at its end, for three numbers
//! (docs/decisions/011-one-wait-per-step.md).

mod buffers;
mod micro_batch;
mod optimizer;
mod settings;
mod synthetic;

use std::sync::Arc;

use dataset::Batch;
use kernels::{Buffer, Device, memory::Arena};
use model::{Decoder, Generator, GeneratorPlan, initialization};
use rayon::ThreadPool;
use run_config::RunConfig;

pub(crate) use self::optimizer::muon_flops;
pub(crate) use self::synthetic::synthetic_batch;
pub use self::{
    buffers::{EvaluationBuffers, RunBuffers},
    micro_batch::{MicroBatch, MicroBatchPlan},
    optimizer::{
        Algorithm, Optimizer, OptimizerPlan, ParameterGroup, StateLayout, StateTensor, StepOutcome, UpdateRule,
    },
    settings::{EngineSettings, model_shape},
    synthetic::synthetic,
};
use crate::{error::Result, pool, stop::StopSignal};

/// A model in training, without data, checkpoints and metrics.
pub struct Engine {
    /// Weights, gradients and activations.
    pub decoder: Decoder,
    /// What changes the weights.
    pub optimizer: Optimizer,
    /// Where the device finds its tokens.
    pub micro_batch: MicroBatch,
    /// What continues `runtime.evaluation.prompts` with the current weights; none without prompts.
    pub generator: Option<Generator>,
    device: Device,
    pool: Arc<ThreadPool>,
}

impl Engine {
    /// Binds the planned buffers to the memory that was allocated for them. All weights are zero: fill them, then
    /// [`Engine::warm_up`].
    ///
    /// # Errors
    /// [`crate::TrainerError::Request`] if the threads cannot be started.
    pub fn bind(
        config: &RunConfig,
        settings: EngineSettings,
        buffers: &RunBuffers,
        arena: &Arena,
        device: &Device,
    ) -> Result<Self> {
        let decoder = buffers.decoder.bind(arena)?;
        Ok(Self {
            optimizer: Optimizer::bind(&buffers.optimizer, arena, &decoder)?,
            micro_batch: MicroBatch::bind(&buffers.micro_batch, arena, settings.micro_batch)?,
            generator: bind_generator(buffers, arena, decoder.weights())?,
            decoder,
            device: device.clone(),
            pool: Arc::new(pool::from_config(config)?),
        })
    }

    /// Fills the weights as a run of this seed begins with, and warms up. Zeros would do neither for measuring nor for
    /// choosing algorithms: a GPU computes them faster.
    pub fn initialize(&mut self, seed: u64) -> Result<()> {
        let Self { pool, decoder, optimizer, .. } = self;
        let shape = decoder.shape().clone();
        pool.install(|| initialization::fill(&shape, seed, decoder.weights_mut(), optimizer.low_bits_mut()))?;
        self.warm_up()
    }

    /// Runs on a GPU everything that a step and an evaluation run, so that kernels are loaded and the fastest algorithm
    /// of each matmul is found before the first step is measured. Weights and optimizer stay as they are.
    pub fn warm_up(&mut self) -> Result<()> {
        if self.device.as_cuda().is_none() {
            return Ok(());
        }
        let (shape, sequences) = (self.decoder.shape(), self.micro_batch.sequences());
        let batch = synthetic(sequences, self.decoder.sequence_length(), shape.vocab_size);
        let Self { pool, decoder, micro_batch, .. } = self;
        pool.install(|| {
            micro_batch.upload(&batch, 0..sequences)?;
            micro_batch.train(decoder, 1.0 / batch.target_count as f32)?;
            micro_batch.evaluate(decoder)?;
            Ok(())
        })
    }

    /// Forward, backward and update. None if the signal was raised before the last micro-batch: then the weights are as
    /// before.
    pub fn step(
        &mut self,
        batch: &Batch,
        step: u64,
        learning_rate: f64,
        stop: &StopSignal,
    ) -> Result<Option<StepOutcome>> {
        let Self { pool, decoder, optimizer, micro_batch, .. } = self;
        pool.install(|| {
            optimizer.prepare(step, learning_rate)?;
            decoder.begin_accumulation()?;
            // The mean is over the targets of the whole batch, however it is cut.
            let scale = 1.0 / batch.target_count as f32;
            let mut pieces = micro_batch.cut(batch);
            let mut ahead = pieces.next();
            if let Some(first) = ahead.clone() {
                micro_batch.send(batch, first)?;
            }
            while ahead.is_some() {
                micro_batch.receive()?;
                if stop.requested().is_some() {
                    return Ok(None);
                }
                micro_batch.train(decoder, scale)?;
                ahead = pieces.next();
                if let Some(next) = ahead.clone() {
                    micro_batch.send(batch, next)?;
                }
            }
            optimizer.update(decoder)?;
            optimizer.outcome(decoder).map(Some)
        })
    }

    /// Where it computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The threads that compute on a CPU, one of which launches on a GPU: work on the engine's buffers belongs inside.
    pub fn pool(&self) -> Arc<ThreadPool> {
        Arc::clone(&self.pool)
    }
}

fn bind_generator(buffers: &RunBuffers, arena: &Arena, weights: &Buffer) -> Result<Option<Generator>> {
    let bind = |plan: &GeneratorPlan| plan.clone().bind(arena, weights);
    Ok(buffers.generator.as_ref().map(bind).transpose()?)
}
