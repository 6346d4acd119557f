//! Sizes of the head's logits and loss.

/// A token with this target has no loss and no gradient.
pub const IGNORED_TARGET: i32 = -100;

/// The sizes of one call of the head.
#[derive(Clone, Copy)]
pub(crate) struct HeadSizes {
    /// Tokens.
    pub(crate) n: usize,
    /// Hidden size.
    pub(crate) d: usize,
    /// Padded vocabulary.
    pub(crate) v: usize,
    /// Real vocabulary.
    pub(crate) vocab_size: usize,
    /// Rows of a chunk.
    pub(crate) c: usize,
    /// Elements from row to row of logits.
    pub(crate) w: usize,
}
