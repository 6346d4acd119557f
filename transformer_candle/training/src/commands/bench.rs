//! `bench`: how fast a config trains on this machine, on synthetic tokens, and the time of each part of a step. Needs
//! neither tokenizer nor data.

mod report;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use clap::Args;
use kernels::cuda::Cuda;
use run_config::RunConfig;

pub use self::report::BenchReport;
use self::report::StepPrediction;
use super::count::at_least_one;
use super::output::print_remark;
use super::{ConfigSource, Output};
use crate::device::{self, DeviceSelection};
use crate::engine::{StepOf, SyntheticSteps, model_shape};
use crate::memory_plan::{self, Calibrator, MemoryPlan, StepPart};
use crate::ranks::RankInfo;
use crate::statistics::median;
use crate::units::counted;
use crate::{Result, TrainerError};

/// Duration in seconds of the pass that times operations one by one, and its minimum and maximum number of steps.
const MEASURED_SECONDS: f64 = 0.5;
const MEASURED_STEPS: [f64; 2] = [2.0, 50.0];
/// Seconds that a prediction of the step's time may take: with a time budget below this there is none.
const PREDICTION_SECONDS: f64 = 10.0;
/// Steps and the prediction's operations are timed in turns of at least this long.
const TURN: Duration = Duration::from_millis(250);
/// M, N and K of the largest GEMM that measures a GPU's speed.
const MAX_GEMM_SIZE: usize = 8192;

/// What `bench` takes.
#[derive(Debug, Clone, Args)]
pub struct BenchOptions {
    /// The run to measure.
    #[command(flatten)]
    pub source: ConfigSource,
    /// Set a key of the config, as in `runtime.threads=1`. Repeatable.
    #[arg(long = "override", value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Optimizer steps to measure, after one to warm up.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = at_least_one::<u32>)]
    pub steps: u32,
    /// Start no step that would end later than this many seconds after the command's start; at least one is measured.
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(1..))]
    pub seconds: Option<u32>,
    /// Where to compute: auto, cpu, cuda or cuda:N. [default: the config's runtime.device]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<run_config::Device>,
    /// On a CPU, measure the steps alone, without the prediction of `plan`, which takes memory and caches of its own.
    #[arg(long)]
    pub no_prediction: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// The deadline for measuring; None without a limit.
#[derive(Debug, Clone, Copy)]
struct TimeBudget(Option<Instant>);

impl TimeBudget {
    fn new(seconds: Option<u32>) -> Self {
        Self(seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds.into())))
    }

    /// Whether there is time to time operations before the steps.
    fn has_time_to_predict(self) -> bool {
        self.steps(PREDICTION_SECONDS) >= 1
    }

    /// Returns how many steps of `seconds` each end before the deadline.
    fn steps(self, seconds: f64) -> u32 {
        let seconds_until = |deadline: Instant| deadline.saturating_duration_since(Instant::now()).as_secs_f64();
        self.0.map_or(u32::MAX, |deadline| (seconds_until(deadline) / seconds) as u32)
    }
}

