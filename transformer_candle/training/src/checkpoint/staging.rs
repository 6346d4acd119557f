//! A staging directory that is renamed to its final name atomically.
//!
//! Files are written into `.step-00001000.tmp-4242/`, hashed while written, and fsynced; then the folder is fsynced,
//! renamed to `step-00001000/` and its parent fsynced. If the process dies at any instant, a reader finds either
//! no directory or a complete one.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::files;
use super::list::original_of_copy;
use super::manifest::{FileRecord, HashingWriter, Manifest, PIECE_BYTES};
use crate::atomic_file::{self, staged_name, staging_path};
use crate::error::checkpoint::{CheckpointError, Result, failed};

/// The writer of a checkpoint's file; tests replace it by a disk that fills up.
pub(super) trait Sink: Write {
    /// Makes the content durable.
    fn sync(&mut self) -> io::Result<()>;
}

impl Sink for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// Creates a file of a checkpoint.
pub(super) type Create<'a> = &'a dyn Fn(&Path) -> io::Result<Box<dyn Sink>>;

/// Creates files on disk.
pub(super) fn create_file(path: &Path) -> io::Result<Box<dyn Sink>> {
    Ok(Box::new(File::create_new(path)?))
}

/// Levels of folders whose entries are made durable when a folder of checkpoints is created: those of a new run.
const NEW_LEVELS: usize = 3;

/// Creates a folder of checkpoints, durably, unless it exists.
pub(super) fn create_folder(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(path).map_err(failed("create", path))?;
    let mut parents = path.ancestors().skip(1);
    parents.next().map_or(Ok(()), sync_folder)?;
    // Those above are often other people's, who may not let them be read.
    parents.take(NEW_LEVELS - 1).for_each(|parent| drop(sync_folder(parent)));
    Ok(())
}

/// A checkpoint that is being written; deleted if dropped without [`StagingDirectory::commit`].
pub(super) struct StagingDirectory<'a> {
    parent: PathBuf,
    name: String,
    folder: PathBuf,
    files: BTreeMap<String, FileRecord>,
    create: Create<'a>,
    committed: bool,
}

impl<'a> StagingDirectory<'a> {
    pub(super) fn create(parent: &Path, name: &str, create: Create<'a>) -> Result<Self> {
        let folder = temporary_path(parent, name);
        fs::create_dir(&folder).map_err(failed("create", &folder))?;
        Ok(Self {
            parent: parent.to_owned(),
            name: name.to_owned(),
            folder,
            files: BTreeMap::new(),
            create,
            committed: false,
        })
    }

    /// The staging directory that another rank has made and will commit.
    pub(super) fn of_another_rank(folder: &Path, create: Create<'a>) -> Self {
        let (folder, name, parent) = (folder.to_owned(), String::new(), PathBuf::new());
        Self { parent, name, folder, files: BTreeMap::new(), create, committed: true }
    }

    /// Its path.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns size and hash of a file that was written.
    pub(super) fn record(&self, name: &str) -> Option<&FileRecord> {
        self.files.get(name)
    }

    /// Lists a file that another rank has written, for the manifest.
    pub(super) fn list(&mut self, name: String, record: FileRecord) {
        self.files.insert(name, record);
    }

    /// Writes one file with the content that `fill` writes.
    pub(super) fn file(&mut self, name: &str, fill: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
        let path = self.folder.join(name);
        let sink = (self.create)(&path).map_err(failed("create", &path))?;
        let mut writer = BufWriter::with_capacity(PIECE_BYTES, HashingWriter::new(sink));
        fill(&mut writer)?;
        let (mut sink, record) =
            writer.into_inner().map_err(|error| failed("write", &path)(error.into_error()))?.finish();
        sink.sync().map_err(failed("write", &path))?;
        self.files.insert(name.to_owned(), record);
        Ok(())
    }

    /// Writes one file from a byte slice.
    pub(super) fn bytes(&mut self, name: &str, content: &[u8]) -> Result<()> {
        let path = self.folder.join(name);
        self.file(name, |writer| writer.write_all(content).map_err(failed("write", &path)))
    }

    /// Writes the manifest and renames the directory to its final name.
    pub(super) fn commit(mut self, step: u64) -> Result<PathBuf> {
        let manifest = Manifest::new(step, std::mem::take(&mut self.files));
        self.bytes(files::MANIFEST, &manifest.to_bytes())?;
        sync_folder(&self.folder)?;
        let place = self.parent.join(&self.name);
        publish(&self.folder, &place)?;
        self.committed = true;
        sync_folder(&self.parent)?;
        Ok(place)
    }
}

