//! Training as a whole, on local text: it learns, repeats bit for bit, and resumes.

#![allow(clippy::unwrap_used)]

mod altered_state;
mod ranks;
mod resume;
mod stages;
#[path = "../support/mod.rs"]
mod support;

use std::fs;

use support::Workshop;
use training::{
    TrainerError,
    progress::ProgressMode,
    ranks::Ranks,
    run::{RunOutcome, run_training},
    run_options::{ResumeFrom, RunOptions},
    stop::{StopReason, StopSignal},
    trainer::Trainer,
};

const QUIET: RunOptions = RunOptions {
    resume: None,
    rebatch: false,
    accept_changed_data: false,
    lock: None,
    max_steps: None,
    device: None,
    profile: None,
    progress: ProgressMode::Silent,
    ranks: Ranks::ONE,
};

fn train(workshop: &Workshop, name: &str, overrides: &[&str], options: &RunOptions) -> RunOutcome {
    run_training(workshop.run(name, overrides), options, &StopSignal::new()).unwrap()
}

fn resume(max_steps: Option<u64>) -> RunOptions {
    RunOptions { resume: Some(ResumeFrom::Latest), max_steps, ..QUIET }
}

#[test]
fn the_loss_falls_below_the_unigram_entropy() {
    let workshop = Workshop::new();
    let outcome = train(&workshop, "run", &["scheduler.total_steps=60", "runtime.evaluation.every_n_steps=20"], &QUIET);
    assert_eq!(outcome, RunOutcome::Finished);
    let losses: Vec<f64> = workshop.metrics("run", "train").iter().map(|line| line["loss"].as_f64().unwrap()).collect();
    assert_eq!(losses.len(), 60);
    let uniform = 260_f64.ln();
    assert!((losses[0] - uniform).abs() < 0.2, "an untrained model knows nothing: {}", losses[0]);
    assert!(losses[59] < 2.0, "and a trained one the pattern: {}", losses[59]);
    let evaluations = workshop.metrics("run", "evaluation");
    assert_eq!(evaluations.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [20, 40, 60]);
    let last = &evaluations[2];
    let (loss, bits) = (last["loss"].as_f64().unwrap(), last["bits_per_byte"].as_f64().unwrap());
    assert!(loss < 2.0 && (last["perplexity"].as_f64().unwrap() - loss.exp()).abs() < 1e-9);
    assert!(bits < loss / std::f64::consts::LN_2, "a token stands for at least a byte, some for more: {bits}");
}

