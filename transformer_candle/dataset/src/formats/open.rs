//! Opens a shard with the reader of its format.

use std::sync::Arc;

use super::corruption_retry::CorruptionRetry;
use super::jsonl::JsonlFile;
use super::jsonl_compressed::CompressedJsonlFile;
use super::parquet::ParquetFile;
use super::text::TextFile;
use super::{Compression, Format, ShardReader};
use crate::DataError;
use crate::byte_source::ByteSource;
use crate::cancel::CancelToken;

impl Format {
    /// Opens a shard to read the column or field `text_column`. Corrupted data is read again; `cancel` cancels reading.
    pub(crate) fn open(
        self,
        source: Arc<dyn ByteSource>,
        text_column: &str,
        cancel: &CancelToken,
    ) -> Result<Box<dyn ShardReader>, DataError> {
        Ok(Box::new(CorruptionRetry::open(self, source, text_column, cancel)?))
    }

    /// The same, but corrupted data is an error.
    pub(super) fn open_unretried(
        self,
        source: Arc<dyn ByteSource>,
        text_column: &str,
        cancel: &CancelToken,
    ) -> Result<Box<dyn ShardReader>, DataError> {
        Ok(match self {
            Self::Parquet => Box::new(ParquetFile::open(source, text_column)?),
            Self::Jsonl(Compression::None) => Box::new(JsonlFile::open(source, text_column)?),
            Self::Jsonl(compression) => Box::new(CompressedJsonlFile::open(source, compression, text_column, cancel)?),
            Self::Text => Box::new(TextFile::open(source)),
        })
    }
}
