//! The files below a folder.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, FileType};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use run_config::regular_file;

use super::glob::Glob;
use crate::DataError;
use crate::cancel::CancelToken;
use crate::formats::Format;

/// A file that matches a pattern, or a folder to be read.
pub(super) struct FoundPath {
    pub path: PathBuf,
    /// The path without symbolic links, which identifies it.
    pub canonical: PathBuf,
    /// Whether a symbolic link led to it.
    pub linked: bool,
}

/// A traversal of directories that enters each one once, however many links lead to it.
pub(super) struct DirectoryTraversal<'a> {
    glob: Glob,
    cancel: &'a CancelToken,
    notes: &'a mut Vec<String>,
    /// Directories still to be read, and links to directories, which are read after all others.
    folders: Vec<FoundPath>,
    links: BTreeMap<PathBuf, PathBuf>,
    entered: HashSet<(PathBuf, usize)>,
    files: Vec<FoundPath>,
}

impl<'a> DirectoryTraversal<'a> {
    /// Returns every file below `root` that matches and is not hidden. Notes what matches but is not a regular file.
    pub(super) fn run(
        root: &Path,
        glob: Glob,
        cancel: &'a CancelToken,
        notes: &'a mut Vec<String>,
    ) -> Result<Vec<FoundPath>, DataError> {
        let canonical = root.canonicalize().map_err(DataError::io(root))?;
        let folders = vec![FoundPath { path: root.to_owned(), canonical, linked: false }];
        let (links, entered) = (BTreeMap::new(), HashSet::new());
        let mut traversal = Self { glob, cancel, notes, folders, links, entered, files: Vec::new() };
        while let Some(folder) = traversal.next_folder() {
            if traversal.entered.insert((folder.canonical.clone(), traversal.glob.pattern_depth(&folder.path))) {
                traversal.read_directory(&folder)?;
            }
        }
        Ok(traversal.files)
    }

    fn next_folder(&mut self) -> Option<FoundPath> {
        let link = |(path, canonical)| FoundPath { path, canonical, linked: true };
        self.folders.pop().or_else(|| self.links.pop_first().map(link))
    }

    fn read_directory(&mut self, folder: &FoundPath) -> Result<(), DataError> {
        let unreadable = |error: io::Error| DataError::io(&folder.path)(error);
        for entry in fs::read_dir(&folder.path).map_err(unreadable)? {
            self.cancel.check()?;
            let entry = entry.map_err(unreadable)?;
            let (name, path) = (entry.file_name(), entry.path());
            if name.to_string_lossy().starts_with('.') {
                continue;
            }
            let kind = entry.file_type().map_err(unreadable)?;
            if kind.is_symlink() {
                self.visit_link(path)?;
            } else {
                self.visit(path, folder.canonical.join(name), kind, folder.linked);
            }
        }
        Ok(())
    }

    fn visit(&mut self, path: PathBuf, canonical: PathBuf, kind: FileType, linked: bool) {
        if kind.is_dir() {
            if self.glob.may_match_below(&path) {
                self.folders.push(FoundPath { path, canonical, linked });
            }
        } else if self.glob.matches(&path) {
            match regular_file::check(kind) {
                Ok(()) => self.files.push(FoundPath { path, canonical, linked }),
                Err(reason) => self.note_skipped(&path, &reason.to_string()),
            }
        }
    }

    fn visit_link(&mut self, path: PathBuf) -> Result<(), DataError> {
        let target = fs::metadata(&path).and_then(|target| Ok((target.file_type(), path.canonicalize()?)));
        match target {
            Ok((kind, canonical)) if kind.is_dir() => {
                if self.glob.may_match_below(&path) {
                    self.links.insert(path, canonical);
                }
            }
            Ok((kind, canonical)) => self.visit(path, canonical, kind, true),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => return Err(DataError::io(&path)(error)),
            Err(_) if self.glob.matches(&path) => self.note_skipped(&path, "it is a broken symbolic link"),
            Err(_) => {}
        }
        Ok(())
    }

    fn note_skipped(&mut self, path: &Path, reason: &str) {
        if Format::from_path(path).is_some() {
            self.notes.push(format!("{} is skipped: {reason}", path.display()));
        }
    }
}
