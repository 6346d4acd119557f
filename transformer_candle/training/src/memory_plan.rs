//! Everything a run will hold in memory, known before it starts.

use std::fmt;

/// Why a run cannot fit, and the largest settings that would.
#[derive(Debug)]
pub struct Shortage {}

impl fmt::Display for Shortage {
    fn fmt(&self, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }
}
