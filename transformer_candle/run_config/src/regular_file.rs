//! Opens files for reading, regular ones only: a named pipe or a device would be waited for or read without end.

use std::fs::{self, File, FileType};
use std::io::{self, ErrorKind, Read, Take};
use std::path::Path;

/// Bytes of a file that is read whole, such as a config or a tokenizer, at most.
const LARGEST: u64 = 1 << 30;

/// Opens a regular file, or a link to one.
pub fn open(path: &Path) -> io::Result<File> {
    check(fs::metadata(path)?.file_type())?;
    File::open(path)
}

/// Reads a regular file whole, if it has at most [`LARGEST`] bytes.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_small(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens a regular file of which at most [`LARGEST`] bytes can be read.
fn open_small(path: &Path) -> io::Result<Take<File>> {
    let file = open(path)?;
    let bytes = file.metadata()?.len();
    if bytes > LARGEST {
        let message = format!("it has {bytes} bytes, and such a file has at most {LARGEST}");
        return Err(io::Error::new(ErrorKind::FileTooLarge, message));
    }
    Ok(file.take(LARGEST))
}

/// Reads a regular file of UTF-8 text whole, without its byte order mark.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    open_small(path)?.read_to_string(&mut text)?;
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
    fn absurdly_large_files_are_not_read_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        File::create(&path).unwrap().set_len(LARGEST + 1).unwrap();
        assert_eq!(read(&path).unwrap_err().kind(), ErrorKind::FileTooLarge);
        assert_eq!(read_to_string(&path).unwrap_err().kind(), ErrorKind::FileTooLarge);
    }

    #[test]
    fn a_byte_order_mark_is_no_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        fs::write(&path, "\u{feff}text \u{feff}").unwrap();
        assert_eq!(read_to_string(&path).unwrap(), "text \u{feff}");
    }
}
