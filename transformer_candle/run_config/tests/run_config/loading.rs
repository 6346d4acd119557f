//! Configs on disk: what lies beside them, the files of `configs/`, streaming configs, and files
//! that cannot be read.

use std::fs;
use std::path::{Path, PathBuf};

use run_config::{ConfigError, Format, Preset, Problem, ResolvedRun, RunConfig, SpecialTokens, presets};
use tempfile::TempDir;

/// A tokenizer of `size` tokens whose last is `<|endoftext|>` and special.
fn write_tokenizer(path: &Path, size: usize) {
    let vocab: serde_json::Map<_, _> = (0..size - 1).map(|id| (format!("t{id}"), id.into())).collect();
    let end = serde_json::json!({"id": size - 1, "content": "<|endoftext|>", "special": true});
    let file = serde_json::json!({"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": [end]});
    fs::write(path, file.to_string()).unwrap();
}

/// A run's folder with a preset copied as `training.yaml`, a tokenizer of 300 tokens and the
/// guide's `streaming_config.json`.
fn streaming_run(preset: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("training.yaml");
    let text = presets().iter().find(|candidate| candidate.name == preset).unwrap().text;
    fs::write(&config, text).unwrap();
    let tokenizer = folder.path().join("bpe.json");
    write_tokenizer(&tokenizer, 300);
    let streaming = serde_json::json!({
        "dataset": "HuggingFaceFW/fineweb", "split": "train", "max_samples": null, "stream_batch_size": 512, "experiment": "e1",
        "tokenizer": tokenizer,
    });
    fs::write(folder.path().join("streaming_config.json"), streaming.to_string()).unwrap();
    (folder, config)
}

fn write(folder: &TempDir, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, text).unwrap();
    path
}

fn load(path: &Path, overrides: &[&str]) -> Result<ResolvedRun, ConfigError> {
    RunConfig::load(path, &overrides.iter().map(|&text| text.to_owned()).collect::<Vec<_>>())
}

fn complaint(path: &Path) -> String {
    load(path, &[]).unwrap_err().to_string().replace(path.parent().unwrap().to_str().unwrap(), "FOLDER")
}

fn vocab_size_of(preset: &Preset) -> Option<usize> {
    RunConfig::parse(preset.text, Format::Yaml, &[]).unwrap().model.vocab_size
}

#[test]
fn a_preset_copied_as_it_is_takes_the_rest_from_its_folder() {
    for preset in presets() {
        let (folder, config) = streaming_run(preset.name);
        let run = load(&config, &[]).unwrap();
        assert_eq!(run.run_directory, folder.path());
        assert_eq!(run.streaming.unwrap().dataset, "HuggingFaceFW/fineweb");
        assert_eq!(run.config.tokenizer.tokenizer_json.unwrap(), folder.path().join("bpe.json"));
        assert_eq!(run.config.runtime.checkpoint.directory.unwrap(), folder.path().join("checkpoints"));
        assert_eq!(run.config.runtime.logging.tensorboard_directory.unwrap(), folder.path().join("tensorboard"));
        assert_eq!(run.config.model.vocab_size, vocab_size_of(preset).or(Some(300)));
        assert_eq!(run.special_tokens, ["<|endoftext|>"]);
        assert_eq!(run.notes, Vec::<String>::new());
    }
}

#[test]
fn special_tokens_beside_the_config_are_read_in_both_forms() {
    let (folder, config) = streaming_run("smoke_cpu");
    for text in ["[\"<|endoftext|>\", \"t7\"]", "<|endoftext|>\n\n  t7\r\n"] {
        let path = write(&folder, "special_tokens.txt", text);
        let run = load(&config, &[]).unwrap();
        assert_eq!(run.special_tokens, ["<|endoftext|>", "t7"]);
        assert_eq!(run.config.tokenizer.special_tokens, Some(SpecialTokens::File(path)));
    }
}