/// Trains on synthetic tokens, and returns what was measured.
pub fn run(options: &BenchOptions) -> Result<BenchReport> {
    let budget = TimeBudget::new(options.seconds);
    let file = options.source.file()?;
    let mut run = RunConfig::load_for_planning(&file, &options.overrides)?;
    if run.config.stages.is_some() {
        let message = "stages: bench measures one kind of step. Add `--override stages=null` and the keys of the stage, such as \
                       `--override data.sequence_length=2048`";
        return Err(TrainerError::Request(message.to_owned()));
    }
    run.config.runtime.device = options.device.unwrap_or(run.config.runtime.device);
    let DeviceSelection { device, notes } = device::select_for_training(&mut run, RankInfo::default())?;
    for note in notes {
        tracing::warn!("{note}");
    }
    let plan = MemoryPlan::here(&run, &device)?;
    plan.check()?;
    let shape = model_shape(&run.config)?;
    let step = StepOf { config: &run.config, shape: &shape, settings: plan.engine_settings(device.kind()) };
    let predicts = !options.no_prediction && budget.has_time_to_predict();
    let mut calibrator = predicts.then(|| MemoryPlan::calibrator(step, &device)).transpose()?.flatten();
    let free = device.as_cuda().map(free_bytes).transpose()?;
    let gemm = device.as_cuda().map(|cuda| gemm_flops(cuda, &run.config)).transpose()?;
    let limit = options.seconds.map(|seconds| format!(", as many as end in {}", counted(seconds.into(), "second")));
    print_remark(&format!(
        "measuring {} of {}{}, on synthetic tokens; the first step warms up",
        counted(options.steps.into(), "step"),
        file.display(),
        limit.unwrap_or_default()
    ));
    let engine = memory_plan::allocate(&run.config, &shape, step.settings, &device)?;
    let mut bench = SyntheticSteps::new(engine, &run.config)?;
    let TimedSteps { count: steps, mean: seconds, median } =
        time_steps(&mut bench, options.steps, budget, calibrator.as_mut())?;
    MemoryPlan::keep_measurement(step, &device, median);
    let prediction = StepPrediction::new(calibrator.as_ref(), MemoryPlan::roofline(step, &device)?, median);
    drop(calibrator);
    let used_bytes = device
        .as_cuda()
        .map(free_bytes)
        .transpose()?
        .zip(free)
        .map(|(now, free_before)| free_before.saturating_sub(now));
    let tokens_per_second = plan.tokens_per_step as f64 / seconds;
    let model_flops_per_second = tokens_per_second * plan.flops_per_token;
    let nominal = device.as_cuda().and_then(Cuda::nominal_bf16_flops);
    let operation_steps = steps_to_measure(seconds).min(budget.steps(seconds));
    Ok(BenchReport {
        device: device::describe(&device),
        steps,
        tokens_per_second,
        model_flops_per_token: plan.flops_per_token,
        model_flops_per_second,
        mfu: nominal.map(|peak| model_flops_per_second / peak),
        nominal_flops_per_second: nominal,
        mfu_measured: gemm.map(|peak| model_flops_per_second / peak),
        product_flops_per_second: gemm,
        memory_bytes: plan.bytes,
        memory_used_bytes: used_bytes,
        micro_batch: plan.micro_batch,
        tokens_per_step: plan.tokens_per_step,
        milliseconds: milliseconds(seconds, part_seconds(&mut bench, operation_steps)?.as_ref()),
        median_step_milliseconds: median * 1e3,
        prediction,
    })
}

/// Prints the measurement; returns the exit code.
pub(super) fn main(options: &BenchOptions, output: &mut dyn Output) -> Result<u8> {
    let report = run(options)?;
    if options.json {
        output.print_json(&report)?;
    } else {
        output.print_wrapped(&format!("{report}\n"))?;
    }
    Ok(0)
}

fn free_bytes(cuda: &Cuda) -> Result<u64> {
    Ok(cuda.memory()?.free)
}

/// Measures the FLOPs per second of a large square BF16 GEMM, its size chosen by the config's hidden size.
fn gemm_flops(cuda: &Cuda, config: &RunConfig) -> Result<f64> {
    let size = (4 * config.model.hidden_size).next_power_of_two().min(MAX_GEMM_SIZE);
    Ok(cuda.measure_gemm_flops(size)?)
}

/// How many steps were timed, and their seconds.
struct TimedSteps {
    count: u32,
    mean: f64,
    median: f64,
}

