//! The stages of a run: finds the stage of the next step, and enters it.

use dataset::{
    Cursor,
    ledger::{SequenceRange, WindowRecord},
};
use run_config::{DataFormat, RunConfig, StageStart};

use super::{Trainer, step::CompletedStep};
use crate::{
    divergence_guard::DivergenceGuard,
    error::{Result, TrainerError},
    report::StageReport,
    schedule::LearningRate,
    units::grouped,
};

/// The bounds of a run's stages, and the current stage. A run without stages has one without an end.
#[derive(Clone, Debug)]
pub(super) struct Stages {
    /// How each stage starts, and the step that it should end with.
    bounds: Vec<(StageStart, u64)>,
    /// The stage that the engine and the stream are in.
    pub(super) current: usize,
    /// The data of a stage that was entered and in which no step was taken yet.
    entered: Option<Entered>,
    /// The report of a stage that [`Trainer::take_stage_report`] has not returned yet.
    report: Option<StageReport>,
}

/// The data stream at the beginning of a stage.
#[derive(Clone, Debug, Default)]
pub(super) struct Entered {
    /// The position at which its stream starts; None for the first stage, which starts where every run does.
    pub(super) start: Option<Cursor>,
    /// Sequences that are left out of the windows in use before.
    pub(super) left_out: Vec<SequenceRange>,
    /// Windows in use before that the ledger may not have yet.
    pub(super) opened: Vec<WindowRecord>,
}

impl Stages {
    /// Returns the stages of a run that is in stage `current`; `is_new` if no step was taken yet.
    pub(super) fn new(config: &RunConfig, current: usize, is_new: bool) -> Self {
        let starts = config.stages.iter().flatten().map(|stage| stage.at);
        let bounds: Vec<_> = starts.zip(config.stage_ends()).collect();
        let entered = (is_new && !bounds.is_empty()).then(Entered::default);
        Self { bounds, current, entered, report: None }
    }

    /// Returns the stage that the step after `step` should be in, if it is not the current one.
    fn due(&self, step: u64) -> Option<usize> {
        let (_, end) = self.bounds.get(self.current)?;
        // A stage that started late may have no step left.
        let next = || self.bounds.iter().position(|(_, end)| step < *end);
        if step < *end { None } else { next() }
    }

    /// Whether the stage `next` has to wait for the end of the shuffle window in use.
    fn waits(&self, next: usize, is_between_windows: bool) -> bool {
        self.bounds[next].0 == StageStart::WindowEnd && !is_between_windows
    }

    /// Returns the data of the stage that was entered since the last call, at a step in it.
    pub(super) fn take_entered(&mut self) -> Option<Entered> {
        self.entered.take()
    }

    /// Whether a stage is the last one.
    pub(super) fn is_last(&self, stage: usize) -> bool {
        stage + 1 >= self.bounds.len()
    }
}

impl Trainer {
    /// Enters the stage of the next step: switches to its buffers, its stream and its learning rate. Returns whether
    /// the next batch must end with the shuffle window in use because a stage waits for that. Until a step is taken in
    /// the stage, the trainer's position is the one before it, so that checkpoints do not depend on whether it was
    /// entered.
    pub(super) fn enter_due_stage(&mut self, interrupted: &dyn Fn() -> bool) -> Result<bool> {
        let Some(next) = self.stages.due(self.position.step) else { return Ok(false) };
        if self.stages.waits(next, self.data.stream.is_between_windows()) {
            return Ok(true);
        }
        let stage_run = self.run.at_stage(next);
        let entered = self.data.enter_stage(&stage_run, interrupted)?;
        self.engine.enter_stage(next);
        self.schedule = LearningRate::new(&stage_run.config);
        self.guard = DivergenceGuard::new(&stage_run.config.runtime.divergence_guard);
        self.observation.enter_stage();
        self.stage_run = stage_run;
        self.stages.current = next;
        self.stages.entered = Some(entered);
        Ok(false)
    }

    /// Checks before the first step that the sequences of every stage can be filled: a window that has just been read
    /// shows what windows hold. Conversations have sequences of their own.
    ///
    /// # Errors
    /// [`TrainerError::Request`] for a stage whose sequences are longer than a window.
    pub(super) fn check_windows(&self) -> Result<()> {
        let data = &self.run.config.data;
        let stages = self.run.config.stages.iter().flatten().enumerate();
        let lengths = stages.filter_map(|(index, stage)| Some((stage.sequence_length?, index)));
        let Some((length, index)) = lengths.max().filter(|_| data.format == DataFormat::Text) else { return Ok(()) };
        let Some(window) = self.data.stream.opened_windows().find(|window| window.targets < length as u64) else {
            return Ok(());
        };
        Err(TrainerError::Request(format!(
            "stages[{index}].sequence_length is {}, but a shuffle window of {} documents has {} tokens, which would be padded to \
             one sequence: raise data.shuffle_buffer_size (it is {}), or shorten the stage's sequences",
            grouped(length as u64),
            grouped(window.documents),
            grouped(window.targets),
            grouped(data.shuffle_buffer_size as u64)
        )))
    }

    /// Reports the stage that a step is the first of, if it is.
    pub(super) fn report_entered_stage(&mut self, completed: &CompletedStep) {
        let Some(entered) = &completed.entered else { return };
        let data = &self.stage_run.config.data;
        let report = StageReport {
            step: completed.step,
            stage: completed.stage,
            stages: self.stages.bounds.len(),
            sequence_length: data.sequence_length,
            sequences_per_step: data.sequences_per_step,
            left_out: entered.left_out.iter().map(|range| range.sequences).sum(),
        };
        self.metrics.record(&report.record());
        self.stages.report = Some(report);
    }

    /// Returns the report of the stage whose first step was taken since the last call, if any.
    pub fn take_stage_report(&mut self) -> Option<StageReport> {
        self.stages.report.take()
    }
}
