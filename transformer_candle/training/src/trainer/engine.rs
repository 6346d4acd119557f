//! What computes a step: the decoder and the optimizer over the planned buffers, and the order in which a device is asked.
//!
//! A step asks for everything it needs and waits once, at its end, for three numbers (docs/decisions/011-one-wait-a-step.md).

use std::sync::Arc;

use dataset::Batch;
use kernels::Device;
use model::{Decoder, ModelShape, initialization};
use rayon::ThreadPool;
use run_config::RunConfig;

use super::MicroBatch;
use crate::{
    engine::{Optimizer, StepOutcome},
    error::Result,
    memory_plan::{RunBuffers, Setting, does_not_fit},
    pool,
    stop::StopSignal,
};

/// A model in training, without data, checkpoints and metrics.
pub(crate) struct Engine {
    pub(crate) decoder: Decoder,
    pub(crate) optimizer: Optimizer,
    pub(crate) micro_batch: MicroBatch,
    device: Device,
    pool: Arc<ThreadPool>,
}

impl Engine {
    /// Allocates every buffer. All weights are zero: fill them, then [`Engine::warm_up`].
    ///
    /// # Errors
    /// [`TrainerError::OutOfMemory`] if the device has less left than the plan was made against.
    pub(crate) fn new(config: &RunConfig, shape: &ModelShape, setting: Setting, device: &Device) -> Result<Self> {
        let pool = pool::of(config)?;
        let buffers = RunBuffers::of(config, shape, setting);
        let arena =
            buffers.plan.allocate(device).map_err(|error| does_not_fit(error, config, shape, setting, device))?;
        let decoder = buffers.decoder.bind(&arena)?;
        Ok(Self {
            optimizer: Optimizer::bind(&buffers.optimizer, &arena, &decoder)?,
            micro_batch: MicroBatch::bind(&buffers.micro_batch, &arena, setting.micro_batch)?,
            decoder,
            device: device.clone(),
            pool: Arc::new(pool),
        })
    }

    /// Fills the weights as a run of this seed begins with, and warms up. Zeros would do neither for measuring nor for choosing
    /// algorithms: a GPU computes them faster.
    pub(crate) fn initialize(&mut self, seed: u64) -> Result<()> {
        let Self { pool, decoder, optimizer, .. } = self;
        let shape = decoder.shape().clone();
        pool.install(|| initialization::fill(&shape, seed, decoder.weights_mut(), optimizer.low_bits_mut()))?;
        self.warm_up()
    }

    /// Runs on a card everything that a step and an evaluation run, so that kernels are loaded and the fastest way of each matrix
    /// product is found before the first step is measured. Weights and optimizer stay as they are.
    pub(crate) fn warm_up(&mut self) -> Result<()> {
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

    /// Forward, backward and update. None if the signal was raised before the last micro-batch: then the weights are as before.
    pub(crate) fn step(
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
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The threads that compute on a CPU, and one of which asks a card: work on the engine's buffers belongs inside.
    pub(crate) fn pool(&self) -> Arc<ThreadPool> {
        Arc::clone(&self.pool)
    }
}

/// Tokens that follow no pattern a cache could like: a multiplicative generator (Lehmer's, MINSTD).
pub(crate) fn synthetic(sequences: usize, sequence_length: usize, vocab_size: usize) -> Batch {
    let mut state = 1_u64;
    let mut token = || {
        state = state * 48_271 % 0x7fff_ffff;
        (state % vocab_size as u64) as u32
    };
    let tokens = sequences * sequence_length;
    Batch {
        inputs: (0..tokens).map(|_| token()).collect(),
        targets: (0..tokens).map(|_| token().cast_signed()).collect(),
        document_starts: None,
        sequence_length,
        target_count: tokens,
        target_bytes: None,
    }
}
