//! Lists a folder of checkpoints, finds the one to resume from, and prunes old ones.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use dataset::CancelToken;
use run_config::regular_file;

use super::files::MANIFEST;
use super::manifest::Manifest;
use super::reader::Checkpoint;
use super::staging::{remove_folder, remove_leftovers, replace_pointer};
use crate::error::checkpoint::{CheckpointError, CorruptedCheckpoint, Result, failed};

/// The link to the checkpoint that a resume starts from.
const LATEST: &str = "latest";
/// The link to the checkpoint with the lowest held-out loss.
const BEST: &str = "best";

/// One checkpoint of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointEntry {
    /// Its directory's name, `step-00001000`.
    pub name: String,
    /// The step it was saved at.
    pub step: u64,
    /// Its directory.
    pub path: PathBuf,
}

impl CheckpointEntry {
    /// The checkpoint in this directory, if it is named like one.
    pub fn from_path(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_string_lossy().into_owned();
        let step = step_of(&name).filter(|_| path.is_dir())?;
        Some(Self { name, step, path: path.to_owned() })
    }

    /// Bytes of all its files according to its manifest. Their content is not read.
    pub fn bytes(&self) -> Result<u64> {
        Manifest::load(&self.path).map(|manifest| manifest.total_bytes())
    }
}

/// The newest intact checkpoint: where a resume starts.
#[derive(Debug)]
pub struct NewestCheckpoint {
    /// The checkpoint, of which every byte has been verified.
    pub checkpoint: Checkpoint,
    /// Newer checkpoints that were skipped because they are corrupted.
    pub corrupted: Vec<CorruptedCheckpoint>,
}

/// The checkpoints of a folder, by step. A folder that does not exist, or is none, has none.
pub fn list(directory: &Path) -> Result<Vec<CheckpointEntry>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(failed("read", directory)(error)),
    };
    let mut checkpoints = Vec::new();
    for entry in entries {
        checkpoints.extend(CheckpointEntry::from_path(&entry.map_err(failed("read", directory))?.path()));
    }
    checkpoints.sort_by_key(|checkpoint| checkpoint.step);
    Ok(checkpoints)
}

/// The newest intact checkpoint. `latest` says which one is newest: later ones were abandoned by a resume from an
/// earlier checkpoint, and are used only if no other one is intact. Those that a live run removes meanwhile do not
/// count. `cancel` stops the verification.
pub fn newest_intact(directory: &Path, cancel: &CancelToken) -> Result<NewestCheckpoint> {
    loop {
        let mut candidates = list(directory)?;
        if candidates.is_empty() {
            return Err(CheckpointError::Absent { directory: directory.to_owned() });
        }
        let newest = latest_step(directory, &candidates);
        let lost = lost_latest(directory);
        candidates.sort_by_key(|checkpoint| (checkpoint.step <= newest, checkpoint.step));
        let (mut corrupted, mut any_removed) = (Vec::from_iter(lost), false);
        for CheckpointEntry { name, path, .. } in candidates.into_iter().rev() {
            match Checkpoint::open(&path).and_then(|checkpoint| checkpoint.verified(cancel)) {
                Ok(checkpoint) => return Ok(NewestCheckpoint { checkpoint, corrupted }),
                Err(CheckpointError::Interrupted) => return Err(CheckpointError::Interrupted),
                Err(_) if is_removed(&path) => any_removed = true,
                Err(CheckpointError::Corrupted { reason, .. } | CheckpointError::Mismatch { reason, .. }) => {
                    corrupted.push(CorruptedCheckpoint { name, reason });
                }
                // A disk that cannot read the file, or a folder without files, is as bad as a wrong byte.
                Err(error) => corrupted.push(CorruptedCheckpoint { name, reason: error.to_string() }),
            }
        }
        if !any_removed {
            return Err(CheckpointError::NoneIntact { directory: directory.to_owned(), corrupted });
        }
    }
}

