//! Decides the split of a source, once for each setting.

use std::ops::Range;
use std::sync::{Arc, PoisonError, TryLockError};
use std::time::Duration;

use super::{HeldOutRule, HeldOutSplit, RowGroupId, SplitSettings, TrainingEnd};
use crate::formats::{Row, ShardReader};
use crate::permutation::{Purpose, key};
use crate::sequential_reader::SequentialReader;
use crate::{DataError, DataSource};

/// Shards that held-out row groups are taken from.
const HELD_OUT_SHARDS: usize = 16;
/// With fewer candidates than this, part of one row group is held out instead of all of it.
const FEW_ROW_GROUPS: usize = 8;
/// Row groups that are tried at most to find one with a document.
const MAX_TRIED_ROW_GROUPS: usize = 256;
/// How often a thread checks whether another one has decided the split.
const SPLIT_POLL_INTERVAL: Duration = Duration::from_millis(20);

impl DataSource {
    /// Returns the split into training and held-out rows, the same for the stream and the evaluation of a run.
    pub(crate) fn held_out_split(&self, settings: SplitSettings) -> Result<Arc<HeldOutSplit>, DataError> {
        // Another thread may be deciding the same split, for as long as the Hub does not respond.
        let mut splits = loop {
            match self.held_out_splits().try_lock() {
                Ok(splits) => break splits,
                Err(TryLockError::Poisoned(splits)) => break splits.into_inner(),
                Err(TryLockError::WouldBlock) => self.cancel().sleep(SPLIT_POLL_INTERVAL)?,
            }
        };
        if let Some((_, split)) = splits.iter().find(|(other, _)| *other == settings) {
            return Ok(Arc::clone(split));
        }
        let split = Arc::new(HeldOutSplit::decide(self, settings)?);
        splits.push((settings, Arc::clone(&split)));
        Ok(split)
    }

    /// Takes over a split that was decided before.
    pub(crate) fn restore_split(&self, settings: SplitSettings, split: &HeldOutSplit) {
        let mut splits = self.held_out_splits().lock().unwrap_or_else(PoisonError::into_inner);
        splits.retain(|(other, _)| *other != settings);
        splits.push((settings, Arc::new(split.clone())));
    }

    /// Counts the rows of a row group, of a corrupted one those before the first that cannot be decoded; `None` if there
    /// is no such row group.
    pub(crate) fn count_rows(&self, reader: &mut dyn ShardReader, row_group: u64) -> Result<Option<u64>, DataError> {
        match reader.row_count(row_group) {
            Err(error) if self.skips(&error) => {}
            count => return count,
        }
        let rows = self.visit_rows(reader, row_group, |_| false)?;
        Ok((rows > 0).then_some(rows))
    }

    /// Calls `visit` with the rows of a row group, in order, until it returns true; of a corrupted one with those before
    /// the first that cannot be decoded. Returns how many it was called with.
    fn visit_rows(
        &self,
        reader: &mut dyn ShardReader,
        row_group: u64,
        mut visit: impl FnMut(Row) -> bool,
    ) -> Result<u64, DataError> {
        let mut rows = 0;
        let mut read = || -> Result<(), DataError> {
            if reader.seek(row_group, 0)? {
                while let Some(row) = reader.next_row()? {
                    rows += 1;
                    if visit(row) {
                        break;
                    }
                }
            }
            Ok(())
        };
        match read() {
            Err(error) if !self.skips(&error) => Err(error),
            _ => Ok(rows),
        }
    }
}

impl HeldOutSplit {
    /// Decides the split, opening as few shards as possible.
    fn decide(source: &DataSource, settings: SplitSettings) -> Result<Self, DataError> {
        let shards = source.shards().len();
        let training_end = match settings.max_samples {
            Some(rows) => find_training_end(source, rows)?,
            None => None,
        };
        let mut split = Self { training_end, held_out: HeldOutRule::Nothing, shards };
        if settings.held_out_fraction > 0.0 {
            let threshold = (settings.held_out_fraction.min(1.0) * u64::MAX as f64) as u64;
            split.held_out = split.choose_held_out(source, threshold)?;
        }
        Ok(split)
    }

