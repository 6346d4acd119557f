//! Reads a shard again where what arrived is corrupted.
//!
//! Servers, networks and this machine's cache may change a byte of an intact file; a page's checksum detects that, and
//! a fresh copy repairs it. Rows returned before the error were intact, so that reading resumes at the current row.

use std::sync::Arc;

use super::{Field, Format, ReadingRules, Row, ShardReader};
use crate::DataError;
use crate::byte_source::ByteSource;
use crate::cancel::CancelToken;

/// Reads of the same data before the corruption is taken to be in the file itself.
const MAX_READS: u32 = 4;

pub(super) struct CorruptionRetry {
    format: Format,
    source: Arc<dyn ByteSource>,
    rules: ReadingRules,
    cancel: CancelToken,
    file: Box<dyn ShardReader>,
    /// The position of the reader: the next row of a row group.
    row_group: u64,
    row: u64,
}

impl CorruptionRetry {
    pub(super) fn open(
        format: Format,
        source: Arc<dyn ByteSource>,
        rules: &ReadingRules,
        cancel: &CancelToken,
    ) -> Result<Self, DataError> {
        let file = retry_on_corruption(source.as_ref(), || format.open_unretried(&source, rules, cancel))?;
        let (rules, cancel) = (rules.clone(), cancel.clone());
        Ok(Self { format, source, rules, cancel, file, row_group: 0, row: 0 })
    }

    /// Calls `read` with the reader; after corrupted data, again with a new reader at the current position.
    fn with_retry<T>(&mut self, read: impl Fn(&mut dyn ShardReader) -> Result<T, DataError>) -> Result<T, DataError> {
        let Self { format, source, rules, cancel, file, row_group, row } = self;
        let mut retrying = false;
        retry_on_corruption(source.as_ref(), || {
            if retrying {
                *file = format.open_unretried(source, rules, cancel)?;
                file.seek(*row_group, *row)?;
            }
            retrying = true;
            read(file.as_mut())
        })
    }
}

impl ShardReader for CorruptionRetry {
    fn row_groups(&self) -> Option<u64> {
        self.file.row_groups()
    }

    fn seek(&mut self, row_group: u64, row: u64) -> Result<bool, DataError> {
        (self.row_group, self.row) = (row_group, row);
        self.with_retry(|file| file.seek(row_group, row))
    }

    fn next_row(&mut self) -> Result<Option<Row>, DataError> {
        let row = self.with_retry(|file| file.next_row())?;
        self.row += u64::from(row.is_some());
        Ok(row)
    }

    fn fields(&mut self) -> Result<Vec<Field>, DataError> {
        self.with_retry(|file| file.fields())
    }

    fn row_count(&mut self, row_group: u64) -> Result<Option<u64>, DataError> {
        self.with_retry(|file| file.row_count(row_group))
    }
}

/// Retries `read` after corruption, as long as other bytes may arrive.
fn retry_on_corruption<T>(
    source: &dyn ByteSource,
    mut read: impl FnMut() -> Result<T, DataError>,
) -> Result<T, DataError> {
    for _ in 1..MAX_READS {
        match read() {
            Err(error @ DataError::Format { .. }) if source.invalidate() => tracing::warn!("{error}; reading it again"),
            result => return result,
        }
    }
    read()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use bytes::Bytes;
    use parquet::basic::{Compression, GzipLevel};

    use super::super::parquet_fixture::{ParquetOptions, write_parquet};
    use super::super::testing::{all_rows, rest_of_group, texts};
    use super::*;

    /// Flips the byte at `offset(length)` in `times` reads, from read number `from` on.
    struct FlippedByteSource {
        bytes: Bytes,
        offset: fn(usize) -> usize,
        from: u32,
        times: u32,
        reads: AtomicU32,
        invalidated: AtomicU32,
    }

    impl ByteSource for FlippedByteSource {
        fn name(&self) -> &'static str {
            "flipping"
        }

        fn length(&self) -> u64 {
            self.bytes.len() as u64
        }

        fn preferred_read_size(&self) -> u64 {
            1000
        }

        fn invalidate(&self) -> bool {
            self.invalidated.fetch_add(1, Ordering::Relaxed);
            true
        }

        fn read(&self, start: u64, length: usize) -> Result<Bytes, DataError> {
            let mut bytes = self.bytes[start as usize..start as usize + length].to_vec();
            let number = self.reads.fetch_add(1, Ordering::Relaxed);
            if (self.from..self.from + self.times).contains(&number) {
                bytes[(self.offset)(length)] ^= 0xff;
            }
            Ok(bytes.into())
        }
    }

    /// Documents of enough digits that a row group takes more than one read.
    fn documents() -> Vec<String> {
        let digits = |i: u64| (1..20).map(move |j| (i * 20 + j).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_string());
        (0..300).map(|i| digits(i).collect()).collect()
    }

    fn parquet() -> Bytes {
        let rows: Vec<_> = documents().into_iter().map(|text| Some(text.into_bytes())).collect();
        // Each page is a gzip member, with a checksum at its end.
        let codec = Compression::GZIP(GzipLevel::default());
        write_parquet(&rows, &ParquetOptions { codec, row_group_rows: 100, ..ParquetOptions::default() }).into()
    }

    fn flipped(offset: fn(usize) -> usize, from: u32, times: u32) -> Arc<FlippedByteSource> {
        let (reads, invalidated) = (AtomicU32::new(0), AtomicU32::new(0));
        Arc::new(FlippedByteSource { bytes: parquet(), offset, from, times, reads, invalidated })
    }

    fn open(source: &Arc<FlippedByteSource>) -> CorruptionRetry {
        let source = Arc::clone(source) as _;
        CorruptionRetry::open(Format::Parquet, source, &ReadingRules::text(), &CancelToken::new()).unwrap()
    }

    fn middle(length: usize) -> usize {
        length / 2
    }

    #[test]
    fn pages_with_a_flipped_byte_are_read_again() {
        let whole = flipped(middle, 0, 0);
        all_rows(&mut open(&whole));
        let reads = whole.reads.load(Ordering::Relaxed);
        assert!(reads > 10);
        for from in 1..reads {
            let source = flipped(middle, from, 1);
            let mut file = open(&source);
            assert_eq!(texts(&all_rows(&mut file)), documents(), "read {from}");
            assert_eq!(source.invalidated.load(Ordering::Relaxed), 1, "read {from}");
        }
    }

    #[test]
    fn corrupted_footers_are_read_again() {
        let source = flipped(|length| length - 6, 0, 1);
        let mut file = open(&source);
        assert_eq!(source.invalidated.load(Ordering::Relaxed), 1);
        file.seek(2, 50).unwrap();
        assert_eq!(rest_of_group(&mut file).len(), 50);
    }

    #[test]
    fn persistent_corruption_is_an_error() {
        let source = flipped(middle, 1, u32::MAX - 1);
        let mut file = open(&source);
        let error = file.seek(0, 0).and_then(|_| file.next_row()).unwrap_err();
        assert!(matches!(error, DataError::Format { .. }), "{error}");
        assert_eq!(source.invalidated.load(Ordering::Relaxed), 3);
    }
}
