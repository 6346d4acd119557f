//! Evaluations during training: their samples, and early stopping.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::Workshop;
use training::{
    TrainerError,
    memory_plan::MemoryPlan,
    progress::ProgressMode,
    run::{RunOutcome, run_training},
    run_options::{ResumeFrom, RunOptions},
    stop::StopSignal,
    trainer::Trainer,
};

fn options(resume: bool, max_steps: Option<u64>) -> RunOptions {
    let resume = resume.then_some(ResumeFrom::Latest);
    RunOptions { resume, max_steps, progress: ProgressMode::Silent, ..RunOptions::default() }
}

fn train(workshop: &Workshop, name: &str, overrides: &[&str], options: &RunOptions) -> RunOutcome {
    run_training(workshop.run(name, overrides), options, &StopSignal::new()).unwrap()
}

/// Returns the metrics that do not depend on time: evaluations, samples and the reason for the end.
fn lines(workshop: &Workshop, name: &str) -> Vec<Value> {
    ["evaluation", "sample", "end"].iter().flat_map(|kind| workshop.metrics(name, kind)).collect()
}

const PROMPTS: [&str; 3] = [
    r#"runtime.evaluation.prompts=["the cat", "the owl sees \"the"]"#,
    "runtime.evaluation.prompt_tokens=12",
    "runtime.evaluation.every_n_steps=2",
];

#[test]
fn each_evaluation_continues_the_prompts() {
    let workshop = Workshop::new();
    train(
        &workshop,
        "run",
        &[&PROMPTS[..], &["scheduler.total_steps=60", "runtime.evaluation.every_n_steps=30"]].concat(),
        &options(false, None),
    );
    let samples = workshop.metrics("run", "sample");
    let of: Vec<_> =
        samples.iter().map(|line| (line["step"].as_u64().unwrap(), line["prompt"].as_str().unwrap())).collect();
    assert_eq!(of, [(30, "the cat"), (30, "the owl sees \"the"), (60, "the cat"), (60, "the owl sees \"the")]);
    assert!(samples.iter().all(|line| !line["text"].as_str().unwrap().is_empty()));
    assert_ne!(samples[0]["text"], samples[2]["text"], "other weights write another text");
}

#[test]
fn samples_change_no_weight_and_are_in_the_plan() {
    let workshop = Workshop::new();
    train(&workshop, "with", &PROMPTS, &options(false, None));
    train(&workshop, "without", &PROMPTS[2..], &options(false, None));
    for file in ["model.safetensors", "optimizer.safetensors"] {
        assert!(workshop.saved("with", 10, file) == workshop.saved("without", 10, file), "{file}");
    }
    let bytes = |overrides: &[&str]| MemoryPlan::new(&workshop.run("planned", overrides)).unwrap().bytes;
    let cache = 2 * 2 * (16 + 12 + "the owl sees \"the".len() as u64) * 16 * 4;
    assert!(bytes(&PROMPTS) > bytes(&PROMPTS[2..]) + cache, "keys and values of two layers, and more");
}

#[test]
fn a_resumed_run_writes_the_samples_of_an_uninterrupted_one() {
    let workshop = Workshop::new();
    for precision in ["fp32", "bf16"] {
        let precision_key = format!("runtime.precision={precision}");
        let overrides = [&PROMPTS[..], &[&precision_key]].concat();
        let [straight, resumed] = ["straight", "resumed"].map(|way| format!("{way}-{precision}"));
        train(&workshop, &straight, &overrides, &options(false, None));
        train(&workshop, &resumed, &overrides, &options(false, Some(3)));
        assert_eq!(workshop.metrics(&resumed, "end").len(), 1);
        train(&workshop, &resumed, &overrides, &options(true, Some(6)));
        train(&workshop, &resumed, &overrides, &options(true, None));
        assert_eq!(lines(&workshop, &straight), lines(&workshop, &resumed));
        assert_eq!(workshop.metrics(&straight, "end")[0]["reason"], "all steps are done");
    }
}

#[test]
fn the_same_weights_write_the_same_text() {
    let workshop = Workshop::new();
    let mut trainer = Trainer::new(workshop.run("run", &PROMPTS)).unwrap();
    trainer.step().unwrap();
    let [first, second] = [(), ()].map(|()| trainer.evaluate().unwrap().unwrap());
    assert_eq!(first.samples.len(), 2);
    assert_eq!(first.samples, second.samples);
}

