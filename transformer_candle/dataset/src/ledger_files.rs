//! The local files of a run, as its ledger records them: what has changed since, and whether what was consumed is still
//! the same.

use std::fmt;
use std::path::Path;

use crate::ledger::{FilesRecord, LedgerHead, LedgerRecord, for_each_record};
use crate::{CancelToken, DataError, Mixture, StreamStage, Tokenizer, replay};

/// A file that differs from the one that a ledger records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedFile {
    /// Index of the component in the mixture.
    pub component: u64,
    /// Index of the shard in the listing, where the listing has the same names as before.
    pub shard: Option<u64>,
    /// The name of the file.
    pub name: String,
    /// Its recorded size in bytes; `None` if it was added.
    pub was: Option<u64>,
    /// Its size in bytes; `None` if it is gone.
    pub is: Option<u64>,
}

impl fmt::Display for ChangedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        match (self.was, self.is) {
            (Some(was), Some(is)) => write!(f, "{name} had {was} bytes and has {is}"),
            (None, _) => write!(f, "{name} was added"),
            (_, None) => write!(f, "{name} is gone"),
        }
    }
}

impl Mixture {
    /// The ledger's records of the local files of each component; none for runs of reading version 1 and for the Hub's,
    /// whose commit is recorded.
    pub fn files_records(&self) -> Vec<FilesRecord> {
        let components = (0..).zip(self.sources()).filter(|(_, source)| source.records_files());
        let record = |(component, source): (u64, &crate::DataSource)| FilesRecord {
            component,
            files: source.shards().iter().map(|shard| (shard.name.clone(), shard.bytes)).collect(),
        };
        components.map(record).collect()
    }

    /// Compares the files with those of a ledger's records.
    pub fn changed_files(&self, recorded: &[FilesRecord]) -> Vec<ChangedFile> {
        let records = self.files_records();
        let pairs =
            recorded.iter().filter_map(|was| Some((was, records.iter().find(|is| is.component == was.component)?)));
        pairs.flat_map(|(was, is)| was.changes(is)).collect()
    }
}

impl FilesRecord {
    /// Returns the files that differ in a later record.
    pub(crate) fn changes(&self, later: &Self) -> Vec<ChangedFile> {
        let component = self.component;
        let has_same_names = self.files.iter().map(|(name, _)| name).eq(later.files.iter().map(|(name, _)| name));
        if has_same_names {
            let sizes = self.files.iter().zip(&later.files);
            let changed = (0..).zip(sizes).filter_map(|(shard, (was, is))| {
                let (name, was, is) = (was.0.clone(), was.1, is.1);
                (was != is).then_some(ChangedFile { component, shard: Some(shard), name, was: Some(was), is: Some(is) })
            });
            return changed.collect();
        }
        let only_in = |files: &[(String, u64)], others: &[(String, u64)]| -> Vec<(String, u64)> {
            let others: std::collections::HashSet<&String> = others.iter().map(|(name, _)| name).collect();
            files.iter().filter(|(name, _)| !others.contains(name)).cloned().collect()
        };
        let change = |name, was, is| ChangedFile { component, shard: None, name, was, is };
        let gone = only_in(&self.files, &later.files).into_iter().map(|(name, was)| change(name, Some(was), None));
        let added = only_in(&later.files, &self.files).into_iter().map(|(name, is)| change(name, None, Some(is)));
        gone.chain(added).collect()
    }
}

/// Returns the newest record of each component's files in a ledger.
///
/// # Errors
/// [`DataError::Ledger`] where the ledger does not match its head.
pub fn recorded_files(path: &Path, head: &LedgerHead, cancel: &CancelToken) -> Result<Vec<FilesRecord>, DataError> {
    let mut newest: Vec<FilesRecord> = Vec::new();
    for_each_record(path, head, cancel, |record| {
        if let LedgerRecord::Files(record) = record {
            newest.retain(|other| other.component != record.component);
            newest.push(record);
        }
        Ok(())
    })?;
    Ok(newest)
}

/// Checks that what a run has consumed of changed files is still the same: makes the batches of all steps that consumed
/// rows of them again. Returns the number of these steps.
///
/// # Errors
/// [`DataError::Ledger`] where a batch differs, or the ledger does not match its head.
pub fn check_consumed(
    path: &Path,
    head: &LedgerHead,
    changed: &[ChangedFile],
    stages: &[StreamStage],
    tokenizer: &Tokenizer,
) -> Result<usize, DataError> {
    let cancel = stages[0].mixture.cancel();
    let is_changed =
        |component, shard| changed.iter().any(|file| (file.component, file.shard) == (component, Some(shard)));
    // Windows with rows of changed files that a step may still take sequences of: component, epoch, window.
    let (mut windows, mut steps) = (Vec::new(), Vec::new());
    for_each_record(path, head, cancel, |record| {
        match record {
            LedgerRecord::Window(window)
                if window.row_ranges.iter().any(|range| is_changed(window.component, range.shard)) =>
            {
                windows.push((window.component, window.start.epoch, window.start.window));
            }
            LedgerRecord::Step(record) => {
                for range in &record.sequence_ranges {
                    let first = (range.epoch, range.window);
                    windows
                        .retain(|&(component, epoch, window)| component != range.component || (epoch, window) >= first);
                }
                if !windows.is_empty() {
                    steps.push(record.step);
                }
            }
            _ => {}
        }
        Ok(())
    })?;
    for &step in &steps {
        replay(path, head, step, stages, tokenizer)?;
    }
    Ok(steps.len())
}
