//! JSON that can only be read from its start: compressed JSON Lines, and files that are one JSON array. A row group is 256
//! rows.
//!
//! The row groups keep their order, and seeking backwards reads the file again from its start. Uncompressed JSON Lines
//! and Parquet have neither limitation.

use std::io::{self, BufRead};
use std::sync::Arc;

use super::decompression::decompress;
use super::json_array::ArrayElements;
use super::json_row::JsonText;
use super::jsonl::{is_array, read_line, sample_fields};
use super::recognition::pretty_printed;
use super::{BYTE_ORDER_MARK, Compression, Field, ReadingRules, Row, ShardReader};
use crate::DataError;
use crate::byte_source::ByteSource;
use crate::cancel::CancelToken;

/// Rows per row group.
const ROW_GROUP_ROWS: u64 = 256;

pub(crate) struct JsonStream {
    source: Arc<dyn ByteSource>,
    compression: Compression,
    rules: ReadingRules,
    cancel: CancelToken,
    objects: Objects,
    /// The position of the reader: the next row of a row group.
    row_group: u64,
    row: u64,
}

/// The objects of a file: its lines, or the elements of its array.
struct Objects {
    reader: Box<dyn BufRead + Send>,
    array: Option<ArrayElements>,
}

impl Objects {
    fn open(source: &Arc<dyn ByteSource>, compression: Compression, cancel: &CancelToken) -> Result<Self, DataError> {
        let mut reader = decompress(source, compression, cancel)?;
        let mut start = || -> io::Result<bool> {
            let has_mark = reader.fill_buf()?.starts_with(BYTE_ORDER_MARK);
            reader.consume(if has_mark { BYTE_ORDER_MARK.len() } else { 0 });
            Ok(is_array(reader.fill_buf()?))
        };
        let is_array = start().map_err(DataError::decoding(source.name()))?;
        Ok(Self { reader, array: is_array.then(ArrayElements::new) })
    }

    fn next(&mut self) -> io::Result<Option<JsonText>> {
        match &mut self.array {
            Some(array) => array.next(&mut self.reader),
            None => read_line(&mut self.reader),
        }
    }

    /// Whether there is no further object.
    fn at_end(&mut self) -> io::Result<bool> {
        if let Some(array) = &mut self.array {
            return Ok(!array.seek_element(&mut self.reader)?);
        }
        loop {
            let rest = self.reader.fill_buf()?;
            let blank = rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            if blank < rest.len() || rest.is_empty() {
                return Ok(rest.is_empty());
            }
            self.reader.consume(blank);
        }
    }
}

impl JsonStream {
    pub(crate) fn open(
        source: Arc<dyn ByteSource>,
        compression: Compression,
        rules: &ReadingRules,
        cancel: &CancelToken,
    ) -> Result<Self, DataError> {
        let mut objects = Objects::open(&source, compression, cancel)?;
        if objects.array.is_none() && rules.version >= 2 {
            let start = objects.reader.fill_buf().map_err(DataError::decoding(source.name()))?;
            if let Some(message) = pretty_printed(start) {
                return Err(DataError::Format { file: source.name().to_owned(), message });
            }
        }
        let (rules, cancel) = (rules.clone(), cancel.clone());
        Ok(Self { source, compression, rules, cancel, objects, row_group: 0, row: 0 })
    }

    /// Reads and counts the next row of the file; skips blank lines.
    fn read_row(&mut self) -> Result<Option<Row>, DataError> {
        loop {
            let object = self.objects.next().map_err(DataError::decoding(self.source.name()))?;
            let Some(object) = object else { return Ok(None) };
            if let Some(row) = object.row(&self.rules) {
                self.row += 1;
                return Ok(Some(row));
            }
        }
    }
}

impl ShardReader for JsonStream {
    fn row_groups(&self) -> Option<u64> {
        None
    }

    fn seek(&mut self, row_group: u64, row: u64) -> Result<bool, DataError> {
        if (row_group, row) < (self.row_group, self.row) {
            self.objects = Objects::open(&self.source, self.compression, &self.cancel)?;
            (self.row_group, self.row) = (0, 0);
        }
        while (self.row_group, self.row) < (row_group, row) {
            if self.row == ROW_GROUP_ROWS && self.row_group < row_group {
                (self.row_group, self.row) = (self.row_group + 1, 0);
            } else if self.read_row()?.is_none() {
                return Ok(self.row_group == row_group);
            }
        }
        Ok(row > 0 || !self.objects.at_end().map_err(DataError::decoding(self.source.name()))?)
    }

