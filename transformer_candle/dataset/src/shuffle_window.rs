//! A window: some thousands of documents, shuffled, tokenised, packed, and the sequences shuffled again, so that the parts
//! of one long document do not follow each other.

use rayon::prelude::*;
use run_config::Packing;

use crate::DataError;
use crate::cancel::CancelToken;
use crate::cursor::WindowStart;
use crate::formats::Document;
use crate::ledger::WindowRecord;
use crate::open_shards::Taken;
use crate::packing::PackedTokens;
use crate::permutation::{Purpose, key, permutation, shuffle};
use crate::tokenizer::Tokenizer;

/// A window ready to be cut into batches.
pub(crate) struct Window {
    pub record: WindowRecord,
    /// Where the window behind it starts.
    pub next: WindowStart,
    packed: PackedTokens,
    /// Sequences in the order of delivery.
    order: Vec<u32>,
}

/// What windows are made of and with.
pub(crate) struct WindowSettings<'a> {
    /// The component's place in the mixture.
    pub component: usize,
    pub tokenizer: &'a Tokenizer,
    pub sequence_length: usize,
    pub packing: Packing,
    pub seed: u64,
    pub cancel: &'a CancelToken,
}

impl Window {
    /// Makes a window of what lies between `start` and `next`, in the threads of the current pool.
    pub(crate) fn prepare(
        start: WindowStart,
        next: WindowStart,
        taken: Taken,
        settings: &WindowSettings,
    ) -> Result<Self, DataError> {
        let place = [settings.seed, start.epoch, start.window];
        let mut documents = taken.documents;
        let count = documents.len() as u64;
        shuffle(&mut documents, key(Purpose::Documents, &place, ""));
        let packed = pack(documents, settings)?;
        let order = permutation(packed.sequences(), key(Purpose::Sequences, &place, ""));
        let record = WindowRecord {
            component: settings.component as u64,
            start,
            pieces: taken.pieces,
            documents: count,
            skipped: taken.skipped,
            targets: packed.targets() as u64,
            sequences: order.len() as u64,
        };
        Ok(Self { record, next, packed, order })
    }

    pub(crate) fn sequences(&self) -> usize {
        self.order.len()
    }

    /// The tokens and the place in them of the sequence that is delivered as number `sequence`.
    pub(crate) fn sequence(&self, sequence: usize) -> (&PackedTokens, usize) {
        (&self.packed, self.order[sequence] as usize)
    }
}

/// Tokenises and packs, in this order; texts are dropped as their tokens come.
pub(crate) fn pack(documents: Vec<Document>, settings: &WindowSettings) -> Result<PackedTokens, DataError> {
    let encoded: Vec<Result<(Vec<u32>, bool), DataError>> = documents
        .into_par_iter()
        .map(|document| {
            settings.cancel.check()?;
            Ok((settings.tokenizer.encode(&document.text)?, document.ends))
        })
        .collect();
    let tokens = encoded.iter().flatten().map(|(ids, _)| ids.len() + 1).sum();
    let &WindowSettings { tokenizer, sequence_length, packing, .. } = settings;
    let mut packed = PackedTokens::with_capacity(sequence_length, packing, tokenizer.end_of_text(), tokens);
    for document in encoded {
        let (ids, ends) = document?;
        packed.push(&ids, ends);
    }
    Ok(packed)
}
