//! One component's part of an audit: its windows and epochs.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Problems;
use crate::formats::Row;
use crate::held_out_split::Selection;
use crate::ledger::{BeginPosition, Piece, TakenSequences, WindowRecord};
use crate::{DataError, DataSource};

/// What an audit found of a component.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AuditedComponent {
    /// The data set's name, or the patterns.
    pub name: String,
    /// Sequences that steps took of it.
    pub sequences: u64,
    /// The epochs begun.
    pub epochs: Vec<AuditedEpoch>,
}

/// An epoch of the ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AuditedEpoch {
    /// From 0.
    pub epoch: u64,
    /// Documents in the windows taken from.
    pub documents: u64,
    /// Rows read for them.
    pub rows: u64,
    /// Whether the epoch is over, so that every row of the training set had to be there.
    pub finished: bool,
    /// Whether the ledger has it from its first window on. Of one that began before the ledger, only what was used
    /// twice is found.
    pub whole: bool,
}

/// Rows read of each group: (file, group) -> [first, end) in order.
type Coverage = BTreeMap<(u64, u64), Vec<(u64, u64)>>;

/// Follows a component.
pub(super) struct ComponentAuditor<'a> {
    source: &'a DataSource,
    selection: &'a Selection,
    pub(super) audited: AuditedComponent,
    place: Place,
    epoch: Option<(AuditedEpoch, Coverage)>,
}

/// Where the next step's first sequence has to lie.
#[derive(Default)]
struct Place {
    /// (epoch, window, sequences) of the windows begun or waiting.
    windows: Vec<(u64, u64, u64)>,
    /// The window used up last.
    left: Option<(u64, u64)>,
    sequence: u64,
}

impl<'a> ComponentAuditor<'a> {
    pub(super) fn new(source: &'a DataSource, selection: &'a Selection) -> Self {
        let audited = AuditedComponent { name: source.name().to_owned(), sequences: 0, epochs: Vec::new() };
        Self { source, selection, audited, place: Place::default(), epoch: None }
    }

    /// The ledger begins in the middle of the run.
    pub(super) fn begin(&mut self, begin: &BeginPosition) {
        self.place = Place { sequence: begin.sequence, ..Place::default() };
        let whole = (begin.window, begin.sequence) == (0, 0);
        self.epoch = Some((AuditedEpoch { epoch: begin.epoch, whole, ..AuditedEpoch::default() }, Coverage::new()));
    }

    pub(super) fn window(&mut self, window: &WindowRecord, problems: &mut Problems) -> Result<(), DataError> {
        let (epoch, number) = (window.start.epoch, window.start.window);
        if self.epoch.as_ref().is_some_and(|(current, _)| current.epoch != epoch) {
            self.finish_epoch(true, problems)?;
        }
        let name = &self.audited.name;
        let windows = &mut self.place.windows;
        if windows.last().is_some_and(|&(last_epoch, last, _)| (last_epoch, last) >= (epoch, number)) {
            problems.note(|| format!("window {number} of epoch {epoch} of {name} comes after a later one"));
        }
        windows.push((epoch, number, window.sequences));
        let begun = || (AuditedEpoch { epoch, whole: true, ..AuditedEpoch::default() }, Coverage::new());
        let (audited, coverage) = self.epoch.get_or_insert_with(begun);
        audited.documents += window.documents;
        for piece in &window.pieces {
            audited.rows += piece.rows;
            coverage.entry((piece.file, piece.group)).or_default().push((piece.row, piece.row + piece.rows));
        }
        let rows: u64 = window.pieces.iter().map(|piece| piece.rows).sum();
        if rows != window.documents + window.skipped.total() {
            problems.note(|| {
                format!(
                    "window {number} of epoch {epoch} of {name} read {rows} rows, which its counts do not add up to"
                )
            });
        }
        Ok(())
    }

    /// Moves behind what a step took; false if it does not start where the one before ended.
    pub(super) fn take(&mut self, taken: &TakenSequences) -> bool {
        self.audited.sequences += taken.sequences;
        self.place.take(taken)
    }