    fn next_row(&mut self) -> Result<Option<Row>, DataError> {
        if self.row == ROW_GROUP_ROWS { Ok(None) } else { self.read_row() }
    }

    fn fields(&mut self) -> Result<Vec<Field>, DataError> {
        let mut objects = Objects::open(&self.source, self.compression, &self.cancel)?;
        sample_fields(|| objects.next()).map_err(DataError::decoding(self.source.name()))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

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
            let mut file =
                JsonStream::open(MemoryFile::new(bytes, 64), compression, &ReadingRules::text(), &CancelToken::new())
                    .unwrap();
            let rows = all_rows(&mut file);
            assert_eq!(rows.iter().map(Vec::len).collect::<Vec<_>>(), [256, 256, 256, 232]);
            assert_eq!(texts(&rows), expected(0..1000));
        }
    }

    #[test]
    fn seeking_works_forwards_and_backwards() {
        let source = MemoryFile::new(gzip(&lines(0..600)), 1 << 20);
        let mut file = JsonStream::open(source, Compression::Gzip, &ReadingRules::text(), &CancelToken::new()).unwrap();
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
        let mut file = JsonStream::open(source, Compression::Gzip, &ReadingRules::text(), &CancelToken::new()).unwrap();
        assert_eq!(all_rows(&mut file).len(), 1);
    }

    #[test]
    fn byte_order_marks_are_ignored() {
        let source = MemoryFile::new(gzip(&format!("\u{feff}{}", lines(0..3))), 1 << 20);
        let mut file = JsonStream::open(source, Compression::Gzip, &ReadingRules::text(), &CancelToken::new()).unwrap();
        assert_eq!(texts(&all_rows(&mut file)), expected(0..3));
    }

    #[test]
    fn cancellation_stops_an_endless_line() {
        let endless = std::io::repeat(b'x').take(64 << 20);
        let bytes = zstd::encode_all(endless, 1).unwrap();
        assert!(bytes.len() < 1 << 20, "one read of the file");
        let cancel = CancelToken::new();
        let mut file =
            JsonStream::open(MemoryFile::new(bytes, 1 << 20), Compression::Zstd, &ReadingRules::text(), &cancel)
                .unwrap();
        cancel.cancel();
        assert!(matches!(file.next_row(), Err(DataError::Closed)));
    }

    #[test]
    fn truncated_files_are_named_in_errors() {
        let mut bytes = gzip(&lines(0..600));
        bytes.truncate(bytes.len() / 2);
        let mut file = JsonStream::open(
            MemoryFile::new(bytes, 1 << 20),
            Compression::Gzip,
            &ReadingRules::text(),
            &CancelToken::new(),
        )
        .unwrap();
        let error = (0..3).find_map(|row_group| file.row_count(row_group).err()).unwrap();
        assert!(matches!(&error, DataError::Format { file, .. } if file == "memory"), "{error}");
    }

    #[test]
    fn arrays_are_read_as_rows() {
        let lines: Vec<String> = (0..600).map(|i| format!("{{\"text\": \"document {i}\",\n \"id\": [{i}]}}")).collect();
        let array = format!("\u{feff}\n[{}]\n", lines.join(",\n  "));
        for (bytes, compression) in [(array.clone().into_bytes(), Compression::None), (gzip(&array), Compression::Gzip)]
        {
            let source = MemoryFile::new(bytes, 100);
            let mut file = JsonStream::open(source, compression, &ReadingRules::text(), &CancelToken::new()).unwrap();
            let rows = all_rows(&mut file);
            assert_eq!(rows.iter().map(Vec::len).collect::<Vec<_>>(), [256, 256, 88]);
            assert_eq!(texts(&rows), expected(0..600));
            assert!(file.seek(1, 3).unwrap() && !file.seek(3, 0).unwrap());
            assert_eq!(file.fields().unwrap().len(), 2);
        }
    }

    #[test]
    fn truncated_arrays_are_errors() {
        let source = MemoryFile::new("[{\"text\": \"a\"}, {\"te", 100);
        let rules = ReadingRules::text();
        let mut file = JsonStream::open(source, Compression::None, &rules, &CancelToken::new()).unwrap();
        assert!(matches!(file.next_row(), Ok(Some(Row::Document(_)))));
        assert!(matches!(file.next_row(), Err(DataError::Format { .. })));
    }
}
