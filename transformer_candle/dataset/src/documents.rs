//! Documents in listing order, for training a tokenizer and for looking at data.

use crate::formats::Row;
use crate::sequential_reader::SequentialReader;
use crate::skip_notices::SkipNotices;
use crate::{DataError, DataSource, Mixture, SkippedRows};

/// The documents of a source in listing order, with one shard open at a time and a few rows in memory. A text file is
/// read as its chunks. Ends after an error.
///
/// The next document of a mixture is that of the component with the least text so far in proportion to its weight. A
/// component that ends starts again, until each has ended once.
pub struct Documents {
    components: Vec<ComponentDocuments>,
    rows_left: u64,
    notices: SkipNotices,
    /// Whether any document was returned.
    any_document: bool,
}

struct ComponentDocuments {
    source: DataSource,
    reader: SequentialReader,
    weight: u64,
    /// Bytes of the documents returned.
    bytes: u64,
    /// Bytes of the documents returned in this pass over the component.
    pass_bytes: u64,
    is_over: bool,
}

impl Documents {
    /// Starts at the first document; stops after `max_samples` rows, skipped ones included.
    pub fn open(data: impl Into<Mixture>, max_samples: Option<u64>) -> Self {
        let mixture: Mixture = data.into();
        let components = mixture.sources().iter().zip(mixture.schedule().weights());
        let component = |(source, &weight): (&DataSource, &u64)| ComponentDocuments {
            source: source.clone(),
            reader: SequentialReader::all(source),
            weight,
            bytes: 0,
            pass_bytes: 0,
            is_over: false,
        };
        Self {
            components: components.map(component).collect(),
            rows_left: max_samples.unwrap_or(u64::MAX),
            notices: SkipNotices::default(),
            any_document: false,
        }
    }

    /// Rows skipped so far.
    pub fn skipped(&self) -> SkippedRows {
        self.notices.skipped
    }

    /// Says how many rows were skipped so far, by reason; `None` if there are none.
    pub fn describe_skipped(&self) -> Option<String> {
        self.notices.total()
    }

    /// Takes the notices of skipped rows and corrupted files since the last call, one sentence each.
    pub fn take_notices(&mut self) -> Vec<String> {
        let corrupted = self.components.iter().flat_map(|component| component.reader.findings().take_warnings());
        corrupted.chain(self.notices.take()).collect()
    }

    fn next_document(&mut self) -> Result<Option<String>, DataError> {
        while self.rows_left > 0 && self.components.iter().any(|component| !component.is_over) {
            let bytes_per_weight = |component: &&mut ComponentDocuments| {
                (u128::from(component.bytes) << 64) / u128::from(component.weight)
            };
            let Some(component) = self.components.iter_mut().min_by_key(bytes_per_weight) else {
                break;
            };
            match component.reader.next_row()? {
                None => component.restart(),
                Some(row) => {
                    self.rows_left -= 1;
                    match row {
                        Row::Document(document) => {
                            self.notices.add(1, SkippedRows::default(), None);
                            component.bytes += document.text.len() as u64;
                            component.pass_bytes += document.text.len() as u64;
                            self.any_document = true;
                            return Ok(Some(document.text));
                        }
                        Row::Skipped(reason) => {
                            let mut skipped = SkippedRows::default();
                            skipped.count(reason);
                            self.notices.add(1, skipped, component.reader.findings().take_first_skipped());
                        }
                    }
                }
            }
        }
        if self.any_document { Ok(None) } else { self.explain_nothing() }
    }

    /// Fails if there was no document because every row was skipped.
    fn explain_nothing<T>(&self) -> Result<Option<T>, DataError> {
        let skipped = self.skipped();
        for ComponentDocuments { source, .. } in &self.components {
            source.check_columns(skipped)?;
        }
        if skipped.total() == 0 {
            return Ok(None);
        }
        let names: Vec<&str> = self.components.iter().map(|component| component.source.name()).collect();
        Err(DataError::NoDocuments {
            name: names.join(" and "),
            rows: skipped.total(),
            skipped: Box::new(skipped),
            first_problem: None,
            held_out: false,
        })
    }
}

impl ComponentDocuments {
    fn restart(&mut self) {
        self.is_over = true;
        if self.pass_bytes == 0 {
            // It has no document: it must not come next again.
            self.bytes = u64::MAX;
        }
        self.pass_bytes = 0;
        self.reader.restart();
    }
}

impl Iterator for Documents {
    type Item = Result<String, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.next_document();
        if next.is_err() {
            self.rows_left = 0;
        }
        next.transpose()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use run_config::NEWEST_READING_VERSION;

    use super::*;
    use crate::CancelToken;

    fn source(folder: &Path) -> DataSource {
        std::fs::write(folder.join("a.jsonl"), "{\"text\": \"one\"}\n{\"text\": \"\"}\n{\"text\": \"two\"}\n").unwrap();
        std::fs::write(folder.join("b.txt"), "three\nlines\nhere\n").unwrap();
        DataSource::local(&[".".to_owned()], folder, "text", NEWEST_READING_VERSION, &CancelToken::new()).unwrap()
    }

    #[test]
    fn documents_follow_listing_order_up_to_max_samples() {
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
    fn an_error_ends_the_iterator() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("z.parquet"), "not Parquet at all").unwrap();
        let mut documents = Documents::open(source(folder.path()).with_bad_files_skipped(false), None);
        assert_eq!(documents.by_ref().take_while(Result::is_ok).count(), 3);
        assert!(documents.next().is_none());
    }

    #[test]
    fn a_missing_text_column_lists_the_available_ones() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.jsonl"), "{\"id\": 1, \"body\": \"x\"}\n").unwrap();
        let source = |column| {
            DataSource::local(&[".".to_owned()], folder.path(), column, NEWEST_READING_VERSION, &CancelToken::new())
                .unwrap()
        };
        let error = |column| Documents::open(source(column), None).next().unwrap().unwrap_err().to_string();
        let way_out = "; its text columns are body: choose one with --text-column (data.text_column)";
        assert_eq!(error("text"), format!("a.jsonl has no text column `text`{way_out}"));
        assert_eq!(error("id"), format!("the column `id` of a.jsonl holds numbers, not strings{way_out}"));
        assert!(Documents::open(source("body"), None).next().unwrap().is_ok());
    }

    #[test]
    fn a_mixture_s_documents_are_proportional_to_weights() {
        let folder = tempfile::tempdir().unwrap();
        let source = |name: &str, documents: usize, text: &str| {
            let lines = format!("{{\"text\": \"{text}\"}}\n").repeat(documents);
            std::fs::write(folder.path().join(name), lines).unwrap();
            DataSource::local(&[name.to_owned()], folder.path(), "text", NEWEST_READING_VERSION, &CancelToken::new())
                .unwrap()
        };
        let (short, long, none) = (source("s.jsonl", 5, "aa"), source("l.jsonl", 30, "bbbb"), source("n.jsonl", 3, ""));
        let mixture = Mixture::new(vec![(short, 1.0), (long, 3.0), (none, 5.0)]).unwrap();
        let texts = Documents::open(&mixture, None).collect::<Result<Vec<_>, _>>().unwrap();
        let count = |expected: &str| texts.iter().filter(|text| *text == expected).count();
        assert_eq!((count("aa"), count("bbbb")), (21, 30), "{texts:?}");
    }
}
