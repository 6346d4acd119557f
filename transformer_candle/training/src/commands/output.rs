//! What commands print: escaped for terminals, and no failure where the reader has gone away.

use std::fmt::Display;
use std::io::{self, Write};

use serde::Serialize;

use crate::terminal::{escaped, escaped_json};
use crate::{Result, TrainerError};

/// `error: ...` on stderr. Nobody reading it is no reason to fail differently.
pub fn print_error(error: &dyn Display) {
    let _ = writeln!(io::stderr(), "error: {}", escaped(&error.to_string()));
}

/// Prints what was asked for, for people. It goes on where the reader has gone away (`| head`): the exit code is the command's.
pub fn print(text: &str) -> Result<()> {
    delivered(written(&escaped(text)))
}

/// Prints a value as one line of JSON.
///
/// # Panics
/// If the value has no JSON, such as a map whose keys are not strings.
pub fn print_json(value: &impl Serialize) -> Result<()> {
    let json = serde_json::to_string(value).expect("plain values always serialise");
    delivered(written(&format!("{}\n", escaped_json(&json))))
}

/// Writes text to stdout, at once.
pub fn written(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
}

/// A reader that wants no more has had enough; a stdout that is full is an error.
pub fn delivered(written: io::Result<()>) -> Result<()> {
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(TrainerError::io("write to", "stdout")),
    }
}
