//! The trainer: one optimizer step per call, over buffers that are all allocated before the first.
//!
//! A step takes its sequences from the stream, cuts them into micro-batches, accumulates their gradients, clips,
//! updates. Every number of it is a pure function of the config, the seed and the data, whatever the number of threads,
//! the restarts and the calling program.

mod between_steps;
mod bf16_units;
mod data;
mod execution;
mod ledger;
mod matmul_algorithms;
mod observation;
mod ranks;
mod samples;
mod skipped;
mod stages;
mod start;
mod starting_point;

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use dataset::{Batch, Cursor, Mixture, Until, hub::RetryStatus, ledger::StageRecord};
use kernels::{Device, cuda::Cuda};
use model::ModelShape;
use run_config::ResolvedRun;

pub(crate) use self::data::{DataPlan, cursor_of};
pub use self::ledger::LEDGER;
use self::ledger::RunLedger;
use self::{
    data::Data,
    observation::Observation,
    ranks::AgreedBatch,
    samples::Prompts,
    stages::{Entered, Stages},
};
use crate::{
    checkpoint::{self, BaseModel, BestEvaluation, Improvement, TokenizerFiles},
    config_fingerprint::ConfigFingerprint,
    divergence_guard::DivergenceGuard,
    engine::{Engine, StepOutcome},
    error::{Result, TrainerError},
    lock::RunLock,
    memory_plan::MemoryPlan,
    metrics::MetricsWriter,
    profile::Profile,
    ranks::Ranks,
    report::{DataReport, StepReport, UtilizationReport},
    run_folder::RunFolder,
    schedule::{self, LearningRate},
    stop::StopSignal,
};

/// A model in training, with everything that belongs to its run directory.
pub struct Trainer {
    run: ResolvedRun,
    /// The run with the current stage's settings.
    stage_run: ResolvedRun,
    stages: Stages,
    plan: MemoryPlan,
    /// Planned bytes of the rank that needs the most.
    largest_plan_bytes: u64,
    shape: ModelShape,
    engine: Engine,
    schedule: LearningRate,
    guard: DivergenceGuard,
    data: Data,
    prompts: Prompts,
    tokenizer_files: TokenizerFiles,
    /// The record of the model that adapters train beside; None where all weights train.
    base: Option<BaseModel>,
    fingerprint: ConfigFingerprint,
    metrics: MetricsWriter,
    /// The rows read and skipped, as last recorded.
    data_report: DataReport,
    observation: Observation,
    profile: Profile,
    ledger: RunLedger,
    position: Position,
    /// The checkpoint of exactly the current state, if there is one.
    saved: Option<PathBuf>,
    notes: Vec<String>,
    /// Warnings that [`Trainer::take_notices`] has not returned yet; `issued_warnings` has all, so that each is given
    /// once.
    notices: Vec<String>,
    issued_warnings: HashSet<String>,
    folder: RunFolder,
    /// The lock of the run directory; None on ranks other than the first.
    _lock: Option<Arc<RunLock>>,
    /// The stop signal of this process. Several ranks stop only after agreeing to.
    own_stop: StopSignal,
}

/// The progress of the run, which a checkpoint holds besides tensors.
#[derive(Clone, Debug)]
struct Position {
    step: u64,
    /// The stage of that step, from 0.
    stage: usize,
    tokens: u64,
    /// The position in the data stream from which the next step reads.
    cursor: Cursor,
    data_ended: bool,
    /// The held-out loss of exactly this step's weights; None before they are evaluated.
    evaluation_loss: Option<f64>,
    best: Option<BestEvaluation>,
    improvement: Option<Improvement>,
}

