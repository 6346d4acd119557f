//! JSON Lines compressed with gzip or Zstandard: a row group is 256 lines.
//!
//! Such a file can only be read from its start, so its row groups keep their order, and seeking backwards reads the
//! file again from its start. Uncompressed JSON Lines and Parquet have neither limitation.

use std::io::{self, BufRead, BufReader, Read};
use std::sync::Arc;

use super::jsonl::{read_fields, read_line, reject_array};
use super::{Columns, Compression, Field, Row, ShardReader};
use crate::DataError;
use crate::byte_source::{ByteSource, RangeReader};
use crate::cancel::CancelToken;

/// Rows per row group.
const ROW_GROUP_ROWS: u64 = 256;

pub(crate) struct CompressedJsonlFile {
    source: Arc<dyn ByteSource>,
    compression: Compression,
    columns: Columns,
    cancel: CancelToken,
    reader: Box<dyn BufRead + Send>,
    /// The position of the reader: the next row of a row group.
    row_group: u64,
    row: u64,
}

impl CompressedJsonlFile {
    pub(crate) fn open(
        source: Arc<dyn ByteSource>,
        compression: Compression,
        columns: &Columns,
        cancel: &CancelToken,
    ) -> Result<Self, DataError> {
        let mut reader = decompress(&source, compression, cancel)?;
        reject_array(source.name(), reader.fill_buf().map_err(|error| DataError::from_decoder(source.name(), error))?)?;
        let (columns, cancel) = (columns.clone(), cancel.clone());
        Ok(Self { source, compression, columns, cancel, reader, row_group: 0, row: 0 })
    }

    /// Reads and counts the next row of the file; skips blank lines.
    fn read_row(&mut self) -> Result<Option<Row>, DataError> {
        loop {
            let line =
                read_line(&mut self.reader).map_err(|error| DataError::from_decoder(self.source.name(), error))?;
            let Some(line) = line else { return Ok(None) };
            if let Some(row) = line.row(&self.columns) {
                self.row += 1;
                return Ok(Some(row));
            }
        }
    }

    /// Whether only white space is left.
    fn at_end(&mut self) -> Result<bool, DataError> {
        loop {
            let rest = self.reader.fill_buf().map_err(|error| DataError::from_decoder(self.source.name(), error))?;
            let blank = rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            if blank < rest.len() || rest.is_empty() {
                return Ok(rest.is_empty());
            }
            self.reader.consume(blank);
        }
    }
}

impl ShardReader for CompressedJsonlFile {
    fn row_groups(&self) -> Option<u64> {
        None
    }

    fn seek(&mut self, row_group: u64, row: u64) -> Result<bool, DataError> {
        if (row_group, row) < (self.row_group, self.row) {
            self.reader = decompress(&self.source, self.compression, &self.cancel)?;
            (self.row_group, self.row) = (0, 0);
        }
        while (self.row_group, self.row) < (row_group, row) {
            if self.row == ROW_GROUP_ROWS && self.row_group < row_group {
                (self.row_group, self.row) = (self.row_group + 1, 0);
            } else if self.read_row()?.is_none() {
                return Ok(self.row_group == row_group);
            }
        }
        Ok(row > 0 || !self.at_end()?)
    }

    fn next_row(&mut self) -> Result<Option<Row>, DataError> {
        if self.row == ROW_GROUP_ROWS { Ok(None) } else { self.read_row() }
    }

    fn fields(&mut self) -> Result<Vec<Field>, DataError> {
        let mut start = decompress(&self.source, self.compression, &self.cancel)?;
        read_fields(&mut start).map_err(|error| DataError::from_decoder(self.source.name(), error))
    }
}

fn decompress(
    source: &Arc<dyn ByteSource>,
    compression: Compression,
    cancel: &CancelToken,
) -> Result<Box<dyn BufRead + Send>, DataError> {
    let compressed = RangeReader::new(Arc::clone(source), 0, u64::MAX);
    let cancel = cancel.clone();
    Ok(match compression {
        Compression::None => Box::new(compressed),
        Compression::Gzip => {
            let decoder = flate2::bufread::MultiGzDecoder::new(compressed);
            Box::new(BufReader::new(CancellableReader { decoder, cancel }))
        }
        Compression::Zstd => {
            let decoder = zstd::Decoder::with_buffer(compressed);
            let decoder = decoder.map_err(|error| DataError::from_decoder(source.name(), error))?;
            Box::new(BufReader::new(CancellableReader { decoder, cancel }))
        }
    })
}

