//! A text file is one document, cut into pieces that can each be read without the others.
//!
//! The cuts lie near multiples of 32 KiB: each is the last start of a line in the 32 KiB before the multiple, or, where no
//! line starts there, the multiple itself (moved back to where a character starts). So a piece has at most 64 KiB, piece
//! `k` of a file of any size is found by reading 64 KiB, and the pieces joined are the file without its byte order mark.

use std::sync::Arc;

use super::{BYTE_ORDER_MARK, DocumentFile, Row};
use crate::DataError;
use crate::byte_source::ByteSource;

/// Distance of the places near which a text is cut.
const GRID: u64 = 32 << 10;

pub(crate) struct TextFile {
    source: Arc<dyn ByteSource>,
    piece: u64,
    taken: bool,
}

impl TextFile {
    pub(crate) fn open(source: Arc<dyn ByteSource>) -> Self {
        Self { source, piece: 0, taken: true }
    }

    fn pieces(&self) -> u64 {
        self.source.length().div_ceil(GRID)
    }

    fn read_piece(&self, piece: u64) -> Result<Row, DataError> {
        let window_start = piece.saturating_sub(1) * GRID;
        let window_end = ((piece + 1) * GRID).min(self.source.length());
        let window = self.source.read(window_start, (window_end - window_start) as usize)?;
        let middle = (piece * GRID - window_start) as usize;
        let start = cut(&window[..middle]);
        let ends = piece + 1 == self.pieces();
        let end = if ends { window.len() } else { middle + cut(&window[middle..]) };
        let text = &window[start..end];
        let text = if piece == 0 { text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text) } else { text };
        Ok(Row::from_bytes(text.to_vec(), ends))
    }
}

impl DocumentFile for TextFile {
    fn groups(&self) -> Option<u64> {
        Some(self.pieces())
    }

    fn seek(&mut self, group: u64, row: u64) -> Result<bool, DataError> {
        self.piece = group;
        self.taken = row > 0;
        Ok(group < self.pieces())
    }

    fn next_row(&mut self) -> Result<Option<Row>, DataError> {
        if std::mem::replace(&mut self.taken, true) {
            return Ok(None);
        }
        self.read_piece(self.piece).map(Some)
    }

    fn rows(&mut self, group: u64) -> Result<Option<u64>, DataError> {
        Ok((group < self.pieces()).then_some(1))
    }
}

/// Where in the stretch `before` a multiple the cut lies: after its last line end, else before the character that the
/// multiple would split, else at the multiple.
fn cut(before: &[u8]) -> usize {
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

    fn pieces(text: &[u8]) -> Vec<Row> {
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
        let ends: Vec<bool> = documents.clone().map(|document| document.ends).collect();
        assert!(ends.iter().enumerate().all(|(i, &end)| end == (i + 1 == ends.len())), "{ends:?}");
        assert!(documents.clone().all(|document| document.text.len() <= 2 * GRID as usize));
        documents.map(|document| document.text.as_str()).collect()
    }

    #[test]
    fn a_long_text_is_cut_at_line_ends() {
        let text: String = (0..20_000).map(|i| format!("line {i}, a few words long\n")).collect();
        let rows = pieces(text.as_bytes());
        assert!(rows.len() > 10);
        assert_eq!(joined(&rows), text);
        let groups = [rows];
        assert!(texts(&groups).iter().all(|piece| piece.ends_with('\n')));
    }

    #[test]
    fn a_text_without_line_ends_is_cut_between_characters() {
        let text = "a\u{20ac}\u{1f600}".repeat(10_000);
        assert_eq!(joined(&pieces(text.as_bytes())), text);
    }

    #[test]
    fn a_small_or_empty_text_is_one_piece_or_none() {
        assert_eq!(joined(&pieces(b"one line")), "one line");
        assert_eq!(pieces(b""), []);
    }

    #[test]
    fn a_byte_order_mark_is_no_text() {
        assert_eq!(joined(&pieces("\u{feff}one line".as_bytes())), "one line");
        let text = "line after line\n".repeat(5000) + "\u{feff}";
        assert_eq!(joined(&pieces(format!("\u{feff}{text}").as_bytes())), text);
    }

    #[test]
    fn a_piece_that_is_not_utf8_is_skipped_alone() {
        let mut bytes = "good line\n".repeat(10_000).into_bytes();
        bytes[40_000] = 0xff;
        let rows = pieces(&bytes);
        let skipped = rows.iter().filter(|row| matches!(row, Row::Skipped(SkipReason::NotUtf8))).count();
        assert_eq!((skipped, rows.len()), (1, 4));
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(40))]
        #[test]
        fn pieces_joined_are_the_file(words in proptest::collection::vec("[a-z\u{e9}\u{4e2d}\n]{1,9}", 1..40), times in 1_usize..2000) {
            let text = words.concat().repeat(times);
            proptest::prop_assert_eq!(joined(&pieces(text.as_bytes())), text);
        }
    }
}
