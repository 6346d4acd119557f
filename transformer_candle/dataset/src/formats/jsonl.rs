//! JSON Lines: each line is an object with a document in its text field.
//!
//! An uncompressed file is divided at byte offsets, so that a row group is found without reading what precedes it: row
//! group `k` is the lines that start in bytes `k * size .. (k + 1) * size`, with `size` a 256th of the file but at
//! least 64 KiB and at most 4 MiB (about 1000 lines of web text).

use std::io::{self, BufRead, Read};
use std::sync::Arc;

use super::json_row::JsonText;
use super::{BYTE_ORDER_MARK, Field, MAX_DOCUMENT_BYTES, ReadingRules, Row, ShardReader};
use crate::DataError;
use crate::byte_source::{ByteSource, RangeReader};

/// Maximum length of a line: the text, escaped, and the other fields.
pub(super) const MAX_LINE_BYTES: u64 = 4 * MAX_DOCUMENT_BYTES as u64;
/// Rows that are read to list the fields.
const FIELD_SAMPLE_ROWS: usize = 8;

pub(crate) struct JsonlFile {
    source: Arc<dyn ByteSource>,
    rules: ReadingRules,
    row_group_bytes: u64,
    reader: RangeReader,
    row_group_end: u64,
}

impl JsonlFile {
    pub(crate) fn open(source: Arc<dyn ByteSource>, rules: &ReadingRules) -> Self {
        let row_group_bytes = (source.length() / 256).clamp(64 << 10, 4 << 20);
        let reader = RangeReader::new(Arc::clone(&source), 0, 0);
        Self { source, rules: rules.clone(), row_group_bytes, reader, row_group_end: 0 }
    }
}

impl ShardReader for JsonlFile {
    fn row_groups(&self) -> Option<u64> {
        Some(self.source.length().div_ceil(self.row_group_bytes))
    }

    fn seek(&mut self, row_group: u64, row: u64) -> Result<bool, DataError> {
        let start = row_group * self.row_group_bytes;
        if start >= self.source.length() {
            return Ok(false);
        }
        self.row_group_end = start + self.row_group_bytes;
        // The line that contains the byte before the row group belongs to an earlier one; it may extend beyond this
        // one.
        let previous_byte = start.saturating_sub(1);
        self.reader = RangeReader::new(Arc::clone(&self.source), previous_byte, u64::MAX);
        if start > 0 {
            let skipped = self.reader.by_ref().take(self.row_group_end - previous_byte).skip_until(b'\n');
            skipped.map_err(DataError::decoding(self.source.name()))?;
        }
        for _ in 0..row {
            self.next_row()?;
        }
        Ok(true)
    }

    fn next_row(&mut self) -> Result<Option<Row>, DataError> {
        while self.reader.position() < self.row_group_end {
            match read_line(&mut self.reader).map_err(DataError::decoding(self.source.name()))? {
                None => return Ok(None),
                Some(line) => {
                    if let Some(row) = line.row(&self.rules) {
                        return Ok(Some(row));
                    }
                }
            }
        }
        Ok(None)
    }

    fn fields(&mut self) -> Result<Vec<Field>, DataError> {
        let mut start = RangeReader::new(Arc::clone(&self.source), 0, u64::MAX);
        sample_fields(|| read_line(&mut start)).map_err(DataError::decoding(self.source.name()))
    }
}

/// Lists the fields of the first rows.
pub(super) fn sample_fields(mut next: impl FnMut() -> io::Result<Option<JsonText>>) -> io::Result<Vec<Field>> {
    let mut fields = Vec::new();
    for _ in 0..FIELD_SAMPLE_ROWS {
        let Some(row) = next()? else { break };
        row.list_fields(&mut fields);
    }
    Ok(fields)
}

