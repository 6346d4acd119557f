//! Resuming: it is bitwise exact, and some settings may change.

use std::{fs, path::Path, thread, time::Duration};

use serde_json::json;
use training::{
    memory_plan::MemoryPlan,
    run::{RunOutcome, run_training},
    run_options::{ResumeFrom, RunOptions},
    stop::{StopReason, StopSignal},
    trainer::Trainer,
};

use super::{QUIET, altered_state::alter_state, resume, support::Workshop, train};

#[test]
fn resuming_after_five_of_ten_steps_is_bit_exact() {
    let workshop = Workshop::new();
    let adamw =
        [("fp32", "concat"), ("bf16", "concat"), ("bf16", "documents"), ("fp8", "concat")].map(|case| (case, "adamw"));
    let muon = [("fp32", "concat"), ("bf16", "concat")].map(|case| (case, "muon"));
    for ((precision, packing), algorithm) in adamw.into_iter().chain(muon) {
        let settings = [
            format!("runtime.precision={precision}"),
            format!("data.packing={packing}"),
            format!("optimizer.algorithm={algorithm}"),
        ];
        let overrides = settings.each_ref().map(String::as_str);
        let [straight, resumed] = ["straight", "resumed"].map(|way| format!("{way}-{precision}-{packing}-{algorithm}"));
        train(&workshop, &straight, &overrides, &QUIET);
        train(&workshop, &resumed, &overrides, &RunOptions { max_steps: Some(5), ..QUIET });
        train(&workshop, &resumed, &overrides, &resume(None));
        for file in ["model.safetensors", "optimizer.safetensors", "trainer_state.json"] {
            assert!(workshop.saved(&straight, 10, file) == workshop.saved(&resumed, 10, file), "{straight} {file}");
        }
        for kind in ["train", "evaluation"] {
            assert_eq!(workshop.losses(&straight, kind), workshop.losses(&resumed, kind), "{straight}");
        }
        assert_eq!(workshop.losses(&straight, "train").len(), 10);
    }
}

#[test]
fn resuming_on_other_units_says_that_bits_may_differ() {
    let workshop = Workshop::new();
    for (precision, expected) in [("bf16", true), ("fp8", true), ("fp32", false)] {
        let precision = format!("runtime.precision={precision}");
        train(&workshop, &precision, &[&precision], &RunOptions { max_steps: Some(5), ..QUIET });
        let notes = || {
            let run = workshop.run(&precision, &[&precision]);
            Trainer::resume(run, &ResumeFrom::Latest, false).unwrap().notes().join("; ")
        };
        assert!(!notes().contains("round differently"), "{}", notes());
        let checkpoint = workshop.run_directory(&precision).join("checkpoints/step-00000005");
        alter_state(&checkpoint, |state| {
            assert_eq!(state.get("bf16_units").is_some(), expected, "{precision}");
            state["bf16_units"] = json!("units of another processor");
        });
        let note = notes();
        assert_eq!(note.contains("were computed with units of another processor, this"), expected, "{note}");
    }
}

#[test]
fn the_batch_warm_up_resumes_bitwise_within_it() {
    let workshop = Workshop::new();
    let overrides = [
        "data.batch_size=2",
        "data.sequences_per_step=8",
        "scheduler.batch_warmup_steps=8",
        "scheduler.batch_warmup_start=1",
    ];
    train(&workshop, "straight", &overrides, &QUIET);
    train(&workshop, "resumed", &overrides, &RunOptions { max_steps: Some(5), ..QUIET });
    train(&workshop, "resumed", &overrides, &resume(None));
    for file in ["model.safetensors", "optimizer.safetensors", "trainer_state.json"] {
        assert!(workshop.saved("straight", 10, file) == workshop.saved("resumed", 10, file), "{file}");
    }
    let metrics = workshop.metrics("straight", "train");
    let tokens: Vec<u64> = metrics.iter().map(|line| line["tokens"].as_u64().unwrap()).collect();
    // A window's last sequence may have fewer targets.
    let sequences = tokens.iter().scan(0, |last, &now| Some((now - std::mem::replace(last, now)).div_ceil(32)));
    assert_eq!(sequences.collect::<Vec<_>>(), [1, 1, 2, 3, 4, 5, 6, 7, 8, 8]);
}

