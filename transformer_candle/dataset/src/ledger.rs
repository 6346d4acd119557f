//! The ledger: an append-only log of the documents and sequences that each step consumed, for audit and replay.
//!
//! A ledger is a JSON Lines file. The line of a window says which rows of which component it was made of; the line of a
//! step says which sequences of which windows it consumed, and the checksum of the batch; the line of a stage says what it
//! leaves out. The lines form a hash chain:
//! `hash_k = SHA-256(hash_(k-1) || line_k)`, with hashes in hexadecimal and `hash_0` all zero. The last hash, the head,
//! is stored in the checkpoint beside the weights and authenticates every line before it.
//!
//! [`crate::audit`] verifies the chain and that each row of each finished epoch was used exactly once; [`crate::replay`]
//! makes the batch of any step again.

use std::io::{self, BufRead, BufReader};
use std::path::Path;

use bytes::Bytes;
use run_config::regular_file;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::cursor::{ComponentPosition, WindowStart};
use crate::skipped_rows::is_zero;
use crate::{AppendFile, Batch, CancelToken, Cursor, DataError, FoundCorruption, SkippedRows};

/// Consecutive rows of one row group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowRange {
    /// Index of the shard in the listing.
    #[serde(rename = "file")]
    pub shard: u64,
    /// Index of the row group in the shard.
    #[serde(rename = "group")]
    pub row_group: u64,
    /// The first row.
    #[serde(rename = "row")]
    pub first_row: u64,
    /// Number of rows.
    pub rows: u64,
}

/// The record of a window: the rows that it was made of, and what they became.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowRecord {
    /// Index of the component in the mixture; 0 for a single source.
    pub component: u64,
    /// The position at which the window starts.
    #[serde(flatten)]
    pub start: WindowStart,
    /// The rows read, in the order of the open shards.
    #[serde(rename = "pieces")]
    pub row_ranges: Vec<RowRange>,
    /// Documents among these rows.
    pub documents: u64,
    /// Skipped rows among these rows.
    pub skipped: SkippedRows,
    /// Conversations among the documents whose end was cut off; not written if 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub truncated: u64,
    /// Target tokens.
    pub targets: u64,
    /// Packed sequences.
    pub sequences: u64,
}

/// The record of an optimizer step: the sequences that it consumed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepRecord {
    /// The optimizer step.
    pub step: u64,
    /// The sequences consumed, for each component that gave any.
    #[serde(rename = "taken")]
    pub sequence_ranges: Vec<SequenceRange>,
    /// Target tokens.
    pub targets: u64,
    /// SHA-256 of the batch: its inputs, then its targets, four little-endian bytes each.
    pub batch: String,
}

/// Consecutive sequences of a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequenceRange {
    /// Index of the component in the mixture.
    pub component: u64,
    /// Epoch of the first sequence.
    pub epoch: u64,
    /// Window of the first sequence, in the epoch.
    pub window: u64,
    /// The first sequence, in the window.
    #[serde(rename = "sequence")]
    pub first_sequence: u64,
    /// Number of sequences.
    pub sequences: u64,
}

/// The record of the start of a stage: later steps consume its stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageRecord {
    /// The stage, from 0; the first one has no record.
    pub stage: u64,
    /// First optimizer step of the stage.
    pub step: u64,
    /// Sequences of the previous stage's windows in use that no step has consumed or will consume.
    pub left_out: Vec<SequenceRange>,
}

/// The first record of a ledger that starts after its run did: what was consumed before is not in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeginRecord {
    /// Optimizer steps taken before.
    pub step: u64,
    /// The stage that the positions are in, from 0; not written if 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub stage: u64,
    /// The position of each component, in the order of the mixture.
    pub components: Vec<BeginPosition>,
}

