//! `streaming_config.json` as the guide's users have it, and as this program writes it.

use std::fs;
use std::path::PathBuf;

use run_config::{StreamingConfig, check_experiment_name};
use tempfile::TempDir;

fn write(folder: &TempDir, name: &str, text: &str) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn a_streaming_config_with_the_guides_five_keys_is_valid() {
    let folder = tempfile::tempdir().unwrap();
    let five = "{\"dataset\": \"a/b\", \"split\": \"train\", \"max_samples\": 5, \"stream_batch_size\": 512, \"experiment\": \"e\"}";
    let path = write(&folder, "streaming_config.json", five);
    let mut streaming = StreamingConfig::load(&path).unwrap();
    assert_eq!((streaming.max_samples, streaming.text_column.as_str(), &streaming.tokenizer), (Some(5), "text", &None));
    streaming.max_samples = None;
    streaming.tokenizer = Some("artifacts/tokenizer/e/tokenizer.json".into());
    streaming.save(&path).unwrap();
    assert_eq!(StreamingConfig::load(&path).unwrap(), streaming);
    insta::assert_snapshot!(fs::read_to_string(&path).unwrap(), @r#"
    {
      "dataset": "a/b",
      "split": "train",
      "max_samples": null,
      "stream_batch_size": 512,
      "experiment": "e",
      "config": null,
      "revision": null,
      "text_column": "text",
      "tokenizer": "artifacts/tokenizer/e/tokenizer.json"
    }
    "#);
}

#[test]
fn a_wrong_streaming_config_names_its_keys() {
    let folder = tempfile::tempdir().unwrap();
    let streaming_complaint = |text: &str| {
        let error = StreamingConfig::load(&write(&folder, "streaming_config.json", text)).unwrap_err().to_string();
        error.replace(folder.path().to_str().unwrap(), "FOLDER")
    };
    insta::assert_snapshot!(streaming_complaint("{\"dataset\": \"a/b\"}"), @"FOLDER/streaming_config.json: is not a streaming config: missing field `split` at line 1 column 18");
    insta::assert_snapshot!(streaming_complaint("{"), @"FOLDER/streaming_config.json: is not a streaming config: EOF while parsing an object at line 1 column 1");
    insta::assert_snapshot!(streaming_complaint(
        "{\"dataset\": \"\", \"split\": \"train\", \"max_samples\": 0, \"stream_batch_size\": 0, \"experiment\": \"../x\"}"
    ), @r#"
    FOLDER/streaming_config.json: 4 problems
      dataset: is empty
      max_samples: must be at least 1; write null for the whole data set
      stream_batch_size: must be at least 1
      experiment: "../x" cannot be the name of an experiment; use 1 to 64 letters, digits, `.`, `_` or `-`, starting with a letter or digit
    "#);
}

#[test]
fn experiment_names_cannot_leave_their_folder() {
    let longest = "a".repeat(64);
    for name in ["demo", "rtx5090-1b", "0.1_x", &longest] {
        assert!(check_experiment_name(name).is_ok(), "{name}");
    }
    let too_long = "a".repeat(65);
    for name in ["", ".", "..", "-x", "a/b", "a b", "ä", "a\n", "_x", &too_long] {
        assert!(check_experiment_name(name).is_err(), "{name:?}");
    }
}
