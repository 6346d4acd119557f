//! A text file is one document, or several with `<|endoftext|>` between them, divided into chunks that can be read
//! independently.
//!
//! Boundaries are near multiples of 32 KiB: each is the start of the last line that starts in the 32 KiB before the
//! multiple or, if no line starts there, the multiple itself (moved back to the start of a character or a separator).
//! So a chunk has at most 64 KiB, chunk `k` of a file of any size is found by reading 64 KiB, and the concatenated
//! chunks are the file without its byte order mark.
//!
//! Since reading version 2, `<|endoftext|>` separates documents, as in the text files of GPT-2 and `TinyStories`. A chunk
//! has a row for each document in it, without the line ends beside separators; blank documents are left out. Both
//! chunks at a boundary find a separator beside it, at most [`VICINITY`] bytes away, and so agree on whether a document
//! crosses it.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;

use super::{BYTE_ORDER_MARK, Row, ShardReader};
use crate::DataError;
use crate::byte_source::ByteSource;

/// Distance of the multiples near which a text is divided.
const CHUNK_STRIDE: u64 = 32 << 10;
/// What separates documents.
const SEPARATOR: &str = "<|endoftext|>";
/// Bytes before a boundary, and after its multiple, in which a separator is looked for.
const VICINITY: usize = 64;

pub(crate) struct TextFile {
    source: Arc<dyn ByteSource>,
    /// Whether separators end documents.
    has_separators: bool,
    chunk: u64,
    /// The remaining rows of the chunk; `None` before it is read.
    rows: Option<VecDeque<Row>>,
    /// Rows to skip once the chunk is read.
    skip: u64,
}

impl TextFile {
    pub(crate) fn open(source: Arc<dyn ByteSource>, reading_version: u32) -> Self {
        Self { source, has_separators: reading_version >= 2, chunk: 0, rows: Some(VecDeque::new()), skip: 0 }
    }

    fn chunks(&self) -> u64 {
        self.source.length().div_ceil(CHUNK_STRIDE)
    }

    fn read_chunk(&self, chunk: u64) -> Result<VecDeque<Row>, DataError> {
        let (stride, vicinity) = (CHUNK_STRIDE as usize, if self.has_separators { VICINITY } else { 0 });
        let first = (chunk.saturating_sub(1) * CHUNK_STRIDE).saturating_sub(vicinity as u64);
        let end = ((chunk + 1) * CHUNK_STRIDE + vicinity as u64).min(self.source.length());
        let window = Window { bytes: self.source.read(first, (end - first) as usize)?, vicinity };
        let multiple = (chunk * CHUNK_STRIDE - first) as usize;
        let file_boundary =
            |offset| Boundary { offset, ends_document: true, separator_before: false, separator_after: false };
        let start = match chunk {
            0 => file_boundary(0),
            _ => window.boundary(multiple),
        };
        let end = match multiple + stride {
            next if chunk + 1 < self.chunks() => window.boundary(next),
            _ => file_boundary(window.bytes.len()),
        };
        let text = &window.bytes[start.offset..end.offset];
        let text = if chunk == 0 { text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text) } else { text };
        if self.has_separators {
            Ok(split_documents(text, &start, &end))
        } else {
            Ok([Row::from_bytes(text.to_vec(), end.ends_document)].into())
        }
    }
}

impl ShardReader for TextFile {
    fn row_groups(&self) -> Option<u64> {
        Some(self.chunks())
    }

    fn seek(&mut self, row_group: u64, row: u64) -> Result<bool, DataError> {
        (self.chunk, self.rows, self.skip) = (row_group, None, row);
        Ok(row_group < self.chunks())
    }

    fn next_row(&mut self) -> Result<Option<Row>, DataError> {
        if self.rows.is_none() {
            // A chunk without separators, which is one row, is not read to skip it.
            let is_skipped = !self.has_separators && self.skip > 0;
            let mut rows = if is_skipped { VecDeque::new() } else { self.read_chunk(self.chunk)? };
            rows.drain(..rows.len().min(self.skip as usize));
            self.rows = Some(rows);
        }
        Ok(self.rows.as_mut().and_then(VecDeque::pop_front))
    }

    fn row_count(&mut self, row_group: u64) -> Result<Option<u64>, DataError> {
        if row_group >= self.chunks() {
            return Ok(None);
        }
        Ok(Some(if self.has_separators { self.read_chunk(row_group)?.len() as u64 } else { 1 }))
    }
}

/// The bytes around a chunk.
struct Window {
    bytes: Bytes,
    /// Bytes beside boundaries in which a separator is looked for; 0 if nothing separates documents.
    vicinity: usize,
}

/// Where a chunk ends and the next one starts.
struct Boundary {
    offset: usize,
    /// Whether a document ends here.
    ends_document: bool,
    /// Whether there is a separator beside it, with only line ends between.
    separator_before: bool,
    separator_after: bool,
}