    fn choose_held_out(&self, source: &DataSource, threshold: u64) -> Result<HeldOutRule, DataError> {
        if let Some(end) = self.training_end {
            let after_training = Candidates::find(source, (end.shard, end.row_group + 1), threshold)?;
            if let Some(rule) = after_training.choose(source, true)? {
                return Ok(rule);
            }
            let rows = source.count_rows(source.open(end.shard)?.as_mut(), end.row_group)?;
            if rows.is_some_and(|rows| rows > end.rows) {
                return Ok(HeldOutRule::Rows { shard: end.shard, row_group: end.row_group, first_row: end.rows });
            }
        }
        let within_training = Candidates::find(source, (0, 0), threshold)?;
        Ok(within_training.choose(source, false)?.unwrap_or(HeldOutRule::Nothing))
    }
}

/// The row groups of at most 16 shards that could be held out.
struct Candidates {
    shards: Range<usize>,
    from: RowGroupId,
    threshold: u64,
    /// Whether all candidates with a hash below the threshold are held out: there is one, and candidates are not few.
    by_hash: bool,
    /// Hash, shard and row group of the candidates, sorted; incomplete if `by_hash`.
    row_groups: Vec<(u64, usize, u64)>,
}

impl Candidates {
    fn find(source: &DataSource, from: RowGroupId, threshold: u64) -> Result<Self, DataError> {
        let shards = from.0..source.shards().len().min(from.0 + HELD_OUT_SHARDS);
        let mut candidates = Self { shards: shards.clone(), from, threshold, by_hash: false, row_groups: Vec::new() };
        let mut any_below = false;
        for shard in shards {
            source.cancel().check()?;
            let name = &source.shards()[shard].name;
            let Some(mut reader) = source.open_intact(shard)? else { continue };
            let row_groups = reader.row_groups();
            let mut row_group = if shard == from.0 { from.1 } else { 0 };
            while match row_groups {
                Some(row_groups) => row_group < row_groups,
                None => source.count_rows(reader.as_mut(), row_group)?.is_some(),
            } {
                let hash = key(Purpose::HELD_OUT, &[row_group], name);
                any_below |= hash < threshold;
                candidates.row_groups.push((hash, shard, row_group));
                row_group += 1;
                if any_below && candidates.row_groups.len() >= FEW_ROW_GROUPS {
                    candidates.by_hash = true;
                    return Ok(candidates);
                }
            }
        }
        candidates.row_groups.sort_unstable();
        Ok(candidates)
    }

    /// Returns the rule for these candidates; `None` if nothing can be held out. Row groups `after_training` may be
    /// held out whole.
    fn choose(self, source: &DataSource, after_training: bool) -> Result<Option<HeldOutRule>, DataError> {
        let needs_documents = source.reading_version() >= 2;
        if self.by_hash {
            let Self { shards, from, threshold, .. } = self;
            let rule = HeldOutRule::Hashed { shards, from, threshold };
            // A stream is not asked for a row group only to see that it has text: of so many some will have.
            let is_checked = needs_documents && source.revision().is_none() && threshold < u64::MAX;
            if !is_checked || rule.divides_documents(source, after_training)? {
                return Ok(Some(rule));
            }
            return Self::find(source, from, 0)?.choose(source, after_training);
        }
        let choices = self.row_groups.len();
        let leaves_training = |first_row: u64| after_training || choices > 1 || first_row > 0;
        let last_eighth = |rows: u64| rows - (rows / 8).max(1).min(rows);
        let trial_count = if needs_documents { choices.min(MAX_TRIED_ROW_GROUPS) } else { choices };
        let mut usual = None;
        for &(_, shard, row_group) in &self.row_groups[..trial_count] {
            let rows = source.count_rows(source.open(shard)?.as_mut(), row_group)?.unwrap_or(0);
            let first_row = if after_training || choices >= FEW_ROW_GROUPS { 0 } else { last_eighth(rows) };
            if rows > 0 && leaves_training(first_row) {
                let rule = HeldOutRule::Rows { shard, row_group, first_row };
                if !needs_documents || rule.divides_documents(source, after_training)? {
                    return Ok(Some(rule));
                }
                usual = usual.or(Some(rule));
            }
        }
        if !needs_documents {
            return Ok(None);
        }
        // The documents are in few rows: a part of a row group is held out that has some and leaves some.
        let mut has_document = false;
        for &(_, shard, row_group) in &self.row_groups[..trial_count] {
            let Some(documents) = Documents::find(source, shard, row_group)? else { continue };
            has_document = true;
            for first_row in [last_eighth(documents.rows), documents.last] {
                let rule = HeldOutRule::Rows { shard, row_group, first_row };
                if leaves_training(first_row) && rule.divides_documents(source, after_training)? {
                    return Ok(Some(rule));
                }
            }
        }
        // Without any document, evaluation says why the rows are skipped.
        Ok(usual.filter(|_| !has_document))
    }
}

