//! The key and the settings that a mask of [`crate::dropout`] is a function of, besides row and column.

/// Elements of a [`Key`] in its buffer (U32).
pub const KEY_ELEMENTS: usize = 5;

/// The random key from which the masks of a pass are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// The seed, the same for all rows of an optimizer step and another one in each step.
    pub seed: u64,
    /// Index of the first row among the rows of the step.
    pub first_row: u64,
    /// Whether anything is dropped; false in evaluation.
    pub enabled: bool,
}

impl Key {
    /// The key as the U32 buffer of an operation holds it.
    pub fn to_words(self) -> [u32; KEY_ELEMENTS] {
        let Self { seed, first_row, enabled } = self;
        [seed as u32, (seed >> 32) as u32, first_row as u32, (first_row >> 32) as u32, u32::from(enabled)]
    }

    pub(crate) fn from_words(words: &[u32]) -> Self {
        let word = |index: usize| u64::from(words[index]);
        Self { seed: word(0) | word(1) << 32, first_row: word(2) | word(3) << 32, enabled: words[4] != 0 }
    }
}

/// The dropout of one module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Probability that an element is dropped; less than 1.
    pub probability: f64,
    /// Number of the module, which tells the masks of modules apart.
    pub module: u64,
}

impl Dropout {
    /// The threshold of the elements' 32-bit hashes: those below it are dropped.
    pub(crate) fn threshold(self) -> u32 {
        (self.probability * 2f64.powi(32)) as u32
    }

    /// Factor of the elements that are kept: 1 / (1 - probability).
    pub(crate) fn scale(self) -> f32 {
        (1.0 / (1.0 - self.probability)) as f32
    }
}
