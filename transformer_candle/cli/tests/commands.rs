//! Commands on a trained model: `generate`, `evaluate`, `checkpoint`, `validate-data`, `bench`.

#![allow(clippy::unwrap_used)]

#[path = "../../training/tests/support/mod.rs"]
mod support;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use support::Workshop;

/// Returns the command `transformer-candle` in the workshop's folder, where its runs are found by their names.
fn command(workshop: &Workshop, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_transformer-candle"));
    command.args(arguments).current_dir(workshop.path()).env("ORCHESTRATE_RUNS_ROOT", workshop.path());
    command
}

fn succeeds(workshop: &Workshop, arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } = command(workshop, arguments).output().unwrap();
    assert!(status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

fn answer(workshop: &Workshop, arguments: &[&str]) -> Value {
    let text = succeeds(workshop, arguments);
    assert_eq!(text.lines().count(), 1, "one object: {text}");
    serde_json::from_str(&text).unwrap()
}

/// Returns a workshop with a run of two checkpoints, steps 5 and 10.
fn trained() -> Workshop {
    let workshop = Workshop::new();
    let config = workshop.run_directory("run").join("training.yaml");
    succeeds(&workshop, &["train", "--config", config.to_str().unwrap()]);
    workshop
}

fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn generate_prints_text_or_json_repeatably() {
    let workshop = trained();
    let ask = ["generate", "--experiment", "run", "--prompt", "the cat", "--max-tokens", "20", "--seed", "3"];
    let one = answer(&workshop, &[ask.as_slice(), &["--json"]].concat());
    assert_eq!(one["prompt"], "the cat");
    assert!(one["tokens"].as_array().unwrap().len() <= 20);
    assert!(one["tokens_per_second"].as_f64().unwrap() > 0.0);
    let keys: Vec<&String> = one.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["prompt", "completion", "tokens", "tokens_per_second"]);

    let checkpoint = workshop.path().join("run/checkpoints/step-00000010");
    fs::write(workshop.path().join("prompt.txt"), "the cat").unwrap();
    let ask = ["generate", "--checkpoint", checkpoint.to_str().unwrap(), "--prompt-file", "prompt.txt"];
    let text = succeeds(&workshop, &[ask.as_slice(), &["--max-tokens", "20", "--seed", "3"]].concat());
    assert_eq!(text, format!("the cat{}\n", one["completion"].as_str().unwrap()));
}

#[test]
fn a_whole_context_is_written_and_a_longer_prompt_refused() {
    let workshop = trained();
    let ask = ["generate", "--experiment", "run", "--temperature", "0", "--max-tokens", "100000", "--json"];
    let new_text = answer(&workshop, &[ask.as_slice(), &["--prompt", ""]].concat());
    assert!(!new_text["tokens"].as_array().unwrap().is_empty());
    let long = "the cat ".repeat(3000);
    let output = command(&workshop, &[ask.as_slice(), &["--prompt", &long]].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("context"));
}

#[test]
fn evaluate_finds_the_loss_that_the_run_found() {
    let workshop = trained();
    let at_last_step = workshop.metrics("run", "evaluation").pop().unwrap();
    let report = answer(&workshop, &["evaluate", "--experiment", "run", "--json"]);
    for key in ["step", "tokens"] {
        assert_eq!(report[key], at_last_step[key], "{key}");
    }
    for key in ["loss", "perplexity", "bits_per_byte"] {
        let (now, then) = (report[key].as_f64().unwrap(), at_last_step[key].as_f64().unwrap());
        assert!((now / then - 1.0).abs() < 1e-6, "{key}: {now}, the run found {then}");
    }
    let text = ["--input", "text.jsonl", "--max-sequences", "8"];
    let on_text = succeeds(&workshop, &[["evaluate", "--experiment", "run"].as_slice(), &text].concat());
    assert!(on_text.starts_with("loss ") && on_text.contains("bits per byte"), "{on_text}");
}

#[test]
fn corrupted_checkpoints_are_skipped_and_named() {
    let workshop = trained();
    assert!(succeeds(&workshop, &["checkpoint", "list", "--experiment", "run"]).contains("latest"));
    assert_eq!(succeeds(&workshop, &["checkpoint", "verify", "run"]).matches("intact").count(), 2);
    damage(&workshop.path().join("run/checkpoints/step-00000010/model.safetensors"));

    let output = command(&workshop, &["checkpoint", "verify", "run"]).output().unwrap();
    assert_eq!(output.status.code(), Some(5));
    assert!(String::from_utf8_lossy(&output.stdout).contains("step-00000005  intact"));
    assert!(String::from_utf8_lossy(&output.stderr).contains("step-00000010"));

    let output = command(&workshop, &["generate", "--experiment", "run", "--prompt", "the"]).output().unwrap();
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("step-00000010"), "what was passed over is named");
    let generate = ["generate", "--checkpoint", "run/checkpoints/step-00000010", "--prompt", "the"];
    assert_eq!(command(&workshop, &generate).output().unwrap().status.code(), Some(5));
}

