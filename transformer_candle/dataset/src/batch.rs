//! What a training step takes: `[sequences, sequence_length]` input ids and their targets.

/// The target of a position that counts for nothing (padding), as in PyTorch's cross-entropy.
pub const IGNORED_TARGET: i32 = -100;

/// Packed sequences, row after row; `targets[i]` is the token that follows `inputs[i]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Token ids, `[sequences * sequence_length]`.
    pub inputs: Vec<u32>,
    /// The next token of every position, or [`IGNORED_TARGET`], `[sequences * sequence_length]`.
    pub targets: Vec<i32>,
    /// Where each position's document begins, as an index within its sequence, `[sequences * sequence_length]`; none where
    /// documents are not kept apart.
    pub document_starts: Option<Vec<i32>>,
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
            document_starts: None,
            sequence_length,
            target_count: 0,
            target_bytes: counts_bytes.then_some(0),
        }
    }

    /// How many sequences there are.
    pub fn sequences(&self) -> usize {
        self.inputs.len().checked_div(self.sequence_length).unwrap_or(0)
    }

    /// True when the stream has ended: there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.inputs.is_empty()
    }
}