#[test]
fn special_tokens_that_the_tokenizer_lacks_are_refused() {
    let (folder, config) = streaming_run("smoke_cpu");
    write(&folder, "special_tokens.txt", "[\"<|endoftext|>\", \"<|pad|>\"]");
    insta::assert_snapshot!(complaint(&config), @r#"FOLDER/training.yaml: tokenizer.special_tokens: FOLDER/special_tokens.txt names "<|pad|>", not in the tokenizer's vocabulary; remove it, or train the tokenizer with it"#);
    let message = load(&config, &["tokenizer.special_tokens=[\"<|user|>\"]"]).unwrap_err().to_string();
    assert!(message.contains("names \"<|user|>\", not in the tokenizer's vocabulary"), "{message}");
}

#[test]
fn without_data_both_ways_to_name_it_are_shown() {
    let folder = tempfile::tempdir().unwrap();
    let config = write(&folder, "training.yaml", presets()[0].text);
    insta::assert_snapshot!(complaint(&config), @r#"
    FOLDER/training.yaml: 2 problems
      data.train_shards: names no files, and there is no FOLDER/streaming_config.json to stream from: nothing to train on; name local files (data.train_shards: ["corpus/*.parquet"]), or let `orchestrate --stream --dataset NAME --experiment NAME --launch none` write that file
      tokenizer.tokenizer_json: is missing, and no streaming_config.json beside the config names a tokenizer; name a tokenizer.json, or let `orchestrate` train one
    "#);
}

#[test]
fn local_files_need_a_tokenizer_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let config = write(&folder, "training.yaml", presets()[0].text);
    let tokenizer = folder.path().join("tokenizer.json");
    write_tokenizer(&tokenizer, 40);
    let run = load(
        &config,
        &["data.train_shards=[corpus/*.txt]", &format!("tokenizer.tokenizer_json={}", tokenizer.display())],
    )
    .unwrap();
    assert_eq!(run.config.data.train_shards, [std::env::current_dir().unwrap().join("corpus/*.txt").to_str().unwrap()]);
    assert_eq!(run.config.model.vocab_size, Some(40));
    assert_eq!(run.streaming, None);
}

#[test]
fn the_tokenizer_beside_vocab_and_merges_is_taken() {
    let folder = tempfile::tempdir().unwrap();
    let config = write(&folder, "training.yaml", presets()[0].text);
    write_tokenizer(&folder.path().join("tokenizer.json"), 40);
    let [vocab, merges] =
        ["vocab", "merges"].map(|name| format!("tokenizer.{name}={}", folder.path().join(name).display()));
    let run = load(&config, &["data.train_shards=[a.txt]", &vocab, &merges]).unwrap();
    assert_eq!(run.config.tokenizer.tokenizer_json.unwrap(), folder.path().join("tokenizer.json"));
}

#[test]
fn planning_needs_neither_tokenizer_nor_data() {
    let folder = tempfile::tempdir().unwrap();
    for preset in presets() {
        let config = write(&folder, "training.yaml", preset.text);
        let run = RunConfig::load_for_planning(&config, &[]).unwrap();
        assert_eq!(run.config.model.vocab_size, vocab_size_of(preset).or(Some(4096)));
        assert_eq!(run.notes.len(), usize::from(preset.name == "smoke_cpu"));
        assert_eq!(RunConfig::load(&config, &[]).unwrap_err().problems.len(), 2, "for training both are needed");
    }
}

#[test]
fn planning_does_not_need_the_files_that_a_config_names() {
    let folder = tempfile::tempdir().unwrap();
    let config = write(&folder, "training.yaml", presets()[0].text);
    let overrides =
        ["tokenizer.tokenizer_json=/none/t.json", "tokenizer.special_tokens=/none/s.txt", "data.train_shards=[a.txt]"];
    assert!(RunConfig::load_for_planning(&config, &overrides.map(str::to_owned)).is_ok());
    insta::assert_snapshot!(load(&config, &overrides).unwrap_err().problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"), @r"
    tokenizer.tokenizer_json: /none/t.json does not exist; name a tokenizer.json, or let `orchestrate` train one
    tokenizer.special_tokens: /none/s.txt does not exist; remove the key for the tokenizer's own, or write the file
    ");
}

#[test]
fn a_vocabulary_smaller_than_the_tokenizer_is_refused() {
    let (_folder, config) = streaming_run("smoke_cpu");
    let error = load(&config, &["model.vocab_size=299"]).unwrap_err().to_string();
    assert!(
        error.contains("model.vocab_size: is 299, less than the tokenizer's 300; leave it out to take the tokenizer's"),
        "{error}"
    );
    assert!(load(&config, &["model.vocab_size=300"]).is_ok());
}

#[test]
fn folder_and_file_problems_are_reported_together() {
    let (folder, config) = streaming_run("smoke_cpu");
    write(&folder, "bpe.json", "{\"model\": {}}");
    write(&folder, "special_tokens.txt", "[1]");
    let error =
        load(&config, &["model.num_layers=0", "scheduler.total_steps=null", "scheduler.total_epochs=2"]).unwrap_err();
    let paths: Vec<_> = error.problems.iter().map(|problem| problem.path.as_str()).collect();
    assert_eq!(
        paths,
        [
            "model.num_layers",
            "scheduler.strategy",
            "tokenizer.tokenizer_json",
            "tokenizer.special_tokens",
            "scheduler.total_epochs"
        ]
    );
}

#[test]
fn a_mixture_excludes_a_streaming_config() {
    let (folder, config) = streaming_run("smoke_cpu");
    let mixture = ["data.mixture=[{dataset: a/b, weight: 7}, {shards: [more/*.txt], weight: 3}]"];
    let error = load(&config, &mixture).unwrap_err().to_string();
    assert!(error.contains("data.mixture") && error.contains("streaming_config.json says what is streamed"), "{error}");
    fs::remove_file(folder.path().join("streaming_config.json")).unwrap();
    let tokenizer = format!("tokenizer.tokenizer_json={}", folder.path().join("bpe.json").display());
    let run = load(&config, &[mixture[0], &tokenizer]).unwrap();
    let [hub, local] = run.config.data.mixture.as_slice() else { panic!("two sources") };
    assert_eq!((hub.dataset.as_deref(), hub.split()), (Some("a/b"), "train"));
    assert!(Path::new(&local.shards[0]).is_absolute() && hub.weight > 2.0 * local.weight);
}

#[test]
fn local_shards_beside_a_streaming_config_are_noted() {
    let (_folder, config) = streaming_run("smoke_cpu");
    let run = load(&config, &["data.train_shards=[a.txt]"]).unwrap();
    assert!(run.notes[0].contains("data.train_shards is not read"), "{:?}", run.notes);
}

#[test]
fn files_that_cannot_be_read_are_explained_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    insta::assert_snapshot!(complaint(&folder.path().join("none.yaml")), @"FOLDER/none.yaml: there is no such file");
    insta::assert_snapshot!(complaint(&write(&folder, "config.ini", "x")), @"FOLDER/config.ini: the file's name does not say its format; name it .yaml, .toml or .json");
    insta::assert_snapshot!(complaint(&write(&folder, "latin.yaml", b"model: \xe4")), @"FOLDER/latin.yaml: is not UTF-8 text: byte 7 is not valid; save it as UTF-8");
    insta::assert_snapshot!(complaint(&write(&folder, "large.yaml", " ".repeat((1 << 20) + 1))), @"FOLDER/large.yaml: is larger than the 1 MiB that such a file may have");
    insta::assert_snapshot!(complaint(&write(&folder, "nul.yaml", "model: \0")), @r"FOLDER/nul.yaml: is not valid YAML: unexpected character: `\u{0}' at line 1, column 8");
    fs::create_dir(folder.path().join("folder.yaml")).unwrap();
    insta::assert_snapshot!(complaint(&folder.path().join("folder.yaml")), @"FOLDER/folder.yaml: is a folder, not a file");
}

/// Overrides each of which is one mistake or, with several keys, one rule broken. No two of them share a key or a rule.
const MISTAKES: [&[&str]; 14] = [
    &["model.num_key_value_heads=5"],
    &["model.max_position_embeddings=128"],
    &["model.num_layer=3"],
    &["tokenizer.special_tokens=[<|endoftext|>, <|endoftext|>]"],
    &["data.batch_size=3"],
    &["data.num_workers=0"],
    &["data.mixture=[{dataset: a/b, weight: 0}, {weight: 1}]"],
    &["optimizer.beta1=1"],
    &["scheduler.warmup_steps=600"],
    &["scheduler.strategy=wsd", "scheduler.decay_steps=601"],
    &["scheduler.min_lr=0.5"],
    &["runtime.device=gpu"],
    &["runtime.checkpoint=5"],
    &["runtime.seed"],
];

/// Wrong files beside a config: a file's name and its text, or `None` if the file is missing.
const WRONG_FILES: [(&str, Option<&str>); 4] = [
    ("bpe.json", None),
    ("bpe.json", Some("{\"model\": {}}")),
    ("streaming_config.json", Some("{")),
    ("special_tokens.txt", Some("[1]")),
];

#[test]
fn a_rule_is_checked_though_the_tokenizer_is_missing() {
    let (folder, config) = streaming_run("rtx5090_1b");
    fs::remove_file(folder.path().join("bpe.json")).unwrap();
    let error = load(&config, &["model.num_key_value_heads=3"]).unwrap_err();
    let messages: Vec<_> = error.problems.iter().map(ToString::to_string).collect();
    assert_eq!(messages.len(), 2, "{messages:#?}");
    assert!(messages[0].starts_with("model.num_key_value_heads: is 3, which does not divide"), "{messages:#?}");
    assert!(
        messages[1].starts_with("tokenizer.tokenizer_json: ") && messages[1].contains("does not exist"),
        "{messages:#?}"
    );
}

/// Returns what each problem is about: its key, or what is said of the file as a whole.
fn subjects(config: &Path, overrides: &[&str]) -> Vec<String> {
    let folder = config.parent().unwrap().to_str().unwrap();
    let about = |problem: Problem| if problem.path.is_empty() { problem.message } else { problem.path };
    let problems = load(config, overrides).map_or_else(|error| error.problems, |_| Vec::new());
    problems.into_iter().map(|problem| about(problem).replace(folder, "FOLDER")).collect()
}

fn assert_within(some: &[String], all: &[String]) {
    assert!(some.iter().all(|problem| all.contains(problem)), "{some:#?} are not all in {all:#?}");
}

#[test]
fn a_second_mistake_hides_no_problem() {
    let (_intact, config) = streaming_run("smoke_cpu");
    for first in MISTAKES {
        let alone = subjects(&config, first);
        assert!(!alone.is_empty(), "{first:?}");
        for second in MISTAKES {
            assert_within(&alone, &subjects(&config, &[first, second].concat()));
        }
    }
    for (name, text) in WRONG_FILES {
        let (folder, wrong) = streaming_run("smoke_cpu");
        let file = folder.path().join(name);
        text.map_or_else(|| fs::remove_file(&file), |text| fs::write(&file, text)).unwrap();
        let of_the_file = subjects(&wrong, &[]);
        assert!(!of_the_file.is_empty(), "{name}");
        for mistake in MISTAKES {
            let subjects_of_both = subjects(&wrong, mistake);
            assert_within(&subjects(&config, mistake), &subjects_of_both);
            assert_within(&of_the_file, &subjects_of_both);
        }
    }
}
