//! Values of `data` that may be `auto`: whether documents start with BOS, the threads, and the micro-batch.

use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::scalar::scalar;

/// Whether each document starts with the BOS token: `auto`, or a boolean.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Bos {
    /// Documents start with BOS if the tokenizer's files say so. A run that has started has one of the others.
    #[default]
    Auto,
    /// Each document starts with BOS.
    Always,
    /// No document starts with BOS.
    Never,
}

impl From<bool> for Bos {
    fn from(starts_with_bos: bool) -> Self {
        if starts_with_bos { Self::Always } else { Self::Never }
    }
}

impl FromStr for Bos {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "true" => Ok(Self::Always),
            "false" => Ok(Self::Never),
            _ => Err("must be `auto`, true or false".to_owned()),
        }
    }
}

impl Serialize for Bos {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Always => serializer.serialize_bool(true),
            Self::Never => serializer.serialize_bool(false),
        }
    }
}

scalar!(Bos, { "type": ["boolean", "string"], "format": "bos", "pattern": "^(auto|true|false)$" });

/// How a config has a type that is `Fixed` to an integer from 1 to the most, or `Auto`.
macro_rules! integer_or_auto {
    ($type:ident, $most:ident, $format:literal) => {
        impl FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text.parse::<usize>() {
                    Ok(number @ 1..=$most) => Ok(Self::Fixed(number)),
                    _ if text == "auto" => Ok(Self::Auto),
                    _ => Err(format!("must be an integer from 1 to {}, or `auto`", $most)),
                }
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                match self {
                    Self::Auto => serializer.serialize_str("auto"),
                    Self::Fixed(number) => serializer.serialize_u64(*number as u64),
                }
            }
        }

        scalar!($type, {
            "type": ["integer", "string"], "format": $format, "minimum": 1, "maximum": $most, "pattern": "^auto$"
        });
    };
}

/// Threads that read and tokenise: a number, or `auto` for what training needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NumWorkers {
    /// As many threads as training needs.
    #[default]
    Auto,
    /// This number of threads.
    Fixed(usize),
}

/// The most threads that a config may name.
const MOST_WORKERS: usize = 256;
/// The most threads that `auto` takes; as many encoders tokenise millions of tokens per second.
const MOST_AUTOMATIC_WORKERS: usize = 8;

impl NumWorkers {
    /// Returns the number of threads, or the most that `auto` takes on a machine with `cores` cores: what memory is
    /// planned for before the encoder is measured.
    pub fn at_most(self, cores: usize) -> usize {
        match self {
            Self::Auto => cores.clamp(1, MOST_AUTOMATIC_WORKERS),
            Self::Fixed(threads) => threads,
        }
    }
}

integer_or_auto!(NumWorkers, MOST_WORKERS, "num-workers");

/// Sequences of a micro-batch: a number, or `auto` for what fits in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchSize {
    /// The largest number that fits in memory and divides `sequences_per_step`.
    Auto,
    /// This number of sequences.
    Fixed(usize),
}

/// The largest micro-batch a config may name.
const LARGEST_BATCH: usize = 65_536;

integer_or_auto!(BatchSize, LARGEST_BATCH, "batch-size");
