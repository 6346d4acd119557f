//! The directory of a run, held open while its trainer runs: a moved or replaced directory is detected.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::{
    atomic_file::{self, is_number, staged_name},
    error::{Result, TrainerError},
    lock,
};

/// The files of a run that the trainer or `orchestrate` replaces atomically.
const REPLACED_FILES: [&str; 7] = [
    "streaming_config.json",
    "training.yaml",
    "special_tokens.txt",
    "resolved_config.json",
    "environment.json",
    "metrics.jsonl",
    lock::LEASE,
];

/// A run directory that is held open, so that another directory in its place is detected.
#[derive(Debug)]
pub(crate) struct RunFolder {
    path: PathBuf,
    /// Held open, so that the system gives its inode number to no other directory.
    opened: File,
}

impl RunFolder {
    /// Opens the run directory, whose lock the caller holds, and removes what killed writers left in it.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let folder = Self::of_another_rank(path)?;
        atomic_file::remove_leftovers(path, is_leftover);
        Ok(folder)
    }

    /// Opens the run directory, whose lock another rank holds.
    pub(crate) fn of_another_rank(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(TrainerError::io("open", path))?;
        Ok(Self { path: path.to_owned(), opened: file })
    }

    /// Checks that the path still leads to the directory. Files written by path would otherwise end up in a new
    /// directory, or in another run's.
    ///
    /// # Errors
    /// [`TrainerError::Moved`]
    pub(crate) fn check(&self) -> Result<()> {
        let there = fs::metadata(&self.path);
        let is_moved = match (&there, self.opened.metadata()) {
            (Ok(there), Ok(opened)) => (there.dev(), there.ino()) != (opened.dev(), opened.ino()),
            (Err(error), _) => matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
            // A temporary failure of the file system does not mean that it was moved.
            _ => false,
        };
        if is_moved {
            return Err(TrainerError::Moved { directory: self.path.clone(), now: self.current_path() });
        }
        Ok(())
    }

    /// Returns the directory's current path, where the system tells it.
    fn current_path(&self) -> Option<PathBuf> {
        use std::os::fd::AsRawFd;
        let place = fs::read_link(format!("/proc/self/fd/{}", self.opened.as_raw_fd())).ok()?;
        place.is_dir().then_some(place)
    }
}

/// Whether a killed writer left a file of this name: `.training.yaml.tmp-4242`, and from earlier versions
/// `.training.yaml.4242` and `metrics.jsonl.tmp-4242`.
fn is_leftover(name: &str) -> bool {
    let original_name = staged_name(name).or_else(|| {
        let (of, process) = name.strip_prefix('.')?.rsplit_once('.')?;
        is_number(process).then_some(of)
    });
    let of_metrics = name.strip_prefix("metrics.jsonl.tmp-").is_some_and(is_number);
    of_metrics || original_name.is_some_and(|name| REPLACED_FILES.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moved_directory_is_detected() {
        let root = tempfile::tempdir().unwrap();
        let (path, new_path) = (root.path().join("run"), root.path().join("away"));
        fs::create_dir(&path).unwrap();
        let folder = RunFolder::open(&path).unwrap();
        folder.check().unwrap();
        fs::rename(&path, &new_path).unwrap();
        let error = folder.check().unwrap_err();
        assert_eq!(error.exit_code(), 1);
        if cfg!(target_os = "linux") {
            assert!(error.to_string().contains(&format!("is now {}", new_path.display())), "{error}");
        }
        fs::create_dir(&path).unwrap();
        assert!(folder.check().is_err(), "another directory in its place");
        fs::remove_dir(&path).unwrap();
        fs::rename(&new_path, &path).unwrap();
        folder.check().unwrap();
    }

    #[test]
    fn a_removed_directory_is_detected() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("run");
        fs::create_dir(&path).unwrap();
        let folder = RunFolder::open(&path).unwrap();
        fs::remove_dir(&path).unwrap();
        assert!(folder.check().unwrap_err().to_string().contains("removed"));
        fs::create_dir(&path).unwrap();
        assert!(folder.check().is_err());
    }

    #[test]
    fn only_files_of_killed_writers_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let leftovers =
            [".environment.json.tmp-42", "metrics.jsonl.tmp-42", ".training.yaml.42", ".training.yaml.tmp-42"];
        let other_files =
            ["environment.json", "metrics.jsonl.1", ".notes.42", ".training.yaml.old", "x.tmp-42", ".x.tmp-42"];
        for name in leftovers.iter().chain(&other_files) {
            fs::write(root.path().join(name), "").unwrap();
        }
        RunFolder::open(root.path()).unwrap();
        assert!(leftovers.iter().all(|name| !root.path().join(name).exists()));
        assert!(other_files.iter().all(|name| root.path().join(name).exists()));
    }
}
