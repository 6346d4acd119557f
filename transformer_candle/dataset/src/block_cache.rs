//! The block cache: blocks of remote files on this machine's disk, so that a second epoch, a resumed run, or another
//! run over the same data reads them from here.
//!
//! A block is [`BLOCK_BYTES`] of a file at a pinned revision, stored in a file of its own with a checksum after it.
//! Blocks are written to a staging file, renamed atomically and never change, so any number of processes may share a
//! folder without locks. A block that does not match its checksum is removed and read again.
//!
//! The folder is bounded: a process that has written a twentieth of the limit since it last measured the folder evicts
//! the least recently used blocks until a tenth of the limit is free. So the folder exceeds its limit only while more
//! than two processes fill it from empty at once. Disk errors cost speed, never a run: the block is read from its
//! source.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use run_config::system_error::in_words;
use sha2::{Digest, Sha256};

use crate::DataError;
use crate::byte_source::ByteSource;
use crate::cancel::CancelToken;
use crate::ledger::hex;

/// Size of a block; the last one of a file is shorter.
pub(crate) const BLOCK_BYTES: u64 = 512 << 10;
const CHECKSUM_BYTES: usize = 4;
/// Extension of a block that is being written.
const STAGING_EXTENSION: &str = "part";
/// A staging file older than this was left behind by a process that died.
const STAGING_EXPIRY: Duration = Duration::from_hours(1);

/// A folder of blocks, shared by all files that are read through it.
pub(crate) struct BlockCache {
    folder: PathBuf,
    limit: u64,
    /// Bytes written since the folder was last measured.
    unmeasured_bytes: AtomicU64,
    eviction: Mutex<()>,
    warned: AtomicBool,
}

/// The name of a file's folder in the cache: a hash of what the file is.
#[derive(Clone, Debug)]
pub(crate) struct CacheKey(String);

/// A block on disk.
struct CachedBlock {
    path: PathBuf,
    bytes: u64,
    last_use: SystemTime,
}

impl CacheKey {
    /// The key of the file `name`, `length` bytes long, of a data set at a commit.
    pub(crate) fn new(dataset: &str, revision: &str, name: &str, length: u64) -> Self {
        let fields = [dataset, revision, name, &length.to_string()].join("\0");
        Self(hex(&Sha256::digest(fields)[..16]))
    }
}

impl BlockCache {
    /// Keeps blocks below `folder`, together at most `limit` bytes, which must be room for one. Touches nothing before
    /// the first block is stored.
    pub(crate) fn new(folder: PathBuf, limit: u64) -> Self {
        // Starts at the limit, so that the first block stored measures the folder.
        let unmeasured_bytes = AtomicU64::new(limit);
        Self { folder, limit, unmeasured_bytes, eviction: Mutex::default(), warned: AtomicBool::new(false) }
    }

    fn get(&self, file: &CacheKey, block: u64) -> Option<Bytes> {
        let path = self.path(file, block);
        let block_file = File::open(&path).ok()?;
        let mut bytes = Vec::new();
        (&block_file).read_to_end(&mut bytes).ok()?;
        let body = bytes.len().checked_sub(CHECKSUM_BYTES);
        let intact = body.filter(|&body| bytes[body..] == crc32c::crc32c(&bytes[..body]).to_le_bytes());
        let Some(body) = intact else {
            let _ = fs::remove_file(&path);
            return None;
        };
        let _ = block_file.set_modified(SystemTime::now());
        bytes.truncate(body);
        Some(bytes.into())
    }

    fn put(&self, file: &CacheKey, block: u64, bytes: &[u8]) {
        let size = (bytes.len() + CHECKSUM_BYTES) as u64;
        if self.unmeasured_bytes.fetch_add(size, Ordering::Relaxed) + size > self.limit / 20 {
            self.make_room(size);
        }
        if let Err(error) = write(&self.path(file, block), bytes)
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("{}: downloaded data cannot be cached: {}", self.folder.display(), in_words(&error));
        }
    }

    fn path(&self, file: &CacheKey, block: u64) -> PathBuf {
        self.folder.join(&file.0).join(block.to_string())
    }

    /// Evicts the least recently used blocks if there is no room for `bytes` more. Returns at once while another thread
    /// evicts.
    fn make_room(&self, bytes: u64) {
        let Ok(_eviction) = self.eviction.try_lock() else {
            return;
        };
        self.unmeasured_bytes.store(0, Ordering::Relaxed);
        let mut blocks = self.blocks();
        let mut total: u64 = blocks.iter().map(|block| block.bytes).sum();
        // A twentieth may be written before the folder is measured again.
        if total + bytes + self.limit / 20 <= self.limit {
            return;
        }
        blocks.sort_unstable_by_key(|block| block.last_use);
        for block in blocks {
            if total + bytes + self.limit / 10 <= self.limit {
                break;
            }
            if fs::remove_file(&block.path).is_ok() {
                total -= block.bytes;
            }
        }
    }

    fn blocks(&self) -> Vec<CachedBlock> {
        let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
        let mut blocks = Vec::new();
        for file in entries(&self.folder) {
            for block in entries(&file.path()) {
                let Ok(metadata) = block.metadata() else {
                    continue;
                };
                let (path, last_use) = (block.path(), metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH));
                let is_staging = path.extension().is_some_and(|ending| ending == STAGING_EXTENSION);
                if is_staging && last_use.elapsed().is_ok_and(|age| age > STAGING_EXPIRY) {
                    let _ = fs::remove_file(&path);
                } else {
                    blocks.push(CachedBlock { path, bytes: metadata.len(), last_use });
                }
            }
        }
        blocks
    }
}

