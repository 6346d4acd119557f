//! A file as row_groups of documents. One file here per format; this one is what they share.
//!
//! A *row_group* is what can be read on its own: the unit that is permuted, held out and resumed at. A Parquet row row_group, a
//! stretch of a JSON Lines file, a piece of a text file. A *row* is a place in a row_group whether it holds a usable document
//! or not, so that positions do not depend on what is skipped.

mod corruption_retry;
mod jsonl;
mod jsonl_compressed;
mod parquet;
#[cfg(test)]
pub(crate) mod parquet_fixture;
mod text;

use std::sync::Arc;

use crate::DataError;
use crate::byte_source::ByteSource;
use crate::cancel::CancelToken;
use crate::skipped_rows::SkipReason;

/// Longer texts are left out: one broken line must not become a window of its own.
pub(crate) const MAX_DOCUMENT_BYTES: usize = 16 << 20;

/// What some editors put before UTF-8 text. It is no part of a document.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// A text that becomes tokens in one go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Document {
    /// The text; never empty.
    pub text: String,
    /// End-of-text follows (not after the pieces of a text file before its last).
    pub ends_document: bool,
}

/// What a row holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Row {
    Document(Document),
    Skipped(SkipReason),
}

impl Row {
    /// A whole document, if the bytes can be one.
    fn from_bytes(bytes: Vec<u8>, ends_document: bool) -> Self {
        if bytes.len() > MAX_DOCUMENT_BYTES {
            return Self::Skipped(SkipReason::TooLong);
        }
        match String::from_utf8(bytes) {
            Err(_) => Self::Skipped(SkipReason::NotUtf8),
            Ok(text) if text.is_empty() => Self::Skipped(SkipReason::Empty),
            Ok(text) => Self::Document(Document { text, ends_document }),
        }
    }
}

/// An open file: a reader that stands before a row of a row_group.
pub(crate) trait ShardReader: Send {
    /// How many row_groups there are, where that is known without reading the file; `None` means that row_groups can only be
    /// read one after the other.
    fn row_groups(&self) -> Option<u64>;

    /// Moves before `row` of `row_group`; false if there is no such row_group.
    fn seek(&mut self, row_group: u64, row: u64) -> Result<bool, DataError>;

    /// The next row of the row_group; none at its end.
    fn next_row(&mut self) -> Result<Option<Row>, DataError>;

    /// The fields of the first rows, where the format does not name them before any row is read.
    fn fields(&mut self) -> Result<Vec<Field>, DataError> {
        Ok(Vec::new())
    }

    /// How many rows a row_group has; none if there is no such row_group. Moves the reader.
    fn row_count(&mut self, row_group: u64) -> Result<Option<u64>, DataError> {
        if !self.seek(row_group, 0)? {
            return Ok(None);
        }
        let mut rows = 0;
        while self.next_row()?.is_some() {
            rows += 1;
        }
        Ok(Some(rows))
    }
}

/// A field of JSON objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Field {
    pub name: String,
    /// What it holds if not text, in words.
    pub non_string_type: Option<&'static str>,
}

/// How a file's name says it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Format {
    Parquet,
    Jsonl(Compression),
    Text,
}

/// How a JSON Lines file is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Format {
    /// By the name's ending, in any case; none if it is not one of ours.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        let name = name.to_ascii_lowercase();
        let (stem, compression) = match name.rsplit_once('.') {
            Some((stem, "gz")) => (stem, Compression::Gzip),
            Some((stem, "zst")) => (stem, Compression::Zstd),
            _ => (name.as_str(), Compression::None),
        };
        match (stem.rsplit_once('.')?.1, compression) {
            ("parquet", Compression::None) => Some(Self::Parquet),
            ("txt", Compression::None) => Some(Self::Text),
            ("jsonl" | "ndjson" | "json", compression) => Some(Self::Jsonl(compression)),
            _ => None,
        }
    }

    /// The format whatever the compression: files of one kind make up a data set.
    pub(crate) fn kind(self) -> Self {
        match self {
            Self::Jsonl(_) => Self::Jsonl(Compression::None),
            other => other,
        }
    }

    /// Opens `source` for reading the column or field `text_column`. Damage on the way is read again; `cancel` ends
    /// reading.
    pub(crate) fn open(
        self,
        source: Arc<dyn ByteSource>,
        text_column: &str,
        cancel: &CancelToken,
    ) -> Result<Box<dyn ShardReader>, DataError> {
        Ok(Box::new(corruption_retry::CorruptionRetry::open(self, source, text_column, cancel)?))
    }

    fn open_unretried(
        self,
        source: Arc<dyn ByteSource>,
        text_column: &str,
        cancel: &CancelToken,
    ) -> Result<Box<dyn ShardReader>, DataError> {
        Ok(match self {
            Self::Parquet => Box::new(parquet::ParquetFile::open(source, text_column)?),
            Self::Jsonl(Compression::None) => Box::new(jsonl::JsonlFile::open(source, text_column)?),
            Self::Jsonl(compression) => {
                Box::new(jsonl_compressed::CompressedJsonlFile::open(source, compression, text_column, cancel)?)
            }
            Self::Text => Box::new(text::TextFile::open(source)),
        })
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// Every row of every row_group.
    pub(crate) fn all_rows(file: &mut dyn ShardReader) -> Vec<Vec<Row>> {
        let mut row_groups = Vec::new();
        while file.seek(row_groups.len() as u64, 0).unwrap() {
            row_groups.push(rest_of_group(file));
        }
        row_groups
    }

    /// The rows from where the reader stands.
    pub(crate) fn rest_of_group(file: &mut dyn ShardReader) -> Vec<Row> {
        std::iter::from_fn(|| file.next_row().unwrap()).collect()
    }

    /// The texts among the rows.
    pub(crate) fn texts(rows: &[Vec<Row>]) -> Vec<&str> {
        rows.iter()
            .flatten()
            .filter_map(|row| match row {
                Row::Document(document) => Some(document.text.as_str()),
                Row::Skipped(_) => None,
            })
            .collect()
    }

    #[test]
    fn formats_are_told_by_their_endings() {
        assert_eq!(Format::from_name("data/train-00000-of-00001.parquet"), Some(Format::Parquet));
        assert_eq!(Format::from_name("a.JSONL.gz"), Some(Format::Jsonl(Compression::Gzip)));
        assert_eq!(Format::from_name("a.ndjson.zst"), Some(Format::Jsonl(Compression::Zstd)));
        assert_eq!(Format::from_name("a.json"), Some(Format::Jsonl(Compression::None)));
        assert_eq!(Format::from_name("book.txt"), Some(Format::Text));
        for other in ["a.parquet.gz", "a.csv", "README.md", "parquet", ".gitattributes", "a.txt.gz"] {
            assert_eq!(Format::from_name(other), None, "{other}");
        }
    }
}
