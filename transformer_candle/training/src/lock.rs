//! Locks a run directory for one trainer. The lock is an advisory `flock`, which the system releases when the process
//! ends; the file's content is only used in the error message. File systems without locks get a lease.

mod lease;
mod process;

use std::{
    fs::{self, File, Metadata, OpenOptions, TryLockError},
    io::{self, Read, Seek, Write},
    os::{
        fd::{AsFd, AsRawFd, RawFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use run_config::system_error::in_words;
use rustix::{fs::OFlags, io::Errno};
use serde::{Deserialize, Serialize};

use self::{
    lease::{Lease, Refusal, Timing},
    process::Process,
};
use crate::error::{Result, TrainerError};

/// The name of the lock file inside a run directory.
pub const FILE_NAME: &str = ".trainer.lock";
/// The name of the lease's file, where there are no locks.
pub(crate) const LEASE: &str = ".trainer.lease";

/// The process that owns a run directory, as error messages name it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Owner {
    pid: u32,
    host: String,
}

impl Default for Owner {
    fn default() -> Self {
        Self { pid: 0, host: "an unknown host".to_owned() }
    }
}

/// The lock of a run directory, released on drop.
#[derive(Debug)]
pub struct RunLock {
    file: File,
    path: PathBuf,
    /// Whether acquiring created the directory; dropping removes it if nothing else was written into it.
    creates_directory: bool,
    /// What owns the directory instead where its file system has no locks.
    lease: Option<Lease>,
}

impl RunLock {
    /// Takes the lock of `run_directory`, which is created if it does not exist.
    ///
    /// A program that holds the lock can pass it on by giving the trainer the locked file as standard input: the lock
    /// belongs to the open file and is held without interruption until both programs have ended.
    ///
    /// # Errors
    /// [`TrainerError::Locked`] with the owner's process id and host; [`TrainerError::Request`] where no file can be written.
    pub fn acquire(run_directory: &Path) -> Result<Self> {
        let creates_directory = !run_directory.exists();
        loop {
            let mut lock = Self::open(run_directory)?;
            let inherited = inherited_lock(&lock.file);
            let is_inherited = inherited.is_some();
            if let Some(file) = inherited {
                lock.file = file;
            }
            match lock.file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    // Empty between the owner's locking and its write.
                    let owner = lock.written_owner().unwrap_or_default();
                    return Err(locked(run_directory, owner));
                }
                Err(TryLockError::Error(source)) if has_no_locks(&source) => {
                    lock.lease = Some(take_lease(run_directory, is_inherited)?);
                }
                Err(TryLockError::Error(source)) => {
                    return Err(TrainerError::io("lock", &lock.path)(source));
                }
            }
            // Another command may have removed the directory that it had created, with the file opened here.
            if lock.belongs_to(run_directory) {
                lock.creates_directory = creates_directory;
                lock.write_owner()?;
                return Ok(lock);
            }
        }
    }

    fn open(run_directory: &Path) -> Result<Self> {
        let unwritable = |source: io::Error| unwritable(run_directory, &source);
        let path = run_directory.join(FILE_NAME);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).custom_flags(OFlags::NOFOLLOW.bits() as i32);
        let file = loop {
            fs::create_dir_all(run_directory).map_err(unwritable)?;
            match options.open(&path) {
                Ok(file) => break file,
                Err(source) if source.kind() == io::ErrorKind::NotFound => {}
                Err(_) if path.is_symlink() => return Err(symlink_error(&path)),
                Err(source) => return Err(unwritable(source)),
            }
        };
        Ok(Self { file, path, creates_directory: false, lease: None })
    }

    /// Whether it is the lock of this run directory.
    pub fn belongs_to(&self, run_directory: &Path) -> bool {
        let other = fs::metadata(run_directory.join(FILE_NAME));
        let (Ok(own), Ok(other)) = (self.file.metadata(), other) else { return false };
        is_same(&own, &other)
    }

    /// Checks that the directory is still this trainer's: a lease can be lost.
    ///
    /// # Errors
    /// [`TrainerError::TakenOver`]
    pub(crate) fn check(&self) -> Result<()> {
        let Some(Owner { pid, host }) = self.lease.as_ref().and_then(Lease::lost_to) else { return Ok(()) };
        let directory = self.path.parent().unwrap_or(&self.path).to_owned();
        Err(TrainerError::TakenOver { directory, pid, host })
    }

    /// Returns a note for the user where the file system has no locks.
    pub(crate) fn note(&self) -> Option<String> {
        self.lease.as_ref().map(|_| {
            format!(
                "the file system of {} has no locks: {LEASE} beside it keeps other trainers away",
                self.path.display()
            )
        })
    }

    fn written_owner(&mut self) -> Option<Owner> {
        let mut text = String::new();
        self.file.read_to_string(&mut text).ok()?;
        serde_json::from_str(&text).ok()
    }

    fn write_owner(&mut self) -> Result<()> {
        let owner = serde_json::json!(Owner { pid: std::process::id(), host: host() });
        self.file
            .set_len(0)
            .and_then(|()| self.file.rewind())
            .and_then(|()| writeln!(self.file, "{owner}"))
            .map_err(TrainerError::io("write", &self.path))
    }
}

