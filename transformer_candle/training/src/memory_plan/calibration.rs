//! Predicts the time of an optimizer step on this machine's CPU from a few short steps of the run's own operations.
//!
//! An engine with the run's shapes, but as few layers and sequences as fit in the time, takes steps whose operations are
//! timed one by one. Every operation is then multiplied by the ratio of its FLOPs or bytes in the run's step to those in
//! the timed one. So kernels, threads, caches and memory are those of the training itself; a config that is small enough
//! is timed whole.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use kernels::Device;
use model::ModelShape;
use run_config::RunConfig;

use super::{OperationCost, StepPart, cpu_speed::CpuSpeed, operation_costs};
use crate::{
    engine::{Engine, EngineSettings, StepOf, SyntheticSteps},
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
    config: RunConfig,
    shape: ModelShape,
    settings: EngineSettings,
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
        let settings = one_process(EngineSettings { micro_batch: sample.micro_batch, ..step.settings });
        let part = StepOf { config: &config, shape: &shape, settings };
        let engine = match Engine::allocate(&config, &[part], &Device::Cpu) {
            Ok(engine) => engine,
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut steps = SyntheticSteps::new(engine, &config)?;
        steps.step()?;
        let (step_seconds, operations) = (Vec::new(), BTreeMap::new());
        Ok(Some(Self { step, config, shape, settings, steps, step_seconds, operations }))
    }

    /// The step that is timed.
    fn timed(&self) -> StepOf<'_> {
        StepOf { config: &self.config, shape: &self.shape, settings: self.settings }
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

    /// Predicts the run's step from the medians of what was timed so far: the timed step, including the time between its
    /// operations, times the factor by which the sum of its operations grows.
    pub(crate) fn predict(&self) -> Calibration {
        let growth = Growth::new(self.step, self.timed());
        let (mut parts, mut timed_seconds) = (BTreeMap::<StepPart, f64>::new(), 0.0);
        for (operation, seconds) in &self.operations {
            let seconds = median(seconds.clone());
            timed_seconds += seconds;
            *parts.entry(StepPart::from_operation(operation)).or_default() += seconds * growth.of(operation);
        }
        let ratio = parts.values().sum::<f64>() / timed_seconds;
        Calibration { seconds: median(self.step_seconds.clone()) * ratio, parts }
    }
}

/// Ranks on this CPU divide its cores between them, and are timed as one process.
fn one_process(settings: EngineSettings) -> EngineSettings {
    EngineSettings { rank_info: RankInfo::default(), ..settings }
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
}

/// How much longer the operations of the run's step take than those of the timed one: by their FLOPs, or by their bytes
/// where they have none.
struct Growth {
    costs: [BTreeMap<&'static str, OperationCost>; 2],
    /// That of operations without a listed cost, which are of micro-batches.
    tokens: f64,
}

impl Growth {
    fn new(run: StepOf<'_>, timed: StepOf<'_>) -> Self {
        let steps = [run, timed];
        let [run, timed] = steps.map(|step| step.config.data.sequences_per_step as f64);
        Self {
            costs: steps.map(|step| operation_costs(step.config, step.shape, one_process(step.settings))),
            tokens: run / timed,
        }
    }

    fn of(&self, operation: &str) -> f64 {
        let module = operation.split("::").next().unwrap_or_default();
        let [run, timed] = self.costs.each_ref().map(|costs| costs.get(operation).or_else(|| costs.get(module)));
        match (run, timed) {
            (Some(run), Some(timed)) if timed.flops > 0.0 => run.flops / timed.flops,
            (Some(run), Some(timed)) if timed.bytes > 0.0 => run.bytes / timed.bytes,
            _ => self.tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use kernels::DeviceKind;
    use run_config::{ActivationRecompute, Algorithm, Format, presets};

    use super::*;
    use crate::engine::model_shape;

    /// Returns how each operation grows from one sequence through 2 layers to 16 through 4.
    fn growth(config: &RunConfig) -> Growth {
        let shape = model_shape(config).unwrap();
        let (activation_recompute, device) = (ActivationRecompute::None, DeviceKind::Cpu);
        let settings = EngineSettings { micro_batch: 8, activation_recompute, device, rank_info: RankInfo::default() };
        let run = StepOf { config, shape: &shape, settings };
        let (reduced, small) = Sample { layers: 2, micro_batch: 1, micro_batches: 1 }.reduced(run);
        let settings = EngineSettings { micro_batch: 1, ..settings };
        Growth::new(run, StepOf { config: &reduced, shape: &small, settings })
    }

    #[test]
    fn operations_grow_with_what_they_pass_over() {
        let preset = presets().iter().find(|preset| preset.name == "smoke_cpu").unwrap();
        let overrides = ["model.architecture=qwen2", "model.vocab_size=4096"].map(str::to_owned);
        let muon = RunConfig::parse(preset.text, Format::Yaml, &overrides).unwrap();
        let mut adapters = muon.clone();
        (adapters.lora.rank, adapters.lora.dropout) = (Some(8), 0.1);
        adapters.optimizer.algorithm = Algorithm::AdamW;
        let (muon, adapters) = (growth(&muon), growth(&adapters));
        let (tokens, layers) = (16.0, 2.0);
        for (growth, operation, expected) in [
            (&muon, "linear::forward", tokens * layers),
            (&muon, "bias::backward", tokens * layers),
            (&muon, "attention::backward", tokens * layers),
            (&muon, "head_cross_entropy::forward_backward", tokens),
            (&muon, "embedding::forward", tokens),
            (&muon, "Buffer::write", tokens),
            (&muon, "muon::orthogonalize", layers),
            (&adapters, "lora::project", tokens * layers),
            (&adapters, "dropout::backward", tokens * layers),
            (&adapters, "adamw::step", layers),
            (&adapters, "grad_norm::forward", layers),
        ] {
            let factor = growth.of(operation);
            assert!((factor / expected - 1.0).abs() < 1e-9, "{operation}: {factor}");
        }
    }
}
