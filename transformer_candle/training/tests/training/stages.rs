//! Stages: each computes what a run of its shape does, and a stop anywhere around a boundary changes nothing.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::{Value, json};
use training::{
    commands::validate_data::{self, ValidateDataOptions},
    memory_plan::MemoryPlan,
    run::run_training,
    run_options::RunOptions,
    stop::StopSignal,
};

use super::{QUIET, altered_state::alter_state, resume, support::Workshop, train};

/// Three stages in ten steps, whose boundaries are in the middle of windows.
const THREE: &str = "stages=[{steps: 4, sequence_length: 16, sequences_per_step: 8, batch_size: 2}, \
                     {steps: 3, sequence_length: 64, sequences_per_step: 3, batch_size: 1, learning_rate: 2.0e-3}, \
                     {steps: 3}]";

/// Returns the files and metrics of a run that depend on its data: the last checkpoint, ledger, losses and stages.
fn left_behind(workshop: &Workshop, name: &str) -> BTreeMap<String, Vec<u8>> {
    let run = workshop.path().join(name);
    let last = workshop.checkpoints(name).pop().unwrap();
    let mut files: BTreeMap<String, Vec<u8>> = ["model.safetensors", "optimizer.safetensors", "trainer_state.json"]
        .map(|file| (file.to_owned(), fs::read(run.join("checkpoints").join(&last).join(file)).unwrap()))
        .into();
    files.insert("ledger".to_owned(), fs::read(run.join("ledger.jsonl")).unwrap());
    for kind in ["train", "evaluation"] {
        files.insert(kind.to_owned(), format!("{:?}", workshop.losses(name, kind)).into_bytes());
    }
    files.insert("stages".to_owned(), format!("{:?}", workshop.metrics(name, "stage")).into_bytes());
    files
}

fn assert_same(workshop: &Workshop, one: &str, other: &str) {
    let (one_files, other_files) = (left_behind(workshop, one), left_behind(workshop, other));
    for (file, bytes) in &one_files {
        assert!(*bytes == other_files[file], "{file} of {one} and {other}");
    }
}

fn validated(workshop: &Workshop, name: &str, replay: &[u64]) -> validate_data::DataReport {
    let options = ValidateDataOptions { run: Some(workshop.path().join(name)), replay: replay.to_vec(), json: false };
    validate_data::run(&options, &dataset::hub::HubSettings::from_environment(), &StopSignal::new()).unwrap()
}

#[test]
fn a_staged_run_resumes_bitwise_from_every_step() {
    let workshop = Workshop::new();
    let every = ["runtime.evaluation.every_n_steps=2", "runtime.checkpoint.every_n_steps=100"];
    for (precision, packing) in [("fp32", "concat"), ("bf16", "documents")] {
        let settings = [format!("runtime.precision={precision}"), format!("data.packing={packing}")];
        let overrides: Vec<&str> = settings.iter().map(String::as_str).chain([THREE]).chain(every).collect();
        let straight = format!("straight-{precision}");
        train(&workshop, &straight, &overrides, &QUIET);
        for kill in 1..10 {
            let killed = format!("killed-{precision}-{kill}");
            train(&workshop, &killed, &overrides, &RunOptions { max_steps: Some(kill), ..QUIET });
            train(&workshop, &killed, &overrides, &resume(None));
            assert_same(&workshop, &straight, &killed);
        }
        let often = format!("killed-{precision}-often");
        train(&workshop, &often, &overrides, &RunOptions { max_steps: Some(3), ..QUIET });
        for step in 4..10 {
            train(&workshop, &often, &overrides, &resume(Some(step)));
        }
        train(&workshop, &often, &overrides, &resume(None));
        assert_same(&workshop, &straight, &often);
    }
}

