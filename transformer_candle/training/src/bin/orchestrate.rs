//! Hands its arguments to the Python command of the same name, for `cargo run -p training --bin orchestrate -- ...`.
//! It prepares and does not train (`--launch none`) unless `--launch` says otherwise.

#![cfg_attr(test, allow(clippy::unwrap_used))]

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use run_config::system_error::in_words;
use training::commands::output::print_error;

/// Set for the command that is started, so that a wrapper that leads back here is seen instead of followed for ever.
const GUARD: &str = "TRANSFORMER_CANDLE_ORCHESTRATE";

fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    if env::var_os(GUARD).is_some() {
        return refuse("the `orchestrate` that was found leads back to this program");
    }
    let Some(program) = candidates().find(|candidate| is_python_command(candidate)) else {
        return refuse("the Python command `orchestrate` is not installed");
    };
    let mut command = Command::new(&program);
    command.args(with_launch(arguments)).env(GUARD, "1");
    hand_over(command, &program)
}

fn refuse(reason: &str) -> ExitCode {
    print_error(&format!(
        "{reason}; `make build` installs it into .venv, then this works, and so does .venv/bin/orchestrate"
    ));
    ExitCode::from(2)
}

/// Returns the paths to try for the Python command: of the active environment, this folder's, the repository's, PATH.
fn candidates() -> impl Iterator<Item = PathBuf> {
    let active = env::var_os("VIRTUAL_ENV").map(|environment| PathBuf::from(environment).join("bin"));
    // `transformer_candle/training` is two folders below the repository's root.
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/bin");
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = active.into_iter().chain([PathBuf::from(".venv/bin"), repository]).chain(env::split_paths(&path));
    folders.map(|folder| folder.join("orchestrate")).collect::<Vec<_>>().into_iter()
}

/// Whether a file is a script, as which Python's installers write commands; this program, under whatever name, is none.
fn is_python_command(candidate: &Path) -> bool {
    let mut start = [0; 2];
    File::open(candidate).is_ok_and(|mut file| file.read_exact(&mut start).is_ok()) && &start == b"#!"
}

/// Adds `--launch none` unless `--launch` is given. Options of the pipeline stand before a subcommand's name.
fn with_launch(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let is_launch =
        |argument: &OsString| argument == OsStr::new("--launch") || argument.to_string_lossy().starts_with("--launch=");
    // Alone it shows its start screen.
    if !arguments.is_empty() && !arguments.iter().any(is_launch) {
        arguments.splice(..0, ["--launch".into(), "none".into()]);
    }
    arguments
}

#[cfg(unix)]
fn hand_over(mut command: Command, program: &Path) -> ExitCode {
    use std::os::unix::process::CommandExt;
    // Returns only when it failed.
    let error = command.exec();
    refuse(&format!("cannot start {}: {}", program.display(), in_words(&error)))
}

#[cfg(not(unix))]
fn hand_over(mut command: Command, program: &Path) -> ExitCode {
    match command.status() {
        Ok(status) => ExitCode::from(status.code().unwrap_or(1) as u8),
        Err(error) => refuse(&format!("cannot start {}: {}", program.display(), in_words(&error))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launched(arguments: &[&str]) -> Vec<OsString> {
        with_launch(arguments.iter().map(OsString::from).collect())
    }

    #[test]
    fn it_prepares_only_unless_told_to_launch() {
        assert_eq!(launched(&["--stream"]), ["--launch", "none", "--stream"]);
        assert_eq!(launched(&["--launch", "process"]), ["--launch", "process"]);
        assert_eq!(launched(&["--launch=bindings"]), ["--launch=bindings"]);
    }

    #[test]
    fn it_never_takes_itself_for_the_python_command() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("orchestrate");
        assert!(!is_python_command(&file));
        std::os::unix::fs::symlink(env::current_exe().unwrap(), &file).unwrap();
        assert!(!is_python_command(&file));
        std::fs::remove_file(&file).unwrap();
        std::fs::write(&file, "#!/usr/bin/python3\n").unwrap();
        assert!(is_python_command(&file));
    }
}
