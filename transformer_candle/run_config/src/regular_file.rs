//! Opens files for reading, regular ones only: a named pipe or a device would be waited for or read without end.

use std::fs::{self, File, FileType};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Opens a regular file, or a link to one.
pub fn open(path: &Path) -> io::Result<File> {
    check(fs::metadata(path)?.file_type())?;
    File::open(path)
}

/// Reads a regular file whole.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a regular file of UTF-8 text whole, without its byte order mark.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    open(path)?.read_to_string(&mut text)?;
    Ok(without_byte_order_mark(text))
}

/// Removes the byte order mark that some editors put before a text.
pub fn without_byte_order_mark(text: String) -> String {
    text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text)
}

/// Fails unless a file of this type is a regular one.
pub fn check(kind: FileType) -> io::Result<()> {
    if kind.is_file() {
        Ok(())
    } else if kind.is_dir() {
        Err(ErrorKind::IsADirectory.into())
    } else {
        Err(io::Error::new(ErrorKind::InvalidInput, format!("it is {}, not a regular file", name_of(kind))))
    }
}

#[cfg(unix)]
fn name_of(kind: FileType) -> &'static str {
    use std::os::unix::fs::FileTypeExt;

    match kind {
        _ if kind.is_fifo() => "a named pipe",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    }
}

#[cfg(not(unix))]
fn name_of(_: FileType) -> &'static str {
    "a device"
}

#[cfg(all(test, unix))]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn devices_sockets_and_folders_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        let link = folder.path().join("link.txt");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        let refusal = |path: &Path| open(path).unwrap_err().to_string();
        assert_eq!(refusal(&socket), "it is a socket, not a regular file");
        assert_eq!(refusal(&link), "it is a device, not a regular file");
        assert_eq!(open(folder.path()).unwrap_err().kind(), ErrorKind::IsADirectory);
    }

    #[test]
    fn a_byte_order_mark_is_no_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        fs::write(&path, "\u{feff}text \u{feff}").unwrap();
        assert_eq!(read_to_string(&path).unwrap(), "text \u{feff}");
    }
}
