//! `bench`: how fast a config trains on this machine, on synthetic tokens. Needs neither tokenizer nor data.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use dataset::Batch;
use kernels::Device;
use model::{Decoder, initialization};
use rayon::ThreadPoolBuilder;
use run_config::{ResolvedRun, RunConfig};
use serde::Serialize;

use crate::memory_plan::{MemoryPlan, RunBuffers, Setting, shape_of};
use crate::optimizer::Optimizer;
use crate::trainer::MicroBatch;
use crate::{Result, TrainerError};

/// What `bench` takes.
#[derive(Debug, Clone, Args)]
pub struct BenchOptions {
    /// The config to measure: YAML, TOML or JSON.
    #[arg(short, long, value_name = "FILE")]
    pub config: PathBuf,
    /// Set a key of the config, as in `runtime.threads=1`. Repeatable.
    #[arg(long = "override", value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Optimizer steps to measure, after one to warm up.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: u32,
}

/// What was measured: means over the steps.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BenchReport {
    /// Target tokens a second.
    pub tokens_per_second: f64,
    /// Model FLOPs a second, as [`model::ModelShape::flops_per_token`] counts them.
    pub model_flops_per_second: f64,
    /// The same over the device's peak; none where no peak is known, as on a CPU.
    pub mfu: Option<f64>,
    /// Bytes of the planned buffers.
    pub memory_bytes: u64,
    /// Milliseconds of an optimizer step, and of its parts. `forward` is measured on its own; it is a part of
    /// `forward_backward`.
    pub milliseconds: BTreeMap<&'static str, f64>,
}

/// Trains on synthetic tokens and measures.
pub fn run(options: &BenchOptions) -> Result<BenchReport> {
    let run = RunConfig::load_for_planning(&options.config, &options.overrides)?;
    let plan = MemoryPlan::here(&run)?;
    plan.check()?;
    let threads = run.config.runtime.threads.unwrap_or(0);
    let pool = ThreadPoolBuilder::new().num_threads(threads).build().map_err(|error| {
        TrainerError::Request(format!("cannot start the {threads} threads of runtime.threads: {error}"))
    })?;
    pool.install(|| {
        let mut bench = Bench::new(&run, &plan)?;
        bench.step(1)?;
        bench.times = BTreeMap::new();
        let started = Instant::now();
        for step in 2..2 + u64::from(options.steps) {
            bench.step(step)?;
        }
        let seconds = started.elapsed().as_secs_f64() / f64::from(options.steps);
        bench.forward(options.steps)?;
        let mut milliseconds = bench.milliseconds(options.steps);
        milliseconds.insert("step", seconds * 1e3);
        let tokens_per_second = plan.tokens_per_step as f64 / seconds;
        Ok(BenchReport {
            tokens_per_second,
            model_flops_per_second: tokens_per_second * plan.flops_per_token,
            mfu: None,
            memory_bytes: plan.bytes,
            milliseconds,
        })
    })
}

pub(super) fn main(options: &BenchOptions) -> Result<u8> {
    super::print_json(&run(options)?)?;
    Ok(0)
}

/// A trainer without data, checkpoints and metrics.
struct Bench {
    decoder: Decoder,
    optimizer: Optimizer,
    micro_batch: MicroBatch,
    batch: Batch,
    learning_rate: f64,
    times: BTreeMap<&'static str, Duration>,
}

impl Bench {
    fn new(run: &ResolvedRun, plan: &MemoryPlan) -> Result<Self> {
        let config = &run.config;
        let shape = shape_of(config)?;
        let sequences = plan.micro_batch as usize;
        let setting = Setting { micro_batch: sequences, activation_recompute: config.runtime.activation_recompute };
        let buffers = RunBuffers::of(config, &shape, setting);
        let arena = buffers.plan.allocate(&Device::Cpu)?;
        let mut decoder = buffers.decoder.bind(&arena)?;
        let mut optimizer = Optimizer::bind(&buffers.optimizer, &arena, &decoder, &config.optimizer)?;
        initialization::fill(&shape, config.runtime.seed, decoder.weights_mut(), optimizer.state_mut().0)?;
        Ok(Self {
            decoder,
            optimizer,
            micro_batch: MicroBatch::bind(&buffers, &arena, sequences),
            batch: synthetic(config.data.sequences_per_step, config.data.sequence_length, shape.vocab_size),
            learning_rate: config.optimizer.learning_rate,
            times: BTreeMap::new(),
        })
    }

    fn step(&mut self, step: u64) -> Result<()> {
        let scale = 1.0 / self.batch.target_count as f32;
        for sequences in self.micro_batch.cut(&self.batch) {
            let started = Instant::now();
            self.micro_batch.upload(&self.batch, sequences)?;
            let uploaded = Instant::now();
            self.decoder.forward_backward(&self.micro_batch.inputs_N, &self.micro_batch.targets_N, scale)?;
            self.add("upload", uploaded - started);
            self.add("forward_backward", uploaded.elapsed());
        }
        let started = Instant::now();
        self.optimizer.step(&mut self.decoder, step, self.learning_rate)?;
        self.decoder.loss_mut().zero()?;
        self.add("optimizer", started.elapsed());
        Ok(())
    }

    /// The forward passes of as many steps; one pass is run, the tokens are as good as any.
    fn forward(&mut self, steps: u32) -> Result<()> {
        let started = Instant::now();
        self.decoder.evaluate(&self.micro_batch.inputs_N, &self.micro_batch.targets_N)?;
        let passes = self.micro_batch.cut(&self.batch).count() as u32 * steps;
        self.add("forward", started.elapsed() * passes);
        Ok(())
    }

    fn add(&mut self, part: &'static str, time: Duration) {
        *self.times.entry(part).or_default() += time;
    }

    fn milliseconds(&self, steps: u32) -> BTreeMap<&'static str, f64> {
        self.times.iter().map(|(part, time)| (*part, time.as_secs_f64() * 1e3 / f64::from(steps))).collect()
    }
}

/// Tokens that follow no pattern a cache could like: a multiplicative generator (Lehmer's, MINSTD).
fn synthetic(sequences: usize, sequence_length: usize, vocab_size: usize) -> Batch {
    let mut state = 1_u64;
    let mut token = || {
        state = state * 48_271 % 0x7fff_ffff;
        (state % vocab_size as u64) as u32
    };
    let tokens = sequences * sequence_length;
    Batch {
        inputs: (0..tokens).map(|_| token()).collect(),
        targets: (0..tokens).map(|_| token() as i32).collect(),
        sequence_length,
        target_count: tokens,
        target_bytes: None,
    }
}
