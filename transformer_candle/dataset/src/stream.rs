//! The endless stream of packed sequences.

use std::time::Duration;

use crate::{Batch, Cursor, DataError, DataSource, SkippedRows, StreamIdentity, Tokenizer};

/// What the order of the stream depends on, besides the source and the tokenizer (and how many threads prepare it).
#[derive(Clone, Debug, PartialEq)]
pub struct StreamSettings {
    /// Tokens in a sequence.
    pub sequence_length: usize,
    /// Documents in a window.
    pub shuffle_buffer_size: usize,
    /// Seed of every permutation.
    pub seed: u64,
    /// Train on the first so many rows in listing order.
    pub max_samples: Option<u64>,
    /// Files open at the same time.
    pub lanes: usize,
    /// Fraction of the row groups to hold out; 0 for none.
    pub held_out_fraction: f64,
    /// Passes over the data; none for no end. Not part of the stream's identity.
    pub epochs: Option<u64>,
    /// Threads that tokenise. Not part of the stream's identity.
    pub workers: usize,
}

/// The stream of packed sequences, prepared ahead by a thread of its own.
pub struct TokenStream {}

impl TokenStream {
    /// Starts at the beginning, or exactly at `cursor`.
    pub fn open(
        _source: &DataSource,
        _settings: &StreamSettings,
        _tokenizer: &Tokenizer,
        _cursor: Option<Cursor>,
    ) -> Result<Self, DataError> {
        unimplemented!()
    }

    /// The next `n` sequences; fewer, then none, when the last epoch ends.
    pub fn next_sequences(&mut self, _n: usize) -> Result<Batch, DataError> {
        unimplemented!()
    }

    /// Where the next call starts.
    pub fn cursor(&self) -> Cursor {
        unimplemented!()
    }

    /// What the order depends on.
    pub fn identity(&self) -> &StreamIdentity {
        unimplemented!()
    }

    /// How long calls have waited for data so far.
    pub fn data_wait(&self) -> Duration {
        unimplemented!()
    }

    /// Rows left out of what was delivered so far.
    pub fn skipped(&self) -> SkippedRows {
        unimplemented!()
    }
}
