//! The format of a file, by its extension, and the reader of each.

use std::sync::Arc;

use super::jsonl::JsonlFile;
use super::jsonl_compressed::{CompressedJsonlFile, Compression};
use super::parquet::ParquetFile;
use super::shard_reader::ShardReader;
use super::text::TextFile;
use crate::DataError;
use crate::byte_source::ByteSource;
use crate::cancel::CancelToken;

/// The format of a file, by its extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Format {
    Parquet,
    Jsonl(Compression),
    Text,
}

impl Format {
    /// The format by extension, in any case; none if it is not supported.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        let name = name.to_ascii_lowercase();
        let (stem, compression) = match name.rsplit_once('.') {
            Some((stem, "gz")) => (stem, Compression::Gzip),
            Some((stem, "zst")) => (stem, Compression::Zstd),
            _ => (name.as_str(), Compression::None),
        };
        match (stem.rsplit_once('.')?.1, compression) {
            ("parquet", Compression::None) => Some(Self::Parquet),
            ("txt", Compression::None) => Some(Self::Text),
            ("jsonl" | "ndjson" | "json", compression) => Some(Self::Jsonl(compression)),
            _ => None,
        }
    }

    /// The format regardless of compression: the shards of a data set have the same one.
    pub(crate) fn kind(self) -> Self {
        match self {
            Self::Jsonl(_) => Self::Jsonl(Compression::None),
            other => other,
        }
    }

    /// Opens a shard to read the column or field `text_column`; `cancel` cancels reading. Corrupted data is an error.
    pub(super) fn open(
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_follow_from_extensions() {
        assert_eq!(Format::from_name("data/train-00000-of-00001.parquet"), Some(Format::Parquet));
        assert_eq!(Format::from_name("a.JSONL.gz"), Some(Format::Jsonl(Compression::Gzip)));
        assert_eq!(Format::from_name("a.ndjson.zst"), Some(Format::Jsonl(Compression::Zstd)));
        assert_eq!(Format::from_name("a.json"), Some(Format::Jsonl(Compression::None)));
        assert_eq!(Format::from_name("book.txt"), Some(Format::Text));
        for other in ["a.parquet.gz", "a.csv", "README.md", "parquet", ".gitattributes", "a.txt.gz"] {
            assert_eq!(Format::from_name(other), None, "{other}");
        }
    }
}
