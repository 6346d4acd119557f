//! Errors of the operating system in words.

use std::io::{Error, ErrorKind};

/// Says why a file could not be read or written, without the system's number: `there is no such file or directory`.
pub fn in_words(error: &Error) -> String {
    match error.kind() {
        ErrorKind::NotFound if error.raw_os_error().is_some() => "there is no such file or directory".to_owned(),
        ErrorKind::NotADirectory => "a part of its path is a file, not a directory".to_owned(),
        ErrorKind::IsADirectory => "it is a directory, not a file".to_owned(),
        ErrorKind::AlreadyExists => "a file of that name is in its place".to_owned(),
        _ => {
            let text = error.to_string();
            let number = error.raw_os_error().map(|number| format!(" (os error {number})"));
            number.and_then(|number| text.strip_suffix(&number)).unwrap_or(&text).to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_error_has_words_and_no_number() {
        let sentences = [2, 13, 20, 28].map(|number| in_words(&Error::from_raw_os_error(number)));
        assert_eq!(
            sentences,
            [
                "there is no such file or directory",
                "Permission denied",
                "a part of its path is a file, not a directory",
                "No space left on device",
            ]
        );
        assert_eq!(in_words(&Error::other("it is no regular file")), "it is no regular file");
        assert_eq!(in_words(&Error::new(ErrorKind::NotFound, "it was removed")), "it was removed");
    }
}