#[test]
fn resuming_keeps_the_micro_batch_of_the_checkpoint() {
    let workshop = Workshop::new();
    let bytes_of = |micro_batch: &str| {
        let run = workshop.run("needed", &[&format!("data.batch_size={micro_batch}")]);
        MemoryPlan::new(&run).unwrap().bytes
    };
    let limit = |bytes: u64| format!("runtime.memory_limit={bytes}B");
    let (auto, tight) = ("data.batch_size=auto", limit(bytes_of("2")));
    train(&workshop, "straight", &[auto, &tight], &QUIET);
    train(&workshop, "resumed", &[auto, &tight], &RunOptions { max_steps: Some(5), ..QUIET });
    // With all memory `auto` alone would take the whole step at once.
    train(&workshop, "resumed", &[auto], &resume(None));
    for file in ["model.safetensors", "optimizer.safetensors", "trainer_state.json"] {
        assert!(workshop.saved("straight", 10, file) == workshop.saved("resumed", 10, file), "{file}");
    }

    let too_tight = limit(bytes_of("2") - 1);
    train(&workshop, "short", &[auto, &tight], &RunOptions { max_steps: Some(5), ..QUIET });
    let refused =
        run_training(workshop.run("short", &[auto, &too_tight]), &resume(None), &StopSignal::new()).unwrap_err();
    assert_eq!(refused.exit_code(), 4);
    assert!(refused.to_string().contains("--rebatch"), "{refused}");
    assert_eq!(workshop.checkpoints("short"), ["step-00000005"], "nothing was touched");
    train(&workshop, "short", &[auto, &too_tight], &RunOptions { rebatch: true, ..resume(None) });
    let [straight, rebatched] = ["straight", "short"].map(|name| workshop.metrics(name, "train"));
    for (one, other) in straight.iter().zip(&rebatched) {
        let [one, other] = [one, other].map(|line| line["loss"].as_f64().unwrap());
        assert!((one - other).abs() < 2e-5 * one, "{one} {other}");
    }
}

#[test]
fn changing_micro_batch_or_recompute_needs_rebatch() {
    let workshop = Workshop::new();
    train(&workshop, "run", &[], &RunOptions { max_steps: Some(5), ..QUIET });
    let refused = |overrides: &[&str], options: &RunOptions| {
        run_training(workshop.run("run", overrides), options, &StopSignal::new()).unwrap_err()
    };
    for (setting, message) in [
        ("data.batch_size=2", "data.batch_size was 4 and is 2"),
        ("runtime.activation_recompute=block", r#"runtime.activation_recompute was "selective" and is "block""#),
    ] {
        let error = refused(&[setting], &resume(None));
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(message) && error.to_string().contains("--rebatch"), "{error}");
        train(&workshop, "run", &[setting], &RunOptions { rebatch: true, ..resume(Some(6)) });
        fs::remove_dir_all(workshop.path().join("run/checkpoints/step-00000006")).unwrap();
    }
    assert_eq!(refused(&[], &RunOptions { rebatch: true, ..QUIET }).exit_code(), 2, "there is nothing to resume");
}

#[test]
fn sequences_per_step_may_change_on_resume() {
    let workshop = Workshop::new();
    train(&workshop, "run", &["data.batch_size=auto"], &RunOptions { max_steps: Some(5), ..QUIET });
    train(&workshop, "run", &["data.batch_size=auto", "data.sequences_per_step=16"], &resume(None));
    let tokens: Vec<u64> =
        workshop.metrics("run", "train").iter().map(|line| line["tokens"].as_u64().unwrap()).collect();
    assert!(tokens[9] - tokens[4] > 18 * (tokens[4] - tokens[0]) / 10, "steps are twice as large: {tokens:?}");
    let state: serde_json::Value = serde_json::from_slice(&workshop.saved("run", 10, "trainer_state.json")).unwrap();
    assert_eq!(state["execution"]["gradient_accumulation_steps"], 2);
}

