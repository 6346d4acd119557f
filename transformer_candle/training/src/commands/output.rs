//! Output of commands: to stdout, or to the stream of the Python command that shares the implementation.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};

use serde::Serialize;

use crate::terminal::{columns, escaped, escaped_json, wrapped};
use crate::{Result, TrainerError};

/// Prints `error: ...` to stderr. That nobody can read it is no reason to fail differently.
pub fn print_error(error: &dyn Display) {
    let _ = writeln!(io::stderr(), "error: {}", escaped(&error.to_string()));
}

/// Prints a remark to stderr, which nobody has to read either.
pub(super) fn print_remark(text: &str) {
    let _ = writeln!(io::stderr(), "{}", escaped(text));
}

/// A stream that takes the answer of a command.
pub trait Output: Send {
    /// Writes a text, and shows it at once.
    ///
    /// # Errors
    /// The stream does not take it; `BrokenPipe` where its reader has gone away.
    fn write(&mut self, text: &str) -> io::Result<()>;

    /// Whether it is a terminal, which would obey control characters.
    fn is_terminal(&self) -> bool;
}

/// The stdout of this process.
#[derive(Debug, Clone, Copy)]
pub struct Stdout;

impl Output for Stdout {
    fn write(&mut self, text: &str) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
    }

    fn is_terminal(&self) -> bool {
        io::stdout().is_terminal()
    }
}

impl dyn Output + '_ {
    /// Prints text for people: escaped wherever it goes, as a pipe may end at a terminal.
    pub fn print(&mut self, text: &str) -> Result<()> {
        delivered(self.write(&escaped(text)))
    }

    /// Prints text for people, whose lines a terminal gets broken to its width.
    pub(super) fn print_wrapped(&mut self, text: &str) -> Result<()> {
        match columns().filter(|_| self.is_terminal()) {
            Some(columns) => self.print(&wrapped(text, columns)),
            None => self.print(text),
        }
    }

    /// Prints a value as one line of JSON.
    ///
    /// # Panics
    /// If the value has no JSON, such as a map whose keys are not strings.
    pub fn print_json(&mut self, value: &impl Serialize) -> Result<()> {
        let json = serde_json::to_string(value).expect("plain values always serialise");
        delivered(self.write(&format!("{}\n", escaped_json(&json))))
    }

    /// Writes text as it is; only a terminal gets it escaped.
    pub(super) fn write_exactly(&mut self, text: &str) -> io::Result<()> {
        if self.is_terminal() { self.write(&escaped(text)) } else { self.write(text) }
    }
}

/// Converts the result of a write to stdout: a full disk is an error; a closed pipe, whose reader wants no more, is
/// none.
pub(super) fn delivered(outcome: io::Result<()>) -> Result<()> {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.map_err(TrainerError::io("write to", "stdout")),
    }
}
