//! The programs `train` and `orchestrate`, run as processes.

#![allow(clippy::unwrap_used)]

#[path = "support/program.rs"]
mod program;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use program::{answers_help_and_version, command, refused};

const TRAIN: &str = env!("CARGO_BIN_EXE_train");
const ORCHESTRATE: &str = env!("CARGO_BIN_EXE_orchestrate");

#[test]
fn invalid_commands_exit_with_2() {
    assert!(refused(TRAIN, &["--config", "no.yaml"], 2).contains("no.yaml"));
}

#[test]
fn help_and_version_succeed() {
    answers_help_and_version(TRAIN);
}

fn write_script(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn orchestrate_runs_the_python_command_with_its_arguments() {
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
fn orchestrate_refuses_a_wrapper_that_calls_itself() {
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
