//! Local files by name, folder or glob.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, FileType};
use std::io::{self, ErrorKind};
use std::path::{Component, Path, PathBuf};

use globset::{GlobBuilder, GlobMatcher};
use run_config::regular_file;

use crate::DataError;
use crate::cancel::CancelToken;
use crate::formats::Format;

/// A file, its size, and its name relative to the folder that all files of the source have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LocalEntry {
    pub name: String,
    pub path: PathBuf,
    pub bytes: u64,
}

/// The files that patterns match.
#[derive(Debug)]
pub(crate) struct LocalListing {
    pub entries: Vec<LocalEntry>,
    /// Notes on files that were skipped, one sentence each.
    pub notes: Vec<String>,
}

/// A file that matches a pattern.
struct MatchedFile {
    path: PathBuf,
    /// The path without symbolic links, which identifies the file.
    canonical: PathBuf,
    /// Whether a symbolic link led to it.
    linked: bool,
}

/// Lists the files of `patterns` in their order, each once, whatever links lead to it; those of one pattern are sorted
/// by path. Empty files are left out.
pub(crate) fn list(patterns: &[String], base: &Path, cancel: &CancelToken) -> Result<LocalListing, DataError> {
    // Absolute paths, so that a file named twice, by a relative and by an absolute path, has one name.
    let base = std::path::absolute(base.join(".")).map_err(DataError::io(base))?;
    let (mut seen, mut notes) = (HashSet::new(), Vec::new());
    let mut files = Vec::new();
    for pattern in patterns {
        let mut found = expand_pattern(pattern, &base, cancel, &mut notes)?;
        // Of several paths to a file, the one without links is kept.
        found.sort_unstable_by(|a, b| (a.linked, &a.path).cmp(&(b.linked, &b.path)));
        found.retain(|file| seen.insert(file.canonical.clone()));
        found.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        for MatchedFile { path, .. } in found {
            let bytes = path.metadata().map_err(DataError::io(&path))?.len();
            files.push((path, bytes));
        }
    }
    let common = common_folder(files.iter().map(|(path, _)| path.as_path()));
    let entry = |(path, bytes): (PathBuf, u64)| {
        let name = path.strip_prefix(&common).unwrap_or(&path).to_string_lossy().replace('\\', "/");
        LocalEntry { name, path, bytes }
    };
    let entries = files.into_iter().filter(|(_, bytes)| *bytes > 0).map(entry).collect();
    Ok(LocalListing { entries, notes })
}

fn expand_pattern(
    pattern: &str,
    base: &Path,
    cancel: &CancelToken,
    notes: &mut Vec<String>,
) -> Result<Vec<MatchedFile>, DataError> {
    let no_files = |problem: &str| DataError::NoFiles { pattern: pattern.to_owned(), problem: problem.to_owned() };
    if pattern.trim().is_empty() {
        let message = "it is empty; use `.` for everything below this folder".to_owned();
        return Err(DataError::Pattern { pattern: pattern.to_owned(), message });
    }
    let whole = base.join(pattern);
    let named = fs::metadata(&whole).ok().map(|metadata| metadata.file_type());
    let found = match named {
        Some(kind) if kind.is_dir() => DirectoryTraversal::run(&whole, Glob::default(), cancel, notes)?,
        Some(_) if !has_supported_extension(&whole) => return Err(no_files("is not of a supported format")),
        Some(kind) => {
            regular_file::check(kind).map_err(DataError::io(&whole))?;
            let canonical = whole.canonicalize().map_err(DataError::io(&whole))?;
            return Ok(vec![MatchedFile { path: whole, canonical, linked: false }]);
        }
        None if pattern.contains(GLOB_CHARACTERS) => {
            let glob = Glob::new(pattern, base)?;
            let folder = glob.folder.clone();
            let found =
                if folder.is_dir() { DirectoryTraversal::run(&folder, glob, cancel, notes)? } else { Vec::new() };
            if found.is_empty() {
                return Err(no_files("matches no file"));
            }
            found
        }
        None => return Err(no_files("does not exist")),
    };
    let found: Vec<MatchedFile> = found.into_iter().filter(|file| has_supported_extension(&file.path)).collect();
    if found.is_empty() {
        return Err(no_files("contains no file of a supported format"));
    }
    Ok(found)
}