impl HeldOutRule {
    /// Whether a row that is held out has a document, and one that is trained on, unless training is over before.
    fn divides_documents(&self, source: &DataSource, after_training: bool) -> Result<bool, DataError> {
        let split = HeldOutSplit { training_end: None, held_out: self.clone(), shards: source.shards().len() };
        Ok(split.holds_out_document(source)? && (after_training || split.leaves_document(source)?))
    }
}

impl HeldOutSplit {
    fn holds_out_document(&self, source: &DataSource) -> Result<bool, DataError> {
        let mut rows = SequentialReader::held_out(source, Arc::new(self.clone()));
        while let Some(row) = rows.next_row()? {
            if matches!(row, Row::Document(_)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether a training row of the first shards has a document.
    fn leaves_document(&self, source: &DataSource) -> Result<bool, DataError> {
        for (shard, file) in source.shards().iter().enumerate().take(HELD_OUT_SHARDS) {
            let Some(mut reader) = source.open_intact(shard)? else { continue };
            let mut row_group = 0;
            loop {
                let training_rows = self.training_rows(shard, &file.name, row_group);
                let (mut visited, mut has_document) = (0, false);
                let rows = source.visit_rows(reader.as_mut(), row_group, |row| {
                    has_document |= visited < training_rows && matches!(row, Row::Document(_));
                    visited += 1;
                    has_document || visited >= training_rows
                })?;
                if has_document {
                    return Ok(true);
                }
                row_group += 1;
                if reader.row_groups().map_or(rows == 0, |row_groups| row_group >= row_groups) {
                    break;
                }
            }
        }
        Ok(false)
    }
}

/// Where the documents of a row group are.
struct Documents {
    rows: u64,
    /// The last row with a document.
    last: u64,
}

impl Documents {
    /// Reads a row group; `None` if it has no document.
    fn find(source: &DataSource, shard: usize, row_group: u64) -> Result<Option<Self>, DataError> {
        let (mut row_index, mut last) = (0, None);
        let rows = source.visit_rows(source.open(shard)?.as_mut(), row_group, |row| {
            last = if matches!(row, Row::Document(_)) { Some(row_index) } else { last };
            row_index += 1;
            false
        })?;
        Ok(last.map(|last| Self { rows, last }))
    }
}

/// Finds the end of the first `rows` rows; `None` if there are fewer.
fn find_training_end(source: &DataSource, rows: u64) -> Result<Option<TrainingEnd>, DataError> {
    let mut remaining = rows;
    for shard in 0..source.shards().len() {
        source.cancel().check()?;
        let Some(mut reader) = source.open_intact(shard)? else { continue };
        let mut row_group = 0;
        while let Some(rows) = source.count_rows(reader.as_mut(), row_group)? {
            if rows > 0 && remaining <= rows {
                return Ok(Some(TrainingEnd { shard, row_group, rows: remaining }));
            }
            remaining -= rows;
            row_group += 1;
        }
    }
    Ok(None)
}
