//! The programs as a shell sees them: exit codes, what goes to stdout and what to stderr.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

const TRANSFORMER_CANDLE: &str = env!("CARGO_BIN_EXE_transformer-candle");
const TRAIN: &str = env!("CARGO_BIN_EXE_train");
const ORCHESTRATE: &str = env!("CARGO_BIN_EXE_orchestrate");

/// A program in an empty folder, with nothing in its environment that could help it.
fn command(program: &str, folder: &TempDir, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder.path()).env_clear();
    command
}

fn refused(program: &str, arguments: &[&str], code: i32) -> String {
    let folder = tempfile::tempdir().unwrap();
    let Output { status, stdout, stderr } = command(program, &folder, arguments).output().unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(code), "{arguments:?}: {stderr}");
    assert!(stdout.is_empty(), "{arguments:?} prints to stdout");
    assert!(stderr.starts_with("error: "), "{arguments:?}: {stderr}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{arguments:?} leaves something behind");
    stderr
}

#[test]
fn what_cannot_be_done_is_one_sentence_and_exit_code_2() {
    for (arguments, named) in [
        (["train", "--config", "no.yaml"].as_slice(), "no.yaml"),
        (&["plan", "--config", "no.toml"], "no.toml"),
        (&["bench", "--config", "no.json"], "no.json"),
        (&["generate", "--checkpoint", "nowhere", "--prompt", "x"], "nowhere"),
        (&["generate", "--experiment", "nobody", "--prompt", "x"], "nobody"),
        (&["generate", "--experiment", "../up", "--prompt", "x"], "../up"),
        (&["generate", "--checkpoint", "d", "--prompt", "x", "--temperature=-1"], "temperature"),
        (&["evaluate", "--checkpoint", "nowhere"], "nowhere"),
        (&["checkpoint", "list", "nowhere"], "nowhere"),
        (&["checkpoint", "verify", "--experiment", "nobody"], "nobody"),
    ] {
        let message = refused(TRANSFORMER_CANDLE, arguments, 2);
        assert!(message.contains(named), "{message}");
        assert_eq!(message.trim_end().lines().count(), 1, "{message}");
    }
    refused(TRANSFORMER_CANDLE, &["train"], 2);
    refused(TRANSFORMER_CANDLE, &["no-such-command"], 2);
    assert!(refused(TRAIN, &["--config", "no.yaml"], 2).contains("no.yaml"));
}

#[test]
fn help_and_version_are_no_errors() {
    let folder = tempfile::tempdir().unwrap();
    for program in [TRANSFORMER_CANDLE, TRAIN] {
        for flag in ["--help", "--version"] {
            let output = command(program, &folder, &[flag]).output().unwrap();
            assert!(output.status.success() && !output.stdout.is_empty() && output.stderr.is_empty());
        }
    }
}

fn write_script(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn orchestrate_hands_its_arguments_to_the_python_command_and_takes_its_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    write_script(&folder.path().join("environment/bin/orchestrate"), "#!/bin/sh\necho \"$@\"\nexit 7\n");
    let output = command(ORCHESTRATE, &folder, &["--stream", "--experiment", "a b"])
        .env("VIRTUAL_ENV", folder.path().join("environment"))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "--launch none --stream --experiment a b\n");
}

#[test]
fn orchestrate_sees_that_a_wrapper_leads_back_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let wrapper = folder.path().join("environment/bin/orchestrate");
    write_script(&wrapper, &format!("#!/bin/sh\nexec {ORCHESTRATE} \"$@\"\n"));
    let output = command(ORCHESTRATE, &folder, &["--stream"])
        .env("VIRTUAL_ENV", folder.path().join("environment"))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("leads back") && message.contains("make build"), "{message}");
}
