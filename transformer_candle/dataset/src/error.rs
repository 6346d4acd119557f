//! Errors of reading data, from a data set's name to a batch.

mod decoders;
mod wording;

use std::path::{Path, PathBuf};

use run_config::system_error::in_words;

pub use self::wording::MissingColumn;
use self::wording::{
    describe_columns, describe_first, describe_skipped, encoding_hint, no_documents_hint, nothing_held_out,
};
use crate::SkippedRows;
use crate::hub::redacted;

/// Why data cannot be read. Each message names the file, URL or setting, and the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A local file cannot be read.
    #[error("cannot read {}: {}", path.display(), in_words(source))]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The content of a file does not match its extension, or is corrupted.
    #[error("{file} is corrupted, or its content does not match its extension: {message}")]
    Format {
        /// The file, as listed.
        file: String,
        /// What is wrong with it.
        message: String,
    },
    /// More files are corrupted than are skipped.
    #[error(
        "{bad} of the {files} files of {name} are corrupted, or do not match their extension: {names}{last}. \
         data.on_bad_file: skip passes over one bad file, or 5 % of all files. Repair the files and resume the run"
    )]
    TooManyBadFiles {
        /// The data set or the patterns.
        name: String,
        /// Corrupted files.
        bad: usize,
        /// All files.
        files: usize,
        /// Names of corrupted files.
        names: String,
        /// What is wrong with the last one, in parentheses; empty if it is not known.
        last: String,
    },
    /// A file has no such text column.
    #[error("{0}")]
    MissingColumn(MissingColumn),
    /// A local pattern matches no file of a supported format.
    #[error(
        "`{pattern}` {problem}; supported files end in .parquet, .jsonl, .ndjson, .json (each also .gz or .zst) or .txt"
    )]
    NoFiles {
        /// The pattern, folder or file as given.
        pattern: String,
        /// What was found instead.
        problem: String,
    },
    /// A glob is invalid.
    #[error("`{pattern}` is not a valid file pattern: {message}")]
    Pattern {
        /// The pattern as given.
        pattern: String,
        /// What is wrong with it.
        message: String,
    },
    /// No data source is configured.
    #[error(
        "no data source is configured: set data.train_shards in the config, or pass --stream --dataset NAME to the orchestrator"
    )]
    NoSource,
    /// The demo data set has not been made.
    #[error("the demo data set is not in {}: run `orchestrate --stream --dataset demo` to create it", folder.display())]
    NoDemo {
        /// The folder that it should be in.
        folder: PathBuf,
    },
    /// The name is not a valid data set name.
    #[error("`{name}` is not a valid data set name: expected `owner/name` on the Hub, or `demo`")]
    DatasetName {
        /// The name as given.
        name: String,
    },
    /// The data set is on the Hub, and offline mode is set.
    #[error(
        "{name} is on the Hub, and HF_HUB_OFFLINE is set: unset it, or take local files (`--input`, or data.train_shards \
         in a config)"
    )]
    Offline {
        /// The data set.
        name: String,
    },
    /// `HF_ENDPOINT` or the token is invalid.
    #[error("{setting} {problem}")]
    HubSetting {
        /// The environment variable, or what is set.
        setting: String,
        /// What is wrong with its value (never the value of a token).
        problem: String,
    },
    /// The Hub refused the request.
    #[error("{url} answered {status}: {hint}")]
    Refused {
        /// The URL, without its query.
        url: String,
        /// The HTTP status.
        status: u16,
        /// The way out.
        hint: String,
    },
    /// The network or the Hub failed for longer than `data.network_patience`.
    #[error(
        "{url} could not be read in {attempts} attempts: {message}; start or resume the run when the network or the Hub is \
         back"
    )]
    Network {
        /// The URL, without its query.
        url: String,
        /// How many attempts failed without progress.
        attempts: u32,
        /// What went wrong the last time.
        message: String,
    },
    /// The response of the Hub is invalid.
    #[error("{url} sent an invalid response: {message}")]
    InvalidResponse {
        /// The URL, without its query.
        url: String,
        /// What is wrong with it.
        message: String,
    },
    /// The dataset card is invalid.
    #[error("the dataset card (README.md) of {name} is invalid: {message}")]
    DatasetCard {
        /// The data set.
        name: String,
        /// What is wrong with it.
        message: String,
    },
    /// The data set has no such config.
    #[error("{name} {problem}: choose one of {} with --data-config", available.join(", "))]
    Config {
        /// The data set.
        name: String,
        /// What is wrong with the request.
        problem: String,
        /// The available configs.
        available: Vec<String>,
    },
    /// The data set has no such split.
    #[error("{name} has no split `{split}`: choose one of {} with --split", available.join(", "))]
    Split {
        /// The data set and its config.
        name: String,
        /// The split asked for.
        split: String,
        /// The available splits.
        available: Vec<String>,
    },
    /// The data set has no files of a supported format.
    #[error("{name} has no files to read for split `{split}`: {problem}")]
    NoHubFiles {
        /// The data set and its config.
        name: String,
        /// The split asked for.
        split: String,
        /// What was found instead.
        problem: String,
    },
    /// There are no documents to train on.
    #[error(
        "{name} has no documents to train on: {rows} rows read, {}{}{}{}",
        describe_skipped(skipped),
        describe_first(first_problem.as_deref()),
        encoding_hint(skipped),
        no_documents_hint(skipped, *held_out)
    )]
    NoDocuments {
        /// The data set or the patterns.
        name: String,
        /// Rows that were read.
        rows: u64,
        /// Why rows were skipped.
        skipped: Box<SkippedRows>,
        /// What is wrong with the first conversation that was skipped, if one was.
        first_problem: Option<String>,
        /// Whether row groups are held out for evaluation.
        held_out: bool,
    },
    /// There is nothing to evaluate on.
    #[error("{}", nothing_held_out(name, skipped, *is_whole))]
    NothingHeldOut {
        /// The data set or the patterns.
        name: String,
        /// Whether it is evaluation data of its own, not a part that training data holds out.
        is_whole: bool,
        /// Why rows of the held-out part were skipped; it has no others.
        skipped: Box<SkippedRows>,
    },
    /// The tokenizer cannot be read or used.
    #[error("the tokenizer {} cannot be used: {message}", path.display())]
    Tokenizer {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// Documents are to start with a BOS token that the tokenizer does not have.
    #[error("data.bos is true, but {problem} ({}): leave data.bos out", path.display())]
    NoBos {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// Why no BOS token can start documents.
        problem: String,
    },
    /// A chat template cannot be read, or not trained with.
    #[error("the chat template {} cannot be used: {message}", path.display())]
    ChatTemplate {
        /// The file that has it, or `chatml`.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// There are messages to render, and no chat template.
    #[error(
        "the model has no chat template: choose one with --chat-template (data.chat_template), `chatml`, `qwen3` or a \
         Jinja file"
    )]
    NoChatTemplate {
        /// The tokenizer beside which it is missing.
        path: PathBuf,
    },
    /// The files have no conversations.
    #[error(
        "{file} has no conversations: data.format chat needs a column `messages` or `conversations`, or two such as `prompt` and `completion`, or \
         `instruction` and `output`{}",
        describe_columns(columns)
    )]
    NoConversations {
        /// The file, as listed.
        file: String,
        /// The columns that it has; empty for a file of text.
        columns: Vec<String>,
    },
    /// The cursor belongs to another stream.
    #[error(
        "the position to resume from belongs to another data stream: {difference} differs; restore it, or start a new run"
    )]
    Cursor {
        /// What differs.
        difference: &'static str,
    },
    /// The ledger is not the one that the checkpoint recorded, or lacks what was requested.
    #[error("the ledger {} cannot be used: {message}", path.display())]
    Ledger {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// A setting is invalid.
    #[error("{setting} must be {must}")]
    Setting {
        /// The config key.
        setting: &'static str,
        /// What it must be.
        must: &'static str,
    },
    /// Threads cannot be started, or one ended unexpectedly.
    #[error("the data threads failed: {message}")]
    Threads {
        /// The error of the operating system, or which thread ended.
        message: String,
    },
    /// Waiting for data was interrupted.
    #[error("stopped while waiting for data")]
    Interrupted,
    /// The stream has ended with an error that was already returned, or is being closed.
    #[error("the data stream is closed: an earlier error ended it, or the run is stopping")]
    Closed,
}

impl DataError {
    pub(crate) fn hub_setting(setting: &str, problem: impl Into<String>) -> Self {
        Self::HubSetting { setting: setting.to_owned(), problem: problem.into() }
    }

    /// An invalid response of the Hub; `url` is redacted.
    pub(crate) fn invalid_response(url: &str, message: impl Into<String>) -> Self {
        Self::InvalidResponse { url: redacted(url), message: message.into() }
    }

    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}
