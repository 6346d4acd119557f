//! Documents in listing order, for training a tokenizer and for looking at data.

use crate::formats::Row;
use crate::skipped::SkippedRows;
use crate::walk::Walk;
use crate::{DataError, DataSource};

/// The documents of a source in listing order, one file open at a time, a few rows in memory. A text file comes as its
/// pieces. Ends after an error.
pub struct Documents {
    walk: Walk,
    rows_left: u64,
    skipped: SkippedRows,
}

impl Documents {
    /// Starts at the first document; stops after `max_samples` rows, skipped ones included.
    pub fn open(source: &DataSource, max_samples: Option<u64>) -> Self {
        Self { walk: Walk::all(source), rows_left: max_samples.unwrap_or(u64::MAX), skipped: SkippedRows::default() }
    }

    /// Rows left out so far.
    pub fn skipped(&self) -> SkippedRows {
        self.skipped
    }
}

impl Iterator for Documents {
    type Item = Result<String, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.rows_left > 0 {
            self.rows_left -= 1;
            match self.walk.next_row() {
                Ok(Some(Row::Document(document))) => return Some(Ok(document.text)),
                Ok(Some(Row::Skipped(reason))) => self.skipped.count(reason),
                Ok(None) => self.rows_left = 0,
                Err(error) => {
                    self.rows_left = 0;
                    return Some(Err(error));
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn source(folder: &Path) -> DataSource {
        std::fs::write(folder.join("a.jsonl"), "{\"text\": \"one\"}\n{\"text\": \"\"}\n{\"text\": \"two\"}\n").unwrap();
        std::fs::write(folder.join("b.txt"), "three\nlines\nhere\n").unwrap();
        DataSource::local(&[".".to_owned()], folder, "text").unwrap()
    }

    #[test]
    fn documents_come_in_listing_order_until_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let source = source(folder.path());
        let read = |limit| Documents::open(&source, limit).collect::<Result<Vec<_>, _>>().unwrap();
        assert_eq!(read(None), ["one", "two", "three\nlines\nhere\n"]);
        assert_eq!(read(Some(3)), ["one", "two"]);
        let mut documents = Documents::open(&source, None);
        documents.by_ref().for_each(drop);
        assert_eq!(documents.skipped(), SkippedRows { empty: 1, ..SkippedRows::default() });
    }

    #[test]
    fn an_error_comes_in_its_place_and_ends_it() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("z.parquet"), "not Parquet at all").unwrap();
        let mut documents = Documents::open(&source(folder.path()), None);
        assert_eq!(documents.by_ref().take_while(Result::is_ok).count(), 3);
        assert!(documents.next().is_none());
    }
}