/// Writes a block to a staging file and renames it atomically.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let staging = path.with_extension(format!("{}-{number}.{STAGING_EXTENSION}", std::process::id()));
    let parent = path.parent().expect("a block has a parent folder");
    fs::create_dir_all(parent)?;
    let outcome = File::create(&staging).and_then(|mut block| {
        block.write_all(bytes)?;
        block.write_all(&crc32c::crc32c(bytes).to_le_bytes())
    });
    let outcome = outcome.and_then(|()| fs::rename(&staging, path));
    if outcome.is_err() {
        let _ = fs::remove_file(&staging);
    }
    outcome
}

/// A file whose blocks are cached.
pub(crate) struct CachedSource<S> {
    source: S,
    cache: Arc<BlockCache>,
    file: CacheKey,
    cancel: CancelToken,
    /// Indices of the blocks that were read.
    read_blocks: Mutex<BTreeSet<u64>>,
}

impl<S: ByteSource> CachedSource<S> {
    pub(crate) fn new(source: S, cache: Arc<BlockCache>, file: CacheKey, cancel: CancelToken) -> Self {
        Self { source, cache, file, cancel, read_blocks: Mutex::default() }
    }

    /// Reads the missing blocks `first..end` with one request and stores them.
    fn fetch(&self, first: u64, end: u64, blocks: &mut Vec<Bytes>) -> Result<(), DataError> {
        let (start, end) = (first * BLOCK_BYTES, (end * BLOCK_BYTES).min(self.length()));
        let bytes = self.source.read(start, (end - start) as usize)?;
        for (index, offset) in (0..bytes.len()).step_by(BLOCK_BYTES as usize).enumerate() {
            let block = bytes.slice(offset..bytes.len().min(offset + BLOCK_BYTES as usize));
            self.cache.put(&self.file, first + index as u64, &block);
            blocks.push(block);
        }
        Ok(())
    }
}

impl<S: ByteSource> ByteSource for CachedSource<S> {
    fn name(&self) -> &str {
        self.source.name()
    }

    fn length(&self) -> u64 {
        self.source.length()
    }

    fn preferred_read_size(&self) -> u64 {
        self.source.preferred_read_size()
    }

    fn invalidate(&self) -> bool {
        let blocks = std::mem::take(&mut *self.read_blocks.lock().unwrap_or_else(PoisonError::into_inner));
        for &block in &blocks {
            let _ = fs::remove_file(self.cache.path(&self.file, block));
        }
        self.source.invalidate()
    }

