//! File formats: each reads a shard as row groups of documents. One file per format; `shard_reader` defines what they share.
//!
//! A *row group* is what can be read on its own: the unit that is permuted, held out and resumed at. It is a row group
//! of a Parquet file, a byte range of a JSON Lines file, 256 lines of a compressed one, or a chunk of a text file. A
//! *row* is a position in a row group whether it holds a usable document or not, so that positions do not depend on
//! what is skipped.

mod corruption_retry;
mod format;
mod jsonl;
mod jsonl_compressed;
mod parquet;
#[cfg(test)]
pub(crate) mod parquet_fixture;
mod shard_reader;
mod text;

pub(crate) use corruption_retry::CorruptionRetry;
pub(crate) use format::Format;
pub(crate) use shard_reader::{Document, Row, ShardReader};

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
}
