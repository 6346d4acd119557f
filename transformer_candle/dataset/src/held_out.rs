//! Documents that training never sees.

use crate::{Batch, DataError, DataSource, StreamSettings, Tokenizer};

/// Held-out documents, packed in listing order.
pub struct HeldOut {}

impl HeldOut {
    /// The part of `source` that a [`crate::TokenStream`] with the same settings leaves out.
    pub fn open(
        _source: &DataSource,
        _settings: &StreamSettings,
        _tokenizer: &Tokenizer,
    ) -> Result<Self, DataError> {
        unimplemented!()
    }

    /// All of `source`: a validation set of its own.
    pub fn whole(
        _source: &DataSource,
        _sequence_length: usize,
        _tokenizer: &Tokenizer,
    ) -> Result<Self, DataError> {
        unimplemented!()
    }

    /// Batches of `sequences` sequences from the start; the last may be smaller.
    pub fn batches(&mut self, _sequences: usize) -> HeldOutBatches<'_> {
        unimplemented!()
    }
}

/// One pass over the held-out documents.
pub struct HeldOutBatches<'a> {
    _held_out: &'a mut HeldOut,
}

impl Iterator for HeldOutBatches<'_> {
    type Item = Result<Batch, DataError>;
    fn next(&mut self) -> Option<Self::Item> {
        unimplemented!()
    }
}
