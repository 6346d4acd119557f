//! `MANIFEST.json`: size and SHA-256 of every file of a checkpoint, and of itself.
//!
//! The manifest has one canonical form and ends with its own hash, so that every changed byte is noticed, even a space.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;

use dataset::CancelToken;
use run_config::regular_file;
use run_config::system_error::in_words;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::files::{MANIFEST, pretty};
use crate::error::checkpoint::{CheckpointError, Result, failed};

/// Bytes read or written at a time.
pub(super) const PIECE_BYTES: usize = 1 << 20;

/// The expected size and hash of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 of the content, in lower-case hexadecimal.
    pub sha256: String,
}

/// The step of one checkpoint, with size and SHA-256 of each of its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The step of the checkpoint.
    pub step: u64,
    /// Every file but this one, by name.
    pub files: BTreeMap<String, FileRecord>,
    /// SHA-256 of this manifest with this field empty.
    sha256: String,
}

impl Manifest {
    /// The manifest of a checkpoint with these files.
    pub fn new(step: u64, files: BTreeMap<String, FileRecord>) -> Self {
        let mut manifest = Self { step, files, sha256: String::new() };
        manifest.sha256 = hexadecimal(&Sha256::digest(manifest.to_bytes()));
        manifest
    }

    /// The manifest in canonical form.
    pub fn to_bytes(&self) -> Vec<u8> {
        pretty(self)
    }

    /// Reads the manifest of a checkpoint and verifies its own hash.
    pub fn load(directory: &Path) -> Result<Self> {
        let path = directory.join(MANIFEST);
        let bytes = regular_file::read(&path).map_err(|error| unreadable(directory, MANIFEST, error))?;
        let manifest: Self = serde_json::from_slice(&bytes)
            .map_err(|error| CheckpointError::corrupted(directory, format!("{MANIFEST}: {error}")))?;
        if let Some(name) = manifest.files.keys().find(|name| name.contains(['/', '\\'])) {
            return Err(CheckpointError::corrupted(
                directory,
                format!("{MANIFEST} names {name:?}, which is not a file name"),
            ));
        }
        let expected = Self::new(manifest.step, manifest.files);
        if expected.to_bytes() != bytes {
            return Err(CheckpointError::corrupted(directory, format!("{MANIFEST} has been changed")));
        }
        Ok(expected)
    }

    /// Bytes of all files together.
    pub fn total_bytes(&self) -> u64 {
        self.files.values().map(|file| file.bytes).sum()
    }

    /// Reads a whole small file and verifies its content.
    pub fn read(&self, directory: &Path, name: &str) -> Result<Vec<u8>> {
        let mut file = self.open(directory, name, &CancelToken::new())?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed("read", &directory.join(name)))?;
        file.finish()?;
        Ok(bytes)
    }

    /// Opens a file to be read once from its start to its end, which [`VerifiedFile::finish`] then verifies. `cancel`
    /// ends reading it.
    pub fn open(&self, directory: &Path, name: &str, cancel: &CancelToken) -> Result<VerifiedFile> {
        let Some(record) = self.files.get(name) else {
            return Err(CheckpointError::corrupted(directory, format!("{MANIFEST} does not list {name}")));
        };
        VerifiedFile::open(directory, name, Some(record.clone()), cancel)
    }

    /// Verifies size and content of every file.
    pub fn verify_files(&self, directory: &Path, cancel: &CancelToken) -> Result<()> {
        // Sizes first: they reveal a truncated file before gigabytes are read.
        for name in self.files.keys() {
            self.open(directory, name, cancel)?;
        }
        for name in self.files.keys() {
            self.open(directory, name, cancel)?.finish()?;
        }
        Ok(())
    }
}

/// Returns the error of a file that cannot be opened: the checkpoint is corrupted, or an I/O error.
fn unreadable(directory: &Path, name: &str, error: io::Error) -> CheckpointError {
    match error.kind() {
        ErrorKind::NotFound => CheckpointError::corrupted(directory, format!("{name} is missing")),
        // `regular_file` fails with these for what is no regular file, and for one of absurd size.
        ErrorKind::InvalidInput | ErrorKind::IsADirectory | ErrorKind::FileTooLarge => {
            CheckpointError::corrupted(directory, format!("{name} cannot be read: {}", in_words(&error)))
        }
        _ if Errno::from_io_error(&error) == Some(Errno::LOOP) => {
            CheckpointError::corrupted(directory, format!("{name} cannot be read: {}", in_words(&error)))
        }
        _ => failed("open", &directory.join(name))(error),
    }
}

