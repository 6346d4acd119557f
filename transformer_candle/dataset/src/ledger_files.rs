//! The local files of a run, as its ledger records them: what has changed since, and whether what was consumed is still
//! the same.

use std::fmt;
use std::path::Path;

use run_config::grouped;

use crate::ledger::{FilesRecord, LedgerHead, LedgerRecord, for_each_record};
use crate::{
    CancelToken, Cursor, DataError, FilePart, Mixture, StreamFingerprint, StreamSettings, StreamStage, Tokenizer,
    replay,
};

/// A file that differs from the one that a ledger records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedFile {
    /// Index of the component in the mixture.
    pub component: u64,
    /// Indices of its shards in the recorded listing; none if it was added.
    pub shards: Vec<u64>,
    /// The name of the file.
    pub name: String,
    /// Its recorded size in bytes; `None` if it was added.
    pub was: Option<u64>,
    /// Its size in bytes; `None` if it is gone.
    pub is: Option<u64>,
    /// Whether its recorded bytes are read as before, and what follows them as a shard of its own.
    pub is_appended: bool,
}

impl fmt::Display for ChangedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        match (self.was, self.is) {
            (Some(was), Some(is)) => write!(f, "{name} had {} bytes and has {}", grouped(was), grouped(is)),
            (None, _) => write!(f, "{name} was added"),
            (_, None) => write!(f, "{name} is gone"),
        }
    }
}

/// What has changed of the local files of a run, and how the run would read them.
pub struct FileChanges {
    /// The files that differ.
    pub files: Vec<ChangedFile>,
    /// The data with the files as they are.
    pub mixture: Mixture,
    /// The position of the run in this data, with the data's hash.
    pub cursor: Cursor,
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

    /// Compares the files, as listed, with those of a ledger's records and of a cursor.
    ///
    /// # Errors
    /// [`DataError::Io`] where a file cannot be read.
    pub fn changed_files(&self, recorded: &[FilesRecord], cursor: &Cursor) -> Result<FileChanges, DataError> {
        let (mut cursor, mut files) = (cursor.clone(), Vec::new());
        for (component, (source, position)) in (0..).zip(self.sources().iter().zip(&mut cursor.components)) {
            let record = recorded.iter().find(|record| record.component == component);
            let Some(record) = record.filter(|_| source.records_files()) else { continue };
            let parts = if position.files.is_empty() { record.parts() } else { position.files.clone() };
            let window = position.start.window + u64::from(position.sequence > 0);
            let epoch = position.start.epoch;
            let changed_parts = source.changed_parts(&parts, epoch + 1, (epoch, window))?;
            files.extend(FilesRecord::of(component, &parts).changes(&FilesRecord::of(component, &changed_parts)));
            let whole_files = source.shards().iter().map(|shard| FilePart::whole(&shard.name, shard.bytes));
            position.files = if whole_files.eq(changed_parts.iter().cloned()) { Vec::new() } else { changed_parts };
        }
        let mixture = self.arranged(&cursor);
        cursor.fingerprint.data = StreamFingerprint::data_hash(&mixture);
        Ok(FileChanges { files, mixture, cursor })
    }
}

