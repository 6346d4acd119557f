//! Predicts the time of an optimizer step on this machine's CPU from a few short steps of the run's own operations.
//!
//! An engine with the run's shapes, but as few layers and sequences as fit in the time, takes steps whose operations are
//! timed one by one. Every operation is then multiplied by how often the run calls it, or by how many parameters it
//! passes over. So kernels, threads, caches and memory are those of the training itself; a config that is small enough
//! is timed whole.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use kernels::Device;
use model::{ModelShape, ParameterLayout};
use run_config::RunConfig;

use super::{StepPart, cpu_speed::CpuSpeed};
use crate::{
    engine::{Engine, EngineSettings, StepOf, SyntheticSteps, UpdateRule, parameter_groups},
    error::Result,
    ranks::RankInfo,
    statistics::median,
};

/// About how long one of the timed steps takes at most.
const STEP_SECONDS: f64 = 0.8;
/// How long one of the timed steps may take where even a sequence through two layers takes longer than that.
const LONGEST_STEP_SECONDS: f64 = 2.0;
/// The fraction of its matmul speed that a CPU sustains in whole steps, about.
const UTILIZATION: f64 = 0.75;
/// How long steps are timed, and how many at most and at least.
const TIMED: Duration = Duration::from_millis(800);
const TIMED_STEPS: [usize; 2] = [2, 200];
/// Micro-batches of a timed step: the first overwrites the gradients, the others add to them.
const MICRO_BATCHES: usize = 2;
/// Fewest layers of a timed step, so that one layer's weights are not in the caches when its turn comes again.
const FEWEST_LAYERS: usize = 2;

/// The predicted time of a step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Calibration {
    pub(crate) seconds: f64,
    /// Seconds of each part of the step; the rest is between operations.
    pub(crate) parts: BTreeMap<StepPart, f64>,
}

/// Times a few steps of a config on this machine's CPU; none where there is no memory for it, or where even the smallest
/// part of a step takes too long.
///
/// # Errors
/// If the threads cannot be started, or an operation fails.
pub(super) fn calibrate(step: StepOf<'_>, matmul: CpuSpeed) -> Result<Option<Calibration>> {
    let Some(mut calibrator) = Calibrator::new(step, matmul)? else { return Ok(None) };
    let ([least, most], started) = (TIMED_STEPS, Instant::now());
    for timed in 0..most {
        if timed >= least && started.elapsed() > TIMED {
            break;
        }
        calibrator.time_step()?;
    }
    Ok(Some(calibrator.predict()))
}

/// Times steps of a reduced config, one at a time, and predicts the run's step from them.
pub(crate) struct Calibrator<'a> {
    step: StepOf<'a>,
    sample: Sample,
    config: RunConfig,
    shape: ModelShape,
    steps: SyntheticSteps,
    step_seconds: Vec<f64>,
    operations: BTreeMap<&'static str, Vec<f64>>,
}

impl<'a> Calibrator<'a> {
    /// Allocates an engine for the largest part of the step that ends in time, and takes a step to warm up; none where
    /// there is too little memory or time.
    ///
    /// # Errors
    /// If the threads cannot be started, or an operation fails.
    pub(super) fn new(step: StepOf<'a>, matmul: CpuSpeed) -> Result<Option<Self>> {
        let sample = Sample::choose(step, matmul);
        if sample.seconds(step, matmul) > LONGEST_STEP_SECONDS {
            return Ok(None);
        }
        let (config, shape) = sample.reduced(step);
        // One process: ranks on this CPU divide its cores between them.
        let rank_info = RankInfo::default();
        let settings = EngineSettings { micro_batch: sample.micro_batch, rank_info, ..step.settings };
        let part = StepOf { config: &config, shape: &shape, settings };
        let engine = match Engine::allocate(&config, &[part], &Device::Cpu) {
            Ok(engine) => engine,
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut steps = SyntheticSteps::new(engine, &config)?;
        steps.step()?;
        let (step_seconds, operations) = (Vec::new(), BTreeMap::new());
        Ok(Some(Self { step, sample, config, shape, steps, step_seconds, operations }))
    }

    /// Times a step, and its operations one by one.
    pub(crate) fn time_step(&mut self) -> Result<()> {
        let from = Instant::now();
        let times = self.steps.time_operations(1)?;
        self.step_seconds.push(from.elapsed().as_secs_f64());
        for (operation, time) in times {
            self.operations.entry(operation).or_default().push(time.as_secs_f64());
        }
        Ok(())
    }

    /// Predicts the run's step from the medians of what was timed so far.
    pub(crate) fn predict(&self) -> Calibration {
        let Self { step, sample, config, shape, step_seconds, operations, .. } = self;
        let counts =
            Counts { run: (step.config, step.shape), timed: (config, shape), tokens: sample.tokens_ratio(*step) };
        let operations = operations.iter().map(|(name, seconds)| (*name, median(seconds.clone()))).collect();
        counts.scale(median(step_seconds.clone()), &operations)
    }
}

/// The reduced step that is timed instead of the run's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sample {
    layers: usize,
    micro_batch: usize,
    micro_batches: usize,
}