/// The result of an attempt at a step.
pub enum Step {
    /// The weights are updated.
    Done(StepReport),
    /// No step was taken: the run is over.
    Finished,
    /// The stop signal interrupted the step. The weights are those before it, and the next step uses its batch.
    Abandoned,
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
        self.folder.check()?;
        if self.is_finished() {
            return Ok(Step::Finished);
        }
        self.profile.begin(self.position.step + 1);
        let (started, waited) = (Instant::now(), self.data.stream.data_wait());
        self.engine.sharding.meter_mut().begin_step()?;
        let mixture = self.data.stream.mixture().clone();
        let own_stop = self.own_stop.clone();
        let interrupted = || {
            mixture.retry_status().iter().for_each(on_wait);
            stop.requested().is_some() || own_stop.requested().is_some()
        };
        let batch = self.next_batch(&interrupted);
        let corrupted = self.corrupted_rows();
        let batch = match ranks::agree_on_batch(self.ranks(), batch, &corrupted, &own_stop, stop)? {
            AgreedBatch::Compute(batch) => batch,
            AgreedBatch::Abandon(batch) => {
                self.data.pending_batch = batch;
                return Ok(Step::Abandoned);
            }
        };
        self.profile.span("data_wait", started);
        if batch.is_empty() {
            self.position.data_ended = true;
            self.position.cursor = self.data.stream.cursor();
            self.ledger.corrupted(&self.data.stream);
            self.tell_skipped(self.position.step);
            return Ok(Step::Finished);
        }
        let step = self.position.step + 1;
        let learning_rate = self.schedule.at(step);
        let data_wait = self.data.stream.data_wait().saturating_sub(waited);
        self.engine.sharding.meter_mut().loaded(data_wait, self.observation.usage());
        let stepped = self
            .profile
            .compute(&mut self.engine, batch.sequences(), |engine| engine.step(&batch, step, learning_rate, stop))?;
        let Some(outcome) = stepped else {
            self.data.pending_batch = Some(batch);
            return Ok(Step::Abandoned);
        };
        self.engine.sharding.meter_mut().end_step()?;
        self.own_stop.time_limit().observe_step(started.elapsed());
        self.record_data(step, &batch);
        self.position.step = step;
        self.position.tokens += batch.target_count as u64;
        self.position.evaluation_loss = None;
        self.saved = None;
        let report = self.report(&outcome, &batch, learning_rate, started, data_wait);
        let diverged = self.guard.observe(outcome.loss, outcome.applied);
        let figures = self.engine.sharding.meter().of_all();
        self.observation.step(&report, figures, diverged.is_some(), &mut self.metrics);
        self.profile.stepped(&report, || {
            let settings = self.plan.stage_settings(self.engine.device().kind());
            (self.stage_run.config.clone(), settings[self.stages.current])
        });
        let Some(reason) = diverged else {
            return Ok(Step::Done(report));
        };
        let last_checkpoint = checkpoint::latest(self.checkpoint_directory());
        Err(TrainerError::Diverged { step, reason, last_checkpoint })
    }

    /// Returns the report of a step that began at `started`, with the times of its ranks.
    fn report(
        &mut self,
        outcome: &StepOutcome,
        batch: &Batch,
        learning_rate: f64,
        started: Instant,
        data_wait: Duration,
    ) -> StepReport {
        let (save_seconds, evaluation_seconds) = self.observation.take_between_steps();
        let step_seconds = started.elapsed().as_secs_f64();
        let positions_per_second = batch.inputs.len() as f64 / step_seconds;
        let world_size = self.ranks().rank_info().world_size;
        let peak = self.engine.device().as_cuda().and_then(Cuda::nominal_bf16_flops);
        let flops_per_token = self.plan.flops_per_token_of(self.position.stage);
        let micro_batches = batch.sequences().div_ceil(self.engine.micro_batch.sequences());
        let figures = self.engine.sharding.meter().of_all();
        StepReport {
            step: self.position.step,
            loss: outcome.loss,
            learning_rate,
            grad_norm: outcome.grad_norm,
            tokens: self.position.tokens,
            tokens_per_second: batch.target_count as f64 / step_seconds,
            positions_per_second,
            mfu: peak.map(|peak| positions_per_second * flops_per_token / (peak * world_size as f64)),
            step_seconds,
            data_wait_seconds: ranks::longest_data_wait(figures).unwrap_or(data_wait.as_secs_f64()),
            save_seconds,
            evaluation_seconds,
            memory_bytes: self.largest_plan_bytes,
            ranks: ranks::times(figures, micro_batches.is_multiple_of(world_size)),
        }
    }

    /// Returns the batch of the next step, in its stage: that of an abandoned step, or the next sequences.
    fn next_batch(&mut self, interrupted: &dyn Fn() -> bool) -> Result<Batch> {
        if let Some(batch) = self.data.pending_batch.take() {
            return Ok(batch);
        }
        let ends_with_window = self.enter_due_stage(interrupted)?;
        let wanted = schedule::sequences_at(&self.stage_run.config, self.position.step + 1);
        let stream = &mut self.data.stream;
        let until = if ends_with_window { Until::WindowEnd(wanted) } else { Until::Count(wanted) };
        let batch = stream.next_sequences_until(until, interrupted)?;
        if self.position.step == 0 {
            self.check_windows()?;
        }
        Ok(batch)
    }

    /// Records in the ledger what a step was trained on, and moves the data position behind it.
    fn record_data(&mut self, step: u64, batch: &Batch) {
        if let Some(Entered { start: Some(start), left_out, opened }) = self.take_entered_stage(step) {
            self.position.cursor = start;
            self.ledger.stage(StageRecord { stage: self.stages.current as u64, step, left_out }, &opened);
            (self.position.best, self.position.improvement) = (None, None);
        }
        let cursor = self.data.stream.cursor();
        self.ledger.step(step, &self.position.cursor, &cursor, batch, &self.data.stream);
        self.tell_skipped(step);
        self.position.stage = self.stages.current;
        self.position.cursor = cursor;
    }

    /// Whether exactly the current weights have been evaluated.
    pub(crate) fn is_evaluated(&self) -> bool {
        self.position.evaluation_loss.is_some()
    }

    /// Whether exactly the current weights have been evaluated, with a lower loss than any before.
    pub(crate) fn is_best(&self) -> bool {
        self.is_evaluated() && self.position.best.is_some_and(|best| best.step == self.position.step)
    }

    /// Whether the run is over: [`Trainer::finished`] says why.
    pub fn is_finished(&self) -> bool {
        self.finished().is_some()
    }

    /// Returns why the run is over; None while there are steps left.
    pub fn finished(&self) -> Option<String> {
        if self.run.config.scheduler.total_steps.is_some_and(|total| self.position.step >= total) {
            Some("all steps are done".to_owned())
        } else if self.position.data_ended {
            Some("the training text has ended".to_owned())
        } else {
            // Early stopping applies to the last stage only, so that it skips no stage.
            let improvement = self.position.improvement.filter(|_| self.stages.is_last(self.position.stage));
            improvement.and_then(|last| last.reason_to_end(&self.run.config.runtime.evaluation))
        }
    }

    /// Writes the profile, and returns its summary as text; None where no steps were to be profiled.
    ///
    /// # Errors
    /// [`TrainerError::Io`] if it cannot be written.
    pub(crate) fn finish_profile(&mut self) -> Result<Option<String>> {
        self.profile.finish(&self.shape, self.engine.device())
    }

    fn checkpoint_directory(&self) -> &Path {
        let directory = &self.run.config.runtime.checkpoint.directory;
        directory.as_deref().expect("a resolved run has its folders filled in")
    }

    /// Returns the run as it is trained: device, folders and micro-batch filled in.
    pub fn run(&self) -> &ResolvedRun {
        &self.run
    }

    /// Returns the plan of the buffers that the trainer has allocated.
    pub fn memory_plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Returns the checkpoint of exactly the current state, if there is one.
    pub fn last_checkpoint(&self) -> Option<&Path> {
        self.saved.as_deref()
    }

    /// Returns the number of threads that compute.
    pub fn threads(&self) -> usize {
        self.engine.pool().current_num_threads()
    }

    /// Returns the number of threads that read and tokenise.
    pub fn data_workers(&self) -> usize {
        self.data.workers
    }

    /// Returns the device that the model is trained on.
    pub fn device(&self) -> &Device {
        self.engine.device()
    }

    /// Returns the ranks of the run.
    pub fn ranks(&self) -> &Ranks {
        self.engine.sharding.ranks()
    }

    /// Returns the number of optimizer steps taken since the run began.
    pub fn steps_done(&self) -> u64 {
        self.position.step
    }

    /// Returns the stage of the last step, from 0.
    pub fn stage(&self) -> usize {
        self.position.stage
    }

    /// Returns the mixture of data sets that the model is trained on.
    pub fn mixture(&self) -> &Mixture {
        self.data.stream.mixture()
    }

    /// Returns how many times each component of the training data has been read to its end.
    pub fn epochs_done(&self) -> Vec<u64> {
        self.position.cursor.components.iter().map(|component| component.start.epoch).collect()
    }

    /// Returns notes for the user on how the trainer started, one sentence each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the newest sample of the run's use of its machine; None before the first one.
    pub fn utilization(&self) -> Option<&UtilizationReport> {
        self.observation.utilization()
    }

    /// Returns the advice found since the last call: what holds the run back and the way out, one sentence each. It is
    /// in `metrics.jsonl` as well.
    pub fn take_advice(&mut self) -> Vec<String> {
        self.observation.take_advice()
    }

    /// Returns notes for the user since the last call, one sentence each: files that cannot be written or removed.
    /// Training continues regardless.
    pub fn take_notices(&mut self) -> Vec<String> {
        let Self { notices, metrics, ledger, .. } = self;
        let files = metrics.take_notices().into_iter().chain(ledger.take_notices());
        notices.drain(..).chain(files).collect()
    }
}
