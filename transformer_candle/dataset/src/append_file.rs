//! An append-only log file that survives a full disk.
//!
//! Lines that cannot be written are buffered in memory, in order, and written again with every append and every sync. A
//! failed sync may have lost anything since the last successful one: everything since then is kept and written again.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use run_config::regular_file;
use run_config::system_error::in_words;
use rustix::fs::OFlags;

/// Bytes that are buffered at most while the file cannot be written: hours of lines.
const MAX_BUFFERED_BYTES: usize = 64 << 20;
/// A file that can be written is synced after this many bytes, so that no more are kept in memory.
const MAX_UNSYNCED_BYTES: usize = 1 << 20;

/// An open log file.
#[derive(Debug)]
pub struct AppendFile {
    path: PathBuf,
    file: File,
    /// Bytes from the start of the file that a successful sync has made durable.
    durable: u64,
    /// Bytes appended after those, kept in memory until a sync succeeds.
    tail: Vec<u8>,
    /// Bytes of the tail that were written to the file.
    written_bytes: usize,
    /// The error of the last write or sync, if it failed.
    failure: Option<String>,
    /// Lines that were lost because the buffer was full.
    dropped_lines: u64,
    notices: Vec<String>,
}

impl AppendFile {
    /// Opens a file to append after its first `keep` bytes; anything after them is cut off.
    ///
    /// # Errors
    /// The path is a symbolic link or something else that is no regular file, or the file cannot be opened or truncated.
    pub fn open(path: &Path, keep: u64) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        // A named pipe would be waited for.
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        options.create(true).truncate(false).write(true).custom_flags(flags.bits().cast_signed());
        let file = options.open(path)?;
        regular_file::check(file.metadata()?.file_type())?;
        if file.metadata()?.len() > keep {
            file.set_len(keep)?;
        }
        Ok(Self::new(path, file, keep))
    }

    /// Opens the log over a file whose whole content is synced; appends go after its end.
    ///
    /// # Errors
    /// The length of the file cannot be read.
    pub fn from_file(path: &Path, file: File) -> io::Result<Self> {
        let durable = file.metadata()?.len();
        Ok(Self::new(path, file, durable))
    }

    fn new(path: &Path, file: File, durable: u64) -> Self {
        let path = path.to_owned();
        Self {
            path,
            file,
            durable,
            tail: Vec::new(),
            written_bytes: 0,
            failure: None,
            dropped_lines: 0,
            notices: Vec::new(),
        }
    }

    /// Appends a line, including its line end. Returns false if the file cannot be written and the buffer is full: then
    /// this line is lost, and those before it are not.
    pub fn append(&mut self, line: &[u8]) -> bool {
        if self.failure.is_some() && self.tail.len() + line.len() > MAX_BUFFERED_BYTES && !self.write() {
            self.dropped_lines += 1;
            return false;
        }
        self.tail.extend_from_slice(line);
        if self.write() && self.tail.len() > MAX_UNSYNCED_BYTES {
            self.sync();
        }
        true
    }

    /// Makes everything appended durable; returns whether that succeeded.
    pub fn sync(&mut self) -> bool {
        if !self.write() {
            return false;
        }
        if self.tail.is_empty() {
            return true;
        }
        if let Err(error) = self.file.sync_data() {
            self.written_bytes = 0;
            self.note_failure(&error);
            return false;
        }
        self.durable += self.tail.len() as u64;
        self.tail.clear();
        self.written_bytes = 0;
        true
    }

    /// Takes the notices since the last call: the file cannot be written, or it can be written again.
    pub fn take_notices(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notices)
    }

    /// Returns what a file lacks that cannot be written: where nothing more is appended, that is lost.
    pub fn unwritten(&self) -> Option<String> {
        let failure = self.failure.as_ref()?;
        let lines = String::from_utf8_lossy(&self.tail).lines().count() as u64 + self.dropped_lines;
        Some(format!("{} lacks its end (lines: {lines}): it could not be written ({failure})", self.path.display()))
    }

    /// Writes the part of the tail that is not yet in the file; returns whether all of it is. After a partial write the
    /// next one resumes in the middle of the line.
    fn write(&mut self) -> bool {
        while self.written_bytes < self.tail.len() {
            match self.file.write_at(&self.tail[self.written_bytes..], self.durable + self.written_bytes as u64) {
                Ok(0) => {
                    self.note_failure(&io::ErrorKind::WriteZero.into());
                    return false;
                }
                Ok(bytes) => self.written_bytes += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.note_failure(&error);
                    return false;
                }
            }
        }
        self.note_recovery();
        true
    }

    /// Replaces the file, as if the disk had filled up or been emptied; returns the previous one.
    #[cfg(test)]
    pub(crate) fn replace_file(&mut self, file: File) -> File {
        std::mem::replace(&mut self.file, file)
    }

    fn note_failure(&mut self, error: &io::Error) {
        if self.failure.is_none() {
            self.notices.push(format!(
                "{} cannot be written ({}): training continues, and its lines are kept in memory until it can",
                self.path.display(),
                in_words(error)
            ));
        }
        self.failure = Some(error.to_string());
    }

    fn note_recovery(&mut self) {
        if self.failure.take().is_some() {
            let loss = match std::mem::take(&mut self.dropped_lines) {
                0 => "no line is lost".to_owned(),
                lines => format!("{lines} lines are lost because the buffer in memory was full"),
            };
            self.notices.push(format!("{} is written again, {loss}", self.path.display()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn redirect(append: &mut AppendFile, device: &str) -> File {
        append.replace_file(OpenOptions::new().write(true).open(device).unwrap())
    }

    #[test]
    fn lines_are_written_in_order_after_a_full_disk() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        fs::write(&path, "0\nabandoned\n").unwrap();
        let mut append = AppendFile::open(&path, 2).unwrap();
        assert!(append.append(b"1\n") && append.sync());
        let disk = redirect(&mut append, "/dev/full");
        assert!(append.append(b"2\n") && append.append(b"3\n"), "memory has room");
        assert!(!append.sync());
        let notices = append.take_notices();
        assert_eq!(notices.len(), 1, "reported once: {notices:?}");
        assert!(notices[0].contains("metrics.jsonl cannot be written (No space left on device"), "{notices:?}");
        append.file = disk;
        assert!(append.append(b"4\n"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "0\n1\n2\n3\n4\n");
        assert!(append.take_notices()[0].ends_with("is written again, no line is lost"));
    }

    #[test]
    fn lines_beyond_the_buffer_are_counted_as_lost() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut append = AppendFile::open(&path, 0).unwrap();
        let disk = redirect(&mut append, "/dev/full");
        let line = vec![b'x'; MAX_BUFFERED_BYTES / 2];
        assert!(append.append(&line) && append.append(&line));
        assert!(!append.append(b"lost\n") && !append.append(b"lost\n"));
        append.file = disk;
        assert!(append.append(b"kept\n"));
        assert!(append.take_notices()[1].contains("2 lines are lost because the buffer in memory was full"));
        assert!(fs::read(&path).unwrap().ends_with(b"xkept\n"));
    }

    #[test]
    fn lines_of_a_failed_sync_are_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut append = AppendFile::open(&path, 0).unwrap();
        assert!(append.append(b"1\n"));
        // A device takes every write, keeps nothing and fails to sync.
        let disk = redirect(&mut append, "/dev/null");
        assert!(append.append(b"2\n"));
        assert!(!append.sync(), "the device cannot sync");
        append.file = disk;
        assert!(append.sync());
        assert_eq!(fs::read_to_string(&path).unwrap(), "1\n2\n");
    }

    #[test]
    fn buffer_stays_small_while_writes_succeed() {
        let folder = tempfile::tempdir().unwrap();
        let mut append = AppendFile::open(&folder.path().join("metrics.jsonl"), 0).unwrap();
        for _ in 0..5 {
            append.append(&vec![b'x'; MAX_UNSYNCED_BYTES / 2]);
            assert!(append.tail.len() <= MAX_UNSYNCED_BYTES);
        }
    }

    #[test]
    fn symbolic_links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("metrics.jsonl"));
        fs::write(&target, "precious").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        assert!(AppendFile::open(&link, 0).is_err());
        assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
    }
}
