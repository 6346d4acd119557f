//! Interleaved reading: a fixed number of shards is open at a time, so that a window mixes documents of many shards.
//!
//! The shards of an epoch form a queue in permuted order. Each of the `open_shards` slots takes the next shard of the
//! queue whenever it has none. It reads the shard's row groups in permuted order (in the shard's own order where the
//! format can only be read from its start) and the rows of a row group in order.
//!
//! A window is filled in rounds. A round divides what the window still lacks evenly among the slots that hold a shard:
//! of `d` documents and `s` such slots, slot `i` reads `d / s`, one more where `i < d % s`; of `b` bytes of text each
//! slot reads up to `ceil(b / s)`, and always finishes the document that reaches the limit. A slot whose shard ends
//! stops early; before the next round, slots without a shard take the next ones of the queue, in slot order. The
//! documents of a round are joined in slot order. Slots read in parallel within a round, but which slot reads which
//! rows depends on the shards alone, never on timing.

use rayon::prelude::*;

use crate::corrupted_rows::{CorruptedRows, FoundCorruption, first_corrupted_row, is_whole_shard_corrupted};
use crate::cursor::ShardPosition;
use crate::formats::{Document, Row, ShardReader};
use crate::held_out_split::HeldOutSplit;
use crate::ledger::RowRange;
use crate::mixture::ReadBudget;
use crate::permutation::{Purpose, key, permutation};
use crate::skip_notices::SkippedRow;
use crate::skipped_rows::SkippedRows;
use crate::{DataError, DataSource};

/// The shards of one epoch, in their permuted order.
pub(crate) struct EpochShards<'a> {
    pub source: &'a DataSource,
    pub split: &'a HeldOutSplit,
    seed: u64,
    epoch: u64,
    /// Indices into the listing, permuted.
    order: Vec<u32>,
}

impl<'a> EpochShards<'a> {
    pub(crate) fn new(source: &'a DataSource, split: &'a HeldOutSplit, seed: u64, epoch: u64) -> Self {
        let shards = split.training_shards(source.added_shards(epoch));
        let order = permutation(shards, key(Purpose::SHARDS, &[seed, epoch], ""));
        Self { source, split, seed, epoch, order }
    }

    /// Returns the index in the listing of the shard at a position of the permuted order.
    fn shard_at(&self, position: u64) -> Result<usize, DataError> {
        // A cursor is checked against the whole listing; `max_samples` may leave less of it to train on.
        let shard = self.order.get(position as usize).ok_or(DataError::Cursor { difference: "the files" })?;
        Ok(*shard as usize)
    }
}

/// The slots that read the shards of an epoch.
pub(crate) struct OpenShards {
    slots: Vec<Slot>,
    next_shard: u64,
}

/// What to read for a window.
#[derive(Clone, Copy)]
pub(crate) struct WindowRequest<'a> {
    pub budget: ReadBudget,
    /// The window, in the epoch.
    pub window: u64,
    /// Corrupted rows that are known.
    pub corrupted: &'a [CorruptedRows],
}

/// The rows that were read for a window.
#[derive(Default)]
pub(crate) struct WindowRows {
    /// Corrupted rows that were found.
    pub corrupted: Vec<FoundCorruption>,
    /// The first row that was skipped.
    pub first_skipped: Option<SkippedRow>,
    pub documents: Vec<Document>,
    /// The row of each document.
    pub document_rows: Vec<RowRange>,
    /// The ranges of all rows read, of documents and of skipped rows.
    pub row_ranges: Vec<RowRange>,
    pub skipped: SkippedRows,
    pub bytes: usize,
}

impl OpenShards {
    pub(crate) fn resume_at(positions: &[Option<ShardPosition>], next_shard: u64) -> Self {
        let slots = positions.iter().map(|&position| Slot { position, open: None }).collect();
        Self { slots, next_shard }
    }

    /// Returns the position of each slot, and the first shard of the queue that no slot has taken.
    pub(crate) fn positions(&self) -> (Vec<Option<ShardPosition>>, u64) {
        (self.slots.iter().map(|slot| slot.position).collect(), self.next_shard)
    }

