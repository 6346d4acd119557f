//! Synthetic batches, for measuring and for choosing algorithms.

use std::{collections::BTreeMap, time::Duration};

use dataset::Batch;
use kernels::timing;
use run_config::{Packing, RunConfig};

use super::Engine;
use crate::{error::Result, stop::StopSignal};

/// Tokens of a document with `packing: documents`: about as many as a FineWeb document of 3 KB has.
const DOCUMENT_TOKENS: usize = 700;

/// Returns a batch of pseudo-random tokens without patterns that caches favour (Lehmer's generator, MINSTD).
pub fn synthetic(sequences: usize, sequence_length: usize, vocab_size: usize) -> Batch {
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

/// Returns a synthetic batch for a config, with `packing: documents` of documents of equal length.
fn synthetic_batch(config: &RunConfig, vocab_size: usize, sequences: usize) -> Batch {
    let mut batch = synthetic(sequences, config.data.sequence_length, vocab_size);
    if config.data.packing == Packing::Documents {
        let start = |position: usize| (position - position % DOCUMENT_TOKENS) as i32;
        let starts: Vec<i32> = (0..batch.sequence_length).map(start).collect();
        batch.document_starts = Some(starts.repeat(batch.sequences()));
    }
    batch
}

/// A trainer without data, checkpoints and metrics: every step is of the same synthetic batch.
pub(crate) struct SyntheticSteps {
    engine: Engine,
    batch: Batch,
    learning_rate: f64,
    steps_done: u64,
}

impl SyntheticSteps {
    /// Initializes the engine of a config for its steps.
    pub(crate) fn new(mut engine: Engine, config: &RunConfig) -> Result<Self> {
        engine.initialize(config.runtime.seed)?;
        let vocab_size = engine.decoder.shape().vocab_size;
        let batch = synthetic_batch(config, vocab_size, config.data.sequences_per_step);
        Ok(Self { engine, batch, learning_rate: config.optimizer.learning_rate, steps_done: 0 })
    }

    /// Takes a step.
    pub(crate) fn step(&mut self) -> Result<()> {
        self.steps_done += 1;
        self.engine.step(&self.batch, self.steps_done, self.learning_rate, &StopSignal::new())?;
        Ok(())
    }

    /// Takes so many steps operation by operation, and returns the time of each operation in all of them.
    pub(crate) fn time_operations(&mut self, steps: u32) -> Result<BTreeMap<&'static str, Duration>> {
        let (pool, device) = (self.engine.pool(), self.engine.device().clone());
        let mut run = || (0..steps).try_for_each(|_| self.step());
        // Operations are timed on the thread that calls them, which is the pool's.
        let (outcome, times) = pool.install(|| timing::measure(&device, || Ok(run())))?;
        outcome.map(|()| times)
    }
}