impl Drop for RunLock {
    /// Removes the directory if it was created for the lock and is otherwise empty.
    fn drop(&mut self) {
        self.lease.take();
        let Some(directory) = self.path.parent() else { return };
        let is_alone = || fs::read_dir(directory).is_ok_and(|entries| entries.count() == 1);
        if self.creates_directory && self.belongs_to(directory) && is_alone() && fs::remove_file(&self.path).is_ok() {
            // Fails, as it should, if another process has written into it.
            drop(fs::remove_dir(directory));
        }
    }
}

impl AsRawFd for RunLock {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// Returns standard input if it is the lock file `file`, opened and locked by another program.
fn inherited_lock(file: &File) -> Option<File> {
    let input = File::from(io::stdin().as_fd().try_clone_to_owned().ok()?);
    is_same(&input.metadata().ok()?, &file.metadata().ok()?).then_some(input)
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

fn symlink_error(path: &Path) -> TrainerError {
    TrainerError::Request(format!("{} is a symbolic link, which is not followed: remove it", path.display()))
}

fn unwritable(run_directory: &Path, source: &io::Error) -> TrainerError {
    TrainerError::Request(format!(
        "cannot write into the run directory {}: {}; name another one (--run-dir, --experiment or ORCHESTRATE_RUNS_ROOT)",
        run_directory.display(),
        in_words(source)
    ))
}

fn locked(run_directory: &Path, Owner { pid, host }: Owner) -> TrainerError {
    TrainerError::Locked { directory: run_directory.into(), pid, host }
}

/// Whether the answer to locking a file means that its file system, or the service behind it, has no locks.
fn has_no_locks(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS))
}

fn take_lease(run_directory: &Path, is_inherited: bool) -> Result<Lease> {
    Lease::take(run_directory, Process::own(), is_inherited, Timing::USUAL).map_err(|refusal| match refusal {
        Refusal::Held(owner) => locked(run_directory, owner),
        Refusal::Io(source) => TrainerError::io("take", run_directory.join(LEASE))(source),
    })
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_trainer_is_refused_with_the_owner() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let lock = RunLock::acquire(&run).unwrap();
        let error = RunLock::acquire(&run).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let TrainerError::Locked { pid, host, .. } = error else { panic!("not a lock's refusal: {error}") };
        assert_eq!(pid, std::process::id());
        assert!(!host.is_empty());
        drop(lock);
        RunLock::acquire(&run).unwrap();
    }

    #[test]
    fn an_unused_run_directory_is_removed_with_its_lock() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        drop(RunLock::acquire(&run).unwrap());
        assert!(!run.exists());

        let lock = RunLock::acquire(&run).unwrap();
        fs::write(run.join("training.yaml"), "").unwrap();
        drop(lock);
        assert!(run.join("training.yaml").exists());

        fs::create_dir(folder.path().join("theirs")).unwrap();
        drop(RunLock::acquire(&folder.path().join("theirs")).unwrap());
        assert!(folder.path().join("theirs").exists());
    }

    #[test]
    fn concurrent_commands_hold_the_lock_one_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let holders = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let Ok(lock) = RunLock::acquire(&run) else { continue };
                        assert_eq!(holders.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        assert!(lock.belongs_to(&run));
                        holders.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    }
                });
            }
        });
    }

    #[test]
    fn the_lock_file_of_a_killed_trainer_does_not_lock() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(FILE_NAME), r#"{"pid": 1, "host": "elsewhere"}"#).unwrap();
        RunLock::acquire(folder.path()).unwrap();
    }
}
