//! Training on several sources with weights, as a user does it.

#![allow(clippy::unwrap_used)]

#[path = "../../training/tests/support/mod.rs"]
mod support;

use std::process::{Command, Output};

use serde_json::{Value, json};
use support::Workshop;

fn run(workshop: &Workshop, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_transformer-candle"))
        .current_dir(workshop.path())
        .args(arguments)
        .output()
        .unwrap()
}

fn train(workshop: &Workshop, data: &[String], more: &[&str]) -> Output {
    let config = workshop.run_directory("run").join("training.yaml");
    let data = data.iter().flat_map(|value| ["--override", value]);
    let command = ["train", "--config", config.to_str().unwrap()];
    run(workshop, &command.into_iter().chain(data).chain(more.iter().copied()).collect::<Vec<_>>())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_mixture_is_trained_on_judged_and_proven_source_by_source() {
    let workshop = Workshop::new();
    let output = train(&workshop, &workshop.mixture(), &["--override", "scheduler.total_steps=40"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let message = text(&output.stdout);
    assert!(message.contains("few.jsonl is exhausted; starting epoch 2"), "{message}");

    for line in workshop.metrics("run", "evaluation") {
        let parts = line["components"].as_array().unwrap();
        let number = |value: &Value| value.as_f64().unwrap();
        assert!(parts[0]["name"].as_str().unwrap().ends_with("text.jsonl"));
        assert_eq!([&parts[0]["share"], &parts[1]["share"]], [&json!(0.75), &json!(0.25)]);
        let mean = 0.75 * number(&parts[0]["loss"]) + 0.25 * number(&parts[1]["loss"]);
        assert!((number(&line["loss"]) - mean).abs() < 1e-12, "{line}");
    }

    let report = run(&workshop, &["validate-data", "run", "--replay", "1", "--replay", "33", "--json"]);
    let report: Value = serde_json::from_slice(&report.stdout).unwrap();
    assert_eq!(report["problems"], json!([]));
    let sequences: Vec<u64> = (0..2).map(|i| report["components"][i]["sequences"].as_u64().unwrap()).collect();
    assert_eq!(sequences, [240, 80], "of 40 steps of 8 sequences");
    let epochs = report["components"][1]["epochs"].as_array().unwrap();
    assert!(epochs.len() > 2 && epochs[0]["finished"] == true, "{report}");
    let message = text(&run(&workshop, &["validate-data", "run"]).stdout);
    assert!(message.contains("text.jsonl: 240 of 320 sequences, 75.00 % (its weight: 75.00 %)"), "{message}");

    let checkpoint = "run/checkpoints/step-00000040";
    let output = run(&workshop, &["evaluate", "--checkpoint", checkpoint, "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output.stderr)));
    let evaluations = workshop.metrics("run", "evaluation");
    for (of_run, alone) in [0, 1].map(|i| (&evaluations.last().unwrap()["components"][i], &report["components"][i])) {
        assert_eq!((&of_run["name"], &of_run["tokens"]), (&alone["name"], &alone["tokens"]));
        let difference = of_run["loss"].as_f64().unwrap() - alone["loss"].as_f64().unwrap();
        assert!(difference.abs() < 1e-5, "{of_run} {alone}");
    }
}

#[test]
fn weights_and_sources_may_not_change_on_resume_and_are_named() {
    let workshop = Workshop::new();
    assert!(train(&workshop, &workshop.mixture(), &["--max-steps", "5"]).status.success());
    let resume = |data: &[String]| {
        let output = train(&workshop, data, &["--resume"]);
        (output.status.code(), text(&output.stderr))
    };
    let (code, message) = resume(&workshop.weighed(3.0, 2.0));
    assert!(code == Some(2) && message.contains("data.mixture[1].weight was 1.0 and is 2.0"), "{message}");
    let (code, message) = resume(&[]);
    assert!(code == Some(2) && message.contains("data.mixture[0].weight was 3.0 and is null"), "{message}");
    assert_eq!(resume(&workshop.mixture()).0, Some(0));
}
