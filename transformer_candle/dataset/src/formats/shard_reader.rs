//! What all formats share: a reader of a shard's rows, and what a row holds.

use crate::DataError;
use crate::skipped_rows::SkipReason;

/// Longer texts are skipped: one broken line must not become a window of its own.
pub(crate) const MAX_DOCUMENT_BYTES: usize = 16 << 20;

/// The mark that some editors put before UTF-8 text; not part of a document.
pub(super) const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// A text that is tokenized as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Document {
    /// The text; never empty.
    pub text: String,
    /// Whether end-of-text follows; false for all chunks of a text file but the last.
    pub ends_document: bool,
}

/// What a row holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Row {
    Document(Document),
    Skipped(SkipReason),
}

impl Row {
    /// The document of these bytes, or the reason to skip them.
    pub(super) fn from_bytes(bytes: Vec<u8>, ends_document: bool) -> Self {
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

    /// The next row of the row group; none at its end.
    fn next_row(&mut self) -> Result<Option<Row>, DataError>;

    /// The fields of the first rows; empty if the format checks its columns when it is opened.
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
    /// What it holds if not strings, in words.
    pub non_string_type: Option<&'static str>,
}
