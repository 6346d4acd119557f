//! The part of a start before the data is opened: the run's device, its directory, the checkpoint to resume from and
//! its memory plan.

use std::{ops::RangeInclusive, path::Path, sync::Arc};

use dataset::CancelToken;
use kernels::Device;
use model::ModelShape;
use run_config::{BatchSize, ResolvedRun};

use crate::{
    checkpoint::{self, Checkpoint, TrainerState},
    config_fingerprint::{self, ConfigFingerprint},
    device,
    engine::model_shape,
    error::{Result, TrainerError},
    lock::RunLock,
    memory_plan::MemoryPlan,
    pool,
    ranks::{RankInfo, Ranks},
    run_folder::RunFolder,
    run_options::{ResumeFrom, RunOptions},
    trainer::{execution, ranks},
    units::grouped,
};

/// A run that fits in memory and has its directory. Nothing is allocated.
pub(super) struct PlannedRun {
    /// The run, with the micro-batch and the recompute mode that it trains with.
    pub(super) run: ResolvedRun,
    /// The config's `data.batch_size`, before the plan fills it in.
    pub(super) requested_batch: BatchSize,
    pub(super) device: Device,
    pub(super) shape: ModelShape,
    pub(super) plan: MemoryPlan,
    pub(super) resumed: Option<ResumePoint>,
    pub(super) profiled_steps: Option<RangeInclusive<u64>>,
    pub(super) folder: RunFolder,
    /// The lock of the run directory; None on ranks other than the first.
    pub(super) lock: Option<Arc<RunLock>>,
    /// Notes for the user, one sentence each.
    pub(super) notes: Vec<String>,
}

impl PlannedRun {
    /// Checks the run, takes its directory and plans it.
    ///
    /// # Errors
    /// Nothing is written for a new run that does not fit in memory, nor where another trainer has the directory.
    pub(super) fn new(mut run: ResolvedRun, options: &RunOptions, cancel: &CancelToken) -> Result<Self> {
        let (from, rank_info) = (options.resume.as_ref(), options.ranks.rank_info());
        pool::check(run.config.runtime.threads, dataset::max_workers(&run.config.data))?;
        let device::DeviceSelection { device, notes: device_notes } = device::select_for_training(&mut run, rank_info)?;
        ranks::connect(&options.ranks, &device, &run.config)?;
        let shape = model_shape(&run.config)?;
        let mut disk_note = None;
        if from.is_none() {
            options.profiled_steps(&run.config, 0)?;
            // A new run that does not fit leaves no trace, not even a lock.
            let plan = MemoryPlan::of_rank(&run, &device, rank_info)?;
            plan.check()?;
            disk_note = check_disk(&run, &plan, rank_info)?;
        }
        let (lock, folder) = occupy(&run, options)?;
        if !rank_info.is_first() {
            run.config.runtime.evaluation.prompts.clear();
        }
        let mut notes = [run.notes.clone(), device_notes].concat();
        notes.extend(lock.as_ref().and_then(|lock| lock.note()));
        let resumed = find_resume_point(&run, from, &mut notes, cancel)?;
        let requested_batch = run.config.data.batch_size;
        let plan = plan(&mut run, &device, &options.ranks, resumed.as_ref(), options.rebatch, &mut notes)?;
        let state = resumed.as_ref().map(|resumed| &resumed.state);
        let steps_done = state.map_or(0, |state| state.step);
        if from.is_some() && run.config.scheduler.total_steps.is_none_or(|total| steps_done < total) {
            disk_note = check_disk(&run, &plan, rank_info)?;
        }
        notes.extend(disk_note);
        let profiled_steps = options.profiled_steps(&run.config, steps_done)?;
        if let Some(state) = state {
            config_fingerprint::restore_data_versions(&state.fingerprint, &mut run);
        }
        Ok(Self { run, requested_batch, device, shape, plan, resumed, profiled_steps, folder, lock, notes })
    }

    /// Returns the state in the checkpoint that the run is resumed from.
    pub(super) fn state(&self) -> Option<&TrainerState> {
        self.resumed.as_ref().map(|resumed| &resumed.state)
    }

    /// Returns the stage that the run starts in, from 0.
    pub(super) fn stage(&self) -> usize {
        self.state().map_or(0, |state| state.stage as usize)
    }
}

/// The checkpoint that a run is resumed from.
pub(super) struct ResumePoint {
    pub(super) checkpoint: Checkpoint,
    pub(super) state: TrainerState,
}

impl ResumePoint {
    pub(super) fn directory(&self) -> &Path {
        self.checkpoint.directory()
    }

    /// Refuses a run that differs in a setting that must not change from `recorded`, the checkpoint's settings.
    pub(super) fn require_same(&self, recorded: &ConfigFingerprint, fingerprint: &ConfigFingerprint) -> Result<()> {
        match config_fingerprint::changes(recorded, fingerprint) {
            changes if changes.is_empty() => Ok(()),
            changes => Err(TrainerError::ChangedOnResume { checkpoint: self.directory().to_owned(), changes }),
        }
    }
}

