//! Batches without data, for measuring and for choosing algorithms.

use dataset::Batch;

/// Tokens that follow no pattern a cache could like: a multiplicative generator (Lehmer's, MINSTD).
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
