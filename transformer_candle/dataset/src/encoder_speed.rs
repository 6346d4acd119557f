//! How fast a tokenizer encodes on this machine.

use std::time::Instant;

use crate::{DataError, Tokenizer};

/// The text that is encoded, English with some code: source files of this crate, which every build has.
const TEXT: &str = concat!(include_str!("lib.rs"), include_str!("stream.rs"), include_str!("mixture.rs"));

impl Tokenizer {
    /// Measures the tokens per second that one thread encodes, in a few milliseconds. No word is cached yet, so a long
    /// run is somewhat faster.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub fn measure_speed(&self) -> Result<f64, DataError> {
        let start = Instant::now();
        let tokens = self.encode(TEXT)?.len();
        Ok(tokens as f64 / start.elapsed().as_secs_f64().max(f64::MIN_POSITIVE))
    }
}