    /// Reads the rows of a window: as much as its budget, and less only at the end of the epoch.
    pub(crate) fn read(&mut self, shards: &EpochShards, request: WindowRequest) -> Result<WindowRows, DataError> {
        let budget = request.budget;
        let mut read = WindowRows::default();
        loop {
            let documents = budget.documents - read.documents.len();
            let bytes = budget.bytes.saturating_sub(read.bytes);
            let mut active = self.fill_slots(shards.order.len() as u64);
            if documents == 0 || bytes == 0 || active.is_empty() {
                return Ok(read);
            }
            let slots = active.len();
            let of_slot = |slot: usize| {
                let documents = documents / slots + usize::from(slot < documents % slots);
                WindowRequest { budget: ReadBudget { documents, bytes: bytes.div_ceil(slots) }, ..request }
            };
            let parts: Vec<Result<WindowRows, DataError>> =
                active.par_iter_mut().enumerate().map(|(index, slot)| slot.read(shards, of_slot(index))).collect();
            for part in parts {
                read.append(part?);
            }
        }
    }

    /// Gives each slot without a shard the next one of the queue; returns the slots that have one.
    fn fill_slots(&mut self, shards: u64) -> Vec<&mut Slot> {
        for slot in &mut self.slots {
            if slot.position.is_none() && self.next_shard < shards {
                slot.position = Some(ShardPosition { shard: self.next_shard, row_group: 0, row: 0 });
                self.next_shard += 1;
            }
        }
        self.slots.iter_mut().filter(|slot| slot.position.is_some()).collect()
    }
}

impl WindowRows {
    fn append(&mut self, part: Self) {
        self.documents.extend(part.documents);
        self.document_rows.extend(part.document_rows);
        for range in part.row_ranges {
            self.record(range);
        }
        self.skipped += part.skipped;
        self.bytes += part.bytes;
        self.corrupted.extend(part.corrupted);
        self.first_skipped = self.first_skipped.take().or(part.first_skipped);
    }

    /// Extends the range that these rows follow, or adds a range.
    fn record(&mut self, range: RowRange) {
        let end = |last: &RowRange| (last.shard, last.row_group, last.first_row + last.rows);
        let start = (range.shard, range.row_group, range.first_row);
        match self.row_ranges.iter_mut().rev().find(|last| end(last) == start) {
            Some(last) => last.rows += range.rows,
            None => self.row_ranges.push(range),
        }
    }
}

/// A slot, which holds one shard at a time, or none if it has no position.
struct Slot {
    position: Option<ShardPosition>,
    open: Option<OpenShard>,
}

/// A shard's reader and the order of its row groups.
struct OpenShard {
    reader: Box<dyn ShardReader>,
    /// Index in the listing.
    index: usize,
    /// The permutation of the row groups; `None` if they can only be read in the shard's order.
    row_groups: Option<Vec<u32>>,
    /// Whether the reader has been moved to the slot's position.
    positioned: bool,
    /// What was read of the shard since it was opened.
    skipped: SkippedRows,
    has_document: bool,
}

impl OpenShard {
    fn open(shards: &EpochShards, shard: u64) -> Result<Self, DataError> {
        let index = shards.shard_at(shard)?;
        let reader = shards.source.open(index)?;
        let name = &shards.source.shards()[index].name;
        let row_groups = reader.row_groups().map(|row_groups| {
            let row_groups = shards.split.training_row_groups(index, row_groups);
            permutation(row_groups as usize, key(Purpose::ROW_GROUPS, &[shards.seed, shards.epoch], name))
        });
        Ok(Self { reader, index, row_groups, positioned: false, skipped: SkippedRows::default(), has_document: false })
    }

    fn count(&mut self, row: &Row) {
        match row {
            Row::Document(_) => self.has_document = true,
            Row::Skipped(reason) => self.skipped.count(*reason),
        }
    }

    /// Returns the row group at a position of the permuted order; `None` past the last.
    fn row_group(&self, shards: &EpochShards, position: u64) -> Option<u64> {
        match &self.row_groups {
            Some(row_groups) => row_groups.get(position as usize).map(|&row_group| u64::from(row_group)),
            None => (position < shards.split.training_row_groups(self.index, u64::MAX)).then_some(position),
        }
    }
}