/// Whether nothing is there any more under the path of a checkpoint or of a link to one.
pub fn is_removed(checkpoint: &Path) -> bool {
    matches!(checkpoint.try_exists(), Ok(false))
}

/// Returns the error of a checkpoint by its name that is not among those of its folder; none for any other path.
pub fn removed(checkpoint: &Path) -> Option<CheckpointError> {
    let name = checkpoint.file_name()?.to_str()?;
    step_of(name).filter(|_| is_removed(checkpoint))?;
    let folder = checkpoint.parent()?;
    let newest = latest(folder).or_else(|| Some(list(folder).ok()?.pop()?.path))?;
    Some(CheckpointError::Removed { directory: checkpoint.to_owned(), newest })
}

/// The checkpoint that `latest` names, if it exists.
pub fn latest(directory: &Path) -> Option<PathBuf> {
    pointed_to(directory, LATEST)
}

/// The checkpoint that `best` names, if it exists.
pub fn best(directory: &Path) -> Option<PathBuf> {
    pointed_to(directory, BEST)
}

/// The checkpoint that a path ending in `latest` or `best` points to; none for any other path.
pub fn pointed_checkpoint(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str().filter(|name| [LATEST, BEST].contains(name))?;
    pointed_to(path.parent()?, name)
}

/// Whether a checkpoint is the one that a resume starts from.
pub fn is_latest(checkpoint: &Path) -> bool {
    checkpoint.parent().and_then(latest).as_deref() == Some(checkpoint)
}

/// Marks a checkpoint as the one that a resume starts from.
pub fn mark_latest(checkpoint: &Path) -> Result<()> {
    mark(checkpoint.parent().unwrap_or(Path::new("")), LATEST, checkpoint)
}

/// Marks a saved checkpoint as the best one.
pub fn mark_best(directory: &Path, checkpoint: &Path) -> Result<()> {
    mark(directory, BEST, checkpoint)
}

fn mark(directory: &Path, pointer: &str, checkpoint: &Path) -> Result<()> {
    replace_pointer(directory, pointer, &checkpoint.file_name().unwrap_or_default().to_string_lossy())
}

/// The checkpoints with the lowest held-out loss measured at their own step, best first. Losses of stages with other
/// sequences or data are not comparable: checkpoints of later stages come first.
pub(super) fn by_loss(checkpoints: &[CheckpointEntry]) -> Vec<&CheckpointEntry> {
    let judge = |listed: &CheckpointEntry| {
        let state = Checkpoint::open(&listed.path).ok()?.state().ok()?;
        Some((Reverse(state.stage), state.evaluation_loss?))
    };
    let losses = checkpoints.iter().filter_map(|checkpoint| Some((judge(checkpoint)?, checkpoint)));
    let mut losses: Vec<_> = losses.collect();
    losses.sort_by(|((a_stage, a), _), ((b_stage, b), _)| a_stage.cmp(b_stage).then(a.total_cmp(b)));
    losses.into_iter().map(|(_, checkpoint)| checkpoint).collect()
}

/// The result of pruning.
#[derive(Debug, Default)]
pub struct PruneResult {
    /// The names of the checkpoints removed.
    pub removed: Vec<String>,
    /// Errors of checkpoints and leftover staging directories that could not be removed.
    pub unremovable: Vec<CheckpointError>,
}

impl PruneResult {
    pub(super) fn remove(&mut self, directory: &Path, checkpoint: &CheckpointEntry) {
        match remove_folder(directory, &checkpoint.name) {
            Ok(()) => self.removed.push(checkpoint.name.clone()),
            Err(error) => self.unremovable.push(error),
        }
    }
}