#[test]
fn a_prompt_without_room_behind_it_is_refused() {
    let workshop = Workshop::new();
    let long = format!("runtime.evaluation.prompts=[\"the\", \"{}\"]", "the cat ".repeat(20));
    let error = Trainer::new(workshop.run("run", &[&long])).err().unwrap();
    assert!(matches!(error, TrainerError::Request(_)), "{error}");
    assert_eq!(error.exit_code(), 2);
    let message = error.to_string();
    assert!(message.starts_with("runtime.evaluation.prompts[1] has ") && message.contains("shorten it"), "{message}");
    assert!(!workshop.path().join("run/metrics.jsonl").exists());
}

/// Overrides with a learning rate at which nothing is learnt: no evaluation improves by 0.1.
const STALLED: [&str; 5] = [
    "optimizer.learning_rate=1e-9",
    "scheduler.min_lr=0",
    "scheduler.total_steps=40",
    "runtime.evaluation.every_n_steps=4",
    "runtime.evaluation.min_delta=0.1",
];

#[test]
fn patience_ends_a_run_that_stopped_improving() {
    let workshop = Workshop::new();
    let overrides = [&STALLED[..], &["runtime.evaluation.patience=3"]].concat();
    let outcome = train(&workshop, "run", &overrides, &options(false, None));
    assert_eq!((outcome, outcome.exit_code()), (RunOutcome::Finished, 0));
    assert_eq!(workshop.metrics("run", "train").len(), 16, "the first evaluation and three more");
    assert_eq!(workshop.checkpoints("run").last().unwrap(), "step-00000016");
    let reason = workshop.metrics("run", "end")[0]["reason"].as_str().unwrap().to_owned();
    assert!(reason.starts_with("evaluation has not improved by at least 0.1 for 3 evaluations (best 5."), "{reason}");
    assert!(reason.ends_with(" at step 4)"), "{reason}");

    let lines_before = lines(&workshop, "run");
    train(&workshop, "run", &overrides, &options(true, None));
    assert_eq!(lines(&workshop, "run"), lines_before, "there is nothing left to do");
    train(&workshop, "run", &[&STALLED[..], &["runtime.evaluation.patience=4"]].concat(), &options(true, None));
    assert_eq!(workshop.metrics("run", "train").len(), 20, "one more evaluation");
}

#[test]
fn a_run_that_improves_is_not_ended() {
    let workshop = Workshop::new();
    let overrides = ["runtime.evaluation.every_n_steps=2", "runtime.evaluation.patience=1", "scheduler.total_steps=10"];
    train(&workshop, "run", &overrides, &options(false, None));
    assert_eq!(workshop.metrics("run", "train").len(), 10);
    assert_eq!(workshop.metrics("run", "end")[0]["reason"], "all steps are done");
}

#[test]
fn the_count_of_patience_survives_resuming() {
    let workshop = Workshop::new();
    let overrides = [&STALLED[..], &["runtime.evaluation.patience=3"]].concat();
    train(&workshop, "straight", &overrides, &options(false, None));
    for stop in [5, 9, 13] {
        train(&workshop, "resumed", &overrides, &options(stop > 5, Some(stop)));
    }
    train(&workshop, "resumed", &overrides, &options(true, None));
    assert_eq!(lines(&workshop, "straight"), lines(&workshop, "resumed"));
    for file in ["model.safetensors", "trainer_state.json"] {
        assert!(workshop.saved("straight", 16, file) == workshop.saved("resumed", 16, file), "{file}");
    }
}

#[test]
fn patience_given_on_resume_counts_from_the_best_evaluation() {
    let workshop = Workshop::new();
    let flat = [&STALLED[..4], &["optimizer.weight_decay=0"]].concat();
    train(&workshop, "run", &flat, &options(false, Some(12)));
    let state: Value = serde_json::from_slice(&workshop.saved("run", 12, "trainer_state.json")).unwrap();
    assert_eq!(state.get("improvement"), None);
    let best = state["best"]["step"].as_u64().unwrap();
    train(&workshop, "run", &[&STALLED[..], &["runtime.evaluation.patience=2"]].concat(), &options(true, None));
    let evaluations: Vec<u64> =
        workshop.metrics("run", "evaluation").iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(*evaluations.last().unwrap(), (best + 8).max(12));
}