impl Slot {
    /// Reads up to the budget from the slot's shard; releases the shard when it ends.
    fn read(&mut self, shards: &EpochShards, request: WindowRequest) -> Result<WindowRows, DataError> {
        let mut read = WindowRows::default();
        let WindowRequest { budget, window, .. } = request;
        while read.documents.len() < budget.documents && read.bytes < budget.bytes {
            let next = match self.next_row(shards, request) {
                Err(error) if shards.source.skips(&error) => {
                    let (corruption, is_readable) = self.skip_corrupted(shards, window, &error)?;
                    read.corrupted.push(corruption);
                    if is_readable {
                        continue;
                    }
                    None
                }
                next => next?,
            };
            let Some((range, row)) = next else {
                let unusable = self.open.take().filter(|open| !open.has_document);
                let notice = unusable.and_then(|open| shards.source.unusable_notice(open.index, open.skipped));
                if let Some(notice) = notice {
                    tracing::warn!("{notice}");
                }
                self.position = None;
                break;
            };
            read.record(range);
            if let Some(open) = &mut self.open {
                open.count(&row);
            }
            match row {
                Row::Document(document) => {
                    read.bytes += document.text.len();
                    read.documents.push(document);
                    read.document_rows.push(range);
                }
                Row::Skipped(reason) => {
                    read.skipped.count(reason);
                    read.first_skipped.get_or_insert_with(|| SkippedRow {
                        file: shards.source.shards()[range.shard as usize].name.clone(),
                        row_group: range.row_group,
                        row: range.first_row,
                        reason,
                    });
                }
            }
        }
        Ok(read)
    }

    /// Moves past the rows that cannot be decoded; returns them, and whether there may be later rows in the shard.
    fn skip_corrupted(
        &mut self,
        shards: &EpochShards,
        window: u64,
        error: &DataError,
    ) -> Result<(FoundCorruption, bool), DataError> {
        let Some(position) = &mut self.position else {
            return Err(DataError::Closed);
        };
        let whole = (shards.shard_at(position.shard)?, 0, 0, true);
        let (index, row_group, first_row, rest_of_shard) = self.open.as_ref().map_or(whole, |open| {
            let row_group = open.row_group(shards, position.row_group).unwrap_or_default();
            (open.index, row_group, position.row, open.row_groups.is_none())
        });
        let epoch = shards.epoch;
        let rows = CorruptedRows { shard: index as u64, row_group, first_row, rest_of_shard, epoch, window };
        (position.row_group, position.row) = (position.row_group + 1, 0);
        if let Some(open) = &mut self.open {
            open.positioned = false;
        }
        Ok((FoundCorruption::new(rows, &shards.source.shards()[index].name, error), !rest_of_shard))
    }

    /// Reads the next training row of the slot's shard, and its location; `None` at the end of the shard.
    fn next_row(
        &mut self,
        shards: &EpochShards,
        WindowRequest { window, corrupted, .. }: WindowRequest,
    ) -> Result<Option<(RowRange, Row)>, DataError> {
        let Some(position) = &mut self.position else {
            return Ok(None);
        };
        if self.open.is_none() {
            let index = shards.shard_at(position.shard)?;
            let is_removed = shards.source.is_removed_at(index, (shards.epoch, window));
            if is_removed || is_whole_shard_corrupted(corrupted, index) {
                return Ok(None);
            }
            self.open = Some(OpenShard::open(shards, position.shard)?);
        }
        let Some(open) = &mut self.open else {
            return Ok(None);
        };
        loop {
            let Some(row_group) = open.row_group(shards, position.row_group) else {
                return Ok(None);
            };
            let name = &shards.source.shards()[open.index].name;
            let readable = first_corrupted_row(corrupted, open.index, row_group).unwrap_or(u64::MAX);
            if open.row_groups.is_none() && position.row >= readable {
                return Ok(None);
            }
            let is_training = position.row < shards.split.training_rows(open.index, name, row_group).min(readable);
            // Where the number of row groups is unknown, only seeking tells whether this one exists.
            if !open.positioned && (is_training || open.row_groups.is_none()) {
                shards.source.cancel().check()?;
                if !open.reader.seek(row_group, position.row)? {
                    return Ok(None);
                }
                open.positioned = true;
            }
            if is_training && let Some(row) = open.reader.next_row()? {
                let range = RowRange { shard: open.index as u64, row_group, first_row: position.row, rows: 1 };
                position.row += 1;
                return Ok(Some((range, row)));
            }
            (position.row_group, position.row, open.positioned) = (position.row_group + 1, 0, false);
        }
    }
}
