//! One optimizer step: the next batch, on which the ranks agree, is trained on, and the completed step is recorded.

use std::time::{Duration, Instant};

use dataset::{Batch, Cursor, Until, hub::RetryStatus};
use kernels::cuda::Cuda;

use super::{
    Trainer,
    ranks::{self, AgreedBatch},
    stages::Entered,
};
use crate::{
    checkpoint,
    engine::StepOutcome,
    error::{Result, TrainerError},
    ranks::RankFigures,
    report::StepReport,
    schedule,
    stop::StopSignal,
};

/// The result of an attempt at a step.
pub enum Step {
    /// The weights are updated.
    Done(StepReport),
    /// No step was taken: the run is over.
    Finished,
    /// The stop signal interrupted the step. The weights are those before it, and the next step uses its batch.
    Abandoned,
}

/// The beginning of a step, from which its times are measured.
#[derive(Clone, Copy)]
struct StepStart {
    at: Instant,
    /// The stream's waits for data before it.
    data_wait: Duration,
}

/// A step after its update: what those that observe a run are told of it.
pub(super) struct CompletedStep {
    /// Its number, from 1.
    pub(super) step: u64,
    /// Its stage, from 0.
    pub(super) stage: usize,
    /// The beginning of that stage, if this is its first step.
    pub(super) entered: Option<Entered>,
    pub(super) started: Instant,
    /// This process's wait for data.
    pub(super) data_wait: Duration,
    pub(super) learning_rate: f64,
    pub(super) batch: Batch,
    /// The positions in the data stream before and after the batch.
    pub(super) from: Cursor,
    pub(super) to: Cursor,
    /// Target tokens trained on since the run began.
    pub(super) tokens: u64,
    pub(super) outcome: StepOutcome,
    /// The figures of each rank; empty for one process.
    pub(super) rank_figures: Vec<RankFigures>,
}

impl Trainer {
    /// Takes one optimizer step. None when the run is over: all steps taken, or all data read.
    ///
    /// # Errors
    /// [`TrainerError::Data`] leaves the trainer as it was before the call, so that it can still be saved;
    /// [`TrainerError::Diverged`] if the divergence guard finds that training has diverged.
    pub fn step(&mut self) -> Result<Option<StepReport>> {
        match self.step_unless(&StopSignal::new(), &|_| ())? {
            Step::Done(report) => Ok(Some(report)),
            Step::Finished | Step::Abandoned => Ok(None),
        }
    }

    /// Takes one optimizer step unless the signal is raised before its last micro-batch. While the step waits for data
    /// because the Hub or the network fails, `on_wait` is called repeatedly with the retry.
    pub fn step_unless(&mut self, stop: &StopSignal, on_wait: &dyn Fn(&RetryStatus)) -> Result<Step> {
        self.check_place()?;
        if self.is_finished() {
            return Ok(Step::Finished);
        }
        let start = self.begin_step()?;
        let batch = match self.agreed_batch(stop, on_wait)? {
            AgreedBatch::Compute(batch) => batch,
            AgreedBatch::Abandon(batch) => {
                self.data.pending_batch = batch;
                return Ok(Step::Abandoned);
            }
        };
        self.profile.span("data_wait", start.at);
        if batch.is_empty() {
            self.end_data();
            return Ok(Step::Finished);
        }
        let Some(completed) = self.compute(batch, start, stop)? else { return Ok(Step::Abandoned) };
        self.advance(&completed);
        self.observe(&completed).map(Step::Done)
    }

    fn begin_step(&mut self) -> Result<StepStart> {
        self.profile.begin(self.position.step + 1);
        let start = StepStart { at: Instant::now(), data_wait: self.data.stream.data_wait() };
        self.engine.sharding.meter_mut().begin_step()?;
        Ok(start)
    }

    /// Reads the batch of the next step, and agrees with the other ranks on what to do with it.
    fn agreed_batch(&mut self, stop: &StopSignal, on_wait: &dyn Fn(&RetryStatus)) -> Result<AgreedBatch> {
        let mixture = self.data.stream.mixture().clone();
        let own_stop = self.own_stop.clone();
        let interrupted = || {
            mixture.retry_status().iter().for_each(on_wait);
            stop.requested().is_some() || own_stop.requested().is_some()
        };
        let batch = self.next_batch(&interrupted);
        ranks::agree_on_batch(self.ranks(), batch, &self.corrupted_rows(), &own_stop, stop)
    }

    /// Returns the batch of the next step, in its stage: that of an abandoned step, or the next sequences.
    fn next_batch(&mut self, interrupted: &dyn Fn() -> bool) -> Result<Batch> {
        if let Some(batch) = self.data.pending_batch.take() {
            return Ok(batch);
        }
        let ends_with_window = self.enter_due_stage(interrupted)?;
        let sequences = schedule::sequences_at(&self.stage_run.config, self.position.step + 1);
        let stream = &mut self.data.stream;
        let until = if ends_with_window { Until::WindowEnd(sequences) } else { Until::Count(sequences) };
        let batch = stream.next_sequences_until(until, interrupted)?;
        if self.position.step == 0 {
            self.check_windows()?;
        }
        Ok(batch)
    }