/// Times steps as they are trained, after one to warm up, and leaves time for those that run operation by
/// operation.
///
/// A prediction is timed in turns with them, so that whatever else the machine does slows both alike: not step by
/// step, because a small model would find another one's numbers in the caches each time.
fn time_steps(
    bench: &mut SyntheticSteps,
    most: u32,
    budget: TimeBudget,
    mut calibrator: Option<&mut Calibrator<'_>>,
) -> Result<TimedSteps> {
    bench.step()?;
    let (start, mut times) = (Instant::now(), Vec::new());
    loop {
        let turn = Instant::now();
        while turn.elapsed() < TURN && times.len() < most as usize {
            let from = Instant::now();
            bench.step()?;
            times.push(from.elapsed().as_secs_f64());
        }
        let turn = Instant::now();
        while let Some(calibrator) = calibrator.as_mut().filter(|_| turn.elapsed() < TURN) {
            calibrator.time_step()?;
        }
        let steps = times.len() as u32;
        let each = start.elapsed().as_secs_f64() / f64::from(steps);
        let turns = TURN * (1 + u32::from(calibrator.is_some()));
        let next_turn = turns.as_secs_f64().max(each * (1.0 + MEASURED_STEPS[0]));
        if steps == most || budget.steps(next_turn) < 1 {
            let mean = times.iter().sum::<f64>() / f64::from(steps);
            return Ok(TimedSteps { count: steps, mean, median: median(times) });
        }
    }
}

/// Returns the mean seconds of each part over `steps` steps that run operation by operation; None for no steps.
fn part_seconds(bench: &mut SyntheticSteps, steps: u32) -> Result<Option<BTreeMap<StepPart, f64>>> {
    if steps == 0 {
        return Ok(None);
    }
    Ok(Some(by_part(&bench.time_operations(steps)?, steps)))
}

/// Returns how many steps of `seconds` each time operations one by one: a few short steps are not representative.
fn steps_to_measure(seconds: f64) -> u32 {
    let [least, most] = MEASURED_STEPS;
    (MEASURED_SECONDS / seconds).clamp(least, most) as u32
}

/// Sums the times of operations to seconds per step of each part.
fn by_part(times: &BTreeMap<&'static str, Duration>, steps: u32) -> BTreeMap<StepPart, f64> {
    let mut parts: BTreeMap<StepPart, f64> = StepPart::ALL.into_iter().map(|part| (part, 0.0)).collect();
    for (operation, time) in times {
        *parts.entry(StepPart::from_operation(operation)).or_default() += time.as_secs_f64() / f64::from(steps);
    }
    parts
}

fn milliseconds(step_seconds: f64, parts: Option<&BTreeMap<StepPart, f64>>) -> BTreeMap<&'static str, f64> {
    let other = parts.map(|parts| ("other", step_seconds - parts.values().sum::<f64>()));
    let timed_parts = parts.into_iter().flatten().map(|(part, seconds)| (part.name(), *seconds));
    timed_parts.chain([("step", step_seconds)]).chain(other).map(|(name, seconds)| (name, seconds * 1e3)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_steps_are_measured_more_often() {
        assert_eq!([1e-4, 0.012, 0.3, 600.0].map(steps_to_measure), [50, 41, 2, 2]);
    }

    #[test]
    fn parts_and_other_add_up_to_the_step() {
        let times = BTreeMap::from([
            ("linear::forward", Duration::from_millis(40)),
            ("linear::backward_input", Duration::from_millis(20)),
            ("adamw::step", Duration::from_millis(10)),
        ]);
        let milliseconds = milliseconds(0.05, Some(&by_part(&times, 2)));
        let near = |name: &str, expected: f64| assert!((milliseconds[name] - expected).abs() < 1e-9, "{name}");
        near("gemm", 30.0);
        near("optimizer", 5.0);
        near("attention", 0.0);
        near("other", 15.0);
        near("step", 50.0);
    }

    #[test]
    fn a_time_budget_limits_the_steps() {
        assert_eq!(TimeBudget::new(None).steps(1e9), u32::MAX);
        let budget = TimeBudget::new(Some(1000));
        assert_eq!([2000.0, 300.0, 99.0].map(|seconds| budget.steps(seconds)), [0, 3, 10]);
        assert_eq!(TimeBudget(Some(Instant::now())).steps(1e-3), 0, "it is used up");
    }

    #[test]
    fn without_part_timings_only_the_step_is_reported() {
        assert_eq!(milliseconds(0.05, None), BTreeMap::from([("step", 50.0)]));
    }
}
