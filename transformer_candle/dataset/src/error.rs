//! Everything that can go wrong between a data set's name and a batch.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::SkippedRows;

/// Why data cannot be read. Each message names the file, address or setting and the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A local file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A file's bytes are not what its name says.
    #[error("{file} is damaged or not what its name says: {message}")]
    Format {
        /// The file, as listed.
        file: String,
        /// What is wrong with it.
        message: String,
    },
    /// A file lacks the text column.
    #[error("{0}")]
    MissingColumn(MissingColumn),
    /// A local pattern matches nothing that can be read.
    #[error("`{pattern}` {problem}; files may end in .parquet, .jsonl, .ndjson, .json (each also .gz or .zst) or .txt")]
    NoFiles {
        /// The pattern, folder or file as given.
        pattern: String,
        /// What was found instead.
        problem: String,
    },
    /// A glob cannot be understood.
    #[error("`{pattern}` is not a pattern of file names: {message}")]
    Pattern {
        /// The pattern as given.
        pattern: String,
        /// What is wrong with it.
        message: String,
    },
    /// No data at all is named.
    #[error("no data is named: give data.train_shards in the config, or --stream --dataset NAME to the orchestrator")]
    NoSource,
    /// The embedded data set has not been written.
    #[error("the demo data set is not in {}: `orchestrate --stream --dataset demo` writes it", folder.display())]
    NoDemo {
        /// The folder it would be in.
        folder: PathBuf,
    },
    /// The name cannot be a data set's.
    #[error("`{name}` is not the name of a data set: expected `owner/name` on the Hub, or `demo`")]
    DatasetName {
        /// The name as given.
        name: String,
    },
    /// The Hub may not be asked.
    #[error("{name} is on the Hub, and HF_HUB_OFFLINE is set: unset it, or name local files in data.train_shards")]
    Offline {
        /// The data set.
        name: String,
    },
    /// `HF_ENDPOINT` or the token cannot be used.
    #[error("{setting} {problem}")]
    HubSetting {
        /// The environment variable.
        setting: &'static str,
        /// What is wrong with its value (never the value of a token).
        problem: String,
    },
    /// The Hub's final answer is a refusal.
    #[error("{url} answered {status}: {hint}")]
    Refused {
        /// The address, without its query.
        url: String,
        /// The HTTP status.
        status: u16,
        /// The way out.
        hint: String,
    },
    /// The network or the Hub failed for longer than `data.network_patience`.
    #[error(
        "{url} could not be read in {attempts} attempts: {message}; resume the run when the network or the Hub is back"
    )]
    Network {
        /// The address, without its query.
        url: String,
        /// How often it was tried without progress.
        attempts: u32,
        /// What went wrong the last time.
        message: String,
    },
    /// The Hub's answer makes no sense.
    #[error("{url} gave an answer that cannot be used: {message}")]
    InvalidResponse {
        /// The address, without its query.
        url: String,
        /// What is wrong with it.
        message: String,
    },
    /// The data set's card cannot be understood.
    #[error("the card (README.md) of {name} cannot be read: {message}")]
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
        /// What is asked for that is not there.
        problem: String,
        /// The configs there are.
        available: Vec<String>,
    },
    /// The data set has no such split.
    #[error("{name} has no split `{split}`: choose one of {} with --split", available.join(", "))]
    Split {
        /// The data set and its config.
        name: String,
        /// The split asked for.
        split: String,
        /// The splits there are.
        available: Vec<String>,
    },
    /// The data set has no files that can be read.
    #[error("{name} has no files to read for split `{split}`: {problem}")]
    NoHubFiles {
        /// The data set and its config.
        name: String,
        /// The split asked for.
        split: String,
        /// What was looked for and found.
        problem: String,
    },
    /// There is not one document to train on.
    #[error("{name} has no documents to train on: {rows} rows read, {}{}", describe_skipped(skipped), held_out_hint(*held_out))]
    NoDocuments {
        /// The data set or the patterns.
        name: String,
        /// Rows that were read.
        rows: u64,
        /// Why rows were left out.
        skipped: SkippedRows,
        /// Groups that are held out for evaluation.
        held_out: bool,
    },
    /// There is nothing to evaluate on.
    #[error("{}", describe_empty_held_out(name, missing.as_deref()))]
    NothingHeldOut {
        /// The data set or the patterns.
        name: String,
        /// The text column, where the lack of it is why; else the data are too small.
        missing: Option<Box<MissingColumn>>,
    },
    /// The tokenizer cannot be read or used.
    #[error("the tokenizer {} cannot be used: {message}", path.display())]
    Tokenizer {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// The cursor does not belong to this stream.
    #[error(
        "the position to resume from does not fit this stream: {difference} differs; put it back as it was, or start a fresh run"
    )]
    Cursor {
        /// What differs.
        difference: &'static str,
    },
    /// The ledger is not what a checkpoint vouches for, or does not know what is asked.
    #[error("the ledger {} cannot be used: {message}", path.display())]
    Ledger {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// A setting that no stream can have.
    #[error("{setting} must be {must}")]
    Setting {
        /// The config key.
        setting: &'static str,
        /// What it must be.
        must: &'static str,
    },
    /// Threads cannot be started, or one broke off.
    #[error("data cannot be prepared: {message}")]
    Threads {
        /// What the operating system said.
        message: String,
    },
    /// Whoever waited for data gave up waiting.
    #[error("stopped while waiting for data")]
    Interrupted,
    /// The stream ended earlier, with an error that was already delivered or because it is being closed.
    #[error("the data stream is closed: an earlier error ended it, or the run is stopping")]
    Closed,
}