/// The position of a component's next sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeginPosition {
    /// The epoch.
    pub epoch: u64,
    /// The window, in the epoch.
    pub window: u64,
    /// The sequence, in the window.
    pub sequence: u64,
    /// Sequences of the component that were delivered before, in the stage.
    #[serde(rename = "given")]
    pub delivered: u64,
}

impl StepRecord {
    /// The record of a step that consumed `batch` and moved the stream from one position to another.
    pub fn new(step: u64, from: &Cursor, to: &Cursor, batch: &Batch) -> Self {
        let ranges = from.components.iter().zip(&to.components).enumerate().map(|(component, (from, to))| {
            let ComponentPosition { start, sequence, delivered, .. } = from;
            SequenceRange {
                component: component as u64,
                epoch: start.epoch,
                window: start.window,
                first_sequence: *sequence,
                sequences: to.delivered - delivered,
            }
        });
        Self {
            step,
            sequence_ranges: ranges.filter(|range| range.sequences > 0).collect(),
            targets: batch.target_count as u64,
            batch: batch_hash(batch),
        }
    }

    /// Number of sequences of all components.
    pub fn sequences(&self) -> u64 {
        self.sequence_ranges.iter().map(|range| range.sequences).sum()
    }
}

impl BeginRecord {
    /// The record of a ledger that starts after `step` steps, with the stream of a stage at `cursor`.
    pub fn new(step: u64, stage: u64, cursor: &Cursor) -> Self {
        let components = cursor.components.iter().map(|ComponentPosition { start, sequence, delivered, .. }| {
            BeginPosition { epoch: start.epoch, window: start.window, sequence: *sequence, delivered: *delivered }
        });
        Self { step, stage, components: components.collect() }
    }
}

impl WindowRecord {
    /// Whether `cursor` is in the middle of this window: a ledger that led to it has the window already.
    pub fn is_in_progress_at(&self, cursor: &Cursor) -> bool {
        let position = cursor.components.get(self.component as usize);
        position.is_some_and(|position| position.sequence > 0 && position.start == self.start)
    }
}

/// The record of corrupted rows, which the windows after it skip: of the window that follows, and of later ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorruptedRecord {
    /// Index of the component in the mixture.
    pub component: u64,
    /// The rows, and what is wrong with them.
    #[serde(flatten)]
    pub found: FoundCorruption,
}

impl CorruptedRecord {
    /// The record of what the stream of a component found.
    pub fn new(component: usize, corruption: &FoundCorruption) -> Self {
        Self { component: component as u64, found: corruption.clone() }
    }
}

/// The record of a component's local files, which the windows after it are read from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesRecord {
    /// Index of the component in the mixture.
    pub component: u64,
    /// Name and size in bytes of each file, in listing order.
    pub files: Vec<(String, u64)>,
}

/// A line of the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum LedgerRecord {
    /// The ledger starts here. Only the first line may be one.
    Begin(BeginRecord),
    /// The local files of a component. A later line than the first says that changed files were accepted.
    Files(FilesRecord),
    /// A window came into use.
    Window(WindowRecord),
    /// Rows cannot be decoded and are skipped from here on.
    Corrupted(CorruptedRecord),
    /// A step was taken.
    Step(StepRecord),
    /// A stage began.
    Stage(StageRecord),
}

/// The length of a ledger and the last hash of its chain. Stored in the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerHead {
    /// Length in bytes.
    pub bytes: u64,
    /// The chain's last hash, in hexadecimal.
    pub hash: String,
}

impl LedgerHead {
    /// The head of an empty ledger.
    pub fn empty() -> Self {
        Self { bytes: 0, hash: hex(&[0; 32]) }
    }

    fn extended_by(&self, line: &[u8]) -> Self {
        let hash = Sha256::new().chain_update(&self.hash).chain_update(line).finalize();
        Self { bytes: self.bytes + line.len() as u64, hash: hex(&hash) }
    }
}

