//! Synthetic batches, for measuring and for choosing algorithms.

use dataset::Batch;
use run_config::{Packing, RunConfig};

/// Tokens of a document with `packing: documents`: about as many as a FineWeb document of 3 KB has.
const DOCUMENT_TOKENS: usize = 700;

/// Returns a batch of pseudo-random tokens without patterns that caches favour (Lehmer's generator, MINSTD).
pub fn synthetic(sequences: usize, sequence_length: usize, vocab_size: usize) -> Batch {
    let mut state = 1_u64;
    let mut token = || {
        state = state * 48_271 % 0x7fff_ffff;
        (state % vocab_size as u64) as u32
    };
    let tokens = sequences * sequence_length;
    Batch {
        inputs: (0..tokens).map(|_| token()).collect(),
        targets: (0..tokens).map(|_| token().cast_signed()).collect(),
        document_starts: None,
        sequence_length,
        target_count: tokens,
        target_bytes: None,
    }
}

/// Returns a synthetic batch for a config, with `packing: documents` of documents of equal length.
pub(crate) fn synthetic_batch(config: &RunConfig, vocab_size: usize, sequences: usize) -> Batch {
    let mut batch = synthetic(sequences, config.data.sequence_length, vocab_size);
    if config.data.packing == Packing::Documents {
        let start = |position: usize| (position - position % DOCUMENT_TOKENS) as i32;
        let starts: Vec<i32> = (0..batch.sequence_length).map(start).collect();
        batch.document_starts = Some(starts.repeat(batch.sequences()));
    }
    batch
}
