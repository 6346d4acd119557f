//! What a mask of [`crate::dropout`] is a function of, besides row and column.

/// Elements of a [`Key`] in its buffer (U32).
pub const KEY_ELEMENTS: usize = 5;

/// What the masks of a pass are drawn from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// The same for all rows of an optimizer step, and another one in each.
    pub seed: u64,
    /// The number of the first row among the rows of the step.
    pub first_row: u64,
    /// Without it nothing is dropped, as in evaluation.
    pub enabled: bool,
}

impl Key {
    /// As the buffer of an operation has it.
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
    /// That an element is dropped; less than 1.
    pub probability: f64,
    /// Tells the masks of modules apart.
    pub module: u64,
}

impl Dropout {
    /// Hashes of 32 bits below it are dropped.
    pub(crate) fn threshold(self) -> u32 {
        (self.probability * 2f64.powi(32)) as u32
    }

    /// What kept elements are multiplied with.
    pub(crate) fn scale(self) -> f32 {
        (1.0 / (1.0 - self.probability)) as f32
    }
}
