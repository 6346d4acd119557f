//! A batch: the inputs and targets of a training step, `[sequences, sequence_length]`.

/// The target of a position that is ignored in the loss (padding), as in PyTorch's cross-entropy.
pub const IGNORED_TARGET: i32 = -100;

/// A batch of packed sequences, row-major; `targets[i]` is the token that follows `inputs[i]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Token ids, `[sequences * sequence_length]`.
    pub inputs: Vec<u32>,
    /// The next token of every position, or [`IGNORED_TARGET`], `[sequences * sequence_length]`.
    pub targets: Vec<i32>,
    /// The first position of each position's document, within its sequence, `[sequences * sequence_length]`; `None`
    /// unless documents are kept apart (`packing: documents`).
    pub document_starts: Option<Vec<i32>>,
    /// Tokens per sequence.
    pub sequence_length: usize,
    /// Number of targets that are not ignored.
    pub target_count: usize,
    /// UTF-8 bytes of text of the targets: the sum of their tokens' lengths in bytes, where special tokens have none.
    /// Over all targets of a document it is the length of its text: what a tokenizer adds to a text (SentencePiece a
    /// space in front) or changes in it is subtracted at its first token. `None` if the length of a token depends on
    /// its position.
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

    /// The number of sequences.
    pub fn sequences(&self) -> usize {
        self.inputs.len().checked_div(self.sequence_length).unwrap_or(0)
    }

    /// Whether there are no sequences: the stream has ended.
    pub fn is_empty(&self) -> bool {
        self.inputs.is_empty()
    }
}
