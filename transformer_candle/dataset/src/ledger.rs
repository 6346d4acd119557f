//! What every step was trained on, written down so that it can be proven and repeated.
//!
//! A ledger is a file of JSON lines. A window's line says which rows of which component it was made of; a step's line
//! says which sequences of which windows it took, and the checksum of the batch. The lines form a chain: `hash_k =
//! SHA-256(hash_(k-1) || line_k)`, hashes in hexadecimal and `hash_0` all zero, so that the last hash, kept in the
//! checkpoint beside the weights, vouches for every line before.
//!
//! [`audit`] follows the chain and says whether each row of each finished epoch was used exactly once; [`replay`] makes
//! any step's batch again.

mod audit;
mod replay;

use std::io::{self, BufRead, BufReader};
use std::path::Path;

use run_config::regular_file;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use self::audit::{Audit, AuditedComponent, AuditedEpoch, audit};
pub use self::replay::replay;
use crate::cursor::{ComponentPosition, WindowStart};
use crate::{AppendFile, Batch, CancelToken, Cursor, DataError, SkippedRows};

/// Rows of one group that a window took, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowRange {
    /// Place of the file in the listing.
    #[serde(rename = "file")]
    pub shard: u64,
    /// Place of the group in the file.
    #[serde(rename = "group")]
    pub row_group: u64,
    /// The first row taken.
    #[serde(rename = "row")]
    pub first_row: u64,
    /// How many.
    pub rows: u64,
}

/// What a window was made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowRecord {
    /// The component's place in the mixture; 0 where there is but one source.
    pub component: u64,
    /// Where it starts.
    #[serde(flatten)]
    pub start: WindowStart,
    /// The rows read, in the order of the lanes.
    #[serde(rename = "pieces")]
    pub row_ranges: Vec<RowRange>,
    /// Documents among them.
    pub documents: u64,
    /// The other rows.
    pub skipped: SkippedRows,
    /// Tokens that are targets.
    pub targets: u64,
    /// Sequences packed.
    pub sequences: u64,
}

/// What a step took.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepRecord {
    /// The optimizer step.
    pub step: u64,
    /// What it took of the components, without those of which it took nothing.
    #[serde(rename = "taken")]
    pub sequence_ranges: Vec<SequenceRange>,
    /// How many targets.
    pub targets: u64,
    /// SHA-256 of the batch: its inputs, then its targets, four little-endian bytes each.
    pub batch: String,
}

/// Sequences of a component, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequenceRange {
    /// The component's place in the mixture.
    pub component: u64,
    /// Where the first one lies.
    pub epoch: u64,
    /// The window of the epoch.
    pub window: u64,
    /// The sequence of the window.
    #[serde(rename = "sequence")]
    pub first_sequence: u64,
    /// How many, from there on.
    pub sequences: u64,
}

/// Where a ledger begins that does not begin with its run: what was trained on before is not in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeginRecord {
    /// Optimizer steps taken before.
    pub step: u64,
    /// Where each component stands.
    pub components: Vec<BeginPosition>,
}

/// Where a component's next sequence lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeginPosition {
    /// The epoch.
    pub epoch: u64,
    /// The window of the epoch.
    pub window: u64,
    /// The sequence of the window.
    pub sequence: u64,
    /// Sequences of the component that were taken before.
    #[serde(rename = "given")]
    pub delivered: u64,
}

impl StepRecord {
    /// Of a step that took `batch` and moved the stream from one position to another.
    pub fn new(step: u64, from: &Cursor, to: &Cursor, batch: &Batch) -> Self {
        let ranges = from.components.iter().zip(&to.components).enumerate().map(|(component, (from, to))| {
            let ComponentPosition { start, sequence, delivered } = from;
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

    /// How many sequences it took of all components.
    pub fn sequences(&self) -> u64 {
        self.sequence_ranges.iter().map(|range| range.sequences).sum()
    }
}

impl BeginRecord {
    /// Of a ledger that begins after `step` steps, where the stream stands at `cursor`.
    pub fn new(step: u64, cursor: &Cursor) -> Self {
        let components = cursor.components.iter().map(|ComponentPosition { start, sequence, delivered }| {
            BeginPosition { epoch: start.epoch, window: start.window, sequence: *sequence, delivered: *delivered }
        });
        Self { step, components: components.collect() }
    }
}

impl WindowRecord {
    /// Whether the stream was opened in the middle of it, so that a ledger that led to `cursor` has it already.
    pub fn is_in_progress_at(&self, cursor: &Cursor) -> bool {
        let position = cursor.components.get(self.component as usize);
        position.is_some_and(|position| position.sequence > 0 && position.start == self.start)
    }
}

/// A line of the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum LedgerRecord {
    /// The ledger begins here. The first line, if any.
    Begin(BeginRecord),
    /// A window came into use.
    Window(WindowRecord),
    /// A step was taken.
    Step(StepRecord),
}

/// How far a ledger is vouched for. Lies in the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerHead {
    /// Bytes of the file.
    pub bytes: u64,
    /// The chain's last hash, in hexadecimal.
    pub hash: String,
}

impl LedgerHead {
    /// Of a ledger without a line.
    pub fn empty() -> Self {
        Self { bytes: 0, hash: hex(&[0; 32]) }
    }