impl Window {
    /// Finds the boundary near a multiple of the stride, by the bytes from a stride before it to the vicinity after it.
    fn boundary(&self, multiple: usize) -> Boundary {
        let start = multiple - CHUNK_STRIDE as usize;
        let is_cut =
            |back: &usize| self.vicinity > 0 && self.bytes[multiple - back..].starts_with(SEPARATOR.as_bytes());
        let offset = match split_offset(&self.bytes[start..multiple]) {
            // A line start cannot be within a separator.
            length if length == CHUNK_STRIDE as usize => multiple - (1..SEPARATOR.len()).find(is_cut).unwrap_or(0),
            line_start => start + line_start,
        };
        let bytes_before = &self.bytes[offset.saturating_sub(self.vicinity)..offset];
        let bytes_after = &self.bytes[offset..self.bytes.len().min(multiple + self.vicinity)];
        let has_separators = self.vicinity > 0;
        let separator_before = has_separators && trim_line_ends(bytes_before).ends_with(SEPARATOR.as_bytes());
        let separator_after = has_separators && trim_line_starts(bytes_after).starts_with(SEPARATOR.as_bytes());
        Boundary { offset, ends_document: separator_before || separator_after, separator_before, separator_after }
    }
}

/// Divides the text of a chunk into the documents in it.
fn split_documents(text: &[u8], start: &Boundary, end: &Boundary) -> VecDeque<Row> {
    let (mut rows, mut rest) = (VecDeque::new(), Some(text));
    let (mut starts_document, mut separator_before) = (start.ends_document, start.separator_before);
    while let Some(text) = rest {
        let separator = find_separator(text);
        let piece = &text[..separator.unwrap_or(text.len())];
        rest = separator.map(|separator| &text[separator + SEPARATOR.len()..]);
        let separator_after = separator.is_some() || end.separator_after;
        let mut body = if separator_before { trim_line_starts(piece) } else { piece };
        body = if separator_after { trim_line_ends(body) } else { body };
        let ends_document = separator.is_some() || end.ends_document;
        // A part of a document may be blank, a document not. What ends the document of the chunk before is kept even if
        // only line ends of it are here.
        let is_left_out = body.is_empty() || (ends_document && body.trim_ascii().is_empty());
        if !(is_left_out && starts_document && (separator_before || separator_after)) {
            let part = if body.is_empty() { piece } else { body };
            rows.push_back(Row::from_bytes(part.to_vec(), ends_document));
        }
        (starts_document, separator_before) = (true, true);
    }
    rows
}

/// Offset of the first separator.
fn find_separator(text: &[u8]) -> Option<usize> {
    let separator = SEPARATOR.as_bytes();
    let mut starts = text.iter().enumerate().filter(|(_, byte)| **byte == separator[0]).map(|(start, _)| start);
    starts.find(|&start| text[start..].starts_with(separator))
}

/// Number of separators in the first bytes of a file, at most `bytes`.
pub(crate) fn count_separators(source: &dyn ByteSource, bytes: u64) -> Result<u64, DataError> {
    let text = source.read(0, source.length().min(bytes) as usize)?;
    let (mut count, mut rest) = (0, &text[..]);
    while let Some(separator) = find_separator(rest) {
        count += 1;
        rest = &rest[separator + SEPARATOR.len()..];
    }
    Ok(count)
}

fn is_line_end(byte: u8) -> bool {
    matches!(byte, b'\n' | b'\r')
}

fn trim_line_starts(text: &[u8]) -> &[u8] {
    let start = text.iter().position(|byte| !is_line_end(*byte)).unwrap_or(text.len());
    &text[start..]
}

fn trim_line_ends(text: &[u8]) -> &[u8] {
    let end = text.iter().rposition(|byte| !is_line_end(*byte)).map_or(0, |last| last + 1);
    &text[..end]
}