/// A file whose text column is not there, or holds something else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingColumn {
    /// The file, as listed.
    pub file: String,
    /// The column looked for.
    pub column: String,
    /// What a column of this name holds instead of text, as in "integers".
    pub found: Option<&'static str>,
    /// The columns that hold text.
    pub available: Vec<String>,
}

impl fmt::Display for MissingColumn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, column, found, available } = self;
        match found {
            None => write!(f, "{file} has no text column `{column}`")?,
            Some(found) => write!(f, "the column `{column}` of {file} holds {found}, not text")?,
        }
        if available.is_empty() {
            f.write_str("; no other column holds text: name other files")
        } else {
            let available = available.join(", ");
            write!(f, "; its text columns are {available}: choose one with --text-column (data.text_column)")
        }
    }
}

impl DataError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    /// An error of a decoder over our own readers: the reader's error where there is one, else damage in the file.
    pub(crate) fn from_decoder(file: &str, error: impl std::error::Error + Send + Sync + 'static) -> Self {
        let message = error.to_string();
        match find_data_error(Box::new(error)) {
            Ok(error) => error,
            Err(()) => Self::Format { file: file.to_owned(), message },
        }
    }
}

impl From<DataError> for std::io::Error {
    fn from(error: DataError) -> Self {
        Self::other(error)
    }
}

impl From<DataError> for parquet::errors::ParquetError {
    fn from(error: DataError) -> Self {
        Self::External(Box::new(error))
    }
}

/// Digs our own error out of the wrappers that a decoder puts around it.
fn find_data_error(error: Box<dyn std::error::Error + Send + Sync>) -> Result<DataError, ()> {
    let error = match error.downcast::<DataError>() {
        Ok(error) => return Ok(*error),
        Err(error) => error,
    };
    let error = match error.downcast::<std::io::Error>() {
        Ok(error) => return error.into_inner().map_or(Err(()), find_data_error),
        Err(error) => error,
    };
    match error.downcast::<parquet::errors::ParquetError>() {
        Ok(error) => match *error {
            parquet::errors::ParquetError::External(inner) => find_data_error(inner),
            _ => Err(()),
        },
        Err(_) => Err(()),
    }
}

fn describe_skipped(skipped: &SkippedRows) -> String {
    if skipped.total() == 0 { "none left out".to_owned() } else { format!("left out: {skipped}") }
}

fn describe_empty_held_out(name: &str, missing: Option<&MissingColumn>) -> String {
    match missing {
        Some(missing) => missing.to_string(),
        None => format!(
            "{name} is too small to hold out a part for evaluation: give data.validation_shards, or more than one \
             document of data"
        ),
    }
}

fn held_out_hint(held_out: bool) -> &'static str {
    if held_out { "; the rest is held out: lower data.held_out_fraction or give data.validation_shards" } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_s_error_survives_the_decoders_around_it() {
        let network =
            || DataError::Network { url: "https://hub/x".to_owned(), attempts: 3, message: "reset".to_owned() };
        let through_io = DataError::from_decoder("f", std::io::Error::from(network()));
        let through_both = parquet::errors::ParquetError::External(Box::new(std::io::Error::from(network())));
        assert!(matches!(through_io, DataError::Network { .. }));
        assert!(matches!(DataError::from_decoder("f", through_both), DataError::Network { .. }));
        let damage = parquet::errors::ParquetError::EOF("short".to_owned());
        assert!(matches!(DataError::from_decoder("f", damage), DataError::Format { .. }));
    }
}
