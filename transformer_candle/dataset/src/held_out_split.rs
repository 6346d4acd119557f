//! Which rows are trained on and which are held out: a function of the listing, `max_samples` and the held-out
//! fraction.
//!
//! Training has the first `max_samples` rows in listing order, or all. Held out are whole row groups, the same ones for
//! every seed:
//!
//! 1. With `max_samples` and data after it, the candidates are the row groups after it, so that training loses nothing;
//!    if there are none, the rest of the row group that the limit cuts is held out. Otherwise the candidates are the
//!    row groups of the training set, which training then leaves out.
//! 2. Of the first 16 shards with candidates, every candidate is held out whose hash (of the shard's name and the row
//!    group's index) is below the fraction.
//! 3. If that selects none, or if there are fewer than eight candidates, the one with the smallest hash is held out. Of
//!    fewer than eight row groups of the training set, a whole one would be too much to lose: then only the last eighth
//!    of its rows is held out, at least one row.
//!
//! Only the shards needed to decide are opened: one of a large data set, all of a small one.

use std::ops::Range;

use crate::cancel::CancelToken;
use crate::permutation::{Purpose, key};
use crate::{DataError, DataSource};

/// Shards that held-out row groups are taken from.
const HELD_OUT_SHARDS: usize = 16;
/// With fewer candidates than this, part of one row group is held out instead of all of it.
const FEW_ROW_GROUPS: usize = 8;

/// A shard's index in the listing and a row group's index in the shard.
type RowGroupId = (usize, u64);

/// The training rows and the held-out rows of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeldOutSplit {
    /// Where `max_samples` ends training; none where it does not.
    training_end: Option<TrainingEnd>,
    held_out: HeldOutRule,
    shards: usize,
}

/// Training has `rows` rows (at least one) of `row_group` in `shard`, and nothing after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TrainingEnd {
    shard: usize,
    row_group: u64,
    rows: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum HeldOutRule {
    Nothing,
    /// The row groups of these shards from `from` on whose hash is below the threshold.
    Hashed {
        shards: Range<usize>,
        from: RowGroupId,
        threshold: u64,
    },
    /// The rows of one row group from `first_row` on.
    Rows {
        shard: usize,
        row_group: u64,
        first_row: u64,
    },
}

/// The settings that the split depends on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SplitSettings {
    pub max_samples: Option<u64>,
    pub held_out_fraction: f64,
}

impl HeldOutSplit {
    /// Decides the split, opening as few shards as possible.
    pub(crate) fn decide(
        source: &DataSource,
        settings: SplitSettings,
        cancel: &CancelToken,
    ) -> Result<Self, DataError> {
        let shards = source.shards().len();
        let training_end = match settings.max_samples {
            Some(rows) => find_training_end(source, rows, cancel)?,
            None => None,
        };
        let mut split = Self { training_end, held_out: HeldOutRule::Nothing, shards };
        if settings.held_out_fraction > 0.0 {
            let threshold = (settings.held_out_fraction.min(1.0) * u64::MAX as f64) as u64;
            split.held_out = split.choose_held_out(source, threshold, cancel)?;
        }
        Ok(split)
    }

    /// How many shards, from the first, have training rows.
    pub(crate) fn training_shards(&self) -> usize {
        self.training_end.map_or(self.shards, |end| end.shard + 1)
    }

    /// How many of a shard's row groups may have training rows.
    pub(crate) fn training_row_groups(&self, shard: usize, row_groups: u64) -> u64 {
        match self.training_end {
            Some(end) if shard == end.shard => row_groups.min(end.row_group + 1),
            Some(end) if shard > end.shard => 0,
            _ => row_groups,
        }
    }

    /// How many rows of a row group, from its first, are training rows.
    pub(crate) fn training_rows(&self, shard: usize, name: &str, row_group: u64) -> u64 {
        let limit = match self.training_end {
            Some(end) if (shard, row_group) == (end.shard, end.row_group) => end.rows,
            Some(end) if (shard, row_group) > (end.shard, end.row_group) => 0,
            _ => u64::MAX,
        };
        limit.min(self.first_held_out_row(shard, name, row_group).unwrap_or(u64::MAX))
    }

    /// The row from which on a row group is held out; none if it is not.
    pub(crate) fn first_held_out_row(&self, shard: usize, name: &str, row_group: u64) -> Option<u64> {
        match &self.held_out {
            HeldOutRule::Hashed { shards, from, threshold } => {
                let held_out = shards.contains(&shard)
                    && (shard, row_group) >= *from
                    && key(Purpose::HeldOut, &[row_group], name) < *threshold;
                held_out.then_some(0)
            }
            HeldOutRule::Rows { shard: held_shard, row_group: held_row_group, first_row } => {
                ((shard, row_group) == (*held_shard, *held_row_group)).then_some(*first_row)
            }
            HeldOutRule::Nothing => None,
        }
    }