    fn read(&self, start: u64, length: usize) -> Result<Bytes, DataError> {
        self.cancel.check()?;
        let end = start + length as u64;
        let (first, last) = (start / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        self.read_blocks.lock().unwrap_or_else(PoisonError::into_inner).extend(first..last);
        let mut blocks: Vec<Bytes> = Vec::with_capacity((last - first) as usize);
        let mut first_missing = first;
        for block in first..last {
            if let Some(bytes) = self.cache.get(&self.file, block) {
                if first_missing < block {
                    self.fetch(first_missing, block, &mut blocks)?;
                }
                blocks.push(bytes);
                first_missing = block + 1;
            }
        }
        if first_missing < last {
            self.fetch(first_missing, last, &mut blocks)?;
        }
        let (skip, take) = ((start - first * BLOCK_BYTES) as usize, length);
        let whole = if blocks.len() == 1 { blocks.swap_remove(0) } else { blocks.concat().into() };
        Ok(whole.slice(skip..skip + take))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::byte_source::testing::MemoryFile;

    /// The file in memory counts the bytes that are read of it.
    impl ByteSource for Arc<MemoryFile> {
        fn name(&self) -> &str {
            self.as_ref().name()
        }
        fn length(&self) -> u64 {
            self.as_ref().length()
        }
        fn preferred_read_size(&self) -> u64 {
            self.as_ref().preferred_read_size()
        }
        fn read(&self, start: u64, length: usize) -> Result<Bytes, DataError> {
            self.as_ref().read(start, length)
        }
    }

    const LENGTH: usize = 3 * BLOCK_BYTES as usize + 1234;

    fn content() -> Vec<u8> {
        (0..LENGTH).map(|i| ((i * 2_654_435_761) >> 13) as u8).collect()
    }

    fn cached(folder: &Path, limit: u64, name: &str) -> (Arc<MemoryFile>, CachedSource<Arc<MemoryFile>>) {
        let memory = MemoryFile::new(content(), 1 << 20);
        let cache = Arc::new(BlockCache::new(folder.to_owned(), limit));
        let file = CacheKey::new("owner/name", "abc", name, LENGTH as u64);
        (Arc::clone(&memory), CachedSource::new(memory, cache, file, CancelToken::new()))
    }

    fn size(folder: &Path) -> u64 {
        BlockCache::new(folder.to_owned(), 1).blocks().iter().map(|block| block.bytes).sum()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn reads_are_exact_and_fetch_each_block_once(
            reads in prop::collection::vec((0..LENGTH, 1..LENGTH), 1..8),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let (memory, source) = cached(folder.path(), 1 << 30, "f");
            let content = content();
            for (start, length) in reads {
                let length = length.min(LENGTH - start);
                prop_assert_eq!(&source.read(start as u64, length).unwrap()[..], &content[start..start + length]);
            }
            prop_assert!(memory.bytes_read() <= LENGTH as u64);
            prop_assert_eq!(memory.bytes_read() % BLOCK_BYTES % 1234, 0);
        }
    }

    #[test]
    fn cached_blocks_serve_the_next_process() {
        let folder = tempfile::tempdir().unwrap();
        cached(folder.path(), 1 << 30, "f").1.read(0, LENGTH).unwrap();
        let (memory, source) = cached(folder.path(), 1 << 30, "f");
        assert_eq!(source.read(0, LENGTH).unwrap(), content());
        assert_eq!(memory.bytes_read(), 0);
        let (memory, other) = cached(folder.path(), 1 << 30, "g");
        other.read(0, 1).unwrap();
        assert_eq!(memory.bytes_read(), BLOCK_BYTES, "another file has blocks of its own");
    }

    #[test]
    fn corrupted_blocks_are_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let (_, source) = cached(folder.path(), 1 << 30, "f");
        source.read(0, LENGTH).unwrap();
        let second = source.cache.path(&source.file, 1);
        for corrupt in [|bytes: &mut Vec<u8>| bytes[77] ^= 1, |bytes: &mut Vec<u8>| bytes.truncate(100), Vec::clear] {
            let mut bytes = fs::read(&second).unwrap();
            corrupt(&mut bytes);
            fs::write(&second, bytes).unwrap();
            let (memory, source) = cached(folder.path(), 1 << 30, "f");
            assert_eq!(source.read(0, LENGTH).unwrap(), content());
            assert_eq!(memory.bytes_read(), BLOCK_BYTES);
        }
    }

    #[test]
    fn invalidation_removes_only_the_blocks_read() {
        let folder = tempfile::tempdir().unwrap();
        cached(folder.path(), 1 << 30, "f").1.read(0, LENGTH).unwrap();
        let (memory, source) = cached(folder.path(), 1 << 30, "f");
        source.read(BLOCK_BYTES, 10).unwrap();
        assert!(!source.invalidate(), "the file in memory cannot change");
        assert_eq!(source.read(0, LENGTH).unwrap(), content());
        assert_eq!(memory.bytes_read(), BLOCK_BYTES, "only the block that was read");
    }

    #[test]
    fn eviction_keeps_recent_blocks_below_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let limit = 10 * BLOCK_BYTES;
        for file in 0..20 {
            let (_, source) = cached(folder.path(), limit, &file.to_string());
            source.read(0, LENGTH).unwrap();
            assert!(size(folder.path()) <= limit, "{}", size(folder.path()));
        }
        let (memory, source) = cached(folder.path(), limit, "19");
        source.read(0, LENGTH).unwrap();
        assert_eq!(memory.bytes_read(), 0);
        let (memory, source) = cached(folder.path(), limit, "0");
        source.read(0, 1).unwrap();
        assert_eq!(memory.bytes_read(), BLOCK_BYTES);
    }

    #[test]
    fn an_unwritable_folder_is_bypassed() {
        let folder = tempfile::tempdir().unwrap();
        let no_folder = folder.path().join("file");
        fs::write(&no_folder, "").unwrap();
        let (memory, source) = cached(&no_folder, 1 << 30, "f");
        for _ in 0..2 {
            assert_eq!(source.read(5, 1000).unwrap(), content()[5..1005]);
        }
        assert_eq!(memory.bytes_read(), 2 * BLOCK_BYTES);
    }

    #[test]
    fn concurrent_readers_get_intact_blocks() {
        let folder = tempfile::tempdir().unwrap();
        let expected = content();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let (_, source) = cached(folder.path(), 1 << 30, "f");
                    assert_eq!(source.read(1, LENGTH - 1).unwrap(), expected[1..]);
                });
            }
        });
        assert_eq!(size(folder.path()), (LENGTH + 4 * CHECKSUM_BYTES) as u64);
    }
}
