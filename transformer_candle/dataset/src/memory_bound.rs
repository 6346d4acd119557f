//! The most memory that the stream of a run takes; the crate's first page says what it is made of.

use run_config::DataConfig;

use crate::mixture::WINDOW_BYTES;
use crate::stream::DEFAULT_OPEN_SHARDS;

/// Text of a document, on the safe side of FineWeb's mean of 3 KB.
const DOCUMENT_BYTES: u64 = 4 << 10;
/// Of a window's text, for the windows in use and in preparation.
const WINDOW_COPIES: u64 = 4;
/// A block from the Hub (4 MiB) and its copy while it is joined to the rest of the one before, a page of 1024 documents
/// (the least that pyarrow writes), and the rows decoded of it.
const OPEN_SHARD_BYTES: u64 = 14 << 20;
/// The words that a worker's encoder remembers.
const ENCODER_BYTES: u64 = 100 << 20;

/// Bytes that the stream of a run takes at most besides the program and the tokenizer, where documents are as long as
/// web pages are.
pub fn memory_bound(data: &DataConfig) -> u64 {
    let text = (data.shuffle_buffer_size as u64 * DOCUMENT_BYTES).min(WINDOW_BYTES as u64);
    let open_shards = DEFAULT_OPEN_SHARDS as u64 * data.mixture.len().max(1) as u64;
    WINDOW_COPIES * text + open_shards * OPEN_SHARD_BYTES + data.num_workers as u64 * ENCODER_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mebibytes(shuffle_buffer_size: usize, num_workers: usize) -> u64 {
        memory_bound(&DataConfig { shuffle_buffer_size, num_workers, ..DataConfig::default() }) >> 20
    }

    #[test]
    fn windows_are_bounded_by_their_text_however_many_documents_are_asked_for() {
        assert_eq!(mebibytes(8192, 2), 128 + 224 + 200);
        assert_eq!(mebibytes(16_384, 2), 256 + 224 + 200);
        assert_eq!(mebibytes(16_777_216, 2), 256 + 224 + 200);
        assert_eq!(mebibytes(1, 8), 224 + 800);
    }
}