impl Drop for StagingDirectory<'_> {
    fn drop(&mut self) {
        if !self.committed {
            // What cannot be removed here is removed by the next save.
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

/// Renames the staging directory to its final name. An existing directory of that name (corrupted, or the same step
/// again) is swapped with it and removed; if it cannot be removed it keeps the staging name, which pruning reports.
pub(super) fn publish(folder: &Path, place: &Path) -> Result<()> {
    if place.exists() {
        exchange(folder, place).map_err(failed("replace", place))?;
        let _ = fs::remove_dir_all(folder);
        return Ok(());
    }
    fs::rename(folder, place).map_err(failed("rename to", place))
}

#[cfg(target_os = "linux")]
fn exchange(folder: &Path, place: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    use rustix::io::Errno;
    match renameat_with(CWD, folder, CWD, place, RenameFlags::EXCHANGE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => exchange_in_three(folder, place),
        swapped => Ok(swapped?),
    }
}

#[cfg(not(target_os = "linux"))]
fn exchange(folder: &Path, place: &Path) -> io::Result<()> {
    exchange_in_three(folder, place)
}

/// The fallback for file systems without an atomic swap.
fn exchange_in_three(folder: &Path, place: &Path) -> io::Result<()> {
    let old = folder.with_extension(format!("tmp-{}-old", std::process::id()));
    fs::rename(place, &old)?;
    fs::rename(folder, place)?;
    fs::rename(&old, folder)
}

/// Points `name` at a checkpoint beside it, atomically: a relative symbolic link, which `from_pretrained` follows, or a
/// text file where the file system has no links.
pub(super) fn replace_pointer(parent: &Path, name: &str, checkpoint: &str) -> Result<()> {
    let path = parent.join(name);
    if original_of_copy(parent, name).is_some() {
        remove_folder(parent, name)?;
    }
    let replaced = match atomic_file::replace_link(&path, Path::new(checkpoint)) {
        Err(error) if has_no_links(&error) => atomic_file::replace(&path, format!("{checkpoint}\n").as_bytes()),
        replaced => replaced,
    };
    replaced.map_err(failed("write", &path))
}

/// Whether the answer to making a symbolic link means that the file system has none.
fn has_no_links(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL))
}

/// Removes a checkpoint's directory so that no reader finds part of it. If no file could be removed it keeps its name.
pub(super) fn remove_folder(parent: &Path, name: &str) -> Result<()> {
    let path = parent.join(name);
    let staging = temporary_path(parent, name);
    fs::rename(&path, &staging).map_err(failed("remove", &path))?;
    fs::remove_dir_all(&staging).map_err(|error| {
        if !has_lost_files(&staging) {
            // Otherwise the next clean-up of staging directories removes it or reports it.
            let _ = fs::rename(&staging, &path);
        }
        failed("remove", &path)(error)
    })
}

/// Whether any file of a checkpoint is missing. In an unreadable directory none could have been removed.
fn has_lost_files(checkpoint: &Path) -> bool {
    match Manifest::load(checkpoint) {
        Ok(manifest) => manifest.files.keys().any(|name| !checkpoint.join(name).exists()),
        Err(CheckpointError::Io { .. }) => false,
        Err(_) => true,
    }
}

/// Removes the staging directories of killed writers; returns the errors. The run's lock excludes concurrent writers.
pub(super) fn remove_leftovers(parent: &Path) -> Result<Vec<CheckpointError>> {
    let mut failures = Vec::new();
    for entry in fs::read_dir(parent).map_err(failed("read", parent))? {
        let entry = entry.map_err(failed("read", parent))?;
        if entry.file_name().to_str().and_then(staged_name).is_some() {
            let path = entry.path();
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let outcome = if is_folder { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            failures.extend(outcome.err().map(failed("remove", &path)));
        }
    }
    Ok(failures)
}

/// Makes the entries of a folder durable.
pub(super) fn sync_folder(folder: &Path) -> Result<()> {
    atomic_file::sync_folder(folder).map_err(failed("sync", folder))
}

pub(super) fn temporary_path(parent: &Path, name: &str) -> PathBuf {
    staging_path(&parent.join(name))
}
