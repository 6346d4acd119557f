//! Programs in an empty folder.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::process::{Command, Output};

use tempfile::TempDir;

/// A program in an empty folder, with nothing in its environment that could help it.
pub fn command(program: &str, folder: &TempDir, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder.path()).env_clear();
    command
}

/// What a program says that refuses what it was asked, and leaves nothing behind.
pub fn refused(program: &str, arguments: &[&str], code: i32) -> String {
    let folder = tempfile::tempdir().unwrap();
    let Output { status, stdout, stderr } = command(program, &folder, arguments).output().unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(code), "{arguments:?}: {stderr}");
    assert!(stdout.is_empty(), "{arguments:?} prints to stdout");
    assert!(stderr.starts_with("error: "), "{arguments:?}: {stderr}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{arguments:?} leaves something behind");
    stderr
}

/// Help and version end a program well, and say nothing on stderr.
pub fn answers_help_and_version(program: &str) {
    let folder = tempfile::tempdir().unwrap();
    for flag in ["--help", "--version"] {
        let output = command(program, &folder, &[flag]).output().unwrap();
        assert!(output.status.success() && !output.stdout.is_empty() && output.stderr.is_empty());
    }
}