/// Stops decompressing once its token is cancelled: a few compressed bytes may expand to gigabytes.
struct CancellableReader<R> {
    decoder: R,
    cancel: CancelToken,
}

impl<R: Read> Read for CancellableReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.cancel.check()?;
        self.decoder.read(buffer)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::testing::{all_rows, rest_of_group, texts};
    use super::*;
    use crate::byte_source::testing::MemoryFile;

    fn gzip(text: &str) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    fn lines(range: std::ops::Range<u32>) -> String {
        range.map(|i| format!("{{\"text\": \"document {i}\"}}\n\n")).collect()
    }

    fn expected(range: std::ops::Range<u32>) -> Vec<String> {
        range.map(|i| format!("document {i}")).collect()
    }

    #[test]
    fn concatenated_gzip_and_zstd_files_are_read() {
        let members = [gzip(&lines(0..400)), gzip(&lines(400..1000))].concat();
        let frame = |range| zstd::encode_all(lines(range).as_bytes(), 1).unwrap();
        let frames = [frame(0..400), frame(400..1000)].concat();
        for (bytes, compression) in [(members, Compression::Gzip), (frames, Compression::Zstd)] {
            let mut file = CompressedJsonlFile::open(
                MemoryFile::new(bytes, 64),
                compression,
                &Columns::text(),
                &CancelToken::new(),
            )
            .unwrap();
            let rows = all_rows(&mut file);
            assert_eq!(rows.iter().map(Vec::len).collect::<Vec<_>>(), [256, 256, 256, 232]);
            assert_eq!(texts(&rows), expected(0..1000));
        }
    }

    #[test]
    fn seeking_works_forwards_and_backwards() {
        let source = MemoryFile::new(gzip(&lines(0..600)), 1 << 20);
        let mut file =
            CompressedJsonlFile::open(source, Compression::Gzip, &Columns::text(), &CancelToken::new()).unwrap();
        let rows = all_rows(&mut file);
        for (row_group, row) in [(1, 200), (0, 0), (2, 87), (2, 88), (0, 256), (1, 0)] {
            assert!(file.seek(row_group, row).unwrap(), "{row_group} {row}");
            assert_eq!(rest_of_group(&mut file), rows[row_group as usize][row as usize..], "{row_group} {row}");
        }
        assert!(!file.seek(3, 0).unwrap());
        assert_eq!((file.row_count(2).unwrap(), file.row_count(3).unwrap()), (Some(88), None));
    }

    #[test]
    fn exactly_256_rows_are_one_row_group() {
        let source = MemoryFile::new(gzip(&lines(0..256)), 1 << 20);
        let mut file =
            CompressedJsonlFile::open(source, Compression::Gzip, &Columns::text(), &CancelToken::new()).unwrap();
        assert_eq!(all_rows(&mut file).len(), 1);
    }

    #[test]
    fn byte_order_marks_are_ignored() {
        let source = MemoryFile::new(gzip(&format!("\u{feff}{}", lines(0..3))), 1 << 20);
        let mut file =
            CompressedJsonlFile::open(source, Compression::Gzip, &Columns::text(), &CancelToken::new()).unwrap();
        assert_eq!(texts(&all_rows(&mut file)), expected(0..3));
    }

    #[test]
    fn cancellation_stops_an_endless_line() {
        let endless = std::io::repeat(b'x').take(64 << 20);
        let bytes = zstd::encode_all(endless, 1).unwrap();
        assert!(bytes.len() < 1 << 20, "one read of the file");
        let cancel = CancelToken::new();
        let mut file =
            CompressedJsonlFile::open(MemoryFile::new(bytes, 1 << 20), Compression::Zstd, &Columns::text(), &cancel)
                .unwrap();
        cancel.cancel();
        assert!(matches!(file.next_row(), Err(DataError::Closed)));
    }

    #[test]
    fn truncated_files_are_named_in_errors() {
        let mut bytes = gzip(&lines(0..600));
        bytes.truncate(bytes.len() / 2);
        let mut file = CompressedJsonlFile::open(
            MemoryFile::new(bytes, 1 << 20),
            Compression::Gzip,
            &Columns::text(),
            &CancelToken::new(),
        )
        .unwrap();
        let error = (0..3).find_map(|row_group| file.row_count(row_group).err()).unwrap();
        assert!(matches!(&error, DataError::Format { file, .. } if file == "memory"), "{error}");
    }
}