/// Offset of the boundary within the `bytes` before a multiple: after the last line end, else before the character that
/// the multiple would split, else at the multiple.
fn split_offset(bytes: &[u8]) -> usize {
    if let Some(newline) = bytes.iter().rposition(|&byte| byte == b'\n') {
        return newline + 1;
    }
    let length = bytes.len();
    let start = bytes.iter().rev().take(4).position(|byte| byte & 0b1100_0000 != 0b1000_0000);
    match start {
        Some(back) => {
            let lead = bytes[length - 1 - back];
            let expected = match lead {
                0b1100_0000..=0b1101_1111 => 2,
                0b1110_0000..=0b1110_1111 => 3,
                0b1111_0000..=0b1111_0111 => 4,
                _ => 1,
            };
            if back + 1 < expected { length - 1 - back } else { length }
        }
        None => length,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    use super::super::testing::{all_rows, rest_of_group, texts};
    use super::*;
    use crate::byte_source::testing::MemoryFile;
    use crate::skipped_rows::SkipReason;

    fn chunks(text: &[u8]) -> Vec<Row> {
        let mut file = TextFile::open(MemoryFile::new(text.to_vec(), 1 << 20), 2);
        let groups = all_rows(&mut file);
        assert!(groups.iter().all(|rows| rows.len() == 1));
        groups.into_iter().flatten().collect()
    }

    fn joined(rows: &[Row]) -> String {
        let documents = rows.iter().map(|row| match row {
            Row::Document(document) => document,
            Row::Skipped(reason) => panic!("skipped: {reason:?}"),
        });
        let ends: Vec<bool> = documents.clone().map(|document| document.ends_document).collect();
        assert!(ends.iter().enumerate().all(|(i, &end)| end == (i + 1 == ends.len())), "{ends:?}");
        assert!(documents.clone().all(|document| document.text.len() <= 2 * CHUNK_STRIDE as usize));
        documents.map(|document| document.text.as_str()).collect()
    }

    #[test]
    fn long_texts_are_divided_at_line_ends() {
        let text: String = (0..20_000).map(|i| format!("line {i}, a few words long\n")).collect();
        let rows = chunks(text.as_bytes());
        assert!(rows.len() > 10);
        assert_eq!(joined(&rows), text);
        let groups = [rows];
        assert!(texts(&groups).iter().all(|chunk| chunk.ends_with('\n')));
    }

    #[test]
    fn texts_without_line_ends_keep_characters_whole() {
        let text = "a\u{20ac}\u{1f600}".repeat(10_000);
        assert_eq!(joined(&chunks(text.as_bytes())), text);
    }

    #[test]
    fn small_and_empty_texts_are_one_chunk_or_none() {
        assert_eq!(joined(&chunks(b"one line")), "one line");
        assert_eq!(chunks(b""), []);
    }

    #[test]
    fn byte_order_marks_are_ignored() {
        assert_eq!(joined(&chunks("\u{feff}one line".as_bytes())), "one line");
        let text = "line after line\n".repeat(5000) + "\u{feff}";
        assert_eq!(joined(&chunks(format!("\u{feff}{text}").as_bytes())), text);
    }

    #[test]
    fn invalid_utf8_skips_one_chunk() {
        let mut bytes = "good line\n".repeat(10_000).into_bytes();
        bytes[40_000] = 0xff;
        let rows = chunks(&bytes);
        let skipped = rows.iter().filter(|row| matches!(row, Row::Skipped(SkipReason::NotUtf8))).count();
        assert_eq!((skipped, rows.len()), (1, 4));
    }

    proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(40))]
        #[test]
        fn chunks_concatenate_to_the_file(words in proptest::collection::vec("[a-z\u{e9}\u{4e2d}\n]{1,9}", 1..40), times in 1_usize..2000) {
            let text = words.concat().repeat(times);
            prop_assert_eq!(joined(&chunks(text.as_bytes())), text);
        }

        #[test]
        fn documents_are_those_between_separators(
            pieces in proptest::collection::vec("(<\\|endoftext\\|>|\n|\r\n|\n\n\n|[a-z\u{e9}< ]{1,5}|x{3000})", 1..30),
            times in 1_usize..400,
        ) {
            let text = pieces.concat().repeat(times);
            let mut file = TextFile::open(MemoryFile::new(text.clone().into_bytes(), 1 << 20), 2);
            let groups = all_rows(&mut file);
            let expected: Vec<&str> = text.split(SEPARATOR).map(trimmed).filter(|text| !text.is_empty()).collect();
            let documents = documents(&groups);
            let different = documents.iter().zip(&expected).find(|(document, expected)| document != expected);
            prop_assert!(documents.len() == expected.len() && different.is_none(), "{:?}", pieces);
            for (group, rows) in groups.iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
                prop_assert_eq!(file.row_count(group as u64).unwrap(), Some(rows.len() as u64));
                file.seek(group as u64, rows.len() as u64 / 2).unwrap();
                prop_assert_eq!(&rest_of_group(&mut file), &rows[rows.len() / 2..]);
            }
        }
    }

    /// A document without blank lines around it, and nothing of a blank one.
    fn trimmed(document: &str) -> &str {
        let is_line_end = |character| matches!(character, '\n' | '\r');
        if document.trim().is_empty() { "" } else { document.trim_matches(is_line_end) }
    }

    /// The documents of all chunks, joined across chunks.
    fn documents(groups: &[Vec<Row>]) -> Vec<String> {
        let mut documents = vec![String::new()];
        for row in groups.iter().flatten() {
            let Row::Document(document) = row else { panic!("{row:?}") };
            documents.last_mut().unwrap().push_str(&document.text);
            if document.ends_document {
                documents.push(String::new());
            }
        }
        documents.iter().map(|text| trimmed(text).to_owned()).filter(|text| !text.is_empty()).collect()
    }

    #[test]
    fn separators_and_line_ends_beside_them_are_removed() {
        let rows = |text: &str| {
            let mut file = TextFile::open(MemoryFile::new(text.to_owned(), 100), 2);
            texts(&all_rows(&mut file)).into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(rows("one\ntwo\n<|endoftext|>\n\nthree\n"), ["one\ntwo", "three\n"]);
        assert_eq!(rows("<|endoftext|>a <|endoftext|> b<|endoftext|><|endoftext|>\r\n"), ["a ", " b"]);
        assert_eq!(rows("\n\na"), ["\n\na"]);
    }

    #[test]
    fn version_1_has_no_separators() {
        let text = "a\n<|endoftext|>\nb";
        let mut file = TextFile::open(MemoryFile::new(text, 100), 1);
        assert_eq!(texts(&all_rows(&mut file)), [text]);
    }
}