#[test]
fn stages_are_reported_and_their_data_is_proven() {
    let workshop = Workshop::new();
    train(&workshop, "run", &[THREE], &QUIET);
    let keys = ["step", "stage", "sequence_length", "sequences_per_step"];
    let stages: Vec<Vec<u64>> = workshop
        .metrics("run", "stage")
        .iter()
        .map(|line| keys.iter().map(|key| line[key].as_u64().unwrap()).collect())
        .collect();
    assert_eq!(stages, [[1, 0, 16, 8], [5, 1, 64, 3], [8, 2, 32, 8]]);
    let report = validated(&workshop, "run", &[1, 4, 5, 7, 8, 10]);
    assert_eq!(report.problems, [""; 0]);
    assert_eq!(report.replayed.len(), 6);
    let left_out: u64 =
        workshop.metrics("run", "stage").iter().map(|line| line["left_out_sequences"].as_u64().unwrap()).sum();
    assert!(left_out > 0);
    assert_eq!(report.components[0].audited.left_out, left_out);
    assert!(report.to_string().contains(&format!("{left_out} sequences left out")), "{report}");

    let rates: Vec<f64> =
        workshop.metrics("run", "train").iter().map(|line| line["learning_rate"].as_f64().unwrap()).collect();
    train(&workshop, "plain", &[], &QUIET);
    let plain: Vec<f64> =
        workshop.metrics("plain", "train").iter().map(|line| line["learning_rate"].as_f64().unwrap()).collect();
    for (step, (rate, plain)) in (1..).zip(rates.iter().zip(&plain)) {
        let scale = if (5..8).contains(&step) { 0.4 } else { 1.0 };
        assert!((rate - scale * plain).abs() < 1e-12, "step {step}: {rate} {plain}");
    }
    let config: Value = serde_json::from_slice(&workshop.saved("run", 10, "config.json")).unwrap();
    assert_eq!(config["max_position_embeddings"], 64, "that of the longest stage");
}

#[test]
fn one_stage_is_the_run_without_stages() {
    let workshop = Workshop::new();
    train(&workshop, "plain", &[], &QUIET);
    train(&workshop, "staged", &["stages=[{steps: 10}]"], &QUIET);
    for file in ["model.safetensors", "optimizer.safetensors", "config.json"] {
        assert!(workshop.saved("plain", 10, file) == workshop.saved("staged", 10, file), "{file}");
    }
    for kind in ["train", "evaluation"] {
        assert_eq!(workshop.losses("plain", kind), workshop.losses("staged", kind));
    }
    let ledger = |name: &str| fs::read(workshop.path().join(name).join("ledger.jsonl")).unwrap();
    assert_eq!(ledger("plain"), ledger("staged"));
}

/// Turns a checkpoint of a stage into one of a run without stages, at the same weights and the same cursor.
fn unstage(checkpoint: &Path, sequence_length: u64) {
    alter_state(checkpoint, |state| {
        let fields = state.as_object_mut().unwrap();
        let stage = usize::try_from(fields["stage"].as_u64().unwrap()).unwrap();
        let execution = fields["execution"]["stages"][stage].clone();
        fields.remove("stage");
        fields.remove("ledger");
        fields["execution"].as_object_mut().unwrap().remove("stages");
        for (key, value) in execution.as_object().unwrap() {
            fields["execution"][key] = value.clone();
        }
        let identity = fields["identity"].as_object_mut().unwrap();
        identity.retain(|key, _| !key.starts_with("stages"));
        identity["data.sequence_length"] = json!(sequence_length);
    });
}

#[test]
fn a_stage_computes_what_a_run_of_its_shape_does() {
    let workshop = Workshop::new();
    let overrides = [THREE, "runtime.evaluation.every_n_steps=null", "runtime.checkpoint.every_n_steps=1"];
    train(&workshop, "staged", &overrides, &RunOptions { max_steps: Some(5), ..QUIET });
    let checkpoint = |name: &str| workshop.run_directory(name).join("checkpoints/step-00000005");
    fs::create_dir_all(checkpoint("alone").parent().unwrap()).unwrap();
    let exit_status =
        std::process::Command::new("cp").arg("-r").arg(checkpoint("staged")).arg(checkpoint("alone")).status();
    assert!(exit_status.unwrap().success());
    unstage(&checkpoint("alone"), 64);
    train(&workshop, "staged", &overrides, &resume(Some(7)));
    let alone = [
        "data.sequence_length=64",
        "data.sequences_per_step=3",
        "data.batch_size=1",
        "optimizer.learning_rate=2.0e-3",
        "scheduler.min_lr=2.0e-4",
        "runtime.evaluation.every_n_steps=null",
        "runtime.checkpoint.every_n_steps=1",
    ];
    train(&workshop, "alone", &alone, &resume(Some(7)));
    assert_eq!(workshop.losses("staged", "train")[5..], workshop.losses("alone", "train")[..]);
    for file in ["model.safetensors", "optimizer.safetensors"] {
        assert!(workshop.saved("staged", 7, file) == workshop.saved("alone", 7, file), "{file}");
    }
}