fn has_supported_extension(path: &Path) -> bool {
    path.file_name().is_some_and(|name| Format::from_name(&name.to_string_lossy()).is_some())
}

/// Characters that make a name a glob.
const GLOB_CHARACTERS: [char; 4] = ['*', '?', '[', '{'];

/// A glob over absolute paths. The default one matches everything.
#[derive(Default)]
struct Glob {
    /// The deepest folder above everything that can match.
    folder: PathBuf,
    whole: Option<GlobMatcher>,
    /// `prefixes[i]` must match a folder's path of `i + 1` components if anything below it can match. Ends at the first
    /// `**`, or where a part is no valid glob.
    prefixes: Vec<GlobMatcher>,
}

impl Glob {
    fn new(pattern: &str, base: &Path) -> Result<Self, DataError> {
        let bad = |error: globset::Error| DataError::Pattern {
            pattern: pattern.to_owned(),
            message: error.kind().to_string(),
        };
        // Without `.` components, as in the paths that are found.
        let parts = Path::new(pattern).components().filter(|part| !matches!(part, Component::CurDir));
        let parts: PathBuf = parts.collect();
        let plain = parts.components().take_while(|part| !part.as_os_str().to_string_lossy().contains(GLOB_CHARACTERS));
        let folder = base.join(plain.collect::<PathBuf>());
        let escaped_base = if parts.is_absolute() { String::new() } else { globset::escape(&base.to_string_lossy()) };
        let glob = Path::new(&escaped_base).join(&parts);
        let matcher = |glob: &Path| {
            let built = GlobBuilder::new(&glob.to_string_lossy()).literal_separator(true).build();
            built.map(|glob| glob.compile_matcher())
        };
        let whole = matcher(&glob).map_err(bad)?;
        let mut prefix = PathBuf::new();
        let parts = glob.components().take_while(|part| !part.as_os_str().to_string_lossy().contains("**"));
        // Half of an alternative that contains a separator is not a valid glob: from there on folders are not filtered.
        let prefixes = parts.map_while(|part| {
            prefix.push(part);
            matcher(&prefix).ok()
        });
        Ok(Self { folder, prefixes: prefixes.collect(), whole: Some(whole) })
    }

    fn matches(&self, path: &Path) -> bool {
        self.whole.as_ref().is_none_or(|whole| whole.is_match(path))
    }

    /// Whether anything below a folder can match.
    fn may_match_below(&self, folder: &Path) -> bool {
        self.prefixes.get(folder.components().count() - 1).is_none_or(|prefix| prefix.is_match(folder))
    }

    /// Number of the glob's components that a folder's path has matched; what it matches below depends on this alone.
    fn pattern_depth(&self, folder: &Path) -> usize {
        folder.components().count().min(self.prefixes.len())
    }
}

/// A traversal of directories that enters each one once, however many links lead to it.
struct DirectoryTraversal<'a> {
    glob: Glob,
    cancel: &'a CancelToken,
    notes: &'a mut Vec<String>,
    /// Directories still to be read, and links to directories, which are read after all others.
    folders: Vec<Folder>,
    links: BTreeMap<PathBuf, PathBuf>,
    entered: HashSet<(PathBuf, usize)>,
    found: Vec<MatchedFile>,
}

struct Folder {
    path: PathBuf,
    canonical: PathBuf,
    linked: bool,
}

