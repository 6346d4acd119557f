//! Copies of the best checkpoints in a separate folder (`runtime.evaluation.best.directory`).

use std::fs;
use std::path::Path;

use super::files;
use super::list::{PruneResult, by_loss, list, mark_best};
use super::manifest::Manifest;
use super::staging::{create_folder, publish, remove_leftovers, sync_folder, temporary_path};
use crate::error::checkpoint::{Result, failed};

/// Copies a saved checkpoint into `best_directory`, marks it as the best there, and keeps the `max_keep` with the
/// lowest held-out loss. Files are hard links where the file system supports them, which need no space.
pub fn keep_best_in(best_directory: &Path, checkpoint: &Path, max_keep: usize) -> Result<PruneResult> {
    create_folder(best_directory)?;
    let mut pruned = PruneResult { unremovable: remove_leftovers(best_directory)?, ..PruneResult::default() };
    let name = checkpoint.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let staging = temporary_path(best_directory, &name);
    fs::create_dir(&staging).map_err(failed("create", &staging))?;
    let files = Manifest::load(checkpoint)?.files;
    for file in files.keys().map(String::as_str).chain([files::MANIFEST]) {
        link_or_copy(&checkpoint.join(file), &staging.join(file))?;
    }
    sync_folder(&staging)?;
    let place = best_directory.join(&name);
    publish(&staging, &place)?;
    sync_folder(best_directory)?;
    mark_best(best_directory, &place)?;
    let best_checkpoints = list(best_directory)?;
    for worse in by_loss(&best_checkpoints).into_iter().skip(max_keep.max(1)) {
        pruned.remove(best_directory, worse);
    }
    Ok(pruned)
}

fn link_or_copy(from: &Path, to: &Path) -> Result<()> {
    if fs::hard_link(from, to).is_ok() {
        return Ok(());
    }
    let outcome = fs::copy(from, to).and_then(|_| fs::File::open(to)?.sync_all());
    outcome.map_err(failed("copy", from))
}
