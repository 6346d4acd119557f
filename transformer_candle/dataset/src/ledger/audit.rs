//! Whether a ledger's steps used every row of every finished epoch exactly once.

use std::collections::BTreeMap;
use std::path::Path;

use super::{BeginRecord, LedgerHead, LedgerRecord, Piece, StepRecord, WindowRecord, for_each_record};
use crate::formats::Row;
use crate::selection::Selection;
use crate::stop::Stop;
use crate::{DataError, DataSource, StreamSettings};

/// What an audit found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Audit {
    /// Steps in the ledger.
    pub steps: u64,
    /// Sequences that they took.
    pub sequences: u64,
    /// Targets that they were trained on.
    pub targets: u64,
    /// The epochs begun.
    pub epochs: Vec<AuditedEpoch>,
    /// What does not fit, in words; empty where all is well.
    pub problems: Vec<String>,
}

/// An epoch of the ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditedEpoch {
    /// From 0.
    pub epoch: u64,
    /// Documents in the windows taken from.
    pub documents: u64,
    /// Rows read for them.
    pub rows: u64,
    /// Whether the epoch is over, so that every row of the training set had to be there.
    pub finished: bool,
    /// Whether the ledger has it from its first window on. Of one that began before the ledger, only what was used twice is found.
    pub whole: bool,
}

/// At most so many problems are put into words.
const MOST_PROBLEMS: usize = 20;

/// Rows read of each group: (file, group) -> [first, end) in order.
type Coverage = BTreeMap<(u64, u64), Vec<(u64, u64)>>;

/// Follows the chain to `head` and checks that steps follow each other without a gap, that no row was read twice in an
/// epoch, and that no document of a finished epoch was left out. `ended` says that the data had ended after the last step.
///
/// Holds a few numbers for each group read in an epoch, and reads the footers of all files for a finished one.
///
/// # Errors
/// [`DataError::Ledger`] where the chain does not hold; [`DataError`] where the data cannot be read.
pub fn audit(
    path: &Path,
    head: &LedgerHead,
    source: &DataSource,
    settings: &StreamSettings,
    ended: bool,
) -> Result<Audit, DataError> {
    let selection = source.selection(settings.wanted(), &Stop::default())?;
    let mut auditor = Auditor { source, selection: &selection, audit: Audit::default(), at: None, epoch: None };
    for_each_record(path, head, |record| match record {
        LedgerRecord::Begin(begin) => {
            auditor.begin(begin);
            Ok(())
        }
        LedgerRecord::Window(window) => auditor.window(&window),
        LedgerRecord::Step(step) => {
            auditor.step(&step);
            Ok(())
        }
    })?;
    auditor.finish_epoch(ended)?;
    Ok(auditor.audit)
}

struct Auditor<'a> {
    source: &'a DataSource,
    selection: &'a Selection,
    audit: Audit,
    /// The windows not yet used up: their place and how many sequences are left of how many.
    at: Option<Place>,
    epoch: Option<(AuditedEpoch, Coverage)>,
}

/// Where the next step has to start.
#[derive(Default)]
struct Place {
    /// (epoch, window, sequences) of the windows begun or waiting.
    windows: Vec<(u64, u64, u64)>,
    /// The window used up last.
    left: Option<(u64, u64)>,
    sequence: u64,
    next_step: u64,
}

