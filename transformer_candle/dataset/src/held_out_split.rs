//! Who is in the training set and who is held out: a function of the listing, `max_samples` and the held-out fraction.
//!
//! Training has the first `max_samples` rows in listing order, or all. Held out are whole groups, and always the same
//! ones, whatever the seed:
//!
//! 1. With `max_samples`, and data behind it: groups behind it (the rest of a group that the limit cuts, if there is no
//!    other), so that training loses nothing. Else groups of the training set, which training then leaves out.
//! 2. Of the first 16 files there, every group whose hash (of the file's name and the group's place) is under the fraction.
//! 3. If that is none, or if there are fewer than eight groups, the group with the smallest hash; of fewer than eight
//!    groups a whole one would be too much to lose, so then only the last eighth of its rows (at least one).
//!
//! Only the files needed to decide are opened: one in a large data set, all of a small one.

use std::ops::Range;

use crate::cancel::CancelToken;
use crate::permutation::{Purpose, key};
use crate::{DataError, DataSource};

/// Files that held-out groups are taken from.
const HELD_OUT_FILES: usize = 16;
/// With fewer groups than this, a part of one is held out instead of all of it.
const FEW_GROUPS: usize = 8;

/// A place between groups.
type Place = (usize, u64);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Selection {
    /// Where `max_samples` ends training; none where it does not.
    end: Option<End>,
    held_out: HeldOutRule,
    files: usize,
}

/// Training has `rows` rows (at least one) of `group` in `file` and nothing behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct End {
    file: usize,
    group: u64,
    rows: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum HeldOutRule {
    Nothing,
    /// The groups from `from` on, in these files, whose hash is under the threshold.
    Hashed {
        files: Range<usize>,
        from: Place,
        threshold: u64,
    },
    /// The rows of one group from `from_row` on.
    Rows {
        file: usize,
        group: u64,
        from_row: u64,
    },
}

/// Which data a source's reader wants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Wanted {
    pub max_samples: Option<u64>,
    pub held_out_fraction: f64,
}

impl Selection {
    /// Decides, opening as few files as it can.
    pub(crate) fn of(source: &DataSource, wanted: Wanted, cancel: &CancelToken) -> Result<Self, DataError> {
        let files = source.files().len();
        let end = match wanted.max_samples {
            Some(rows) => find_end(source, rows, cancel)?,
            None => None,
        };
        let mut selection = Self { end, held_out: HeldOutRule::Nothing, files };
        if wanted.held_out_fraction > 0.0 {
            let threshold = (wanted.held_out_fraction.min(1.0) * u64::MAX as f64) as u64;
            selection.held_out = selection.choose_held_out(source, threshold, cancel)?;
        }
        Ok(selection)
    }

    /// How many files, from the first, have rows to train on.
    pub(crate) fn training_files(&self) -> usize {
        self.end.map_or(self.files, |end| end.file + 1)
    }

    /// How many of a file's groups may have rows to train on.
    pub(crate) fn training_groups(&self, file: usize, groups: u64) -> u64 {
        match self.end {
            Some(end) if file == end.file => groups.min(end.group + 1),
            Some(end) if file > end.file => 0,
            _ => groups,
        }
    }

    /// How many rows of a group, from its first, are for training.
    pub(crate) fn training_rows(&self, file: usize, name: &str, group: u64) -> u64 {
        let limit = match self.end {
            Some(end) if (file, group) == (end.file, end.group) => end.rows,
            Some(end) if (file, group) > (end.file, end.group) => 0,
            _ => u64::MAX,
        };
        limit.min(self.held_out_from(file, name, group).unwrap_or(u64::MAX))
    }

    /// The row from which on a group is held out; none if it is not.
    pub(crate) fn held_out_from(&self, file: usize, name: &str, group: u64) -> Option<u64> {
        match &self.held_out {
            HeldOutRule::Hashed { files, from, threshold } => {
                let held_out = files.contains(&file)
                    && (file, group) >= *from
                    && key(Purpose::HeldOut, &[group], name) < *threshold;
                held_out.then_some(0)
            }
            HeldOutRule::Rows { file: held_file, group: held_group, from_row } => {
                ((file, group) == (*held_file, *held_group)).then_some(*from_row)
            }
            HeldOutRule::Nothing => None,
        }
    }

