//! A fixed number of files read side by side, so that a window mixes many files while few are open.
//!
//! The files of an epoch stand in a permuted line. Each lane takes the next file of the line whenever it has none, reads
//! its groups in a permuted order (files that can only be read from their start keep theirs) and rows in the file's order.
//! A window's documents are asked for in rounds: what is still wanted is shared out evenly, each lane reads its share or up
//! to the end of its file, then lanes without a file take the next ones, in lane order. Lanes read in parallel within a
//! round; who gets which file and how much depends on the files alone.

use rayon::prelude::*;

use crate::cancel::CancelToken;
use crate::cursor::LanePosition;
use crate::formats::{Document, DocumentFile, Row};
use crate::held_out_split::Selection;
use crate::ledger::Piece;
use crate::permutation::{Purpose, key, permutation};
use crate::skipped_rows::SkippedRows;
use crate::{DataError, DataSource};

/// What lanes read from, the same for a whole epoch.
pub(crate) struct EpochFiles<'a> {
    pub source: &'a DataSource,
    pub selection: &'a Selection,
    pub cancel: &'a CancelToken,
    seed: u64,
    epoch: u64,
    /// Places in the listing, permuted.
    order: Vec<u32>,
}

impl<'a> EpochFiles<'a> {
    pub(crate) fn new(
        source: &'a DataSource,
        selection: &'a Selection,
        cancel: &'a CancelToken,
        seed: u64,
        epoch: u64,
    ) -> Self {
        let order = permutation(selection.training_files(), key(Purpose::Files, &[seed, epoch], ""));
        Self { source, selection, cancel, seed, epoch, order }
    }
}

/// All lanes of an epoch.
pub(crate) struct Lanes {
    lanes: Vec<Lane>,
    next_file: u64,
}

/// What was read for a window.
#[derive(Default)]
pub(crate) struct Taken {
    pub documents: Vec<Document>,
    /// The rows that were read for them.
    pub pieces: Vec<Piece>,
    pub skipped: SkippedRows,
    pub bytes: usize,
}

/// How much is wanted; the first to be reached ends it.
#[derive(Clone, Copy)]
pub(crate) struct Share {
    pub documents: usize,
    pub bytes: usize,
}

impl Lanes {
    pub(crate) fn at(positions: &[Option<LanePosition>], next_file: u64) -> Self {
        let lanes = positions.iter().map(|&position| Lane { position, reader: None }).collect();
        Self { lanes, next_file }
    }

    /// Where the lanes stand.
    pub(crate) fn positions(&self) -> (Vec<Option<LanePosition>>, u64) {
        (self.lanes.iter().map(|lane| lane.position).collect(), self.next_file)
    }

    /// Reads up to `wanted`, less only at the epoch's end.
    pub(crate) fn take(&mut self, files: &EpochFiles, wanted: Share) -> Result<Taken, DataError> {
        let mut taken = Taken::default();
        loop {
            let documents = wanted.documents - taken.documents.len();
            let bytes = wanted.bytes.saturating_sub(taken.bytes);
            let mut reading = self.with_files(files.order.len() as u64);
            if documents == 0 || bytes == 0 || reading.is_empty() {
                return Ok(taken);
            }
            let lanes = reading.len();
            let share = |lane: usize| Share {
                documents: documents / lanes + usize::from(lane < documents % lanes),
                bytes: bytes.div_ceil(lanes),
            };
            let parts: Vec<Result<Taken, DataError>> =
                reading.par_iter_mut().enumerate().map(|(place, lane)| lane.take(files, share(place))).collect();
            for part in parts {
                taken.append(part?);
            }
        }
    }

    /// The lanes that have a file, after those without have taken one.
    fn with_files(&mut self, files: u64) -> Vec<&mut Lane> {
        for lane in &mut self.lanes {
            if lane.position.is_none() && self.next_file < files {
                lane.position = Some(LanePosition { file: self.next_file, group: 0, row: 0 });
                self.next_file += 1;
            }
        }
        self.lanes.iter_mut().filter(|lane| lane.position.is_some()).collect()
    }
}