#[test]
fn what_a_run_was_trained_on_is_proven_and_made_again() {
    let workshop = Workshop::new();
    let config = workshop.run_directory("run").join("training.yaml");
    let epochs = ["scheduler.total_steps=null", "scheduler.total_epochs=2", "scheduler.strategy=constant"];
    let overrides = epochs.iter().flat_map(|value| ["--override", value]);
    succeeds(
        &workshop,
        &["train", "--config", config.to_str().unwrap()].into_iter().chain(overrides).collect::<Vec<_>>(),
    );
    let report = answer(&workshop, &["validate-data", "run", "--replay", "3", "--json"]);
    assert_eq!((&report["problems"], &report["replayed"]), (&serde_json::json!([]), &serde_json::json!([3])));
    let epochs = report["components"][0]["epochs"].as_array().unwrap();
    assert_eq!(epochs.len(), 2);
    assert!(epochs.iter().all(|epoch| epoch["finished"] == true && epoch["documents"] == epochs[0]["documents"]));
    let text = succeeds(&workshop, &["validate-data", "run"]);
    assert_eq!(text.matches("every document used exactly once").count(), 2, "{text}");

    let ledger = workshop.path().join("run/ledger.jsonl");
    damage(&ledger);
    let output = command(&workshop, &["validate-data", "run"]).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains("ledger.jsonl"));
}

#[test]
fn a_lost_ledger_restarts_and_is_reported() {
    let workshop = trained();
    let ledger = workshop.path().join("run/ledger.jsonl");
    fs::remove_file(&ledger).unwrap();
    let output = command(&workshop, &["validate-data", "run"]).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let config = workshop.run_directory("run").join("training.yaml");
    let more = ["train", "--config", config.to_str().unwrap(), "--resume", "--override", "scheduler.total_steps=14"];
    let output = command(&workshop, &more).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    assert!(String::from_utf8_lossy(&text).contains("restarts at step 10"), "{}", String::from_utf8_lossy(&text));
    let report = answer(&workshop, &["validate-data", "run", "--json"]);
    assert_eq!((&report["steps"], &report["problems"]), (&serde_json::json!(4), &serde_json::json!([])));
}

#[test]
fn bench_measures_a_config_that_has_no_data() {
    let workshop = Workshop::new();
    let config = "model: {vocab_size: 300, hidden_size: 32, intermediate_size: 48, num_layers: 1, \
                  num_attention_heads: 4}\ndata: {sequence_length: 16, batch_size: 2, gradient_accumulation_steps: 2}\n\
                  scheduler: {total_steps: 10}\n";
    fs::write(workshop.path().join("bench.yaml"), config).unwrap();
    let report = answer(&workshop, &["bench", "--json", "--config", "bench.yaml", "--steps", "2", "--device", "cpu"]);
    assert_eq!(report["device"], "cpu");
    for key in ["tokens_per_second", "model_flops_per_second", "memory_bytes"] {
        assert!(report[key].as_f64().unwrap() > 0.0, "{key}");
    }
    for of_a_gpu in ["mfu", "mfu_measured", "product_flops_per_second", "memory_used_bytes"] {
        assert!(report[of_a_gpu].is_null(), "{of_a_gpu}");
    }
    let milliseconds = |part: &str| report["milliseconds"][part].as_f64().unwrap();
    let parts = ["attention", "gemm", "head_and_loss", "norm_and_pointwise", "optimizer"];
    for part in parts {
        assert!(milliseconds(part) > 0.0, "{part}");
    }
    let sum: f64 = parts.into_iter().chain(["other"]).map(milliseconds).sum();
    assert!((sum - milliseconds("step")).abs() < 1e-6);
    let (flops, tokens) = (report["model_flops_per_second"].as_f64(), report["tokens_per_second"].as_f64());
    let per_token = report["model_flops_per_token"].as_f64().unwrap();
    assert!((flops.unwrap() / tokens.unwrap() / per_token - 1.0).abs() < 1e-9);
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let workshop = trained();
    let ask = ["generate", "--experiment", "run", "--prompt", "the", "--max-tokens", "200", "--temperature", "1"];
    let mut child = command(&workshop, &ask).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
