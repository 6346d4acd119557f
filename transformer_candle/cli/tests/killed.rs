//! A trainer that is killed at any instant and started again with `--resume` ends where one that was left alone ends.

#![allow(clippy::unwrap_used)]

#[path = "../../training/tests/support/mod.rs"]
mod support;

use std::{
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use support::Workshop;

const OVERRIDES: [&str; 4] = [
    "scheduler.total_steps=60",
    "runtime.checkpoint.every_n_steps=3",
    "runtime.evaluation.every_n_steps=7",
    "runtime.seed=1",
];

fn start(workshop: &Workshop, name: &str, data: &[String]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_transformer-candle"));
    command.arg("train").arg("--config").arg(workshop.run_directory(name).join("training.yaml")).arg("--resume");
    for value in OVERRIDES.into_iter().chain(data.iter().map(String::as_str)) {
        command.args(["--override", value]);
    }
    command.stdout(Stdio::null()).spawn().unwrap()
}

#[test]
fn a_repeatedly_killed_run_ends_as_an_uninterrupted_one() {
    kill_again_and_again(&Workshop::new(), &[]);
}

#[test]
fn a_killed_mixture_run_ends_as_an_uninterrupted_one() {
    let workshop = Workshop::new();
    kill_again_and_again(&workshop, &workshop.mixture());
}

#[test]
fn so_does_a_run_that_keeps_documents_apart() {
    kill_again_and_again(&Workshop::new(), &["data.packing=documents".to_owned()]);
}

fn kill_again_and_again(workshop: &Workshop, data: &[String]) {
    let start_time = Instant::now();
    assert!(start(workshop, "left-alone", data).wait().unwrap().success());
    let alone = start_time.elapsed();

    // Each life is a little longer than the last, so that kills fall at different instants and the run still ends.
    let mut kills = 0;
    for life in 1.. {
        let mut child = start(workshop, "killed", data);
        let deadline = Instant::now() + alone.mul_f64(0.1 * f64::from(life));
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if Instant::now() > deadline => break None,
                None => thread::sleep(Duration::from_millis(1)),
            }
        };
        if let Some(status) = status {
            assert!(status.success());
            break;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        kills += 1;
    }
    assert!(kills > 0);
    for file in ["model.safetensors", "optimizer.safetensors", "trainer_state.json"] {
        assert!(
            workshop.saved("left-alone", 60, file) == workshop.saved("killed", 60, file),
            "{file} after {kills} kills"
        );
    }
    for kind in ["train", "evaluation"] {
        assert_eq!(workshop.losses("left-alone", kind), workshop.losses("killed", kind), "after {kills} kills");
    }
    assert_eq!(workshop.checkpoints("left-alone"), workshop.checkpoints("killed"));
    let mut validate = Command::new(env!("CARGO_BIN_EXE_transformer-candle"));
    validate.arg("validate-data").arg(workshop.run_directory("killed")).args(["--replay", "1", "--replay", "60"]);
    assert!(validate.stdout(Stdio::null()).status().unwrap().success(), "after {kills} kills");
}
