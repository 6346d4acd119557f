//! Values of `data` that may be `auto`: whether documents start with BOS, the threads, and the micro-batch.

use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

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

impl<'de> Deserialize<'de> for Bos {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        crate::scalar::from_text(deserializer)
    }
}

impl JsonSchema for Bos {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Bos".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": ["boolean", "string"], "format": "bos", "pattern": "^(auto|true|false)$" })
    }
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

impl FromStr for NumWorkers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<usize>() {
            Ok(threads @ 1..=MOST_WORKERS) => Ok(Self::Fixed(threads)),
            _ if text == "auto" => Ok(Self::Auto),
            _ => Err(format!("must be an integer from 1 to {MOST_WORKERS}, or `auto`")),
        }
    }
}

impl Serialize for NumWorkers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Fixed(threads) => serializer.serialize_u64(*threads as u64),
        }
    }
}

impl<'de> Deserialize<'de> for NumWorkers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        crate::scalar::from_text(deserializer)
    }
}

impl JsonSchema for NumWorkers {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "NumWorkers".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": ["integer", "string"], "format": "num-workers",
            "minimum": 1, "maximum": MOST_WORKERS, "pattern": "^auto$"
        })
    }
}

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

impl FromStr for BatchSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<usize>() {
            Ok(sequences @ 1..=LARGEST_BATCH) => Ok(Self::Fixed(sequences)),
            _ if text == "auto" => Ok(Self::Auto),
            _ => Err(format!("must be an integer from 1 to {LARGEST_BATCH}, or `auto`")),
        }
    }
}

impl Serialize for BatchSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Fixed(sequences) => serializer.serialize_u64(*sequences as u64),
        }
    }
}

impl<'de> Deserialize<'de> for BatchSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        crate::scalar::from_text(deserializer)
    }
}

impl JsonSchema for BatchSize {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "BatchSize".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": ["integer", "string"], "format": "batch-size",
            "minimum": 1, "maximum": LARGEST_BATCH, "pattern": "^auto$"
        })
    }
}