    /// The files in which something may be held out.
    pub(crate) fn held_out_files(&self) -> Range<usize> {
        match &self.held_out {
            HeldOutRule::Nothing => 0..0,
            HeldOutRule::Hashed { files, .. } => files.clone(),
            HeldOutRule::Rows { file, .. } => *file..*file + 1,
        }
    }

    fn choose_held_out(
        &self,
        source: &DataSource,
        threshold: u64,
        cancel: &CancelToken,
    ) -> Result<HeldOutRule, DataError> {
        if let Some(end) = self.end {
            let behind = Candidates::find(source, (end.file, end.group + 1), threshold, cancel)?;
            if let Some(rule) = behind.decide(source, cancel, true)? {
                return Ok(rule);
            }
            let rows = source.open(end.file, cancel)?.rows(end.group)?;
            if rows.is_some_and(|rows| rows > end.rows) {
                return Ok(HeldOutRule::Rows { file: end.file, group: end.group, from_row: end.rows });
            }
        }
        let inside = Candidates::find(source, (0, 0), threshold, cancel)?;
        Ok(inside.decide(source, cancel, false)?.unwrap_or(HeldOutRule::Nothing))
    }
}

/// The groups of at most 16 files that could be held out.
struct Candidates {
    files: Range<usize>,
    from: Place,
    threshold: u64,
    /// One is under the threshold and there are not few: then the others are not looked at.
    hashed: bool,
    /// By hash, where all were looked at.
    groups: Vec<(u64, usize, u64)>,
}

impl Candidates {
    fn find(source: &DataSource, from: Place, threshold: u64, cancel: &CancelToken) -> Result<Self, DataError> {
        let files = from.0..source.files().len().min(from.0 + HELD_OUT_FILES);
        let mut found = Self { files: files.clone(), from, threshold, hashed: false, groups: Vec::new() };
        let mut under = false;
        for file in files {
            cancel.check()?;
            let name = &source.files()[file].name;
            let mut reader = source.open(file, cancel)?;
            let known = reader.groups();
            let mut group = if file == from.0 { from.1 } else { 0 };
            while match known {
                Some(groups) => group < groups,
                None => reader.rows(group)?.is_some(),
            } {
                let hash = key(Purpose::HeldOut, &[group], name);
                under |= hash < threshold;
                found.groups.push((hash, file, group));
                group += 1;
                if under && found.groups.len() >= FEW_GROUPS {
                    found.hashed = true;
                    return Ok(found);
                }
            }
        }
        found.groups.sort_unstable();
        Ok(found)
    }

    /// The rule; none if nothing can be held out. What lies `behind` the training set may be held out whole.
    fn decide(self, source: &DataSource, cancel: &CancelToken, behind: bool) -> Result<Option<HeldOutRule>, DataError> {
        if self.hashed {
            return Ok(Some(HeldOutRule::Hashed { files: self.files, from: self.from, threshold: self.threshold }));
        }
        let choices = self.groups.len();
        for (_, file, group) in self.groups {
            let rows = source.open(file, cancel)?.rows(group)?.unwrap_or(0);
            let from_row = if behind || choices >= FEW_GROUPS { 0 } else { rows - (rows / 8).max(1).min(rows) };
            let leaves_training = behind || choices > 1 || from_row > 0;
            if rows > 0 && leaves_training {
                return Ok(Some(HeldOutRule::Rows { file, group, from_row }));
            }
        }
        Ok(None)
    }
}

/// Where the first `rows` rows end; none if there are no more than that.
fn find_end(source: &DataSource, rows: u64, cancel: &CancelToken) -> Result<Option<End>, DataError> {
    let mut left = rows;
    for file in 0..source.files().len() {
        cancel.check()?;
        let mut reader = source.open(file, cancel)?;
        let mut group = 0;
        while let Some(rows) = reader.rows(group)? {
            if rows > 0 && left <= rows {
                return Ok(Some(End { file, group, rows: left }));
            }
            left -= rows;
            group += 1;
        }
    }
    Ok(None)
}