impl Sample {
    /// Estimates the seconds that a step of it takes.
    fn seconds(&self, StepOf { config, shape, .. }: StepOf<'_>, matmul: CpuSpeed) -> f64 {
        let shape = ModelShape { num_layers: self.layers, ..shape.clone() };
        let sequence_length = config.data.sequence_length;
        let tokens = (self.micro_batch * self.micro_batches * sequence_length) as f64;
        tokens * shape.flops_per_token(sequence_length) / (UTILIZATION * matmul.flops)
    }

    /// Returns the largest part of the step that ends in time, or else the smallest.
    fn choose(step: StepOf<'_>, matmul: CpuSpeed) -> Self {
        let StepOf { config, shape, settings } = step;
        let all = config.data.sequences_per_step;
        let whole = Self {
            layers: shape.num_layers,
            micro_batch: settings.micro_batch,
            micro_batches: (all / settings.micro_batch).clamp(1, MICRO_BATCHES),
        };
        let fewest = FEWEST_LAYERS.min(shape.num_layers);
        let fewer_layers = (fewest..=shape.num_layers).rev();
        let fewer_sequences = (1..=settings.micro_batch).rev();
        [whole]
            .into_iter()
            .chain(fewer_layers.map(|layers| Self { layers, micro_batches: 1, ..whole }))
            .chain(fewer_sequences.map(|micro_batch| Self { layers: fewest, micro_batch, micro_batches: 1 }))
            .find(|sample| sample.seconds(step, matmul) < STEP_SECONDS)
            .unwrap_or(Self { layers: fewest, micro_batch: 1, micro_batches: 1 })
    }

    /// The config and the model that are timed.
    fn reduced(self, step: StepOf<'_>) -> (RunConfig, ModelShape) {
        let (mut config, shape) = (step.config.clone(), step.shape.clone());
        config.model.num_layers = self.layers;
        config.data.sequences_per_step = self.micro_batch * self.micro_batches;
        (config, ModelShape { num_layers: self.layers, ..shape })
    }

    /// Tokens of the run's step over those of a timed one.
    fn tokens_ratio(self, step: StepOf<'_>) -> f64 {
        step.config.data.sequences_per_step as f64 / (self.micro_batch * self.micro_batches) as f64
    }
}

/// Compares how often the run's step and the timed one call an operation.
struct Counts<'a> {
    run: (&'a RunConfig, &'a ModelShape),
    timed: (&'a RunConfig, &'a ModelShape),
    tokens: f64,
}

impl Counts<'_> {
    /// Predicts the run's step: the timed one, including the time between its operations, times the factor by which the
    /// sum of its operations grows.
    fn scale(&self, step_seconds: f64, operations: &BTreeMap<&'static str, f64>) -> Calibration {
        let mut parts: BTreeMap<StepPart, f64> = BTreeMap::new();
        for (operation, seconds) in operations {
            *parts.entry(StepPart::from_operation(operation)).or_default() +=
                seconds * self.calls_per_timed_call(operation);
        }
        let ratio = parts.values().sum::<f64>() / operations.values().sum::<f64>();
        Calibration { seconds: step_seconds * ratio, parts }
    }

    fn ratio(&self, number: impl Fn(&RunConfig, &ModelShape) -> usize) -> f64 {
        let [run, timed] = [self.run, self.timed].map(|(config, shape)| number(config, shape) as f64);
        if timed == 0.0 { 1.0 } else { run / timed }
    }

    /// Returns the calls of an operation in the run's step per call in the timed one, counted in calls of equal length.
    fn calls_per_timed_call(&self, operation: &str) -> f64 {
        match operation.split("::").next().unwrap_or_default() {
            "attention" | "linear" | "rope" | "swiglu" | "qk_norm" | "bias" => {
                self.tokens * self.ratio(|_, shape| shape.num_layers)
            }
            // Two per block, and the final norm.
            "add_rms_norm" | "rms_norm" => self.tokens * self.ratio(|_, shape| 2 * shape.num_layers + 1),
            "muon" => self.ratio(|_, shape| shape.num_layers),
            "adamw" => self.ratio(adamw_elements),
            "grad_norm" | "accumulate" => self.ratio(|_, shape| ParameterLayout::new(shape).elements()),
            _ if operation == "Buffer::zero" => self.ratio(|_, shape| ParameterLayout::new(shape).elements()),
            _ => self.tokens,
        }
    }
}

/// Parameters that `AdamW` updates.
fn adamw_elements(config: &RunConfig, shape: &ModelShape) -> usize {
    let groups = parameter_groups(&config.optimizer, &ParameterLayout::new(shape));
    let by_adamw = groups.iter().filter(|group| matches!(group.rule, UpdateRule::AdamW(_)));
    by_adamw.map(|group| group.range.len()).sum()
}
