//! Recognizes files whose content is not what their extension says, so that an error can name the way out.

use bytes::Bytes;

use super::{Format, jsonl};
use crate::DataError;
use crate::byte_source::ByteSource;

/// Bytes at the start of a file that are looked at.
const HEAD_BYTES: u64 = 4096;

const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";
/// First bytes of formats, and what to do with such a file.
const SIGNATURES: [(&[u8], &str); 6] = [
    (LFS_POINTER, "it is a Git LFS pointer, not the data: fetch the data with `git lfs pull` or `hf download`"),
    (b"PAR1", "it is a Parquet file: let its name end in .parquet"),
    (
        b"ARROW1",
        "it is an Arrow file: convert it to Parquet, as with `datasets.Dataset.from_file(PATH).to_parquet(PATH)`",
    ),
    (b"PK\x03\x04", "it is a zip archive: unpack it"),
    (b"\x1f\x8b", "it is compressed with gzip: let its name end in .jsonl.gz, or decompress it"),
    (b"\x28\xb5\x2f\xfd", "it is compressed with Zstandard: let its name end in .jsonl.zst, or decompress it"),
];

/// Reads the first bytes of a file.
pub(crate) fn read_head(source: &dyn ByteSource) -> Result<Bytes, DataError> {
    source.read(0, source.length().min(HEAD_BYTES) as usize)
}

impl Format {
    /// Fails if a file's first bytes cannot be of this format, with a sentence that says what they are.
    pub(super) fn check_head(self, file: &str, head: &[u8]) -> Result<(), DataError> {
        match self.recognize(head) {
            Some(message) => Err(DataError::Format { file: file.to_owned(), message }),
            None => Ok(()),
        }
    }

    /// Says what a file is that starts with these bytes; `None` if it may be of this format.
    fn recognize(self, head: &[u8]) -> Option<String> {
        let signature = SIGNATURES.iter().find(|(signature, _)| head.starts_with(signature));
        match self {
            Self::Parquet if head.starts_with(b"PAR1") => None,
            Self::Jsonl(super::Compression::Gzip) if head.starts_with(b"\x1f\x8b") => None,
            Self::Jsonl(super::Compression::Zstd) if head.starts_with(b"\x28\xb5\x2f\xfd") => None,
            _ if signature.is_some() => signature.map(|(_, message)| (*message).to_owned()),
            Self::Parquet | Self::Jsonl(_) if is_html(head) => {
                Some("it is an HTML page: download the file again".to_owned())
            }
            Self::Jsonl(super::Compression::None) if !jsonl::is_array(head) => {
                wide_encoding(head).or_else(|| pretty_printed(head))
            }
            Self::Jsonl(super::Compression::None) | Self::Text => wide_encoding(head),
            _ => None,
        }
    }
}

fn is_html(head: &[u8]) -> bool {
    let start: Vec<u8> = head.trim_ascii_start().iter().take(14).map(u8::to_ascii_lowercase).collect();
    start.starts_with(b"<!doctype html") || start.starts_with(b"<html")
}

/// Names the encoding of text whose characters have two or four bytes.
fn wide_encoding(head: &[u8]) -> Option<String> {
    let zeros = |parity: usize| head.len() >= 8 && head.iter().take(64).skip(parity).step_by(2).all(|byte| *byte == 0);
    let encoding = match head {
        [0xff, 0xfe, 0, 0, ..] | [0, 0, 0xfe, 0xff, ..] => "UTF-32",
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => "UTF-16",
        _ if zeros(0) && zeros(1) => return None,
        _ if zeros(0) => "UTF-16BE",
        _ if zeros(1) => "UTF-16LE",
        _ => return None,
    };
    Some(format!("it is {encoding} text: convert it to UTF-8, as with `iconv -f {encoding} -t UTF-8`"))
}

/// Says how to convert a file that is one JSON object over several lines; `None` if its start is something else.
pub(super) fn pretty_printed(head: &[u8]) -> Option<String> {
    let mut lines = head.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).filter(|line| !line.is_empty());
    let (first, second) = (lines.next()?, lines.next()?);
    if first.strip_prefix(super::BYTE_ORDER_MARK).unwrap_or(first) != b"{" || !second.starts_with(b"\"") {
        return None;
    }
    let list = second.strip_suffix(b"[").map(<[u8]>::trim_ascii).and_then(|key| key.strip_suffix(b":"));
    let key = list.and_then(|key| serde_json::from_slice::<String>(key.trim_ascii()).ok());
    let filter = key.map_or_else(|| "-c .".to_owned(), |key| format!("-c '.[\"{key}\"][]'"));
    Some(format!("it is a JSON object over several lines: write one object per line, as `jq {filter}` does"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::Compression;

    #[test]
    fn files_that_are_something_else_are_named() {
        let json = Format::Jsonl(Compression::None);
        let pointer: &[u8] = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
        let utf16: Vec<u8> = "a line of text".encode_utf16().flat_map(u16::to_le_bytes).collect();
        let cases: [(Format, &[u8], &str); 12] = [
            (json, pointer, "git lfs pull"),
            (Format::Text, pointer, "git lfs pull"),
            (Format::Parquet, pointer, "git lfs pull"),
            (Format::Jsonl(Compression::Gzip), pointer, "git lfs pull"),
            (Format::Parquet, b"<!DOCTYPE html>", "HTML"),
            (json, b"PAR1", ".parquet"),
            (Format::Text, b"\x1f\x8b\x08\x00", "gzip"),
            (Format::Text, &[b"\xff\xfe".as_slice(), &utf16].concat(), "UTF-16 "),
            (json, &utf16, "UTF-16LE"),
            (json, b"\n{\n  \"text\": \"a\",", "jq -c .`"),
            (json, b"\xef\xbb\xbf{\n \"data\": [\n", "jq -c '.[\"data\"][]'"),
            (json, b"{\r\n\t\"a b\" : [\r\n", "'.[\"a b\"][]'"),
        ];
        for (format, head, expected) in cases {
            let message = format.recognize(head).unwrap();
            assert!(message.contains(expected), "{format:?} {message}");
        }
    }

    #[test]
    fn usual_files_are_not_taken_for_others() {
        let json = Format::Jsonl(Compression::None);
        let cases: [(Format, &[u8]); 9] = [
            (json, b"{\"text\": \"a\"}\n{\"text\": \"b\"}\n"),
            (json, b"{\n{\"text\": \"a\"}\n"),
            (json, b"[\n {\n \"text\": \"a\"}]"),
            (json, b"{\"text\": \"cut off\n\"x\"\n"),
            (Format::Text, b"{\n\"a\": [\n"),
            (Format::Text, b"<html>"),
            (Format::Text, &[0; 100]),
            (Format::Text, b""),
            (Format::Parquet, b"PAR1"),
        ];
        for (format, head) in cases {
            assert_eq!(format.recognize(head), None, "{format:?} {head:?}");
        }
    }
}