    fn extended_by(&self, line: &[u8]) -> Self {
        let hash = Sha256::new().chain_update(&self.hash).chain_update(line).finalize();
        Self { bytes: self.bytes + line.len() as u64, hash: hex(&hash) }
    }
}

/// The checksum that a step's line holds.
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

/// A ledger open for options.
#[derive(Debug)]
pub struct Ledger {
    file: AppendFile,
    /// Of every line appended, also of those that wait for room on the disk.
    head: LedgerHead,
}

impl Ledger {
    /// Continues behind `head`; what the file holds beyond (steps that no checkpoint knows) is cut off. Refuses a file
    /// that is shorter or not the one that `head` vouches for.
    pub fn open(path: &Path, head: &LedgerHead, cancel: &CancelToken) -> Result<Self, DataError> {
        for_each_line(path, head, cancel, |_| Ok(()))?;
        let file = AppendFile::open(path, head.bytes).map_err(DataError::io(path))?;
        Ok(Self { file, head: head.clone() })
    }

    /// Appends a line. One that the disk has no room for waits in memory.
    ///
    /// # Errors
    /// Memory holds no more of them: the line is lost, and no later head may vouch for this file.
    pub fn append(&mut self, record: &LedgerRecord) -> io::Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        if !self.file.append(&line) {
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, "too many lines wait for room on the disk"));
        }
        self.head = self.head.extended_by(&line);
        Ok(())
    }

    /// Makes everything appended durable; returns what vouches for it. None while the disk does not take it: a head
    /// never vouches for lines that are not on the disk.
    pub fn sync(&mut self) -> Option<LedgerHead> {
        self.file.sync().then(|| self.head.clone())
    }

    /// What a person should know since this was last asked, one sentence each.
    pub fn take_notices(&mut self) -> Vec<String> {
        self.file.take_notices()
    }
}

/// Hands over each line that `head` vouches for, in order; an error at the end if they are others.
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
    let message = "its lines are not those that the checkpoint vouches for".to_owned();
    Err(DataError::Ledger { path: path.to_owned(), message })
}

/// Hands over every record that `head` vouches for. The last may come before it turns out that the chain does not hold:
/// then the result is an error.
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

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64) -> LedgerRecord {
        let batch = "b".repeat(64);
        let sequence_ranges =
            vec![SequenceRange { component: 0, epoch: 0, window: 0, first_sequence: step, sequences: 1 }];
        LedgerRecord::Step(StepRecord { step, sequence_ranges, targets: 8, batch })
    }

    fn written(path: &Path, steps: u64) -> LedgerHead {
        let mut ledger = Ledger::open(path, &LedgerHead::empty(), &CancelToken::new()).unwrap();
        for step in 1..=steps {
            ledger.append(&record(step)).unwrap();
        }
        ledger.sync().unwrap()
    }

    fn steps(path: &Path, head: &LedgerHead) -> Result<Vec<u64>, DataError> {
        let mut steps = Vec::new();
        for_each_record(path, head, &CancelToken::new(), |record| {
            if let LedgerRecord::Step(record) = record {
                steps.push(record.step);
            }
            Ok(())
        })?;
        Ok(steps)
    }

    #[test]
    fn what_is_written_is_read_as_far_as_the_head_vouches() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.jsonl");
        assert_eq!(steps(&path, &LedgerHead::empty()).unwrap(), [0_u64; 0], "no file is an empty ledger");
        let three = written(&path, 3);
        assert_eq!(steps(&path, &three).unwrap(), [1, 2, 3]);
        let mut ledger = Ledger::open(&path, &three, &CancelToken::new()).unwrap();
        ledger.append(&record(4)).unwrap();
        assert_eq!(steps(&path, &ledger.sync().unwrap()).unwrap(), [1, 2, 3, 4]);
        assert_eq!(steps(&path, &three).unwrap(), [1, 2, 3]);
    }

    #[test]
    fn going_on_cuts_off_what_no_checkpoint_knows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.jsonl");
        let two = written(&path, 2);
        let five = written(&path, 5);
        let mut again = Ledger::open(&path, &two, &CancelToken::new()).unwrap();
        for step in 3..=5 {
            again.append(&record(step)).unwrap();
        }
        assert_eq!(again.sync().unwrap(), five, "the same lines give the same chain");
    }

    #[test]
    fn no_head_vouches_for_lines_not_on_the_disk() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.jsonl");
        let mut ledger = Ledger::open(&path, &LedgerHead::empty(), &CancelToken::new()).unwrap();
        ledger.append(&record(1)).unwrap();
        let one = ledger.sync().unwrap();
        let disk = ledger.file.replace_file(std::fs::File::options().write(true).open("/dev/full").unwrap());
        ledger.append(&record(2)).unwrap();
        assert_eq!(ledger.sync(), None);
        assert_eq!(steps(&path, &one).unwrap(), [1], "what was vouched for before still is");
        ledger.file.replace_file(disk);
        ledger.append(&record(3)).unwrap();
        assert_eq!(steps(&path, &ledger.sync().unwrap()).unwrap(), [1, 2, 3]);
        assert_eq!(ledger.take_notices().len(), 2);
    }

    #[test]
    fn any_changed_lost_or_swapped_byte_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.jsonl");
        let head = written(&path, 4);
        let intact = std::fs::read(&path).unwrap();
        let lines: Vec<&[u8]> = intact.split_inclusive(|&byte| byte == b'\n').collect();
        let mut damaged: Vec<Vec<u8>> = (0..intact.len())
            .step_by(7)
            .map(|at| {
                let mut bytes = intact.clone();
                bytes[at] ^= 1;
                bytes
            })
            .collect();
        damaged.push(intact[..intact.len() - 1].to_vec());
        damaged.push([lines[1], lines[0], lines[2], lines[3]].concat());
        damaged.push([lines[0], lines[1], lines[2], lines[2]].concat());
        for bytes in damaged {
            std::fs::write(&path, bytes).unwrap();
            let error = Ledger::open(&path, &head, &CancelToken::new()).unwrap_err();
            assert!(matches!(error, DataError::Ledger { .. }), "{error}");
        }
    }
}
