//! Opens a shard with the reader of its format.

use std::sync::Arc;

use super::corruption_retry::CorruptionRetry;
use super::jsonl::JsonlFile;
use super::jsonl_compressed::CompressedJsonlFile;
use super::parquet::ParquetFile;
use super::parquet_rows::ParquetConversations;
use super::text::TextFile;
use super::{Columns, Compression, Format, ShardReader};
use crate::DataError;
use crate::byte_source::ByteSource;
use crate::cancel::CancelToken;

impl Format {
    /// Opens a shard to read `columns`. Corrupted data is read again; `cancel` cancels reading.
    pub(crate) fn open(
        self,
        source: Arc<dyn ByteSource>,
        columns: &Columns,
        cancel: &CancelToken,
    ) -> Result<Box<dyn ShardReader>, DataError> {
        Ok(Box::new(CorruptionRetry::open(self, source, columns, cancel)?))
    }

    /// Like [`Self::open`], but corrupted data is an error.
    pub(super) fn open_unretried(
        self,
        source: Arc<dyn ByteSource>,
        columns: &Columns,
        cancel: &CancelToken,
    ) -> Result<Box<dyn ShardReader>, DataError> {
        Ok(match self {
            Self::Parquet => match columns {
                Columns::Text(column) => Box::new(ParquetFile::open(source, column)?),
                Columns::Conversation => Box::new(ParquetConversations::open(source)?),
            },
            Self::Jsonl(Compression::None) => Box::new(JsonlFile::open(source, columns)?),
            Self::Jsonl(compression) => Box::new(CompressedJsonlFile::open(source, compression, columns, cancel)?),
            Self::Text if *columns == Columns::Conversation => {
                let file = source.name().to_owned();
                return Err(DataError::NoConversations { file, columns: Vec::new() });
            }
            Self::Text => Box::new(TextFile::open(source)),
        })
    }
}