/// Whether a file is a JSON array, by its first bytes.
pub(crate) fn is_array(start: &[u8]) -> bool {
    let start = start.strip_prefix(BYTE_ORDER_MARK).unwrap_or(start);
    start.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[')
}

/// Reads the next line; `None` at the end of the file. A line of more than [`MAX_LINE_BYTES`] is skipped to its end.
pub(super) fn read_line(reader: &mut impl BufRead) -> io::Result<Option<JsonText>> {
    let mut bytes = Vec::new();
    if reader.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut bytes)? == 0 {
        return Ok(None);
    }
    let terminated = bytes.pop_if(|byte| *byte == b'\n').is_some();
    let too_long = !terminated && bytes.len() as u64 > MAX_LINE_BYTES;
    if too_long {
        reader.skip_until(b'\n')?;
        bytes.clear();
    }
    Ok(Some(JsonText { bytes, too_long }))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{all_rows, rest_of_group, texts};
    use super::*;
    use crate::byte_source::testing::MemoryFile;
    use crate::skipped_rows::SkipReason;
    use crate::skipped_rows::SkipReason::{Empty, Malformed, NotUtf8, Null};

    fn open(text: &str) -> JsonlFile {
        JsonlFile::open(MemoryFile::new(text.to_owned(), 1000), &ReadingRules::text())
    }

    #[test]
    fn every_line_is_in_exactly_one_row_group() {
        for length in [1, 17, 90, 700] {
            let lines: Vec<String> = (0..5000).map(|i| format!("{i} {}", "x".repeat(i % length))).collect();
            let text: String =
                lines.iter().map(|line| format!("{{\"id\": [1, {{}}], \"text\": \"{line}\"}}\n")).collect();
            let mut file = open(&text);
            assert!(file.row_groups().unwrap() > 1);
            let rows = all_rows(&mut file);
            assert_eq!(rows.len() as u64, file.row_groups().unwrap());
            assert_eq!(texts(&rows), lines);
        }
    }

    #[test]
    fn seeking_equals_reading_up_to_the_row() {
        let text: String = (0..9000).map(|i| format!("{{\"text\": \"document {i}\"}}\n")).collect();
        let mut file = open(&text);
        let rows = all_rows(&mut file);
        for (row_group, row) in [(0, 3), (1, 0), (2, 1000)] {
            assert!(file.seek(row_group, row).unwrap());
            assert_eq!(rest_of_group(&mut file), rows[row_group as usize][row as usize..]);
        }
    }

    #[test]
    fn bad_lines_are_classified_and_blank_ones_ignored() {
        let mut bytes = br#"{"text": "good"}
{"other": 1}
{"text": null}

{"text": ""}
{"text": 3}
{"text": "cut off
["text"]
{"text": "a", "text": "b"}
{"text": "surrogate \ud800"}
"#
        .to_vec();
        bytes.extend_from_slice(b"{\"text\": \"\xff\"}\n  \r\n{\"te\\u0078t\": \"l\\u00e4st\"}");
        let mut file = JsonlFile::open(MemoryFile::new(bytes, 1 << 20), &ReadingRules::text());
        let rows = all_rows(&mut file);
        let skipped: Vec<_> = rows[0]
            .iter()
            .filter_map(|row| match row {
                Row::Skipped(reason) => Some(*reason),
                Row::Document(_) => None,
            })
            .collect();
        assert_eq!(skipped, [Null, Null, Empty, Malformed, Malformed, Malformed, Malformed, Malformed, NotUtf8]);
        assert_eq!(texts(&rows), ["good", "l\u{e4}st"]);
    }

    #[test]
    fn byte_order_marks_are_ignored() {
        let text = "\u{feff}{\"text\": \"a\"}\n{\"text\": \"b\"}\n\u{feff}{\"text\": \"\u{feff}c\"}\n";
        assert_eq!(texts(&all_rows(&mut open(text))), ["a", "b", "\u{feff}c"]);
    }

    #[test]
    fn fields_of_the_first_rows_are_listed_with_types() {
        let text = "{\"id\": 1, \"body\": null}\nnonsense\n{\"body\": \"x\", \"tags\": []}\n";
        let fields = open(text).fields().unwrap();
        let names_and_types: Vec<_> = fields.iter().map(|field| (field.name.as_str(), field.non_string_type)).collect();
        assert_eq!(names_and_types, [("id", Some("numbers")), ("body", None), ("tags", Some("lists"))]);
    }

    #[test]
    fn overlong_lines_and_texts_are_skipped() {
        let text = format!(
            "{{\"text\": \"{}\"}}\n{{\"text\": \"{}\"}}\n{{\"text\": \"next\"}}\n",
            "a".repeat(MAX_LINE_BYTES as usize),
            "b".repeat(MAX_DOCUMENT_BYTES + 1)
        );
        let mut file = JsonlFile::open(MemoryFile::new(text, 8 << 20), &ReadingRules::text());
        let rows = all_rows(&mut file);
        let flat: Vec<_> = rows.into_iter().flatten().collect();
        assert_eq!(flat[..2], [Row::Skipped(SkipReason::TooLong), Row::Skipped(SkipReason::TooLong)]);
        assert_eq!(texts(&[flat]), ["next"]);
    }
}
