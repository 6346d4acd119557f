//! What a training step takes: `[sequences, sequence_length]` input ids and their targets.

use std::ops::Range;

/// The target of a position that counts for nothing (padding, or the end of a document), as in PyTorch's cross-entropy.
pub const IGNORED_TARGET: i32 = -100;

/// Packed sequences, row after row; `targets[i]` is the token that follows `inputs[i]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Token ids, `[sequences * sequence_length]`.
    pub inputs: Vec<u32>,
    /// The next token of every position, or [`IGNORED_TARGET`], `[sequences * sequence_length]`.
    pub targets: Vec<i32>,
    /// Tokens in a sequence.
    pub sequence_length: usize,
    /// How many targets are not ignored.
    pub target_count: usize,
    /// UTF-8 bytes of text that the targets stand for: the sum of their tokens' lengths in bytes, where end-of-text has
    /// none. Exact for byte-level tokenizers without a normaliser or prefix space; `None` where a token has no length of
    /// its own (the tokenizer is not byte-level).
    pub target_bytes: Option<u64>,
}

impl Batch {
    pub(crate) fn new(sequence_length: usize, counts_bytes: bool) -> Self {
        Self {
            inputs: Vec::new(),
            targets: Vec::new(),
            sequence_length,
            target_count: 0,
            target_bytes: counts_bytes.then_some(0),
        }
    }

    /// How many sequences there are.
    pub fn sequences(&self) -> usize {
        self.inputs.len().checked_div(self.sequence_length).unwrap_or(0)
    }

    /// Writes for every position of these sequences the index within its sequence at which its document begins, of a batch
    /// that was packed by documents: behind the last position before it that has no target.
    pub fn write_document_starts(&self, sequences: Range<usize>, starts: &mut [i32]) {
        let length = self.sequence_length;
        let targets = &self.targets[sequences.start * length..sequences.end * length];
        for (targets, starts) in targets.chunks(length).zip(starts.chunks_mut(length)) {
            let mut start = 0;
            for (position, (&target, of_position)) in targets.iter().zip(starts).enumerate() {
                *of_position = start;
                if target == IGNORED_TARGET {
                    start = position as i32 + 1;
                }
            }
        }
    }

    /// True when the stream has ended: there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.inputs.is_empty()
    }
}
