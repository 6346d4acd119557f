//! File formats: each reads a shard as row groups of documents. One file per format; this one defines what they share.
//!
//! A *row group* is what can be read on its own: the unit that is permuted, held out and resumed at. It is a row group
//! of a Parquet file, a byte range of a JSON Lines file, 256 rows of a compressed one or of a JSON array, or a chunk of a
//! text file. A
//! *row* is a position in a row group whether it holds a usable document or not, so that positions do not depend on
//! what is skipped.

mod columns;
mod corruption_retry;
mod decompression;
mod json_array;
mod json_row;
mod json_stream;
mod jsonl;
mod open;
mod parquet;
#[cfg(test)]
pub(crate) mod parquet_fixture;
mod parquet_rows;
mod recognition;
mod text;

use std::path::Path;

pub(crate) use self::columns::{Columns, ReadingRules};
pub(crate) use self::jsonl::is_array as is_array_start;
pub(crate) use self::recognition::read_head;
pub(crate) use self::text::count_separators;
use crate::DataError;
use crate::skipped_rows::SkipReason;

/// Maximum length of a text. Longer ones are skipped: one broken line must not become a window of its own.
pub(crate) const MAX_DOCUMENT_BYTES: usize = 16 << 20;

/// Extensions of texts that a folder may have beside its data: documents, source code and configuration.
const TEXT_EXTENSIONS: [&str; 67] = [
    "text", "md", "markdown", "mdx", "rst", "adoc", "org", "tex", "html", "htm", "css", "scss", "xml", "yaml", "yml",
    "toml", "ini", "cfg", "py", "pyi", "ipynb", "rs", "c", "h", "cc", "cpp", "cxx", "hh", "hpp", "hxx", "cu", "cuh",
    "m", "mm", "java", "kt", "kts", "scala", "groovy", "cs", "fs", "vb", "go", "js", "mjs", "cjs", "jsx", "ts", "tsx",
    "vue", "rb", "php", "pl", "pm", "r", "jl", "lua", "swift", "dart", "hs", "ml", "ex", "exs", "clj", "sh", "bash",
    "sql",
];

/// The mark that some editors put before UTF-8 text; not part of a document.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// A text that is tokenized as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Document {
    /// The text, never empty; for a conversation, its row as a JSON object.
    pub text: String,
    /// Whether end-of-text follows; false for all chunks of a text file but the last.
    pub ends_document: bool,
}

/// The content of a row: a document, or the reason to skip the row.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Row {
    Document(Document),
    Skipped(SkipReason),
}

impl Row {
    /// Makes a document of these bytes, or returns the reason to skip them.
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

/// A reader of an open shard, positioned before a row of a row group.
pub(crate) trait ShardReader: Send {
    /// Number of row groups, if known without reading the file; `None` means that row groups must be read in order.
    fn row_groups(&self) -> Option<u64>;

    /// Moves before `row` of `row_group`; false if there is no such row group.
    fn seek(&mut self, row_group: u64, row: u64) -> Result<bool, DataError>;

    /// Reads the next row of the row group; `None` at its end.
    fn next_row(&mut self) -> Result<Option<Row>, DataError>;

    /// Reads the fields of the first rows; empty if the format checks its columns when it is opened.
    fn fields(&mut self) -> Result<Vec<Field>, DataError> {
        Ok(Vec::new())
    }

    /// Number of rows of a row group; none if there is no such row group. Moves the reader.
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
    /// The type of its values, in words such as "numbers"; `None` if they are strings.
    pub non_string_type: Option<&'static str>,
}

/// The format of a file, by its extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Format {
    Parquet,
    Jsonl(Compression),
    Text,
}

/// The compression of a JSON Lines file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Format {
    /// The format by extension, in any case; none if it is not supported.
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

    /// The format of a file by its name.
    pub(crate) fn from_path(path: &Path) -> Option<Self> {
        Self::from_name(&path.file_name()?.to_string_lossy())
    }

    /// The format of a file that is read only if it is asked for: Markdown and source code are texts.
    pub(crate) fn of_named_text(path: &Path) -> Option<Self> {
        let extension = path.extension()?.to_string_lossy().to_ascii_lowercase();
        TEXT_EXTENSIONS.contains(&extension.as_str()).then_some(Self::Text)
    }

    /// Returns the format without its compression, which is the same for all shards of a data set.
    pub(crate) fn kind(self) -> Self {
        match self {
            Self::Jsonl(_) => Self::Jsonl(Compression::None),
            other => other,
        }
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// Every row of every row group.
    pub(crate) fn all_rows(file: &mut dyn ShardReader) -> Vec<Vec<Row>> {
        let mut row_groups = Vec::new();
        while file.seek(row_groups.len() as u64, 0).unwrap() {
            row_groups.push(rest_of_group(file));
        }
        row_groups
    }

    /// The remaining rows of the row group.
    pub(crate) fn rest_of_group(file: &mut dyn ShardReader) -> Vec<Row> {
        std::iter::from_fn(|| file.next_row().unwrap()).collect()
    }

    /// The texts of the documents among the rows.
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
    fn formats_follow_from_extensions() {
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