impl Taken {
    fn append(&mut self, part: Self) {
        self.documents.extend(part.documents);
        for piece in part.pieces {
            self.note(piece);
        }
        self.skipped += part.skipped;
        self.bytes += part.bytes;
    }

    /// Adds rows to the piece they continue, or as one of their own.
    fn note(&mut self, piece: Piece) {
        let end = |last: &Piece| (last.file, last.group, last.row + last.rows);
        match self.pieces.iter_mut().rev().find(|last| end(last) == (piece.file, piece.group, piece.row)) {
            Some(last) => last.rows += piece.rows,
            None => self.pieces.push(piece),
        }
    }
}

struct Lane {
    position: Option<LanePosition>,
    reader: Option<Reader>,
}

/// An open file and the order of its groups.
struct Reader {
    file: Box<dyn DocumentFile>,
    /// Place in the listing.
    index: usize,
    /// None where groups can only be read in the file's order.
    groups: Option<Vec<u32>>,
    /// The file stands at the lane's position.
    there: bool,
}

impl Reader {
    fn open(files: &EpochFiles, place: u64) -> Result<Self, DataError> {
        // A cursor's places were checked against the listing; `max_samples` may have left less of it.
        let index = *files.order.get(place as usize).ok_or(DataError::Cursor { difference: "the files" })? as usize;
        let file = files.source.open(index, files.cancel)?;
        let name = &files.source.files()[index].name;
        let groups = file.groups().map(|groups| {
            let groups = files.selection.training_groups(index, groups);
            permutation(groups as usize, key(Purpose::Groups, &[files.seed, files.epoch], name))
        });
        Ok(Self { file, index, groups, there: false })
    }

    /// The group at a place of the order; none behind the last.
    fn group(&self, files: &EpochFiles, place: u64) -> Option<u64> {
        match &self.groups {
            Some(groups) => groups.get(place as usize).map(|&group| u64::from(group)),
            None => (place < files.selection.training_groups(self.index, u64::MAX)).then_some(place),
        }
    }
}

impl Lane {
    /// Reads up to `share` from the lane's file; without a file afterwards if it has ended.
    fn take(&mut self, files: &EpochFiles, share: Share) -> Result<Taken, DataError> {
        let mut taken = Taken::default();
        while taken.documents.len() < share.documents && taken.bytes < share.bytes {
            let Some((place, row)) = self.next_row(files)? else {
                (self.position, self.reader) = (None, None);
                break;
            };
            taken.note(place);
            match row {
                Row::Document(document) => {
                    taken.bytes += document.text.len();
                    taken.documents.push(document);
                }
                Row::Skipped(reason) => taken.skipped.count(reason),
            }
        }
        Ok(taken)
    }

    /// The next row of the lane's file that is for training, and where it lies; none at its end.
    fn next_row(&mut self, files: &EpochFiles) -> Result<Option<(Piece, Row)>, DataError> {
        let Some(position) = &mut self.position else {
            return Ok(None);
        };
        if self.reader.is_none() {
            self.reader = Some(Reader::open(files, position.file)?);
        }
        let Some(reader) = &mut self.reader else {
            return Ok(None);
        };
        loop {
            let Some(group) = reader.group(files, position.group) else {
                return Ok(None);
            };
            let name = &files.source.files()[reader.index].name;
            let wanted = position.row < files.selection.training_rows(reader.index, name, group);
            // Where the number of groups is not known only seeking one tells whether it is there.
            if !reader.there && (wanted || reader.groups.is_none()) {
                files.cancel.check()?;
                if !reader.file.seek(group, position.row)? {
                    return Ok(None);
                }
                reader.there = true;
            }
            if wanted && let Some(row) = reader.file.next_row()? {
                let place = Piece { file: reader.index as u64, group, row: position.row, rows: 1 };
                position.row += 1;
                return Ok(Some((place, row)));
            }
            (position.group, position.row, reader.there) = (position.group + 1, 0, false);
        }
    }
}