impl FileChanges {
    /// Says why the run cannot read the files as they are; `None` if it can, where what it has consumed is the same.
    ///
    /// # Errors
    /// [`DataError::Ledger`] where the ledger does not match its head.
    pub fn refusal(
        &self,
        path: &Path,
        head: &LedgerHead,
        settings: &StreamSettings,
    ) -> Result<Option<String>, DataError> {
        let in_use = windows_in_use(path, head, &self.cursor, self.mixture.cancel())?;
        let mut parts = self.cursor.components.iter().flat_map(|position| &position.files);
        if let Some(part) = parts.find(|part| part.bytes == 0 && part.removed.is_none()) {
            let (name, offset) = (&part.name, grouped(part.offset));
            return Ok(Some(format!(
                "{name} has grown before, and is now shorter than the {offset} bytes that it had then"
            )));
        }
        let refusal = |file: &ChangedFile| {
            let ChangedFile { component, shards, name, is, .. } = file;
            let split = self.cursor.components[*component as usize].split.as_ref();
            let is_used = || in_use.iter().any(|(other, shard)| other == component && shards.contains(shard));
            let is_held_out =
                || split.is_some_and(|split| shards.iter().any(|&shard| split.may_hold_out(shard as usize)));
            let is_gone = is.is_none();
            let is_longer = file.was.is_none() || file.is_appended;
            match () {
                () if is_longer && settings.max_samples.is_some() => Some(format!(
                    "{name} cannot grow or be added, as data.max_samples takes the first rows of all files"
                )),
                () if (is_gone || is_longer) && split.is_none() => {
                    Some(format!("nothing was read yet of the files that {name} belongs to"))
                }
                () if is_gone && is_used() => {
                    Some(format!("{name} cannot be removed, as the shuffle window in use was made of its rows"))
                }
                () if is_gone && is_held_out() => {
                    Some(format!("{name} cannot be removed, as rows of it may be held out for evaluation"))
                }
                () => None,
            }
        };
        Ok(self.files.iter().find_map(refusal))
    }
}

/// Returns component and shard of the rows that the windows in use at a position were made of.
fn windows_in_use(
    path: &Path,
    head: &LedgerHead,
    cursor: &Cursor,
    cancel: &CancelToken,
) -> Result<Vec<(u64, u64)>, DataError> {
    let mut shards = Vec::new();
    for_each_record(path, head, cancel, |record| {
        if let LedgerRecord::Window(window) = record
            && window.is_in_progress_at(cursor)
        {
            shards.extend(window.row_ranges.iter().map(|range| (window.component, range.shard)));
        }
        Ok(())
    })?;
    Ok(shards)
}

impl FilesRecord {
    fn of(component: u64, parts: &[FilePart]) -> Self {
        let bytes = |part: &FilePart| if part.removed.is_some() { 0 } else { part.bytes };
        Self { component, files: parts.iter().map(|part| (part.name.clone(), bytes(part))).collect() }
    }

    fn parts(&self) -> Vec<FilePart> {
        self.files.iter().map(|(name, bytes)| FilePart::whole(name, *bytes)).collect()
    }

    /// Returns the files that differ in a later record, which has the same files first.
    pub(crate) fn changes(&self, later: &Self) -> Vec<ChangedFile> {
        let component = self.component;
        // A file that has grown has several shards.
        let shards_of = |name: &String| -> Vec<u64> {
            (0..).zip(&self.files).filter(|(_, file)| file.0 == *name).map(|(shard, _)| shard).collect()
        };
        let pairs = self.files.iter().zip(&later.files);
        let changed_files = pairs.filter(|(was, is)| was.1 != is.1).map(|(was, is)| ChangedFile {
            component,
            shards: shards_of(&was.0),
            name: was.0.clone(),
            was: Some(was.1),
            is: (is.1 > 0).then_some(is.1),
            is_appended: false,
        });
        let grown_files = later.files.iter().skip(self.files.len()).map(|(name, bytes)| {
            let shards = shards_of(name);
            let was: u64 = shards.iter().map(|&shard| self.files[shard as usize].1).sum();
            let is_appended = !shards.is_empty();
            let (was, is) = (is_appended.then_some(was), Some(was + bytes));
            ChangedFile { component, shards, name: name.clone(), was, is, is_appended }
        });
        changed_files.chain(grown_files).collect()
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

/// Checks that what a run has consumed of changed files, other than those that are gone, is still the same: makes the
/// batches of all steps that consumed rows of them again. Returns the number of these steps.
///
/// # Errors
/// [`DataError::Ledger`] where a batch differs, or the ledger does not match its head.
pub fn check_consumed(
    path: &Path,
    head: &LedgerHead,
    changed_files: &[ChangedFile],
    stages: &[StreamStage],
    tokenizer: &Tokenizer,
) -> Result<usize, DataError> {
    let cancel = stages[0].mixture.cancel();
    // The batches of what is gone cannot be made again.
    let present = || changed_files.iter().filter(|file| file.is.is_some());
    let is_changed =
        |component, shard| present().any(|file| file.component == component && file.shards.contains(&shard));
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