/// Refuses a run whose disk has no room for a checkpoint; returns a note where it has none for all that are kept.
fn check_disk(run: &ResolvedRun, plan: &MemoryPlan, rank_info: RankInfo) -> Result<Option<String>> {
    let directory = run.config.runtime.checkpoint.directory.as_deref().filter(|_| rank_info.is_first());
    let Some(directory) = directory else { return Ok(None) };
    Ok(checkpoint::check_room(directory, plan.checkpoint_bytes, plan.checkpoints)?)
}

/// Plans the run, with its checkpoint's micro-batch and accumulation unless `rebatch`, and writes them into the config.
fn plan(
    run: &mut ResolvedRun,
    device: &Device,
    ranks: &Ranks,
    resumed: Option<&ResumePoint>,
    rebatch: bool,
    notes: &mut Vec<String>,
) -> Result<MemoryPlan> {
    let rank_info = ranks.rank_info();
    if let Some(resumed) = resumed.filter(|_| !rebatch) {
        notes.extend(execution::keep(run, resumed.directory(), resumed.state.execution.as_ref())?);
    }
    let plan = MemoryPlan::of_rank(run, device, rank_info)?;
    match (&plan.shortage, resumed) {
        (Some(shortage), Some(resumed))
            if !rebatch
                && !shortage.fits.is_empty()
                && resumed.state.execution.as_ref() == Some(&execution::from_plan(&plan)) =>
        {
            let (checkpoint, shortage) = (resumed.directory().to_owned(), Box::new(shortage.clone()));
            return Err(TrainerError::OutOfMemoryOnResume { checkpoint, shortage });
        }
        _ => plan.check()?,
    }
    if rebatch {
        notes.extend(execution::changed(&plan, resumed.and_then(|resumed| resumed.state.execution.as_ref())));
    }
    execution::write(&plan, run);
    if !ranks::agree_on_micro_batch(ranks, run)? {
        return Ok(plan);
    }
    let plan = MemoryPlan::of_rank(run, device, rank_info)?;
    execution::write(&plan, run);
    Ok(plan)
}

fn find_resume_point(
    run: &ResolvedRun,
    from: Option<&ResumeFrom>,
    notes: &mut Vec<String>,
    cancel: &CancelToken,
) -> Result<Option<ResumePoint>> {
    let directory = run.config.runtime.checkpoint.directory.as_deref().unwrap_or(&run.run_directory);
    checkpoint::check_pointers(directory)?;
    let existing = checkpoint::list(directory)?;
    let checkpoint = match (from, existing.last()) {
        (None, None) => return Ok(None),
        (None, Some(newest)) => {
            return Err(TrainerError::Request(format!(
                "{} already holds checkpoints, the newest of step {}: resume the run (`--resume`, in Python \
                 `Trainer.resume`), or give the new run another directory",
                directory.display(),
                grouped(newest.step)
            )));
        }
        (Some(ResumeFrom::Latest), None) => {
            notes.push(format!("there is no checkpoint in {} yet: starting at step 0", directory.display()));
            return Ok(None);
        }
        (Some(ResumeFrom::Latest), Some(_)) => {
            let newest = checkpoint::newest_intact(directory, cancel)?;
            notes.extend(newest.corrupted.iter().map(|corrupted| {
                format!("checkpoint {} is corrupted and was skipped: {}", corrupted.name, corrupted.reason)
            }));
            newest.checkpoint
        }
        (Some(ResumeFrom::Directory(path)), _) => Checkpoint::open(path)?.verified(cancel)?,
    };
    let base_model = run.config.model.init_from.as_deref().filter(|_| checkpoint.has_adapters());
    let checkpoint = checkpoint.beside(base_model);
    let state = checkpoint.state()?;
    notes.push(resuming(state.step, checkpoint.directory()));
    Ok(Some(ResumePoint { checkpoint, state }))
}

fn resuming(step: u64, checkpoint: &Path) -> String {
    format!("resuming at step {} from {}", grouped(step), checkpoint.display())
}

/// Takes the run directory for this run's ranks: the first one locks it.
fn occupy(run: &ResolvedRun, options: &RunOptions) -> Result<(Option<Arc<RunLock>>, RunFolder)> {
    let is_first = options.ranks.rank_info().is_first();
    let lock = match &options.lock {
        _ if !is_first => None,
        Some(lock) if lock.belongs_to(&run.run_directory) => Some(Arc::clone(lock)),
        _ => Some(Arc::new(RunLock::acquire(&run.run_directory)?)),
    };
    // Where another trainer holds the lock, only the first rank knows: the others wait for it here.
    ranks::require_same_request(&options.ranks, run, options)?;
    let open = if is_first { RunFolder::open } else { RunFolder::of_another_rank };
    Ok((lock, open(&run.run_directory)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resume_names_its_step_with_grouped_digits() {
        assert_eq!(resuming(85_000, Path::new("step-00085000")), "resuming at step 85,000 from step-00085000");
    }
}
