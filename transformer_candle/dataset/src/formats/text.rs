//! A text file is one document, divided into chunks that can be read independently.
//!
//! Boundaries are near multiples of 32 KiB: each is the start of the last line that starts in the 32 KiB before the
//! multiple or, if no line starts there, the multiple itself (moved back to the start of a character). So a chunk has
//! at most 64 KiB, chunk `k` of a file of any size is found by reading 64 KiB, and the concatenated chunks are the file
//! without its byte order mark.

use std::sync::Arc;

use super::{BYTE_ORDER_MARK, Row, ShardReader};
use crate::DataError;
use crate::byte_source::ByteSource;

/// Distance of the multiples near which a text is divided.
const CHUNK_STRIDE: u64 = 32 << 10;

pub(crate) struct TextFile {
    source: Arc<dyn ByteSource>,
    chunk: u64,
    consumed: bool,
}

impl TextFile {
    pub(crate) fn open(source: Arc<dyn ByteSource>) -> Self {
        Self { source, chunk: 0, consumed: true }
    }

    fn chunks(&self) -> u64 {
        self.source.length().div_ceil(CHUNK_STRIDE)
    }

    fn read_chunk(&self, chunk: u64) -> Result<Row, DataError> {
        let window_start = chunk.saturating_sub(1) * CHUNK_STRIDE;
        let window_end = ((chunk + 1) * CHUNK_STRIDE).min(self.source.length());
        let window = self.source.read(window_start, (window_end - window_start) as usize)?;
        let boundary = (chunk * CHUNK_STRIDE - window_start) as usize;
        let start = split_offset(&window[..boundary]);
        let ends_document = chunk + 1 == self.chunks();
        let end = if ends_document { window.len() } else { boundary + split_offset(&window[boundary..]) };
        let text = &window[start..end];
        let text = if chunk == 0 { text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text) } else { text };
        Ok(Row::from_bytes(text.to_vec(), ends_document))
    }
}

impl ShardReader for TextFile {
    fn row_groups(&self) -> Option<u64> {
        Some(self.chunks())
    }

    fn seek(&mut self, row_group: u64, row: u64) -> Result<bool, DataError> {
        self.chunk = row_group;
        self.consumed = row > 0;
        Ok(row_group < self.chunks())
    }

    fn next_row(&mut self) -> Result<Option<Row>, DataError> {
        if std::mem::replace(&mut self.consumed, true) {
            return Ok(None);
        }
        self.read_chunk(self.chunk).map(Some)
    }

    fn row_count(&mut self, row_group: u64) -> Result<Option<u64>, DataError> {
        Ok((row_group < self.chunks()).then_some(1))
    }
}

/// Offset of the boundary within the bytes `before` a multiple: after the last line end, else before the character that
/// the multiple would split, else at the multiple.
fn split_offset(before: &[u8]) -> usize {
    if let Some(newline) = before.iter().rposition(|&byte| byte == b'\n') {
        return newline + 1;
    }
    let length = before.len();
    let start = before.iter().rev().take(4).position(|byte| byte & 0b1100_0000 != 0b1000_0000);
    match start {
        Some(back) => {
            let lead = before[length - 1 - back];
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
    use super::super::testing::{all_rows, texts};
    use super::*;
    use crate::byte_source::testing::MemoryFile;
    use crate::skipped_rows::SkipReason;

    fn chunks(text: &[u8]) -> Vec<Row> {
        let mut file = TextFile::open(MemoryFile::new(text.to_vec(), 1 << 20));
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

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(40))]
        #[test]
        fn chunks_concatenate_to_the_file(words in proptest::collection::vec("[a-z\u{e9}\u{4e2d}\n]{1,9}", 1..40), times in 1_usize..2000) {
            let text = words.concat().repeat(times);
            proptest::prop_assert_eq!(joined(&chunks(text.as_bytes())), text);
        }
    }
}