/// A file that is hashed while it is read.
#[derive(Debug)]
pub struct VerifiedFile {
    file: File,
    hasher: Sha256,
    /// None for a file without a manifest (an external model).
    record: Option<FileRecord>,
    directory: std::path::PathBuf,
    name: String,
    bytes: u64,
    cancel: CancelToken,
}

impl VerifiedFile {
    pub(super) fn open(directory: &Path, name: &str, record: Option<FileRecord>, cancel: &CancelToken) -> Result<Self> {
        let path = directory.join(name);
        let file = regular_file::open(&path).map_err(|error| unreadable(directory, name, error))?;
        let bytes = file.metadata().map_err(failed("read", &path))?.len();
        if let Some(record) = &record
            && record.bytes != bytes
        {
            let reason = format!("{name} has {bytes} bytes, {} were written", record.bytes);
            return Err(CheckpointError::corrupted(directory, reason));
        }
        let (directory, name, cancel) = (directory.to_owned(), name.to_owned(), cancel.clone());
        Ok(Self { file, hasher: Sha256::new(), record, directory, name, bytes, cancel })
    }

    /// The file's name in its directory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file's size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads the rest of the file and compares its hash with the manifest's.
    pub fn finish(self) -> Result<()> {
        let (directory, name, expected) = (self.directory.clone(), self.name.clone(), self.record.clone());
        let actual = self.record()?;
        match expected {
            Some(expected) if expected.sha256 != actual.sha256 => {
                Err(CheckpointError::corrupted(&directory, format!("{name} is not what was written")))
            }
            _ => Ok(()),
        }
    }

    /// Reads the rest of the file and returns its size and hash.
    pub(super) fn record(mut self) -> Result<FileRecord> {
        let path = self.directory.join(&self.name);
        let mut piece = vec![0; PIECE_BYTES];
        while !self.cancel.is_cancelled() && self.read(&mut piece).map_err(failed("read", &path))? > 0 {}
        if self.cancel.is_cancelled() {
            return Err(CheckpointError::Interrupted);
        }
        Ok(FileRecord { bytes: self.bytes, sha256: hexadecimal(&self.hasher.finalize()) })
    }
}

impl Read for VerifiedFile {
    fn read(&mut self, piece: &mut [u8]) -> io::Result<usize> {
        if self.cancel.is_cancelled() {
            return Err(io::Error::other("stopped"));
        }
        let read = self.file.read(piece)?;
        self.hasher.update(&piece[..read]);
        Ok(read)
    }
}

/// Hashes and counts the bytes of files whose pieces are shown to it in order.
#[derive(Default)]
pub(super) struct FileHashes(BTreeMap<String, (u64, Sha256)>);

impl FileHashes {
    pub(super) fn update(&mut self, path: &Path, piece: &[u8]) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let (bytes, hasher) = self.0.entry(name.into_owned()).or_default();
        *bytes += piece.len() as u64;
        hasher.update(piece);
    }

    /// Returns size and hash of every file that was shown, by name.
    pub(super) fn records(self) -> BTreeMap<String, FileRecord> {
        let record = |(bytes, hasher): (u64, Sha256)| FileRecord { bytes, sha256: hexadecimal(&hasher.finalize()) };
        self.0.into_iter().map(|(name, hashed)| (name, record(hashed))).collect()
    }
}

/// Hashes and counts the bytes passed to the inner writer.
pub(super) struct HashingWriter<W> {
    inner: W,
    hasher: Sha256,
    bytes: u64,
}

impl<W: Write> HashingWriter<W> {
    pub(super) fn new(inner: W) -> Self {
        Self { inner, hasher: Sha256::new(), bytes: 0 }
    }

    pub(super) fn finish(self) -> (W, FileRecord) {
        let record = FileRecord { bytes: self.bytes, sha256: hexadecimal(&self.hasher.finalize()) };
        (self.inner, record)
    }
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(piece)?;
        self.hasher.update(&piece[..count]);
        self.bytes += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

fn hexadecimal(digest: &[u8]) -> String {
    use std::fmt::Write as _;
    digest.iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
