//! How large the cases are.

use crate::HeadLayout;

/// How large the cases are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// Dozens, for an emulated driver and for compute-sanitizer.
    Small,
    /// Hundreds: several tasks of each operation on a CPU, for unit tests.
    Medium,
    /// Those of models of a billion parameters beside odd ones.
    Full,
}

/// Heads and the positions of their tokens: `batch` sequences of `length` positions from `first` on.
#[derive(Debug, Clone, Copy)]
pub struct Positions {
    /// Query and key/value heads.
    pub layout: HeadLayout,
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// The position of a sequence's first token.
    pub first: usize,
}

impl Positions {
    const fn new([heads, kv_heads, head_size]: [usize; 3], [batch, length, first]: [usize; 3]) -> Self {
        Self { layout: HeadLayout { heads, kv_heads, head_size }, batch, length, first }
    }

    /// Tokens of all sequences.
    pub fn tokens(&self) -> usize {
        self.batch * self.length
    }

    /// The heads, such as `32/8 x 64`.
    pub fn heads(&self) -> String {
        let HeadLayout { heads, kv_heads, head_size } = self.layout;
        format!("{heads}/{kv_heads} x {head_size}")
    }
}

impl Size {
    /// Rows of a hidden size, [N, D].
    pub(crate) fn hidden(self) -> Vec<[usize; 2]> {
        match self {
            Self::Small => vec![[7, 64]],
            Self::Medium => vec![[3000, 80]],
            Self::Full => vec![[37, 80], [513, 1536], [1024, 2048], [64, 8192]],
        }
    }

    /// Rows of an intermediate size, [N, I].
    pub(crate) fn wide(self) -> Vec<[usize; 2]> {
        match self {
            Self::Small => vec![[7, 48]],
            Self::Medium => vec![[500, 272]],
            Self::Full => vec![[37, 80], [513, 6144], [1024, 8192]],
        }
    }

    /// Heads of packed rows.
    pub(crate) fn positions(self) -> Vec<Positions> {
        match self {
            Self::Small => vec![Positions::new([2, 1, 32], [2, 5, 0])],
            Self::Medium => vec![Positions::new([4, 2, 40], [2, 750, 3])],
            Self::Full => vec![
                Positions::new([6, 2, 40], [2, 33, 0]),
                Positions::new([3, 1, 96], [1, 1, 70]),
                Positions::new([32, 8, 64], [2, 512, 0]),
                Positions::new([16, 4, 128], [1, 300, 5]),
            ],
        }
    }

    /// Elements of flat buffers.
    pub(crate) fn elements(self) -> Vec<usize> {
        match self {
            Self::Small => vec![1003],
            Self::Medium => vec![300_001],
            Self::Full => vec![1003, 1 << 16, 5_000_003],
        }
    }
}