impl<'a> DirectoryTraversal<'a> {
    /// Returns every file below `root` that matches and is not hidden. Notes what matches but is not a regular file.
    fn run(
        root: &Path,
        glob: Glob,
        cancel: &'a CancelToken,
        notes: &'a mut Vec<String>,
    ) -> Result<Vec<MatchedFile>, DataError> {
        let canonical = root.canonicalize().map_err(DataError::io(root))?;
        let folders = vec![Folder { path: root.to_owned(), canonical, linked: false }];
        let (links, entered) = (BTreeMap::new(), HashSet::new());
        let mut traversal = Self { glob, cancel, notes, folders, links, entered, found: Vec::new() };
        while let Some(folder) = traversal.next_folder() {
            if traversal.entered.insert((folder.canonical.clone(), traversal.glob.pattern_depth(&folder.path))) {
                traversal.read_directory(&folder)?;
            }
        }
        Ok(traversal.found)
    }

    fn next_folder(&mut self) -> Option<Folder> {
        let link = |(path, canonical)| Folder { path, canonical, linked: true };
        self.folders.pop().or_else(|| self.links.pop_first().map(link))
    }

    fn read_directory(&mut self, folder: &Folder) -> Result<(), DataError> {
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
                self.folders.push(Folder { path, canonical, linked });
            }
        } else if self.glob.matches(&path) {
            match regular_file::check(kind) {
                Ok(()) => self.found.push(MatchedFile { path, canonical, linked }),
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
        if has_supported_extension(path) {
            self.notes.push(format!("{} is skipped: {reason}", path.display()));
        }
    }
}

