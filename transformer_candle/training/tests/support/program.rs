//! Runs programs in an empty folder.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::process::{Command, Output};

use tempfile::TempDir;

/// Returns a command that runs a program in this folder with an empty environment.
pub fn command(program: &str, folder: &TempDir, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder.path()).env_clear();
    command
}

/// Runs a program that must refuse its arguments with this exit code and write no files; returns its stderr.
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

/// Checks that `--help` and `--version` succeed, and print nothing to stderr.
pub fn answers_help_and_version(program: &str) {
    let folder = tempfile::tempdir().unwrap();
    for flag in ["--help", "--version"] {
        let output = command(program, &folder, &[flag]).output().unwrap();
        assert!(output.status.success() && !output.stdout.is_empty() && output.stderr.is_empty());
    }
}