#[test]
fn a_stage_may_wait_for_the_end_of_the_window() {
    let workshop = Workshop::new();
    let waiting = "stages=[{steps: 3, sequence_length: 16}, {steps: 9, at: window_end, sequence_length: 64, \
                   sequences_per_step: 4, batch_size: 2}]";
    let overrides = [waiting, "scheduler.total_steps=12", "runtime.checkpoint.every_n_steps=100"];
    train(&workshop, "straight", &overrides, &QUIET);
    let stages = workshop.metrics("straight", "stage");
    let begins = stages[1]["step"].as_u64().unwrap();
    assert!(begins > 4 && begins <= 12, "the window in use after step 3 lasts longer: {begins}");
    assert_eq!(stages[1]["left_out_sequences"], 0);
    assert_eq!(workshop.losses("straight", "train").len(), 12);
    let report = validated(&workshop, "straight", &[begins - 1, begins]);
    assert_eq!((report.problems.as_slice(), report.components[0].audited.left_out), (&[][..], 0));
    for kill in [2, 3, 4, begins - 2, begins - 1, begins, 11] {
        let killed = format!("killed-{kill}");
        train(&workshop, &killed, &overrides, &RunOptions { max_steps: Some(kill), ..QUIET });
        train(&workshop, &killed, &overrides, &resume(None));
        assert_same(&workshop, "straight", &killed);
    }
}

#[test]
fn a_stage_that_a_window_outlasts_is_passed_over() {
    let workshop = Workshop::new();
    let stages = "stages=[{steps: 1, sequence_length: 16, sequences_per_step: 1, batch_size: 1}, \
                  {steps: 1, at: window_end, sequence_length: 48}, {steps: 8, at: window_end}]";
    train(&workshop, "run", &[stages], &QUIET);
    let stages: Vec<u64> =
        workshop.metrics("run", "stage").iter().map(|line| line["stage"].as_u64().unwrap()).collect();
    assert_eq!(stages, [0], "the window has more than ten sequences of 16 tokens");
    assert_eq!(workshop.losses("run", "train").len(), 10);
}

#[test]
fn stages_may_weigh_the_sources_of_a_mixture() {
    let workshop = Workshop::new();
    let [no_shards, mixture] = workshop.mixture();
    let named_mixture =
        mixture.replacen("{shards", "{name: large, shards", 1).replacen(", {shards", ", {name: small, shards", 1);
    let stages = "stages=[{steps: 5}, {steps: 5, sequence_length: 16, mixture: [{source: small, weight: 9.0}]}]";
    let overrides = [&*no_shards, &*named_mixture, stages, "runtime.checkpoint.every_n_steps=100"];
    train(&workshop, "straight", &overrides, &QUIET);
    let report = validated(&workshop, "straight", &[5, 6, 10]);
    assert_eq!(report.problems, [""; 0]);
    let sequences: Vec<u64> = report.components.iter().map(|component| component.audited.sequences).collect();
    assert_eq!(sequences, [30 + 10, 10 + 30]);
    let shares: Vec<f64> = report.components.iter().map(|component| component.share).collect();
    assert!((shares[0] - 0.5).abs() < 1e-9 && (shares[1] - 0.5).abs() < 1e-9, "{shares:?}");
    for kill in [4, 5, 6] {
        let killed = format!("killed-{kill}");
        train(&workshop, &killed, &overrides, &RunOptions { max_steps: Some(kill), ..QUIET });
        train(&workshop, &killed, &overrides, &resume(None));
        assert_same(&workshop, "straight", &killed);
    }
}

