//! Opens a shard with the reader of its format.

use std::sync::Arc;

use bytes::Bytes;

use super::corruption_retry::CorruptionRetry;
use super::json_stream::JsonStream;
use super::jsonl::{JsonlFile, is_array};
use super::parquet::ParquetFile;
use super::parquet_rows::ParquetConversations;
use super::recognition::read_head;
use super::text::TextFile;
use super::{Columns, Compression, Format, ReadingRules, ShardReader};
use crate::DataError;
use crate::byte_source::ByteSource;
use crate::cancel::CancelToken;

impl Format {
    /// Opens a shard to read its rows by `rules`. Corrupted data is read again; `cancel` cancels reading.
    pub(crate) fn open(
        self,
        source: Arc<dyn ByteSource>,
        rules: &ReadingRules,
        cancel: &CancelToken,
    ) -> Result<Box<dyn ShardReader>, DataError> {
        Ok(Box::new(CorruptionRetry::open(self, source, rules, cancel)?))
    }

    /// Like [`Self::open`], but corrupted data is an error.
    pub(super) fn open_unretried(
        self,
        source: &Arc<dyn ByteSource>,
        rules: &ReadingRules,
        cancel: &CancelToken,
    ) -> Result<Box<dyn ShardReader>, DataError> {
        let is_plain = matches!(self, Self::Text | Self::Jsonl(Compression::None));
        let head = if is_plain { read_head(source.as_ref())? } else { Bytes::new() };
        if rules.version >= 2 && is_plain {
            self.check_head(source.name(), &head)?;
        }
        let reader = self.open_reader(Arc::clone(source), &head, rules, cancel);
        if !is_plain && matches!(reader, Err(DataError::Format { .. })) {
            self.check_head(source.name(), &read_head(source.as_ref())?)?;
        }
        reader
    }

    fn open_reader(
        self,
        source: Arc<dyn ByteSource>,
        head: &[u8],
        rules: &ReadingRules,
        cancel: &CancelToken,
    ) -> Result<Box<dyn ShardReader>, DataError> {
        Ok(match self {
            Self::Parquet => match &rules.columns {
                Columns::Text(column) => Box::new(ParquetFile::open(source, column)?),
                Columns::Conversation => Box::new(ParquetConversations::open(source, rules)?),
            },
            Self::Jsonl(Compression::None) if !is_array(head) => Box::new(JsonlFile::open(source, rules)),
            Self::Jsonl(compression) => Box::new(JsonStream::open(source, compression, rules, cancel)?),
            Self::Text if rules.columns == Columns::Conversation => {
                let file = source.name().to_owned();
                return Err(DataError::NoConversations { file, columns: Vec::new() });
            }
            Self::Text => Box::new(TextFile::open(source, rules.version)),
        })
    }
}