    /// The shards that may have held-out rows.
    pub(crate) fn held_out_shards(&self) -> Range<usize> {
        match &self.held_out {
            HeldOutRule::Nothing => 0..0,
            HeldOutRule::Hashed { shards, .. } => shards.clone(),
            HeldOutRule::Rows { shard, .. } => *shard..*shard + 1,
        }
    }

    fn choose_held_out(
        &self,
        source: &DataSource,
        threshold: u64,
        cancel: &CancelToken,
    ) -> Result<HeldOutRule, DataError> {
        if let Some(end) = self.training_end {
            let after_training = Candidates::find(source, (end.shard, end.row_group + 1), threshold, cancel)?;
            if let Some(rule) = after_training.choose(source, cancel, true)? {
                return Ok(rule);
            }
            let rows = source.open(end.shard, cancel)?.row_count(end.row_group)?;
            if rows.is_some_and(|rows| rows > end.rows) {
                return Ok(HeldOutRule::Rows { shard: end.shard, row_group: end.row_group, first_row: end.rows });
            }
        }
        let within_training = Candidates::find(source, (0, 0), threshold, cancel)?;
        Ok(within_training.choose(source, cancel, false)?.unwrap_or(HeldOutRule::Nothing))
    }
}

/// The row groups of at most 16 shards that could be held out.
struct Candidates {
    shards: Range<usize>,
    from: RowGroupId,
    threshold: u64,
    /// One is below the threshold and there are not few: the others need not be looked at.
    by_hash: bool,
    /// Hash, shard and row group, sorted, if all were looked at.
    row_groups: Vec<(u64, usize, u64)>,
}

impl Candidates {
    fn find(source: &DataSource, from: RowGroupId, threshold: u64, cancel: &CancelToken) -> Result<Self, DataError> {
        let shards = from.0..source.shards().len().min(from.0 + HELD_OUT_SHARDS);
        let mut found = Self { shards: shards.clone(), from, threshold, by_hash: false, row_groups: Vec::new() };
        let mut any_below = false;
        for shard in shards {
            cancel.check()?;
            let name = &source.shards()[shard].name;
            let mut reader = source.open(shard, cancel)?;
            let known = reader.row_groups();
            let mut row_group = if shard == from.0 { from.1 } else { 0 };
            while match known {
                Some(row_groups) => row_group < row_groups,
                None => reader.row_count(row_group)?.is_some(),
            } {
                let hash = key(Purpose::HeldOut, &[row_group], name);
                any_below |= hash < threshold;
                found.row_groups.push((hash, shard, row_group));
                row_group += 1;
                if any_below && found.row_groups.len() >= FEW_ROW_GROUPS {
                    found.by_hash = true;
                    return Ok(found);
                }
            }
        }
        found.row_groups.sort_unstable();
        Ok(found)
    }

    /// The rule for these candidates; none if nothing can be held out. Row groups `after_training` may be held out
    /// whole.
    fn choose(
        self,
        source: &DataSource,
        cancel: &CancelToken,
        after_training: bool,
    ) -> Result<Option<HeldOutRule>, DataError> {
        if self.by_hash {
            return Ok(Some(HeldOutRule::Hashed { shards: self.shards, from: self.from, threshold: self.threshold }));
        }
        let choices = self.row_groups.len();
        for (_, shard, row_group) in self.row_groups {
            let rows = source.open(shard, cancel)?.row_count(row_group)?.unwrap_or(0);
            let hold_out_whole = after_training || choices >= FEW_ROW_GROUPS;
            let first_row = if hold_out_whole { 0 } else { rows - (rows / 8).max(1).min(rows) };
            let leaves_training = after_training || choices > 1 || first_row > 0;
            if rows > 0 && leaves_training {
                return Ok(Some(HeldOutRule::Rows { shard, row_group, first_row }));
            }
        }
        Ok(None)
    }
}

/// Where the first `rows` rows end; `None` if there are at most that many.
fn find_training_end(source: &DataSource, rows: u64, cancel: &CancelToken) -> Result<Option<TrainingEnd>, DataError> {
    let mut remaining = rows;
    for shard in 0..source.shards().len() {
        cancel.check()?;
        let mut reader = source.open(shard, cancel)?;
        let mut row_group = 0;
        while let Some(rows) = reader.row_count(row_group)? {
            if rows > 0 && remaining <= rows {
                return Ok(Some(TrainingEnd { shard, row_group, rows: remaining }));
            }
            remaining -= rows;
            row_group += 1;
        }
    }
    Ok(None)
}