#[test]
fn document_packing_keeps_targets_and_changes_losses() {
    let workshop = Workshop::new();
    for packing in ["concat", "documents"] {
        train(&workshop, packing, &[&format!("data.packing={packing}")], &QUIET);
    }
    let ledger = |name: &str| -> Vec<serde_json::Value> {
        let text = fs::read_to_string(workshop.path().join(name).join("ledger.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let of_kind = |name: &str, kind: &str, keys: &[&str]| -> Vec<Vec<serde_json::Value>> {
        let lines = ledger(name).into_iter().filter(|line| line["kind"] == kind);
        lines.map(|line| keys.iter().map(|key| line[key].clone()).collect()).collect()
    };
    for (kind, keys) in [("window", ["targets", "sequences"]), ("step", ["targets", "batch"])] {
        let lines = of_kind("concat", kind, &keys);
        assert!(lines.iter().flatten().all(|value| !value.is_null()), "{lines:?}");
        assert_eq!(lines, of_kind("documents", kind, &keys));
    }
    for kind in ["train", "evaluation"] {
        let tokens = |name: &str| workshop.metrics(name, kind).last().unwrap()["tokens"].as_u64().unwrap();
        assert_eq!(tokens("concat"), tokens("documents"), "{kind}");
        assert_ne!(workshop.losses("concat", kind), workshop.losses("documents", kind));
    }
}

#[test]
fn a_z_loss_changes_weights_and_not_the_reported_loss() {
    let workshop = Workshop::new();
    train(&workshop, "without", &[], &QUIET);
    train(&workshop, "with", &["optimizer.z_loss=0.1"], &QUIET);
    let (without, with) = (workshop.losses("without", "train"), workshop.losses("with", "train"));
    assert_eq!(without[0], with[0]);
    assert_ne!(without[9], with[9]);
    let initial = 260_f64.ln();
    assert!(with.iter().all(|(_, loss)| loss.parse::<f64>().unwrap() < initial + 0.2), "{with:?}");
}

#[test]
fn muon_learns_and_another_algorithm_is_refused_on_resume() {
    let workshop = Workshop::new();
    let muon = ["optimizer.algorithm=muon", "scheduler.total_steps=60"];
    train(&workshop, "run", &muon, &QUIET);
    let last = workshop.metrics("run", "train")[59]["loss"].as_f64().unwrap();
    assert!(last < 2.5, "an untrained model has 5.6: {last}");
    let refused = run_training(workshop.run("run", &["scheduler.total_steps=70"]), &resume(None), &StopSignal::new());
    let refused = refused.unwrap_err();
    assert_eq!(refused.exit_code(), 2);
    assert!(refused.to_string().contains("optimizer.algorithm"), "{refused}");
}

#[test]
fn results_do_not_depend_on_the_thread_count() {
    let workshop = Workshop::new();
    let weights: Vec<Vec<u8>> = ["1", "2", "4"]
        .map(|threads| {
            let name = format!("threads-{threads}");
            let (threads, workers) = (format!("runtime.threads={threads}"), format!("data.num_workers={threads}"));
            train(&workshop, &name, &[&threads, &workers], &QUIET);
            workshop.saved(&name, 10, "optimizer.safetensors")
        })
        .into();
    assert!(weights[0] == weights[1] && weights[0] == weights[2]);
    train(&workshop, "auto", &["data.num_workers=auto"], &QUIET);
    assert!(weights[0] == workshop.saved("auto", 10, "optimizer.safetensors"));
}

#[test]
fn the_micro_batch_size_changes_rounding_only() {
    let workshop = Workshop::new();
    let losses = ["1", "2", "8", "auto"].map(|micro_batch| {
        let name = format!("cut-{micro_batch}");
        train(&workshop, &name, &[&format!("data.batch_size={micro_batch}")], &QUIET);
        workshop.metrics(&name, "train").iter().map(|line| line["loss"].as_f64().unwrap()).collect::<Vec<_>>()
    });
    for other in &losses[1..] {
        for (step, (one, other)) in losses[0].iter().zip(other).enumerate() {
            assert!((one - other).abs() < 2e-5 * one, "step {}: {one} {other}", step + 1);
        }
    }
}

#[test]
fn a_signal_during_data_listing_ends_the_run_unsaved() {
    let workshop = Workshop::new();
    let stop = StopSignal::new();
    stop.request(StopReason::Terminate);
    let error = run_training(workshop.run("run", &[]), &QUIET, &stop).unwrap_err();
    assert!(error.is_interruption(), "{error}");
    assert!(!workshop.path().join("run/checkpoints/latest").exists());
    train(&workshop, "run", &[], &resume(Some(2)));
    assert_eq!(workshop.losses("run", "train").len(), 2);
}

#[test]
fn total_epochs_ends_the_run_with_its_data() {
    let workshop = Workshop::new();
    let overrides = ["scheduler.total_steps=null", "scheduler.total_epochs=1", "scheduler.strategy=constant"];
    fs::write(workshop.path().join("text.jsonl"), "{\"text\": \"the cat sees the dog.\"}\n".repeat(1500)).unwrap();
    train(&workshop, "run", &overrides, &QUIET);
    let lines = workshop.metrics("run", "train");
    let last = lines.last().unwrap();
    let checkpoints = workshop.checkpoints("run");
    assert_eq!(checkpoints.last().unwrap(), &format!("step-{:08}", last["step"].as_u64().unwrap()));
    let evaluated = workshop.losses("run", "evaluation");
    assert_eq!(evaluated.last().unwrap().0, last["step"].as_u64().unwrap());
    train(&workshop, "run", &overrides, &resume(None));
    assert_eq!(workshop.metrics("run", "train").len(), lines.len(), "there is nothing left to train on");
    assert_eq!(workshop.losses("run", "evaluation"), evaluated);
}

#[test]
fn a_second_trainer_in_the_same_directory_is_refused() {
    let workshop = Workshop::new();
    let first = Trainer::new(workshop.run("run", &[])).unwrap();
    let error = Trainer::new(workshop.run("run", &[])).err().unwrap();
    assert!(matches!(error, TrainerError::Locked { .. }), "{error}");
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
    drop(first);
    Trainer::new(workshop.run("run", &[])).unwrap();
}

#[test]
fn a_new_run_refuses_existing_checkpoints() {
    let workshop = Workshop::new();
    train(&workshop, "run", &[], &QUIET);
    let error = run_training(workshop.run("run", &[]), &QUIET, &StopSignal::new()).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains("--resume"), "{error}");
    assert_eq!(workshop.checkpoints("run"), ["step-00000005", "step-00000010"]);
}

#[test]
fn a_run_that_does_not_fit_writes_nothing() {
    let workshop = Workshop::new();
    let run = workshop.run("run", &["runtime.memory_limit=1MB"]);
    let directory = run.run_directory.clone();
    let error = Trainer::new(run).err().unwrap();
    assert_eq!(error.exit_code(), 4, "{error}");
    assert!(error.to_string().contains("runtime.memory_limit: 1MB"), "{error}");
    let files: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(files, ["training.yaml"]);
}

#[test]
fn a_manual_loop_has_the_losses_of_run_training() {
    let workshop = Workshop::new();
    train(&workshop, "loop", &[], &QUIET);
    let mut trainer = Trainer::new(workshop.run("hand", &[])).unwrap();
    let mut losses = Vec::new();
    while let Some(report) = trainer.step().unwrap() {
        losses.push((report.step, serde_json::to_string(&report.loss).unwrap()));
        assert_eq!(report.memory_bytes, trainer.memory_plan().bytes);
    }
    assert_eq!(losses, workshop.losses("loop", "train"));
    let evaluation = trainer.evaluate().unwrap().unwrap();
    let last = workshop.losses("loop", "evaluation").pop().unwrap();
    assert_eq!((evaluation.step, serde_json::to_string(&evaluation.loss).unwrap()), last);
    trainer.save().unwrap();
    assert!(workshop.saved("hand", 10, "model.safetensors") == workshop.saved("loop", 10, "model.safetensors"));
    let completion = trainer.generate("the cat", 8, &model::SamplingSettings::greedy()).unwrap();
    assert_eq!(completion.prompt, "the cat");
    assert!(!completion.tokens.is_empty() && completion.tokens.len() <= 8);
}

#[test]
fn divergence_exits_with_6_and_keeps_earlier_checkpoints() {
    let workshop = Workshop::new();
    let overrides = [
        "scheduler.total_steps=200",
        "scheduler.warmup_steps=100",
        "scheduler.strategy=constant",
        "optimizer.learning_rate=1.0",
        "optimizer.max_grad_norm=null",
        "runtime.divergence_guard.window_steps=3",
        "runtime.divergence_guard.max_loss_increase=0.5",
    ];
    let error = run_training(workshop.run("run", &overrides), &QUIET, &StopSignal::new()).unwrap_err();
    assert_eq!(error.exit_code(), 6, "{error}");
    assert!(error.to_string().contains("optimizer.learning_rate"), "{error}");
    let stopped_at = workshop.metrics("run", "train").len();
    assert!(!workshop.checkpoints("run").contains(&format!("step-{stopped_at:08}")));
}

#[test]
fn a_text_too_small_to_hold_out_is_not_evaluated() {
    let workshop = Workshop::new();
    fs::write(workshop.path().join("text.jsonl"), "{\"text\": \"the cat sees the dog.\"}\n").unwrap();
    train(&workshop, "run", &[], &QUIET);
    assert_eq!(workshop.losses("run", "train").len(), 10);
    assert!(workshop.losses("run", "evaluation").is_empty());
    let trainer = Trainer::resume(workshop.run("run", &[]), &ResumeFrom::Latest, false).unwrap();
    assert!(trainer.notes()[1].starts_with("nothing is evaluated: "), "{:?}", trainer.notes());
}

#[test]
fn a_trainer_is_send() {
    fn is_send<T: Send>() {}
    is_send::<Trainer>();
}

#[test]
fn the_resolved_config_reproduces_the_run() {
    let workshop = Workshop::new();
    let run = workshop.run("run", &["data.batch_size=auto", "runtime.device=auto"]);
    let trainer = Trainer::new(run).unwrap();
    let path = trainer.run().run_directory.join("resolved_config.json");
    let resolved = run_config::RunConfig::load(&path, &[]).unwrap();
    assert_eq!(resolved.config, trainer.run().config);
    let environment = fs::read_to_string(trainer.run().run_directory.join("environment.json")).unwrap();
    assert!(environment.contains("\"threads\": 2"));
}
