//! Range reads of a file, on this machine or on the Hub, and sequential reading on top of them.

use std::fs::File;
use std::io::{self, BufRead, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use run_config::regular_file;

use crate::DataError;
use crate::cancel::CancelToken;

/// A file that can be read at any offset.
pub(crate) trait ByteSource: Send + Sync {
    /// The name of the file in the listing, for messages.
    fn name(&self) -> &str;

    /// Length in bytes.
    fn length(&self) -> u64;

    /// The number of bytes that one read should request.
    fn preferred_read_size(&self) -> u64;

    /// Drops cached copies of what was read, because it turned out to be corrupted; returns whether reading again may
    /// give other bytes.
    fn invalidate(&self) -> bool {
        false
    }

    /// Reads exactly `length` bytes from offset `start`; the range must be inside the file.
    fn read(&self, start: u64, length: usize) -> Result<Bytes, DataError>;
}

/// A file on this machine; reads are refused once its token is cancelled.
pub(crate) struct LocalFile {
    name: String,
    path: PathBuf,
    /// The first byte.
    offset: u64,
    length: u64,
    file: Mutex<File>,
    cancel: CancelToken,
}

impl LocalFile {
    /// Opens the `length` bytes of a file from an offset on, as listed: a file that was truncated is noticed when its end
    /// is read.
    pub(crate) fn open(
        name: &str,
        path: &Path,
        (offset, length): (u64, u64),
        cancel: &CancelToken,
    ) -> Result<Self, DataError> {
        let file = Mutex::new(regular_file::open(path).map_err(DataError::io(path))?);
        let (name, path, cancel) = (name.to_owned(), path.to_owned(), cancel.clone());
        Ok(Self { name, path, offset, length, file, cancel })
    }
}

impl ByteSource for LocalFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn length(&self) -> u64 {
        self.length
    }

    fn preferred_read_size(&self) -> u64 {
        1 << 20
    }

    fn read(&self, start: u64, length: usize) -> Result<Bytes, DataError> {
        self.cancel.check()?;
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = vec![0; length];
        file.seek(SeekFrom::Start(self.offset + start))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(DataError::io(&self.path))?;
        Ok(bytes.into())
    }
}

/// Reads `start..end` of a file in order, one block of the preferred size at a time.
pub(crate) struct RangeReader {
    source: Arc<dyn ByteSource>,
    position: u64,
    end: u64,
    block: Bytes,
}

impl RangeReader {
    pub(crate) fn new(source: Arc<dyn ByteSource>, start: u64, end: u64) -> Self {
        let end = end.min(source.length());
        Self { source, position: start, end, block: Bytes::new() }
    }

    /// Offset in the file of the next byte.
    pub(crate) fn position(&self) -> u64 {
        self.position - self.block.len() as u64
    }
}

impl BufRead for RangeReader {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.block.is_empty() && self.position < self.end {
            let length = self.source.preferred_read_size().min(self.end - self.position);
            self.block = self.source.read(self.position, length as usize)?;
            self.position += length;
        }
        Ok(&self.block)
    }

    fn consume(&mut self, amount: usize) {
        let _ = self.block.split_to(amount);
    }
}

impl Read for RangeReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let available = self.fill_buf()?;
        let length = available.len().min(buffer.len());
        buffer[..length].copy_from_slice(&available[..length]);
        self.consume(length);
        Ok(length)
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! A file in memory that counts the bytes that are read of it.

    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    pub(crate) struct MemoryFile {
        bytes: Bytes,
        preferred: u64,
        read: AtomicU64,
    }

    impl MemoryFile {
        pub(crate) fn new(bytes: impl Into<Bytes>, preferred: u64) -> Arc<Self> {
            Arc::new(Self { bytes: bytes.into(), preferred, read: AtomicU64::new(0) })
        }

        pub(crate) fn bytes_read(&self) -> u64 {
            self.read.load(Ordering::Relaxed)
        }
    }

    impl ByteSource for MemoryFile {
        fn name(&self) -> &'static str {
            "memory"
        }

        fn length(&self) -> u64 {
            self.bytes.len() as u64
        }

        fn preferred_read_size(&self) -> u64 {
            self.preferred
        }

        fn read(&self, start: u64, length: usize) -> Result<Bytes, DataError> {
            self.read.fetch_add(length as u64, Ordering::Relaxed);
            Ok(self.bytes.slice(start as usize..start as usize + length))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::MemoryFile;
    use super::*;

    #[test]
    fn range_reader_reads_blocks_within_its_range() {
        let file = MemoryFile::new((0_u8..100).collect::<Vec<_>>(), 16);
        let mut reader = RangeReader::new(Arc::clone(&file) as _, 10, 50);
        let mut first = [0; 3];
        reader.read_exact(&mut first).unwrap();
        assert_eq!((first, reader.position()), ([10, 11, 12], 13));
        let mut rest = Vec::new();
        reader.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, (13_u8..50).collect::<Vec<_>>());
        assert_eq!(file.bytes_read(), 40);
    }

    #[test]
    fn truncated_files_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        std::fs::write(&path, "short").unwrap();
        let file = LocalFile::open("a.txt", &path, (0, 10), &CancelToken::new()).unwrap();
        let error = file.read(0, 10).unwrap_err();
        assert!(matches!(&error, DataError::Io { .. }), "{error}");
        assert!(error.to_string().contains("a.txt"));
    }
}
