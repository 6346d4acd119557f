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
//! Since reading version 2, rules apply only if a row that is held out has a document, and one that is trained on. Where
//! they do not, the row groups are tried in the order of their hashes: as in rule 3, then the last eighth of each, then
//! the rows from its last document on.
//! Corrupted shards, where they are skipped, count as far as they can be decoded.
//!
//! Only the shards needed to decide are opened: one of a large data set, all of a small one.

mod decide;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::permutation::{Purpose, key};

/// A shard's index in the listing and a row group's index in the shard.
type RowGroupId = (usize, u64);

/// The training rows and the held-out rows of a source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HeldOutSplit {
    /// The end of the training rows if `max_samples` limits them, else `None`.
    training_end: Option<TrainingEnd>,
    held_out: HeldOutRule,
    /// Number of shards that it was decided on. Those that were added to the listing later are trained on as a whole.
    shards: usize,
}

/// The end of the training rows: the first `rows` rows (at least one) of `row_group` in `shard` are the last ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct TrainingEnd {
    shard: usize,
    row_group: u64,
    rows: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
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
    /// Whether it can have been decided on these shards, or the first of them.
    pub(crate) fn is_of(&self, shards: usize) -> bool {
        self.shards <= shards
            && self.training_end.is_none_or(|end| end.shard < self.shards)
            && self.held_out_shards().end <= self.shards
    }

    /// Number of shards, from the first, that have training rows, of which `added` were added to the listing.
    pub(crate) fn training_shards(&self, added: usize) -> usize {
        self.training_end.map_or(self.shards + added, |end| end.shard + 1)
    }

    /// Number of a shard's row groups, from the first, that may have training rows.
    pub(crate) fn training_row_groups(&self, shard: usize, row_groups: u64) -> u64 {
        match self.training_end {
            Some(end) if shard == end.shard => row_groups.min(end.row_group + 1),
            Some(end) if shard > end.shard => 0,
            _ => row_groups,
        }
    }

    /// Number of rows of a row group, from its first, that are training rows.
    pub(crate) fn training_rows(&self, shard: usize, name: &str, row_group: u64) -> u64 {
        let limit = match self.training_end {
            Some(end) if (shard, row_group) == (end.shard, end.row_group) => end.rows,
            Some(end) if (shard, row_group) > (end.shard, end.row_group) => 0,
            _ => u64::MAX,
        };
        limit.min(self.first_held_out_row(shard, name, row_group).unwrap_or(u64::MAX))
    }

    /// Returns the row from which on a row group is held out; `None` if it is not.
    pub(crate) fn first_held_out_row(&self, shard: usize, name: &str, row_group: u64) -> Option<u64> {
        match &self.held_out {
            HeldOutRule::Hashed { shards, from, threshold } => {
                let held_out = shards.contains(&shard)
                    && (shard, row_group) >= *from
                    && key(Purpose::HELD_OUT, &[row_group], name) < *threshold;
                held_out.then_some(0)
            }
            HeldOutRule::Rows { shard: held_shard, row_group: held_row_group, first_row } => {
                ((shard, row_group) == (*held_shard, *held_row_group)).then_some(*first_row)
            }
            HeldOutRule::Nothing => None,
        }
    }

    /// Whether rows of a shard may be held out.
    pub(crate) fn may_hold_out(&self, shard: usize) -> bool {
        self.held_out_shards().contains(&shard)
    }

    /// The shards that may have held-out rows.
    pub(crate) fn held_out_shards(&self) -> Range<usize> {
        match &self.held_out {
            HeldOutRule::Nothing => 0..0,
            HeldOutRule::Hashed { shards, .. } => shards.clone(),
            HeldOutRule::Rows { shard, .. } => *shard..*shard + 1,
        }
    }
}
