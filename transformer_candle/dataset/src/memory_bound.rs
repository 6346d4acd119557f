//! An upper bound of the memory of a run's stream, and an estimate of what it usually takes; the bound's terms are
//! explained in the crate's documentation.

use run_config::DataConfig;

use crate::mixture::WINDOW_BYTES;
use crate::stream_settings::{DEFAULT_OPEN_SHARDS, max_workers};

/// Assumed bytes of text per document, above FineWeb's mean of 3 KB.
const DOCUMENT_BYTES: u64 = 4 << 10;
/// Memory of the window in use and of the one in preparation, as a multiple of a window's text.
const WINDOW_COPIES: u64 = 4;
/// Bytes per open shard: a block from the Hub (4 MiB) and a copy of it while it is joined to the rest of the previous
/// one, a page of 1024 documents (the minimum of pyarrow), and the rows decoded of it.
const OPEN_SHARD_BYTES: u64 = 14 << 20;
/// Maximum bytes of the words that a worker's encoder caches.
const ENCODER_BYTES: u64 = 100 << 20;

/// Bytes that a worker's encoder takes after some thousand documents, measured: few of the words that it may cache.
const FRESH_ENCODER_BYTES: u64 = 1_500_000;

/// Bytes of text of a shuffle window, if documents are about as long as web pages.
fn window_bytes(data: &DataConfig) -> u64 {
    (data.shuffle_buffer_size as u64 * DOCUMENT_BYTES).min(WINDOW_BYTES as u64)
}

/// Returns the bytes that the stream of a run over local files usually takes, if they hold at least a window of
/// documents that are about as long as web pages.
pub fn expected_memory(data: &DataConfig) -> u64 {
    WINDOW_COPIES * window_bytes(data) + max_workers(data) as u64 * FRESH_ENCODER_BYTES
}

/// Returns the bytes that the stream of a run takes at most, in addition to the program and the tokenizer, if documents
/// are about as long as web pages.
pub fn memory_bound(data: &DataConfig) -> u64 {
    let open_shards = DEFAULT_OPEN_SHARDS as u64 * data.mixture.len().max(1) as u64;
    WINDOW_COPIES * window_bytes(data) + open_shards * OPEN_SHARD_BYTES + max_workers(data) as u64 * ENCODER_BYTES
}

#[cfg(test)]
mod tests {
    use run_config::NumWorkers;

    use super::*;

    fn mebibytes(shuffle_buffer_size: usize, num_workers: usize) -> u64 {
        let num_workers = NumWorkers::Fixed(num_workers);
        memory_bound(&DataConfig { shuffle_buffer_size, num_workers, ..DataConfig::default() }) >> 20
    }

    #[test]
    fn window_text_is_bounded_for_any_buffer_size() {
        assert_eq!(mebibytes(8192, 2), 128 + 224 + 200);
        assert_eq!(mebibytes(16_384, 2), 256 + 224 + 200);
        assert_eq!(mebibytes(16_777_216, 2), 256 + 224 + 200);
        assert_eq!(mebibytes(1, 8), 224 + 800);
    }
}