/// Removes all but the `keep_newest` newest checkpoints, the `keep_best` with the lowest held-out loss and the one
/// that `best` names. Those after `latest` were abandoned and do not count as newest. What cannot be
/// removed stays.
pub fn prune(directory: &Path, keep_newest: usize, keep_best: usize) -> Result<PruneResult> {
    let mut pruned = PruneResult { unremovable: remove_leftovers(directory)?, ..PruneResult::default() };
    let checkpoints = list(directory)?;
    let latest = latest_step(directory, &checkpoints);
    let newest = checkpoints.iter().rev().filter(|checkpoint| checkpoint.step <= latest).take(keep_newest.max(1));
    let mut retained_paths: HashSet<PathBuf> = newest.map(|checkpoint| checkpoint.path.clone()).collect();
    retained_paths.extend(by_loss(&checkpoints).into_iter().take(keep_best).map(|checkpoint| checkpoint.path.clone()));
    retained_paths.extend(best(directory));
    for checkpoint in checkpoints.iter().filter(|checkpoint| !retained_paths.contains(&checkpoint.path)) {
        pruned.remove(directory, checkpoint);
    }
    Ok(pruned)
}

/// The step that `latest` names; without a usable `latest`, the highest there is.
fn latest_step(directory: &Path, checkpoints: &[CheckpointEntry]) -> u64 {
    let latest_step = latest(directory).and_then(|path| step_of(&path.file_name()?.to_string_lossy()));
    latest_step.or_else(|| checkpoints.last().map(|checkpoint| checkpoint.step)).unwrap_or(0)
}

/// Returns the checkpoint that `latest` names if it is not there.
fn lost_latest(directory: &Path) -> Option<CorruptedCheckpoint> {
    let path = pointer_target(directory, LATEST).filter(|path| !path.is_dir())?;
    // A live run has moved the pointer meanwhile.
    let is_named = pointer_target(directory, LATEST).as_ref() == Some(&path);
    let name = path.file_name()?.to_string_lossy().into_owned();
    let reason = if is_removed(&path) { "it is missing" } else { "it is no directory" };
    is_named.then(|| CorruptedCheckpoint { name, reason: reason.to_owned() })
}

/// Fails if a directory that is not a copy of a checkpoint stands where the run keeps a pointer.
pub fn check_pointers(directory: &Path) -> Result<()> {
    for name in [LATEST, BEST] {
        let path = directory.join(name);
        if path.is_dir() && !path.is_symlink() && original_of_copy(directory, name).is_none() {
            return Err(CheckpointError::PointerInUse { path });
        }
    }
    Ok(())
}

fn pointed_to(directory: &Path, pointer: &str) -> Option<PathBuf> {
    let mut target = pointer_target(directory, pointer)?;
    // A live run may have moved the pointer and removed its former target after it was read.
    while is_removed(&target) {
        let former = std::mem::replace(&mut target, pointer_target(directory, pointer)?);
        if former == target {
            return None;
        }
    }
    Some(target).filter(|path| path.is_dir())
}

fn pointer_target(directory: &Path, pointer: &str) -> Option<PathBuf> {
    let path = directory.join(pointer);
    let name = match fs::read_link(&path) {
        Ok(target) => target.to_str()?.to_owned(),
        Err(_) if path.is_dir() => original_of_copy(directory, pointer)?,
        // Earlier versions, and file systems without symbolic links, have a text file.
        Err(_) => regular_file::read_to_string(&path).ok()?,
    };
    let name = name.trim();
    step_of(name)?;
    Some(directory.join(name))
}

/// The name of the checkpoint of which the directory `pointer` is a copy, made by a program that copied the folder and
/// followed the link; none if it is anything else.
pub(super) fn original_of_copy(directory: &Path, pointer: &str) -> Option<String> {
    let path = directory.join(pointer);
    let manifest = |folder: &Path| regular_file::read(&folder.join(MANIFEST)).ok();
    let own_manifest = if path.is_symlink() { None } else { manifest(&path) }?;
    let original =
        list(directory).ok()?.into_iter().find(|listed| manifest(&listed.path).as_ref() == Some(&own_manifest))?;
    Some(original.name)
}

/// `step-00001000` -> 1000; none for any other name.
fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?;
    if digits.len() < 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok()
}