/// Returns the deepest folder above all files: names must not depend on where the data is stored.
fn common_folder<'a>(mut paths: impl Iterator<Item = &'a Path>) -> PathBuf {
    let Some(first) = paths.next().and_then(Path::parent) else {
        return PathBuf::new();
    };
    let mut common = first.to_owned();
    for path in paths {
        while !path.starts_with(&common) && common.pop() {}
    }
    common
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let path = folder.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "text").unwrap();
        }
        folder
    }

    fn names(folder: &Path, patterns: &[&str]) -> Result<Vec<String>, DataError> {
        let patterns: Vec<String> = patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
        Ok(list(&patterns, folder, &CancelToken::new())?.entries.into_iter().map(|entry| entry.name).collect())
    }

    #[test]
    fn patterns_keep_their_order_and_sort_their_files() {
        let root = folder(&["b.txt", "a.jsonl", "sub/d.txt", "sub/c.txt", "sub/x/e.parquet", "sub/n.csv", ".h/f.txt"]);
        let names = |patterns: &[&str]| names(root.path(), patterns).unwrap();
        assert_eq!(names(&["sub", "a.jsonl"]), ["sub/c.txt", "sub/d.txt", "sub/x/e.parquet", "a.jsonl"]);
        assert_eq!(names(&["*.txt", "sub/*.txt", "b.txt"]), ["b.txt", "sub/c.txt", "sub/d.txt"]);
        assert_eq!(names(&["**/*.{txt,parquet}"]), ["b.txt", "sub/c.txt", "sub/d.txt", "sub/x/e.parquet"]);
        assert_eq!(names(&["sub/[cd].txt"]), ["c.txt", "d.txt"]);
        assert_eq!(names(&["./sub/./*.txt"]), ["c.txt", "d.txt"]);
        let whole = root.path().join("sub/c.txt");
        assert_eq!(names(&[whole.to_str().unwrap(), "sub/*.txt"]), ["c.txt", "d.txt"]);
        let absolute = root.path().join("sub/d.txt");
        assert_eq!(names(&[absolute.to_str().unwrap()]), ["d.txt"]);
    }

    #[test]
    fn patterns_without_files_are_named_in_errors() {
        let root = folder(&["a.csv", "empty/.keep"]);
        for (pattern, problem) in [
            ("gone.txt", "does not exist"),
            ("*.txt", "matches no file"),
            ("*.csv", "of a supported format"),
            ("./*.txt", "matches no file"),
            ("a.csv", "is not of a supported format"),
            ("empty", "contains no file"),
            ("gone/*.txt", "matches no file"),
        ] {
            let error = names(root.path(), &[pattern]).unwrap_err().to_string();
            assert!(error.contains(pattern) && error.contains(problem), "{error}");
        }
        for pattern in ["a[.txt", "", " "] {
            assert!(matches!(names(root.path(), &[pattern]), Err(DataError::Pattern { .. })), "{pattern:?}");
        }
    }

    #[test]
    fn glob_characters_in_existing_names_are_literal() {
        let root = folder(&["odd [1] {x}/a.txt"]);
        assert_eq!(names(&root.path().join("odd [1] {x}"), &["*.txt"]).unwrap(), ["a.txt"]);
        assert_eq!(names(root.path(), &["odd [1] {x}/a.txt"]).unwrap(), ["a.txt"]);
    }

    #[test]
    fn empty_files_are_left_out() {
        let root = folder(&["a.txt", "b.txt"]);
        std::fs::write(root.path().join("a.txt"), "").unwrap();
        assert_eq!(names(root.path(), &["*.txt"]).unwrap(), ["b.txt"]);
    }
    #[test]
    #[cfg(unix)]
    fn linked_directories_are_entered_once() {
        let root = folder(&["f40/a.txt"]);
        let at = |number: usize| root.path().join(format!("f{number}"));
        for number in (0..40).rev() {
            std::fs::create_dir_all(at(number)).unwrap();
            for link in ["l", "r"] {
                std::os::unix::fs::symlink(at(number + 1), at(number).join(link)).unwrap();
            }
        }
        std::os::unix::fs::symlink(root.path(), at(40).join("top")).unwrap();
        assert_eq!(names(root.path(), &["."]).unwrap(), ["a.txt"]);
        assert_eq!(names(root.path(), &["**/*.txt"]).unwrap(), ["a.txt"]);
        assert_eq!(names(&at(38), &["l/r/*.txt"]).unwrap(), ["a.txt"]);
        assert_eq!(names(&at(38), &["[a-l]/r*/*.txt"]).unwrap(), ["a.txt"]);
    }

    #[test]
    #[cfg(unix)]
    fn linked_files_count_once() {
        let root = folder(&["sub/b.txt", "sub/c.txt", "a.txt"]);
        std::os::unix::fs::symlink("sub", root.path().join("alias")).unwrap();
        std::os::unix::fs::symlink("sub/b.txt", root.path().join("0.txt")).unwrap();
        let names = |patterns: &[&str]| names(root.path(), patterns).unwrap();
        assert_eq!(names(&["."]), ["a.txt", "sub/b.txt", "sub/c.txt"]);
        assert_eq!(names(&["alias/*.txt", "sub", "*.txt"]), ["alias/b.txt", "alias/c.txt", "a.txt"]);
        assert_eq!(names(&["0.txt", "sub/b.txt"]), ["0.txt"]);
        assert_eq!(names(&["{alias,sub}/*.txt", "a.txt"]), ["sub/b.txt", "sub/c.txt", "a.txt"]);
        assert_eq!(names(&["{alias/c,sub/c}.txt"]), ["c.txt"]);
    }

    #[test]
    #[cfg(unix)]
    fn broken_links_and_devices_are_skipped_with_a_note() {
        let root = folder(&["a.txt"]);
        for (target, link) in [("gone.txt", "b.txt"), ("c.txt", "c.txt"), ("/dev/zero", "d.txt"), ("gone", "e.csv")] {
            std::os::unix::fs::symlink(target, root.path().join(link)).unwrap();
        }
        for pattern in [".", "*.txt"] {
            let LocalListing { entries, mut notes } =
                list(&[pattern.to_owned()], root.path(), &CancelToken::new()).unwrap();
            assert_eq!(entries.iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>(), ["a.txt"]);
            notes.sort();
            let ends = ["b.txt is skipped: it is a broken symbolic link", "c.txt", "d.txt is skipped: it is a device"];
            assert_eq!(notes.len(), ends.len(), "{notes:?}");
            assert!(notes.iter().zip(ends).all(|(note, end)| note.contains(end)), "{notes:?}");
        }
        let named = names(root.path(), &["d.txt"]).unwrap_err();
        assert!(matches!(&named, DataError::Io { .. }) && named.to_string().contains("a device"), "{named}");
    }
}
