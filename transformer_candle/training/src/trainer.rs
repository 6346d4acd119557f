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
mod step;

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use dataset::{Cursor, Mixture};
use kernels::Device;
use model::ModelShape;
use run_config::ResolvedRun;

pub(crate) use self::data::{DataPlan, cursor_of};
use self::{data::Data, ledger::RunLedger, observation::Observation, samples::Prompts, stages::Stages};
pub use self::{ledger::LEDGER, step::Step};
use crate::{
    checkpoint::{BaseModel, BestEvaluation, Improvement, TokenizerFiles},
    config_fingerprint::ConfigFingerprint,
    divergence_guard::DivergenceGuard,
    engine::Engine,
    error::Result,
    lock::RunLock,
    memory_plan::MemoryPlan,
    metrics::MetricsWriter,
    profile::Profile,
    ranks::Ranks,
    report::{DataReport, UtilizationReport},
    run_folder::RunFolder,
    schedule::LearningRate,
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
    lock: Option<Arc<RunLock>>,
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

impl Trainer {
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
    /// [`crate::TrainerError::Io`] if it cannot be written.
    pub(crate) fn finish_profile(&mut self) -> Result<Option<String>> {
        self.profile.finish(&self.shape, self.engine.device())
    }

    /// Checks that the run directory is still there, and this trainer's.
    fn check_place(&self) -> Result<()> {
        self.folder.check()?;
        self.lock.as_ref().map_or(Ok(()), |lock| lock.check())
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
