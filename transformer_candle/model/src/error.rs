//! The errors of building, loading, saving and running a model.

use std::io;
use std::path::{Path, PathBuf};

use run_config::system_error::in_words;

/// The result of every function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model cannot be built, loaded, saved or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation refused its buffers.
    #[error(transparent)]
    Kernel(#[from] kernels::Error),
    /// The operating system refused.
    #[error("cannot {action} {path}: {}", in_words(source))]
    Io {
        /// What was attempted, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A tensor of a file is not the one that the model or its optimizer has there.
    #[error("{path}: tensor `{name}` {problem}; the file belongs to another model or precision than asked for")]
    Tensor {
        /// The safetensors file.
        path: PathBuf,
        /// The tensor's name in the file.
        name: String,
        /// What differs.
        problem: String,
    },
    /// A model directory without readable weights.
    #[error("{directory} has no weights that can be read: {problem}")]
    NoWeights {
        /// The directory.
        directory: PathBuf,
        /// Which file is missing.
        problem: String,
    },
    /// Weights that nothing can be computed with.
    #[error("{path}: tensor `{name}` holds numbers that are not finite (NaN or infinity)")]
    NotFiniteWeights {
        /// The safetensors file.
        path: PathBuf,
        /// The tensor's name in the file.
        name: String,
    },
    /// The bytes are no safetensors file.
    #[error("{path} is not a valid safetensors file: {problem}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The first thing found wrong.
        problem: String,
    },
    /// The index of a model's files cannot be followed.
    #[error("{path} is not an index of weights: {problem}")]
    Index {
        /// The index.
        path: PathBuf,
        /// The first thing found wrong.
        problem: String,
    },
    /// A config.json describes something that this decoder is not.
    #[error("config.json: {problem}")]
    ConfigJson {
        /// The key, what is wrong, and what would be right.
        problem: String,
    },
    /// The decoder was planned with `training: false`.
    #[error("this decoder was planned for evaluation only; plan it with `training: true` to compute gradients")]
    EvaluationOnly,
    /// A model's numbers overflowed.
    #[error(
        "the model's output is not a number (NaN): its weights are not finite, as those of a run that diverged; take an earlier checkpoint"
    )]
    NotFinite,
    /// Generation was asked to start from nothing.
    #[error("the prompt has no tokens; give it at least one, such as the end-of-text token")]
    EmptyPrompt,
    /// A token id that the vocabulary does not have.
    #[error(
        "token {token} is outside of the vocabulary of {vocab_size}; was the prompt encoded with another tokenizer?"
    )]
    UnknownToken {
        /// The id given.
        token: u32,
        /// Ids of the model's vocabulary.
        vocab_size: usize,
    },
    /// More tokens than the key/value cache holds.
    #[error(
        "{tokens} tokens do not fit into a context of {capacity}; shorten the prompt or take a model with a longer context"
    )]
    ContextFull {
        /// Tokens that the context would have to hold.
        tokens: usize,
        /// Tokens that it holds.
        capacity: usize,
    },
    /// A sampling setting out of its range.
    #[error("`{key}` is {value}; it must be {expected}")]
    Sampling {
        /// The setting.
        key: &'static str,
        /// The value given.
        value: f64,
        /// The range.
        expected: &'static str,
    },
}

/// Names the path in an I/O error: `.map_err(failed("read", path))`.
pub(crate) fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { action, path, source }
}