    /// Records that the training text has ended, with the corrupted rows at its end.
    fn end_data(&mut self) {
        self.position.data_ended = true;
        self.position.cursor = self.data.stream.cursor();
        self.ledger.corrupted(&self.data.stream);
        self.tell_skipped(self.position.step);
    }

    /// Trains on a batch. None if the signal was raised before the last micro-batch: the next step takes the batch.
    fn compute(&mut self, batch: Batch, start: StepStart, stop: &StopSignal) -> Result<Option<CompletedStep>> {
        let step = self.position.step + 1;
        let learning_rate = self.schedule.at(step);
        let data_wait = self.data.stream.data_wait().saturating_sub(start.data_wait);
        self.engine.sharding.meter_mut().loaded(data_wait, self.observation.usage());
        let outcome = self
            .profile
            .compute(&mut self.engine, batch.sequences(), |engine| engine.step(&batch, step, learning_rate, stop))?;
        let Some(outcome) = outcome else {
            self.data.pending_batch = Some(batch);
            return Ok(None);
        };
        self.engine.sharding.meter_mut().end_step()?;
        let entered = self.stages.take_entered();
        let stage_start = entered.as_ref().and_then(|entered| entered.start.as_ref());
        Ok(Some(CompletedStep {
            step,
            stage: self.stages.current,
            from: stage_start.unwrap_or(&self.position.cursor).clone(),
            to: self.data.stream.cursor(),
            entered,
            started: start.at,
            data_wait,
            learning_rate,
            tokens: self.position.tokens + batch.target_count as u64,
            batch,
            outcome,
            rank_figures: self.engine.sharding.meter().of_all().to_vec(),
        }))
    }

    /// Moves the position behind a step: neither an evaluation nor a checkpoint is of its weights.
    fn advance(&mut self, completed: &CompletedStep) {
        let position = &mut self.position;
        if completed.later_stage().is_some() {
            (position.best, position.improvement) = (None, None);
        }
        (position.step, position.stage, position.tokens) = (completed.step, completed.stage, completed.tokens);
        position.cursor = completed.to.clone();
        position.evaluation_loss = None;
        self.saved = None;
    }

    /// Tells everything that observes the run of a step, in the order of its records in the run's files.
    ///
    /// # Errors
    /// [`TrainerError::Diverged`] if the divergence guard finds that training has diverged.
    fn observe(&mut self, completed: &CompletedStep) -> Result<StepReport> {
        self.own_stop.time_limit().observe_step(completed.started.elapsed());
        self.report_entered_stage(completed);
        self.ledger.step(completed, &self.data.stream);
        self.tell_skipped(completed.step);
        let report = self.report(completed);
        let diverged = self.guard.observe(completed.outcome.loss, completed.outcome.applied);
        self.observation.step(&report, &completed.rank_figures, diverged.is_some(), &mut self.metrics);
        self.profile.stepped(&report, || {
            let settings = self.plan.stage_settings(self.engine.device().kind());
            (self.stage_run.config.clone(), settings[completed.stage])
        });
        let Some(reason) = diverged else { return Ok(report) };
        let last_checkpoint = checkpoint::latest(self.checkpoint_directory());
        Err(TrainerError::Diverged { step: completed.step, reason, last_checkpoint })
    }

    /// Returns the report of a step, with the times of its ranks and of what was done before it.
    fn report(&mut self, completed: &CompletedStep) -> StepReport {
        let CompletedStep { step, stage, batch, tokens, learning_rate, outcome, rank_figures, .. } = completed;
        let (save_seconds, evaluation_seconds) = self.observation.take_between_steps();
        let step_seconds = completed.started.elapsed().as_secs_f64();
        let positions_per_second = batch.inputs.len() as f64 / step_seconds;
        let world_size = self.ranks().rank_info().world_size;
        let peak = self.engine.device().as_cuda().and_then(Cuda::nominal_bf16_flops);
        let flops_per_token = self.plan.flops_per_token_of(*stage);
        let micro_batches = batch.sequences().div_ceil(self.engine.micro_batch.sequences());
        StepReport {
            step: *step,
            loss: outcome.loss,
            learning_rate: *learning_rate,
            grad_norm: outcome.grad_norm,
            tokens: *tokens,
            tokens_per_second: batch.target_count as f64 / step_seconds,
            positions_per_second,
            mfu: peak.map(|peak| positions_per_second * flops_per_token / (peak * world_size as f64)),
            step_seconds,
            data_wait_seconds: ranks::longest_data_wait(rank_figures).unwrap_or(completed.data_wait.as_secs_f64()),
            save_seconds,
            evaluation_seconds,
            memory_bytes: self.largest_plan_bytes,
            ranks: ranks::times(rank_figures, micro_batches.is_multiple_of(world_size)),
        }
    }
}

impl CompletedStep {
    /// The beginning of its stage, if this is the first step of a stage other than the first.
    pub(super) fn later_stage(&self) -> Option<&Entered> {
        self.entered.as_ref().filter(|entered| entered.start.is_some())
    }
}
