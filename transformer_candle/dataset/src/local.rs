//! Files of this machine by name, folder or glob.

use std::collections::HashSet;
use std::path::{Component, Path, PathBuf};

use globset::GlobBuilder;

use crate::DataError;
use crate::formats::Format;

/// A file, its size, and its name below the folder that all files of the source share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LocalEntry {
    pub name: String,
    pub path: PathBuf,
    pub bytes: u64,
}

/// Folders inside folders that are followed.
const DEEPEST: usize = 64;

/// The files of `patterns` in their order, each once, those of one pattern sorted by path. Empty files hold nothing and
/// are left out.
pub(crate) fn list(patterns: &[String], base: &Path) -> Result<Vec<LocalEntry>, DataError> {
    // Whole paths, so that a file named twice, once relative and once whole, is one file.
    let base = std::path::absolute(base.join(".")).map_err(DataError::io(base))?;
    let mut seen = HashSet::new();
    let mut files = Vec::new();
    for pattern in patterns {
        for path in matching(pattern, &base)? {
            if seen.insert(path.clone()) {
                let bytes = path.metadata().map_err(DataError::io(&path))?.len();
                files.push((path, bytes));
            }
        }
    }
    let shared = shared_folder(files.iter().map(|(path, _)| path.as_path()));
    let entry = |(path, bytes): (PathBuf, u64)| {
        let name = path.strip_prefix(&shared).unwrap_or(&path).to_string_lossy().replace('\\', "/");
        LocalEntry { name, path, bytes }
    };
    Ok(files.into_iter().filter(|(_, bytes)| *bytes > 0).map(entry).collect())
}

fn matching(pattern: &str, base: &Path) -> Result<Vec<PathBuf>, DataError> {
    let nothing = |problem: &str| DataError::NoFiles { pattern: pattern.to_owned(), problem: problem.to_owned() };
    if pattern.trim().is_empty() {
        let message = "it is empty, which would be everything below this folder; that is `.`".to_owned();
        return Err(DataError::Pattern { pattern: pattern.to_owned(), message });
    }
    let whole = base.join(pattern);
    if whole.is_file() {
        return if readable(&whole) { Ok(vec![whole]) } else { Err(nothing("is not of a kind that can be read")) };
    }
    let mut found = Vec::new();
    if whole.is_dir() {
        walk(&whole, DEEPEST, &mut found)?;
    } else if pattern.contains(GLOB) {
        found = matching_glob(pattern, base)?;
        if found.is_empty() {
            return Err(nothing("matches no file"));
        }
    } else {
        return Err(nothing("does not exist"));
    }
    found.retain(|path| readable(path));
    if found.is_empty() {
        return Err(nothing("holds no file of a kind that can be read"));
    }
    found.sort();
    Ok(found)
}

/// Characters that make a name a pattern.
const GLOB: [char; 4] = ['*', '?', '[', '{'];

fn matching_glob(pattern: &str, base: &Path) -> Result<Vec<PathBuf>, DataError> {
    let bad =
        |error: &globset::Error| DataError::Pattern { pattern: pattern.to_owned(), message: error.kind().to_string() };
    // Without `.` parts, so that it looks like the paths that are found.
    let parts: PathBuf = Path::new(pattern).components().filter(|part| !matches!(part, Component::CurDir)).collect();
    let escaped_base = if parts.is_absolute() { String::new() } else { globset::escape(&base.to_string_lossy()) };
    let glob = Path::new(&escaped_base).join(&parts);
    let matcher = GlobBuilder::new(&glob.to_string_lossy()).literal_separator(true).build();
    let matcher = matcher.map_err(|error| bad(&error))?.compile_matcher();
    let plain = parts.components().take_while(|part| !part.as_os_str().to_string_lossy().contains(GLOB));
    let folder = base.join(plain.collect::<PathBuf>());
    let mut found = Vec::new();
    if folder.is_dir() {
        walk(&folder, DEEPEST, &mut found)?;
    }
    found.retain(|path| matcher.is_match(path));
    Ok(found)
}

fn readable(path: &Path) -> bool {
    path.file_name().is_some_and(|name| Format::of(&name.to_string_lossy()).is_some())
}

/// Every file below `folder` that is not hidden.
fn walk(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let entries = std::fs::read_dir(folder).map_err(DataError::io(folder))?;
    for entry in entries {
        let path = entry.map_err(DataError::io(folder))?.path();
        let hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        if hidden {
            continue;
        }
        if path.is_dir() {
            if depth > 0 {
                walk(&path, depth - 1, found)?;
            }
        } else {
            found.push(path);
        }
    }
    Ok(())
}

/// The deepest folder above all files, so that names do not depend on where the data lies.
fn shared_folder<'a>(mut paths: impl Iterator<Item = &'a Path>) -> PathBuf {
    let Some(first) = paths.next().and_then(Path::parent) else {
        return PathBuf::new();
    };
    let mut shared = first.to_owned();
    for path in paths {
        while !path.starts_with(&shared) && shared.pop() {}
    }
    shared
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
        Ok(list(&patterns, folder)?.into_iter().map(|entry| entry.name).collect())
    }

    #[test]
    fn files_folders_and_globs_keep_the_order_given_and_are_sorted_within() {
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
    fn what_matches_nothing_says_so_and_names_the_pattern() {
        let root = folder(&["a.csv", "empty/.keep"]);
        for (pattern, problem) in [
            ("gone.txt", "does not exist"),
            ("*.txt", "matches no file"),
            ("*.csv", "of a kind that can be read"),
            ("./*.txt", "matches no file"),
            ("a.csv", "is not of a kind"),
            ("empty", "holds no file"),
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
    fn a_folder_s_name_is_no_pattern() {
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
}