/// The checksum of a batch, as in [`StepRecord::batch`].
pub fn batch_hash(batch: &Batch) -> String {
    let mut hash = Sha256::new();
    let mut bytes = Vec::with_capacity(4 * batch.inputs.len());
    bytes.extend(batch.inputs.iter().flat_map(|id| id.to_le_bytes()));
    hash.update(&bytes);
    bytes.clear();
    bytes.extend(batch.targets.iter().flat_map(|id| id.to_le_bytes()));
    hash.update(&bytes);
    hex(&hash.finalize())
}

/// A ledger that is open for writing.
#[derive(Debug)]
pub struct Ledger {
    file: AppendFile,
    /// Length and hash of all lines appended, also of those that are not on disk.
    head: LedgerHead,
}

impl Ledger {
    /// Opens a ledger to append after `head`; lines after it, of steps that no checkpoint has, are cut off. Rejects a
    /// file that is shorter or whose lines do not match `head`.
    pub fn open(path: &Path, head: &LedgerHead, cancel: &CancelToken) -> Result<Self, DataError> {
        for_each_line(path, head, cancel, |_| Ok(()))?;
        let file = AppendFile::open(path, head.bytes).map_err(DataError::io(path))?;
        Ok(Self { file, head: head.clone() })
    }

    /// Returns what the file lacks while it cannot be written.
    pub fn unwritten(&self) -> Option<String> {
        self.file.unwritten()
    }

    /// Appends a line. While it cannot be written it is kept in memory.
    ///
    /// # Errors
    /// The memory for lines is full: the line is lost, and no later head may cover this file.
    pub fn append(&mut self, record: &LedgerRecord) -> io::Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        if !self.file.append(&line) {
            return Err(io::Error::new(
                io::ErrorKind::OutOfMemory,
                "the memory for lines that cannot be written is full",
            ));
        }
        self.head = self.head.extended_by(&line);
        Ok(())
    }

    /// Makes everything appended durable and returns the head. Returns none if that fails: a head must not cover lines
    /// that are not on disk.
    pub fn sync(&mut self) -> Option<LedgerHead> {
        self.file.sync().then(|| self.head.clone())
    }

    /// Takes the notices since the last call, one sentence each.
    pub fn take_notices(&mut self) -> Vec<String> {
        self.file.take_notices()
    }
}

/// Calls `visit` with each line up to `head`, in order; fails at the end if the hashes do not match.
fn for_each_line(
    path: &Path,
    head: &LedgerHead,
    cancel: &CancelToken,
    mut visit: impl FnMut(&[u8]) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let mut reached = LedgerHead::empty();
    if head.bytes > 0 {
        let mut reader = BufReader::new(regular_file::open(path).map_err(DataError::io(path))?);
        let mut line = Vec::new();
        while reached.bytes < head.bytes {
            cancel.check()?;
            line.clear();
            if reader.read_until(b'\n', &mut line).map_err(DataError::io(path))? == 0 {
                break;
            }
            visit(&line)?;
            reached = reached.extended_by(&line);
        }
    }
    if reached == *head {
        return Ok(());
    }
    let message = "its lines do not match the hash in the checkpoint".to_owned();
    Err(DataError::Ledger { path: path.to_owned(), message })
}

/// Calls `visit` with each record up to `head`, in order. A mismatch of the hash chain is found only after the last
/// record: the result is then an error.
pub fn for_each_record(
    path: &Path,
    head: &LedgerHead,
    cancel: &CancelToken,
    mut visit: impl FnMut(LedgerRecord) -> Result<(), DataError>,
) -> Result<(), DataError> {
    for_each_line(path, head, cancel, |line| {
        let record = serde_json::from_slice(line)
            .map_err(|error| DataError::Ledger { path: path.to_owned(), message: error.to_string() })?;
        visit(record)
    })
}

/// Returns bytes in hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    format!("{:x}", Bytes::copy_from_slice(bytes))
}

#[cfg(test)]
mod tests;