    /// Judges the rows of the epoch that is begun; all of them have to be there if it is over.
    pub(super) fn finish_epoch(&mut self, finished: bool, problems: &mut Problems) -> Result<(), DataError> {
        let Some((mut audited, mut coverage)) = self.epoch.take() else {
            return Ok(());
        };
        audited.finished = finished;
        let epoch = audited.epoch;
        for ((file, group), ranges) in &mut coverage {
            ranges.sort_unstable();
            if let Some(pair) = ranges.windows(2).find(|pair| pair[0].1 > pair[1].0) {
                let (name, row) = (&self.source.files()[*file as usize].name, pair[1].0);
                problems.note(|| format!("row {row} of group {group} of {name} was used twice in epoch {epoch}"));
            }
        }
        if finished && audited.whole {
            self.check_complete(epoch, &coverage, problems)?;
        }
        self.audited.epochs.push(audited);
        Ok(())
    }

    fn check_complete(&self, epoch: u64, coverage: &Coverage, problems: &mut Problems) -> Result<(), DataError> {
        for index in 0..self.selection.training_files() {
            let name = &self.source.files()[index].name;
            let mut file = self.source.open(index, self.source.cancel())?;
            let mut group = 0;
            while group < self.selection.training_groups(index, file.groups().unwrap_or(u64::MAX)) {
                let Some(rows) = file.rows(group)? else {
                    break;
                };
                let wanted = rows.min(self.selection.training_rows(index, name, group));
                let taken = coverage.get(&(index as u64, group)).map_or(&[][..], Vec::as_slice);
                for missing in missing(taken, Piece { file: index as u64, group, row: 0, rows: wanted }) {
                    if let Some(row) = self.first_document(&missing)? {
                        problems.note(|| format!("row {row} of group {group} of {name} was not used in epoch {epoch}"));
                    }
                }
                group += 1;
            }
        }
        Ok(())
    }

    /// The first row among these that holds a document: rows without one leave no trace where a window has nothing
    /// else.
    fn first_document(&self, rows: &Piece) -> Result<Option<u64>, DataError> {
        let mut file = self.source.open(rows.file as usize, self.source.cancel())?;
        file.seek(rows.group, rows.row)?;
        for row in rows.row..rows.row + rows.rows {
            if matches!(file.next_row()?, Some(Row::Document(_))) {
                return Ok(Some(row));
            }
        }
        Ok(None)
    }
}

impl Place {
    /// Moves behind what a step took; false if it does not start here or takes more than there is.
    fn take(&mut self, taken: &TakenSequences) -> bool {
        self.leave_used_up();
        let Some(&(epoch, window, _)) = self.windows.first() else {
            return false;
        };
        let (at, claimed) = ((epoch, window), (taken.epoch, taken.window));
        // Behind a window the place is that of the next one, which may turn out to have no sequence.
        let between = self.left.is_none_or(|left| left < claimed) && claimed <= at;
        let starts = taken.sequence == self.sequence && if self.sequence == 0 { between } else { claimed == at };
        self.sequence += taken.sequences;
        while self.windows.len() > 1 && self.sequence > self.windows[0].2 {
            self.sequence -= self.windows[0].2;
            self.leave();
        }
        starts && self.sequence <= self.windows[0].2
    }

    fn leave_used_up(&mut self) {
        while self.windows.first().is_some_and(|&(.., sequences)| self.sequence == sequences) {
            self.sequence = 0;
            self.leave();
        }
    }

    fn leave(&mut self) {
        let (epoch, window, _) = self.windows.remove(0);
        self.left = Some((epoch, window));
    }
}

/// The parts of `wanted` that lie in none of the sorted ranges.
fn missing(taken: &[(u64, u64)], wanted: Piece) -> Vec<Piece> {
    let end = wanted.row + wanted.rows;
    let (mut gaps, mut at) = (Vec::new(), wanted.row);
    for &(first, last) in taken.iter().chain(std::iter::once(&(end, end))) {
        let first = first.min(end);
        if first > at {
            gaps.push(Piece { row: at, rows: first - at, ..wanted });
        }
        at = at.max(last);
    }
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_what_no_range_covers() {
        let wanted = Piece { file: 1, group: 2, row: 0, rows: 10 };
        let gaps =
            |taken: &[(u64, u64)]| missing(taken, wanted).iter().map(|gap| (gap.row, gap.rows)).collect::<Vec<_>>();
        assert_eq!(gaps(&[]), [(0, 10)]);
        assert_eq!(gaps(&[(0, 10)]), []);
        assert_eq!(gaps(&[(2, 4), (4, 6), (8, 10)]), [(0, 2), (6, 2)]);
        assert_eq!(gaps(&[(0, 3), (12, 15)]), [(3, 7)]);
    }
}
