//! Profiles steps of a run (`--profile STEPS`): a trace of every operation, and a summary of where the time goes.
//!
//! A profiled step lasts from its start to the start of the next one, so that the evaluation and the checkpoint after it
//! are part of it. Its operations are timed one by one: on a CPU by the clock, on a GPU by events in the stream, for
//! which operations are launched one by one and not as a CUDA graph. Steps that are not profiled are as without it.

mod steps;
mod summary;
mod trace;

use std::{
    collections::VecDeque,
    ops::{Range, RangeInclusive},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use kernels::{
    Device,
    timing::{self, Recording},
};
use model::ModelShape;
use run_config::RunConfig;
use serde_json::json;

pub use self::steps::ProfileSteps;
use self::{
    summary::{Summary, Totals},
    trace::Trace,
};
use crate::{
    atomic_file,
    engine::{Engine, EngineSettings, StepOf, StepOutcome},
    error::{Result, TrainerError},
    memory_plan::PeakRates,
    report::StepReport,
    statistics::median,
    units::grouped,
};

/// The folder of traces and summaries in a run's directory.
const FOLDER: &str = "profile";
/// Steps before the profile that its own are compared with, at most.
const COMPARED: usize = 20;

/// The profile of a session of training; one without steps does nothing.
pub(crate) struct Profile {
    session: Option<Session>,
}

/// The state of a profile that was asked for.
struct Session {
    steps: RangeInclusive<u64>,
    folder: PathBuf,
    device: String,
    /// The GPU, by device and name; none on a CPU.
    gpu: Option<String>,
    threads: usize,
    origin: Instant,
    open: Option<OpenStep>,
    trace: Option<Trace>,
    totals: Totals,
    /// Config and settings of the last profiled step.
    made_for: Option<(RunConfig, EngineSettings)>,
    /// Whether profiled steps had different sequence lengths or settings, in different stages.
    is_mixed: bool,
    /// Seconds of the last steps that were not profiled, and of those that were.
    step_seconds: [VecDeque<f64>; 2],
    failure: Option<TrainerError>,
}

/// Everything of a step, from its start to the start of the next one. Times are since the profile's origin.
#[derive(Clone, Debug, Default)]
struct ProfiledStep {
    /// The number of the step, from 1.
    number: u64,
    /// Start and end.
    time: Range<Duration>,
    /// What the loop did besides computing: names and times.
    spans: Vec<(&'static str, Range<Duration>)>,
    /// Sequences that were trained on.
    sequences: usize,
    /// The recorded operations.
    recording: Recording,
}

/// The profiled step that is under way or was the last.
struct OpenStep {
    step: ProfiledStep,
    /// Whether the step was completed.
    is_done: bool,
}

impl Profile {
    /// The profile of these steps (None for no profile), written to the directory of the run that the engine trains.
    pub(crate) fn new(steps: Option<RangeInclusive<u64>>, run_directory: &Path, engine: &Engine) -> Self {
        let (gpu, threads) = (engine.device().as_cuda(), engine.pool().current_num_threads());
        let of_device =
            |device: &Device| gpu.map_or_else(|| device.to_string(), |gpu| format!("{device} ({})", gpu.name()));
        let device = of_device(engine.device());
        let session = |steps| Session {
            steps,
            folder: run_directory.join(FOLDER),
            gpu: gpu.map(|_| device.clone()),
            device,
            threads,
            origin: Instant::now(),
            open: None,
            trace: None,
            totals: Totals::default(),
            made_for: None,
            is_mixed: false,
            step_seconds: [VecDeque::new(), VecDeque::new()],
            failure: None,
        };
        Self { session: steps.map(session) }
    }

    /// Begins step `number` and ends the one before.
    pub(crate) fn begin(&mut self, number: u64) {
        if let Some(session) = &mut self.session {
            session.close();
            session.open(number);
        }
    }

    /// Records a span since `from`, in which the loop did something other than computing.
    pub(crate) fn span(&mut self, name: &'static str, from: Instant) {
        if let Some(session) = &mut self.session
            && let Some(open) = &mut session.open
        {
            let since = |time: Instant| time.saturating_duration_since(session.origin);
            open.step.spans.push((name, since(from)..since(Instant::now())));
        }
    }

    /// Computes a step of `sequences` sequences with `body`, and records its operations if it is profiled.
    pub(crate) fn compute(
        &mut self,
        engine: &mut Engine,
        sequences: usize,
        body: impl FnOnce(&mut Engine) -> Result<Option<StepOutcome>> + Send,
    ) -> Result<Option<StepOutcome>> {
        let Some(session) = &mut self.session else { return body(engine) };
        let Some(open) = &mut session.open else { return body(engine) };
        let (pool, device, origin) = (engine.pool(), engine.device().clone(), session.origin);
        // Operations are recorded on the thread that calls them, which is the pool's.
        let (outcome, recording) = pool.install(|| timing::record(&device, origin, || Ok(body(engine))))?;
        (open.step.recording, open.step.sequences) = (recording, sequences);
        outcome
    }

    /// Counts the step as completed; `made_for` returns its config and settings.
    pub(crate) fn stepped(&mut self, report: &StepReport, made_for: impl FnOnce() -> (RunConfig, EngineSettings)) {
        let Some(session) = &mut self.session else { return };
        let is_profiled = session.open.is_some();
        if let Some(open) = &mut session.open {
            open.is_done = true;
            let (config, settings) = made_for();
            if let Some((config_before, settings_before)) = session.made_for.replace((config.clone(), settings)) {
                session.is_mixed |=
                    config_before.data.sequence_length != config.data.sequence_length || settings_before != settings;
            }
        }
        let seconds = &mut session.step_seconds[usize::from(is_profiled)];
        seconds.push_back(report.step_seconds);
        if seconds.len() > COMPARED && !is_profiled {
            seconds.pop_front();
        }
    }

    /// Completes the trace, writes the summary beside it, and returns it for people; none without a profile.
    ///
    /// # Errors
    /// [`TrainerError::Io`] if either could not be written, also earlier.
    pub(crate) fn finish(&mut self, shape: &ModelShape, device: &Device) -> Result<Option<String>> {
        self.session.take().map(|session| session.finish(shape, device)).transpose()
    }
}

impl Session {
    fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    fn open(&mut self, number: u64) {
        if self.steps.contains(&number) && self.failure.is_none() {
            let now = self.now();
            let step = ProfiledStep { number, time: now..now, ..ProfiledStep::default() };
            self.open = Some(OpenStep { step, is_done: false });
        }
    }

    /// Ends the open step. One that was abandoned is taken again.
    fn close(&mut self) {
        let now = self.now();
        let Some(OpenStep { mut step, is_done: true }) = self.open.take() else { return };
        step.time.end = now;
        self.totals.add(&step);
        if let Err(error) = self.append(&step) {
            self.failure = Some(error);
            self.trace.take().into_iter().for_each(Trace::discard);
        }
    }

    fn append(&mut self, step: &ProfiledStep) -> Result<()> {
        let path = self.path("trace", "json");
        let failed = TrainerError::io("write", &path);
        let outcome = match &mut self.trace {
            Some(trace) => trace.append(step),
            None => Trace::create(&path, self.gpu.as_deref(), self.threads, &self.metadata()).and_then(|mut trace| {
                let outcome = trace.append(step);
                self.trace = Some(trace);
                outcome
            }),
        };
        outcome.map_err(failed)
    }

    fn metadata(&self) -> serde_json::Value {
        let operations = if self.gpu.is_some() {
            "launched one by one between CUDA events, not as a CUDA graph"
        } else {
            "timed on the thread that calls them; threads of the pool show their tasks, those less than 10 us apart as one"
        };
        json!({
            "program": concat!("transformer-candle ", env!("CARGO_PKG_VERSION")),
            "steps": self.step_range(),
            "device": self.device,
            "threads": self.threads,
            "operations": operations,
        })
    }

    /// The steps that were asked for: `10` or `10-12`.
    fn step_range(&self) -> String {
        let (first, last) = (self.steps.start(), self.steps.end());
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    }

    fn path(&self, kind: &str, extension: &str) -> PathBuf {
        self.folder.join(format!("{kind}-{}.{extension}", self.step_range()))
    }

    fn finish(mut self, shape: &ModelShape, device: &Device) -> Result<String> {
        self.close();
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        let (trace, path) = (self.path("trace", "json"), self.path("summary", "txt"));
        let (Some(open_trace), Some((config, settings))) = (self.trace.take(), self.made_for.take()) else {
            return Ok(format!("nothing was profiled: step {} was not taken", self.steps.start()));
        };
        open_trace.finish().map_err(TrainerError::io("write", &trace))?;
        let summary = self.summary(StepOf { config: &config, shape, settings }, device)?.to_string();
        atomic_file::replace(&path, summary.as_bytes()).map_err(TrainerError::io("write", &path))?;
        Ok(format!("{summary}\ntrace: {}, for https://ui.perfetto.dev", trace.display()))
    }

    fn summary(&self, step: StepOf<'_>, device: &Device) -> Result<Summary<'_>> {
        let mut config = step.config.clone();
        config.data.sequences_per_step = self.totals.sequences_per_step();
        let step = StepOf { config: &config, ..step };
        let peak = if self.is_mixed { None } else { PeakRates::of_device(&config, device)? };
        let threads = if self.gpu.is_some() { String::new() } else { format!(" with {} threads", self.threads) };
        let tokens = if self.is_mixed {
            String::new()
        } else {
            format!(", {} tokens per step", grouped(config.data.tokens_per_step() as u64))
        };
        let title = format!(
            "step{} {} on {}{threads}{tokens}",
            if self.totals.steps == 1 { "" } else { "s" },
            self.step_range(),
            self.device
        );
        Ok(Summary {
            title,
            notes: self.notes(),
            totals: &self.totals,
            roofline: peak.map(|peak| (peak.clone(), peak.bounds(step))),
        })
    }

    fn notes(&self) -> Vec<String> {
        let milliseconds = |seconds: &VecDeque<f64>| 1e3 * median(seconds.iter().copied().collect());
        let [unprofiled_seconds, profiled] = &self.step_seconds;
        let comparison = (!unprofiled_seconds.is_empty()).then(|| {
            let (profiled, count) = (milliseconds(profiled), unprofiled_seconds.len());
            format!(
                "a profiled step takes {profiled:.1} ms, one before {:.1} ms (medians, {count} before)",
                milliseconds(unprofiled_seconds)
            )
        });
        let graph = self
            .gpu
            .as_ref()
            .map(|_| "operations are launched one by one, with events around them, and not as a CUDA graph".to_owned());
        let mixed = self.is_mixed.then(|| "the steps are of several stages: no roofline is theirs".to_owned());
        comparison.into_iter().chain(graph).chain(mixed).collect()
    }
}