#[test]
fn a_stopped_run_saves_and_resumes_bit_exactly() {
    let workshop = Workshop::new();
    let stop = StopSignal::new();
    let stop_copy = stop.clone();
    let run = workshop.run("stopped", &["scheduler.total_steps=400"]);
    let metrics = run.run_directory.join("metrics.jsonl");
    let raise = thread::spawn(move || {
        while fs::read_to_string(&metrics).map_or(0, |text| text.lines().count()) < 5 {
            thread::sleep(Duration::from_millis(1));
        }
        stop_copy.request(StopReason::Interrupt);
    });
    let outcome = run_training(run, &QUIET, &stop).unwrap();
    raise.join().unwrap();
    assert_eq!(outcome, RunOutcome::Stopped(StopReason::Interrupt));
    assert_eq!(outcome.exit_code(), 130);
    let reached = workshop.losses("stopped", "train").len() as u64;
    assert_eq!(workshop.checkpoints("stopped").last().unwrap(), &format!("step-{reached:08}"));

    train(&workshop, "stopped", &["scheduler.total_steps=400"], &resume(Some(reached + 7)));
    let options = RunOptions { max_steps: Some(reached + 7), ..QUIET };
    train(&workshop, "straight", &["scheduler.total_steps=400"], &options);
    for kind in ["train", "evaluation"] {
        assert_eq!(workshop.losses("stopped", kind), workshop.losses("straight", kind));
    }
}

#[test]
fn resuming_completes_what_a_kill_left_undone() {
    let workshop = Workshop::new();
    let every_five = ["runtime.evaluation.every_n_steps=5", "runtime.checkpoint.max_keep=1"];
    train(&workshop, "run", &every_five, &QUIET);
    assert_eq!(workshop.checkpoints("run"), ["step-00000010"]);
    let folder = workshop.run_directory("run").join("checkpoints");
    fs::remove_file(folder.join("best")).unwrap();
    fs::create_dir(folder.join(".step-00000001.tmp-1")).unwrap();
    fs::create_dir(folder.join("step-00000005")).unwrap();
    fs::copy(folder.join("step-00000010/MANIFEST.json"), folder.join("step-00000005/MANIFEST.json")).unwrap();
    train(&workshop, "run", &every_five, &resume(None));
    assert_eq!(workshop.checkpoints("run"), ["step-00000010"]);
    assert_eq!(fs::read_link(folder.join("best")).unwrap(), Path::new("step-00000010"));
    assert!(!folder.join(".step-00000001.tmp-1").exists());
}

#[test]
fn resuming_without_a_checkpoint_starts_at_step_0() {
    let workshop = Workshop::new();
    train(&workshop, "fresh", &[], &QUIET);
    train(&workshop, "resumed", &[], &resume(None));
    assert_eq!(workshop.losses("fresh", "train"), workshop.losses("resumed", "train"));
}

#[test]
fn resuming_names_settings_that_must_not_change() {
    let workshop = Workshop::new();
    train(&workshop, "run", &[], &RunOptions { max_steps: Some(5), ..QUIET });
    for (key, value) in [
        ("data.sequence_length", "16"),
        ("model.num_layers", "3"),
        ("runtime.seed", "8"),
        ("runtime.precision", "bf16"),
        ("data.shuffle_buffer_size", "17"),
        ("data.packing", "documents"),
    ] {
        let run = workshop.run("run", &[&format!("{key}={value}")]);
        let error = run_training(run, &resume(None), &StopSignal::new()).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{key}: {error}");
        assert!(error.to_string().contains(&format!("{key} was ")), "{key}: {error}");
    }
    let overrides =
        ["optimizer.learning_rate=1e-3", "data.batch_size=2", "scheduler.total_steps=12", "runtime.threads=1"];
    train(&workshop, "run", &overrides, &RunOptions { rebatch: true, ..resume(None) });
    assert_eq!(workshop.losses("run", "train").len(), 12);
}

#[test]
fn a_data_error_saves_and_resumes_once_data_is_back() {
    let workshop = Workshop::new();
    let overrides =
        ["scheduler.total_steps=300", "data.sequences_per_step=32", "runtime.evaluation.every_n_steps=null"];
    let text = workshop.path().join("text.jsonl");
    let whole = fs::read(&text).unwrap();
    let options = RunOptions { max_steps: Some(2), ..QUIET };
    train(&workshop, "run", &overrides, &options);
    fs::write(&text, vec![b'x'; whole.len()]).unwrap();
    let error = run_training(workshop.run("run", &overrides), &resume(None), &StopSignal::new()).unwrap_err();
    assert_eq!(error.exit_code(), 3, "{error}");
    fs::write(&text, whole).unwrap();
    train(&workshop, "run", &overrides, &resume(Some(12)));
    train(&workshop, "straight", &overrides, &RunOptions { max_steps: Some(12), ..QUIET });
    assert_eq!(workshop.losses("run", "train"), workshop.losses("straight", "train"));
}
