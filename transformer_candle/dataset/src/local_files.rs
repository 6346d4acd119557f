//! Local files by name, folder or glob.
//!
//! A file that is named, or that a pattern such as `*.py` names by its extension, may be any text. Of a folder the files
//! of data are read and, since reading version 2, those of one split: `splits`.

mod glob;
mod passed_over;
mod splits;
mod traversal;

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use run_config::regular_file;

use self::glob::{GLOB_CHARACTERS, Glob};
use self::passed_over::{PassedOver, is_documentation};
pub use self::splits::FolderSplit;
use self::traversal::{DirectoryTraversal, FoundPath};
use crate::DataError;
use crate::cancel::CancelToken;
use crate::formats::Format;

/// A file, its size, and its name relative to the folder that all files of the source have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LocalEntry {
    pub name: String,
    pub path: PathBuf,
    pub bytes: u64,
    pub format: Format,
}

/// The files that patterns match.
#[derive(Debug)]
pub(crate) struct LocalListing {
    pub entries: Vec<LocalEntry>,
    /// Notes on files that were left out, one sentence each.
    pub notes: Vec<String>,
}

/// What is listed, and by which rules.
#[derive(Clone, Copy)]
pub(crate) struct ListingRules<'a> {
    /// The folder that relative patterns are relative to.
    pub base: &'a Path,
    /// The split of folders that is read.
    pub split: &'a FolderSplit,
    /// The version of the rules (`data.reading_version`).
    pub reading_version: u32,
    pub cancel: &'a CancelToken,
}

/// Lists the files of `patterns` in their order, each once, whatever links lead to it; those of one pattern are sorted
/// by path. Empty files are left out.
pub(crate) fn list(patterns: &[String], rules: ListingRules<'_>) -> Result<LocalListing, DataError> {
    // Absolute paths, so that a file named twice, by a relative and by an absolute path, has one name.
    let base = std::path::absolute(rules.base.join(".")).map_err(DataError::io(rules.base))?;
    if let (FolderSplit::Named(_), false) = (rules.split, patterns.iter().any(|pattern| base.join(pattern).is_dir())) {
        let must = "left out where no folder is read: it chooses among the files of a folder";
        return Err(DataError::Setting { setting: "--split (data.split)", must });
    }
    let rules = ListingRules { base: &base, ..rules };
    let (mut canonical_paths, mut notes) = (HashSet::new(), Vec::new());
    let mut files = Vec::new();
    for pattern in patterns {
        let mut data_files = expand_pattern(pattern, rules, &mut notes)?;
        // Of several paths to a file, the one without links is kept.
        data_files.sort_unstable_by(|a, b| (a.file.linked, &a.file.path).cmp(&(b.file.linked, &b.file.path)));
        data_files.retain(|entry| canonical_paths.insert(entry.file.canonical.clone()));
        data_files.sort_unstable_by(|a, b| a.file.path.cmp(&b.file.path));
        for DataFile { file, format } in data_files {
            let bytes = file.path.metadata().map_err(DataError::io(&file.path))?.len();
            files.push((file.path, bytes, format));
        }
    }
    let common = common_folder(files.iter().map(|(path, ..)| path.as_path()));
    let entry = |(path, bytes, format): (PathBuf, u64, Format)| {
        let name = path.strip_prefix(&common).unwrap_or(&path).to_string_lossy().replace('\\', "/");
        LocalEntry { name, path, bytes, format }
    };
    let entries = files.into_iter().filter(|(_, bytes, _)| *bytes > 0).map(entry).collect();
    Ok(LocalListing { entries, notes })
}

/// A file and its format.
struct DataFile {
    file: FoundPath,
    format: Format,
}

