//! The shuffle window: thousands of documents that are shuffled, tokenized and packed, and whose sequences are shuffled
//! again, so that the sequences of one long document do not follow each other.
//!
//! Elsewhere in this crate it is called "window".

use std::sync::Arc;

use crate::DataError;
use crate::cancel::CancelToken;
use crate::corrupted_rows::FoundCorruption;
use crate::cursor::WindowStart;
use crate::held_out_split::HeldOutSplit;
use crate::ledger::{RowRange, WindowRecord};
use crate::open_shards::WindowRows;
use crate::permutation::{Purpose, key, permutation, shuffle};
use crate::sequence_packer::{PackedDocuments, PackedSequences, SequencePacker};
use crate::skip_notices::SkippedRow;

/// A window whose sequences are ready to be delivered.
pub(crate) struct Window {
    pub record: WindowRecord,
    /// Start of the window after this one.
    pub next: WindowStart,
    /// Corrupted rows that were found in this window, or since the last window that has a sequence.
    pub corrupted: Vec<FoundCorruption>,
    /// The first row that was skipped.
    pub first_skipped: Option<SkippedRow>,
    /// The held-out rows of the source, where cursors record them.
    pub split: Option<Arc<HeldOutSplit>>,
    /// What was counted while its documents were packed.
    pub packing: PackedDocuments,
    packed: PackedSequences,
    /// The row of each document, in the order in which they were packed.
    document_rows: Vec<RowRange>,
    /// Indices of the packed sequences in the order of delivery.
    order: Vec<u32>,
}

pub(crate) struct WindowSettings<'a> {
    /// Index of the component in the mixture.
    pub component: usize,
    pub packer: &'a SequencePacker,
    pub seed: u64,
    pub cancel: &'a CancelToken,
}

impl Window {
    /// Makes a window of the rows between `start` and `next`, in the threads of the current pool.
    pub(crate) fn prepare(
        start: WindowStart,
        next: WindowStart,
        rows: WindowRows,
        settings: &WindowSettings,
    ) -> Result<Self, DataError> {
        let numbers = [settings.seed, start.epoch, start.window];
        let (mut documents, mut document_rows) = (rows.documents, rows.document_rows);
        let count = documents.len() as u64;
        let documents_key = key(Purpose::DOCUMENTS, &numbers, "");
        shuffle(&mut documents, documents_key);
        shuffle(&mut document_rows, documents_key);
        let mut packed = settings.packer.empty();
        let packing = settings.packer.append(&mut packed, documents, settings.cancel)?;
        let mut skipped = rows.skipped;
        skipped += packing.skipped;
        let order = permutation(packed.sequences(), key(Purpose::SEQUENCES, &numbers, ""));
        let record = WindowRecord {
            component: settings.component as u64,
            start,
            row_ranges: rows.row_ranges,
            documents: count - packing.skipped.total(),
            skipped,
            truncated: packing.truncated,
            targets: packed.targets() as u64,
            sequences: order.len() as u64,
        };
        let (corrupted, first_skipped) = (rows.corrupted, rows.first_skipped);
        Ok(Self { record, next, corrupted, first_skipped, split: None, packing, packed, document_rows, order })
    }

    pub(crate) fn sequences(&self) -> usize {
        self.order.len()
    }

    /// Returns the packed sequences, and the index in them of the sequence that is delivered at `position`.
    pub(crate) fn sequence(&self, position: usize) -> (&PackedSequences, usize) {
        (&self.packed, self.order[position] as usize)
    }

    /// Returns the rows whose documents have targets in the sequence that is delivered at `position`.
    pub(crate) fn rows_of(&self, position: usize) -> Vec<RowRange> {
        let documents = self.packed.documents(self.order[position] as usize);
        documents.into_iter().map(|document| self.document_rows[document]).collect()
    }
}
