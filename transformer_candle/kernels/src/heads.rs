//! The layout of query, key and value heads in a packed QKV row.

use crate::{Error, Result};

/// The heads of a packed QKV row: H query heads, then K key heads, then K value heads, each of E elements. Query head h
/// attends with key/value head h / (H / K).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLayout {
    /// H, the number of query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// K, the number of key heads, and of value heads.
    pub kv_heads: usize,
    /// E, the elements of a head; even.
    pub head_size: usize,
}

impl HeadLayout {
    /// P, the elements of a packed QKV row: (H + 2K) * E.
    pub fn packed_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_size
    }

    /// Elements of the query part of a packed row, and of a row of attention's output: H * E.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_size
    }

    /// Elements of the key part of a packed row, and of a row of a key or value cache: K * E.
    pub fn key_width(&self) -> usize {
        self.kv_heads * self.head_size
    }

    /// Query heads that share one key/value head: H / K.
    pub fn group_size(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Whether these are heads that `RoPE` and attention can work on.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        let &Self { heads, kv_heads, head_size } = self;
        let problem = if heads == 0 || kv_heads == 0 || head_size == 0 {
            format!("heads ({heads}), key/value heads ({kv_heads}) and head size ({head_size}) must be positive")
        } else if !heads.is_multiple_of(kv_heads) {
            format!("{heads} heads cannot share {kv_heads} key/value heads evenly")
        } else if !head_size.is_multiple_of(2) {
            format!("the head size {head_size} is odd")
        } else {
            return Ok(());
        };
        Err(Error::Invalid { operation, problem })
    }
}

/// The sizes of attention over whole sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// The layout of a packed QKV row.
    pub heads: HeadLayout,
    /// B, the number of sequences.
    pub batch: usize,
    /// T, the positions of a sequence.
    pub sequence_length: usize,
}

impl AttentionShape {
    /// N, the tokens of all sequences.
    pub fn tokens(&self) -> usize {
        self.batch * self.sequence_length
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_follow_from_the_heads() {
        let layout = HeadLayout { heads: 8, kv_heads: 2, head_size: 64 };
        assert_eq!((layout.packed_width(), layout.query_width(), layout.key_width()), (768, 512, 128));
        assert_eq!(layout.group_size(), 4);
        assert!(layout.check("test").is_ok());
    }

    #[test]
    fn impossible_heads_are_refused_with_the_reason() {
        let reason = |heads, kv_heads, head_size| {
            HeadLayout { heads, kv_heads, head_size }.check("attention::forward").unwrap_err().to_string()
        };
        assert_eq!(reason(6, 4, 8), "attention::forward: 6 heads cannot share 4 key/value heads evenly");
        assert_eq!(reason(6, 2, 7), "attention::forward: the head size 7 is odd");
        assert!(reason(6, 0, 8).contains("must be positive"));
    }
}