fn expand_pattern(pattern: &str, rules: ListingRules<'_>, notes: &mut Vec<String>) -> Result<Vec<DataFile>, DataError> {
    let no_files = |problem: &str| DataError::NoFiles { pattern: pattern.to_owned(), problem: problem.to_owned() };
    if pattern.trim().is_empty() {
        let message = "it is empty; use `.` for everything below this folder".to_owned();
        return Err(DataError::Pattern { pattern: pattern.to_owned(), message });
    }
    let whole = rules.base.join(pattern);
    match fs::metadata(&whole).ok().map(|metadata| metadata.file_type()) {
        Some(kind) if kind.is_dir() => list_folder(pattern, &whole, rules, notes),
        Some(kind) => {
            let format = Format::from_path(&whole).or_else(|| Format::of_named_text(&whole));
            let format = format.ok_or_else(|| no_files(&passed_over::describe_file(&whole)))?;
            regular_file::check(kind).map_err(DataError::io(&whole))?;
            let canonical = whole.canonicalize().map_err(DataError::io(&whole))?;
            Ok(vec![DataFile { file: FoundPath { path: whole, canonical, linked: false }, format }])
        }
        None if pattern.contains(GLOB_CHARACTERS) => {
            let glob = Glob::new(pattern, rules.base)?;
            let folder = glob.folder.clone();
            let paths =
                if folder.is_dir() { DirectoryTraversal::run(&folder, glob, rules.cancel, notes)? } else { Vec::new() };
            if paths.is_empty() {
                return Err(no_files("matches no file"));
            }
            let is_named = |path: &Path| rules.reading_version >= 2 && passed_over::names_extension(pattern, path);
            let format = |path: &Path| {
                Format::from_path(path).or_else(|| Format::of_named_text(path).filter(|_| is_named(path)))
            };
            keep_data(pattern, &folder, paths, format, notes)
        }
        None if pattern.starts_with("~/") => Err(no_files(
            "does not exist: a shell leaves ~ as it is in quotes and after =, so write $HOME for your home folder",
        )),
        None => Err(no_files("does not exist")),
    }
}

/// Lists the data below a folder.
fn list_folder(
    pattern: &str,
    folder: &Path,
    rules: ListingRules<'_>,
    notes: &mut Vec<String>,
) -> Result<Vec<DataFile>, DataError> {
    let paths = DirectoryTraversal::run(folder, Glob::default(), rules.cancel, notes)?;
    let is_data = |path: &Path| rules.reading_version < 2 || !is_documentation(path);
    let format = |path: &Path| Format::from_path(path).filter(|_| is_data(path));
    let files = keep_data(pattern, folder, paths, format, notes)?;
    if rules.reading_version < 2 { Ok(files) } else { rules.split.choose(pattern, folder, files, notes) }
}

/// Keeps the files that have a format; notes what the others are.
fn keep_data(
    pattern: &str,
    folder: &Path,
    paths: Vec<FoundPath>,
    format: impl Fn(&Path) -> Option<Format>,
    notes: &mut Vec<String>,
) -> Result<Vec<DataFile>, DataError> {
    let (mut data, mut passed_over) = (Vec::new(), PassedOver::default());
    for file in paths {
        match format(&file.path) {
            Some(format) => data.push(DataFile { file, format }),
            None => passed_over.add(&file.path),
        }
    }
    if data.is_empty() {
        return Err(DataError::NoFiles { pattern: pattern.to_owned(), problem: passed_over.problem(folder) });
    }
    notes.extend(passed_over.note(pattern));
    Ok(data)
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

    fn listed(folder: &Path, patterns: &[String], reading_version: u32) -> Result<LocalListing, DataError> {
        let (split, cancel) = (&FolderSplit::Train, &CancelToken::new());
        list(patterns, ListingRules { base: folder, split, reading_version, cancel })
    }

    fn names(folder: &Path, patterns: &[&str]) -> Result<Vec<String>, DataError> {
        let patterns: Vec<String> = patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
        Ok(listed(folder, &patterns, 2)?.entries.into_iter().map(|entry| entry.name).collect())
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
            let LocalListing { entries, mut notes } = listed(root.path(), &[pattern.to_owned()], 2).unwrap();
            assert_eq!(entries.iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>(), ["a.txt"]);
            notes.sort();
            let ends = ["b.txt is skipped: it is a broken symbolic link", "c.txt", "d.txt is skipped: it is a device"];
            assert_eq!(notes.len(), ends.len(), "{notes:?}");
            assert!(notes.iter().zip(ends).all(|(note, end)| note.contains(end)), "{notes:?}");
        }
        let error = names(root.path(), &["d.txt"]).unwrap_err();
        assert!(matches!(&error, DataError::Io { .. }) && error.to_string().contains("a device"), "{error}");
    }
}
