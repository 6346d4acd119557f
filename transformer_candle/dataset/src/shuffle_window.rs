//! The shuffle window: thousands of documents that are shuffled, tokenized and packed, and whose sequences are shuffled
//! again, so that the sequences of one long document do not follow each other.
//!
//! Elsewhere in this crate it is called "window".

use rayon::prelude::*;
use run_config::Packing;

use crate::DataError;
use crate::cancel::CancelToken;
use crate::cursor::WindowStart;
use crate::formats::Document;
use crate::ledger::WindowRecord;
use crate::open_shards::WindowRows;
use crate::packing::PackedTokens;
use crate::permutation::{Purpose, key, permutation, shuffle};
use crate::tokenizer::{EncodedText, Tokenizer};

/// A window whose sequences are ready to be delivered.
pub(crate) struct Window {
    pub record: WindowRecord,
    /// Where the following window starts.
    pub next: WindowStart,
    packed: PackedTokens,
    /// Indices of the packed sequences in the order of delivery.
    order: Vec<u32>,
}

pub(crate) struct WindowSettings<'a> {
    /// Index of the component in the mixture.
    pub component: usize,
    pub tokenizer: &'a Tokenizer,
    pub sequence_length: usize,
    pub packing: Packing,
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
        let mut documents = rows.documents;
        let count = documents.len() as u64;
        shuffle(&mut documents, key(Purpose::Documents, &numbers, ""));
        let packed = pack(documents, settings)?;
        let order = permutation(packed.sequences(), key(Purpose::Sequences, &numbers, ""));
        let record = WindowRecord {
            component: settings.component as u64,
            start,
            row_ranges: rows.row_ranges,
            documents: count,
            skipped: rows.skipped,
            targets: packed.targets() as u64,
            sequences: order.len() as u64,
        };
        Ok(Self { record, next, packed, order })
    }

    pub(crate) fn sequences(&self) -> usize {
        self.order.len()
    }

    /// The packed tokens, and the index in them of the sequence that is delivered at `position`.
    pub(crate) fn sequence(&self, position: usize) -> (&PackedTokens, usize) {
        (&self.packed, self.order[position] as usize)
    }
}

/// Tokenizes and packs the documents in this order; each text is dropped once it is tokenized.
pub(crate) fn pack(documents: Vec<Document>, settings: &WindowSettings) -> Result<PackedTokens, DataError> {
    let encoded: Vec<Result<(EncodedText, bool), DataError>> = documents
        .into_par_iter()
        .map(|document| {
            settings.cancel.check()?;
            Ok((settings.tokenizer.encode_document(&document.text)?, document.ends_document))
        })
        .collect();
    let &WindowSettings { tokenizer, sequence_length, packing, .. } = settings;
    let marks = tokenizer.document_tokens();
    let added = if marks.starts_with_bos { 2 } else { 1 };
    let tokens = encoded.iter().flatten().map(|(text, _)| text.ids.len() + added).sum();
    let mut packed = PackedTokens::with_capacity(sequence_length, packing, marks, tokens);
    for document in encoded {
        let (text, ends_document) = document?;
        packed.push(&text, ends_document);
    }
    Ok(packed)
}