impl Auditor<'_> {
    fn problem(&mut self, problem: impl FnOnce() -> String) {
        if self.audit.problems.len() < MOST_PROBLEMS {
            self.audit.problems.push(problem());
        }
    }

    fn begin(&mut self, begin: BeginRecord) {
        if self.at.is_some() {
            self.problem(|| "the ledger begins a second time".to_owned());
        }
        self.at = Some(Place { sequence: begin.sequence, next_step: begin.step + 1, ..Place::default() });
        let whole = (begin.window, begin.sequence) == (0, 0);
        self.epoch = Some((AuditedEpoch { epoch: begin.epoch, whole, ..AuditedEpoch::default() }, Coverage::new()));
    }

    fn window(&mut self, window: &WindowRecord) -> Result<(), DataError> {
        let (epoch, number) = (window.start.epoch, window.start.window);
        if self.epoch.as_ref().is_some_and(|(current, _)| current.epoch != epoch) {
            self.finish_epoch(true)?;
        }
        let place = self.at.get_or_insert_with(|| Place { next_step: 1, ..Place::default() });
        let follows = place.windows.last().is_none_or(|&(last_epoch, last, _)| (last_epoch, last) < (epoch, number));
        place.windows.push((epoch, number, window.sequences));
        if !follows {
            self.problem(|| format!("window {number} of epoch {epoch} comes after a later one"));
        }
        let begun = || (AuditedEpoch { epoch, whole: true, ..AuditedEpoch::default() }, Coverage::new());
        let (audited, coverage) = self.epoch.get_or_insert_with(begun);
        audited.documents += window.documents;
        for piece in &window.pieces {
            audited.rows += piece.rows;
            coverage.entry((piece.file, piece.group)).or_default().push((piece.row, piece.row + piece.rows));
        }
        let rows: u64 = window.pieces.iter().map(|piece| piece.rows).sum();
        if rows != window.documents + window.skipped.total() {
            self.problem(|| {
                format!("window {number} of epoch {epoch} read {rows} rows, which its counts do not add up to")
            });
        }
        Ok(())
    }

    fn step(&mut self, step: &StepRecord) {
        self.audit.steps += 1;
        self.audit.sequences += step.sequences;
        self.audit.targets += step.targets;
        let fits = self.at.as_mut().is_some_and(|place| place.take(step));
        if !fits {
            let StepRecord { step, epoch, window, sequence, .. } = *step;
            self.problem(|| {
                format!("step {step} starts at sequence {sequence} of window {window} of epoch {epoch}, not where the step before ended")
            });
        }
    }

    /// Judges the epoch's rows; all of them have to be there if it is over.
    fn finish_epoch(&mut self, finished: bool) -> Result<(), DataError> {
        let Some((mut audited, mut coverage)) = self.epoch.take() else {
            return Ok(());
        };
        audited.finished = finished;
        let epoch = audited.epoch;
        for ((file, group), ranges) in &mut coverage {
            ranges.sort_unstable();
            if let Some(pair) = ranges.windows(2).find(|pair| pair[0].1 > pair[1].0) {
                let (name, row) = (&self.source.files()[*file as usize].name, pair[1].0);
                self.problem(|| format!("row {row} of group {group} of {name} was used twice in epoch {epoch}"));
            }
        }
        if finished && audited.whole {
            self.check_complete(epoch, &coverage)?;
        }
        self.audit.epochs.push(audited);
        Ok(())
    }

    fn check_complete(&mut self, epoch: u64, coverage: &Coverage) -> Result<(), DataError> {
        for index in 0..self.selection.training_files() {
            let name = self.source.files()[index].name.clone();
            let mut file = self.source.open(index, &Stop::default())?;
            let mut group = 0;
            while group < self.selection.training_groups(index, file.groups().unwrap_or(u64::MAX)) {
                let Some(rows) = file.rows(group)? else {
                    break;
                };
                let wanted = rows.min(self.selection.training_rows(index, &name, group));
                let taken = coverage.get(&(index as u64, group)).map_or(&[][..], Vec::as_slice);
                for missing in missing(taken, Piece { file: index as u64, group, row: 0, rows: wanted }) {
                    if let Some(row) = self.first_document(&missing)? {
                        self.problem(|| format!("row {row} of group {group} of {name} was not used in epoch {epoch}"));
                    }
                }
                group += 1;
            }
        }
        Ok(())
    }

    /// The first row among these that holds a document: rows without one leave no trace where a window has nothing else.
    fn first_document(&self, rows: &Piece) -> Result<Option<u64>, DataError> {
        let mut file = self.source.open(rows.file as usize, &Stop::default())?;
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
    /// Moves behind a step; false if it does not start here or takes more than there is.
    fn take(&mut self, step: &StepRecord) -> bool {
        self.leave_used_up();
        let Some(&(epoch, window, _)) = self.windows.first() else {
            return false;
        };
        let (at, claimed) = ((epoch, window), (step.epoch, step.window));
        // Behind a window the place is that of the next one, which may turn out to have no sequence.
        let between = self.left.is_none_or(|left| left < claimed) && claimed <= at;
        let starts = step.sequence == self.sequence && if self.sequence == 0 { between } else { claimed == at };
        let counts = step.step == self.next_step;
        self.next_step = step.step + 1;
        self.sequence += step.sequences;
        while self.windows.len() > 1 && self.sequence > self.windows[0].2 {
            self.sequence -= self.windows[0].2;
            self.leave();
        }
        starts && counts && self.sequence <= self.windows[0].2
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