#[test]
fn changing_stages_on_resume_is_refused_by_key() {
    let workshop = Workshop::new();
    train(&workshop, "run", &[THREE], &RunOptions { max_steps: Some(5), ..QUIET });
    let refused = |overrides: &[&str]| {
        let error = run_training(workshop.run("run", overrides), &resume(None), &StopSignal::new()).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{error}");
        error.to_string()
    };
    for (from, to, message) in [
        ("steps: 4", "steps: 5", "stages[0].steps was 4 and is 5"),
        ("sequence_length: 64", "sequence_length: 48", "stages[1].sequence_length was 64 and is 48"),
        ("sequences_per_step: 3", "sequences_per_step: 4", "stages[1].sequences_per_step was 3 and is 4"),
        ("batch_size: 1", "batch_size: 3", "stages[1].batch_size was 1 and is 3"),
        ("{steps: 3}]", "{steps: 3, at: window_end}]", r#"stages[2].at was "next_window" and is "window_end""#),
        (", {steps: 3}]", "]", "stages[2]"),
    ] {
        let stages = THREE.replace(from, to);
        assert_ne!(stages, THREE);
        let error = refused(&[&stages, "scheduler.total_steps=null", "model.max_position_embeddings=64"]);
        assert!(error.contains(message), "{message}: {error}");
    }
    let error = refused(&["model.max_position_embeddings=64"]);
    assert!(error.contains("stages[0].steps was 4 and is null"), "{error}");
    let longer = THREE.replace("learning_rate: 2.0e-3", "learning_rate: 1.0e-3").replace("{steps: 3}]", "{steps: 4}]");
    train(&workshop, "run", &[&longer, "scheduler.total_steps=11"], &resume(None));
    assert_eq!(workshop.losses("run", "train").len(), 11);
}

#[test]
fn the_best_checkpoint_is_one_of_the_last_stage() {
    let workshop = Workshop::new();
    // Nothing is learnt in the last stage, and its held-out loss is higher than in the one before.
    let stages = "stages=[{steps: 20, sequence_length: 64}, {steps: 10, sequence_length: 2, learning_rate: 1.0e-9}]";
    let overrides =
        [stages, "scheduler.total_steps=30", "runtime.evaluation.patience=1", "runtime.evaluation.best.max_keep=1"];
    train(&workshop, "run", &overrides, &QUIET);
    assert_eq!(workshop.losses("run", "train").len(), 30, "patience ends the last stage only");
    let evaluations = workshop.metrics("run", "evaluation");
    let losses: Vec<f64> = evaluations.iter().map(|line| line["loss"].as_f64().unwrap()).collect();
    assert!(losses[3] < losses[5], "{losses:?}");
    let best = fs::read_link(workshop.path().join("run/checkpoints/best")).unwrap();
    assert!(["step-00000025", "step-00000030"].contains(&best.to_str().unwrap()), "{best:?}");
}

#[test]
fn memory_is_that_of_the_largest_stage() {
    let workshop = Workshop::new();
    let bytes = |overrides: &[&str]| MemoryPlan::new(&workshop.run("plan", overrides)).unwrap().bytes;
    let positions = "model.max_position_embeddings=64";
    let large = bytes(&[positions, "data.sequence_length=64", "data.batch_size=8"]);
    let stages =
        "stages=[{steps: 5, sequence_length: 16, batch_size: 2}, {steps: 5, sequence_length: 64, batch_size: 8}]";
    assert_eq!(bytes(&[stages]), large);
    let plan = MemoryPlan::new(&workshop.run("plan", &[stages])).unwrap();
    assert_eq!((plan.stages.len(), plan.stages[1].bytes), (2, large));
    assert_eq!(plan.total_tokens, Some(5 * 8 * (16 + 64)));
    let mut trainer = training::trainer::Trainer::new(workshop.run("run", &[stages])).unwrap();
    while let Some(report) = trainer.step().unwrap() {
        assert_eq!(report.memory_bytes, large);
    }
    let error = MemoryPlan::new(&workshop.run("plan", &[stages, &format!("runtime.memory_limit={}B", large - 1)]));
    let error = error.unwrap().check().unwrap_err();
    assert_eq!(error.exit_code(), 4);
    assert!(error.to_string().contains("stages[1].batch_size=8"), "{error}");
    assert!(error.to_string().contains("stages[1].batch_size=4"), "{error}");
}

#[test]
fn auto_finds_a_micro_batch_for_each_stage_and_keeps_it() {
    let workshop = Workshop::new();
    let stages =
        "stages=[{steps: 5, sequence_length: 16, batch_size: auto}, {steps: 5, sequence_length: 64, batch_size: auto}]";
    let micro_batches = |overrides: &[&str]| -> Vec<u64> {
        let plan = MemoryPlan::new(&workshop.run("plan", overrides)).unwrap();
        plan.stages.iter().map(|stage| stage.micro_batch).collect()
    };
    assert_eq!(micro_batches(&[stages]), [8, 8]);
    let fixed = stages.replacen("batch_size: auto", "batch_size: 8", 1).replace("batch_size: auto", "batch_size: 2");
    let bytes = MemoryPlan::new(&workshop.run("plan", &[&fixed])).unwrap().bytes;
    let tight = format!("runtime.memory_limit={bytes}B");
    assert_eq!(micro_batches(&[stages, &tight]), [8, 2]);
    train(&workshop, "straight", &[stages, &tight], &QUIET);
    train(&workshop, "resumed", &[stages, &tight], &RunOptions { max_steps: Some(3), ..QUIET });
    train(&workshop, "resumed", &[stages], &resume(None));
    assert_same(&workshop, "straight", "resumed");
}

#[test]
fn a_stage_longer_than_a_window_is_refused_before_step_1() {
    let workshop = Workshop::new();
    let stages = "stages=[{steps: 5}, {steps: 5, sequence_length: 65536, sequences_per_step: 1, batch_size: 1}]";
    let error = run_training(workshop.run("run", &[stages]), &QUIET, &StopSignal::new()).unwrap_err();
    assert_eq!(error.exit_code(), 2, "{error}");
    let text = error.to_string();
    assert!(text.contains("stages[1].sequence_length") && text.contains("data.shuffle_buffer_size"), "{text}");
    assert!(!workshop.path().join("run/checkpoints/latest").exists());
}
