//! Atomic replacement of files: a reader finds the old content or the new one, whatever instant the process dies at. A
//! symbolic link in a file's place is replaced itself; what it points to stays as it is.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Separates a file's name from the id of the process that writes it, or another number of the writer's own, in the name
/// of its staging file.
pub(crate) const STAGING: &str = ".tmp-";

/// Replaces a file, durably.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    replace_with(path, |writer| writer.write_all(content)).map(drop)
}

/// Replaces a file, durably, with what `fill` writes; returns it open for writing.
pub(crate) fn replace_with(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<File> {
    let staging = staging_path(path);
    let outcome = create(&staging).and_then(|file| {
        let mut writer = BufWriter::new(file);
        fill(&mut writer)?;
        let file = writer.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        fs::rename(&staging, path)?;
        Ok(file)
    });
    match outcome {
        Ok(file) => sync_folder(path.parent().unwrap_or(Path::new("."))).map(|()| file),
        Err(error) => {
            // What cannot be removed here is removed at the next start.
            let _ = fs::remove_file(&staging);
            Err(error)
        }
    }
}

/// Replaces a file or link by a symbolic link to `target`, durably.
pub(crate) fn replace_link(path: &Path, target: &Path) -> io::Result<()> {
    let staging = staging_path(path);
    match fs::remove_file(&staging) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => std::os::unix::fs::symlink(target, &staging)?,
    }
    if let Err(error) = fs::rename(&staging, path) {
        let _ = fs::remove_file(&staging);
        return Err(error);
    }
    sync_folder(path.parent().unwrap_or(Path::new(".")))
}

/// Creates a file that was not there; in particular it follows no link.
fn create(staging: &Path) -> io::Result<File> {
    match File::create_new(staging) {
        // Left by a killed process that had this one's id.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(staging)?;
            File::create_new(staging)
        }
        created => created,
    }
}

/// Returns the staging path where a file or folder is written before it is renamed: `.latest.tmp-4242`.
pub(crate) fn staging_path(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}{STAGING}{}", std::process::id()))
}

/// Returns the name that a staging file or folder was to be renamed to; None for any other name.
pub(crate) fn staged_name(name: &str) -> Option<&str> {
    let (name, process) = name.strip_prefix('.')?.rsplit_once(STAGING)?;
    is_number(process).then_some(name)
}

/// Removes files that killed writers left: those whose names `is_leftover` knows. Nothing depends on it, so that what
/// cannot be removed stays.
pub(crate) fn remove_leftovers(folder: &Path, is_leftover: impl Fn(&str) -> bool) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(&is_leftover) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

pub(crate) fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Makes the entries of a folder durable.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    File::open(folder).and_then(|file| file.sync_all())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn names(folder: &Path) -> Vec<String> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_failed_write_keeps_the_old_content() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("environment.json");
        replace(&path, b"former").unwrap();
        let failed = replace_with(&path, |writer| {
            writer.write_all(b"half")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read(&path).unwrap(), b"former");
        assert_eq!(names(folder.path()), ["environment.json"]);
    }

    #[test]
    fn symbolic_links_are_replaced_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (target, path) = (folder.path().join("target"), folder.path().join("environment.json"));
        fs::write(&target, "precious").unwrap();
        symlink(&target, &path).unwrap();
        symlink(&target, staging_path(&path)).unwrap();
        replace(&path, b"new").unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"precious");
        assert!(!path.is_symlink());
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }

    #[test]
    fn staged_name_returns_the_final_name() {
        assert_eq!(staged_name(".latest.tmp-4242"), Some("latest"));
        for other in ["latest.tmp-4242", ".latest.tmp-", ".latest.tmp-x", ".latest"] {
            assert_eq!(staged_name(other), None, "{other}");
        }
    }
}
