use super::*;

/// The files resolved in a repository of these files, and the folders that were listed for it.
fn resolved(
    files: &[&str],
    card: &str,
    config: Option<&str>,
    split: &str,
) -> Result<(Vec<String>, Vec<String>), DataError> {
    let mut folders = Vec::new();
    let readme = format!("---\n{card}\n---\n");
    let files = resolve("o/n", (!card.is_empty()).then_some(readme.as_str()), config, split, |folder| {
        folders.push(folder.to_owned());
        let below = |path: &str| folder.is_empty() || path.starts_with(&format!("{folder}/"));
        let mut paths: Vec<&&str> = files.iter().filter(|path| below(path)).collect();
        paths.sort();
        Ok(paths.into_iter().map(|path| ListedFile { path: (*path).to_owned(), bytes: 1 }).collect())
    })?;
    Ok((files.into_iter().map(|file| file.path).collect(), folders))
}

#[track_caller]
fn check(files: &[&str], split: &str, expected: &[&str]) {
    assert_eq!(resolved(files, "", None, split).unwrap().0, expected);
}

const FINEWEB: &str = "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/*/*\n\
    - config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n\
    - config_name: CC-MAIN-2013-20\n  data_files:\n  - split: train\n    path: data/CC-MAIN-2013-20/*";
const FINEWEB_FILES: [&str; 5] = [
    "README.md",
    "data/CC-MAIN-2013-20/000_00001.parquet",
    "data/CC-MAIN-2013-20/000_00000.parquet",
    "data/CC-MAIN-2014-10/000_00000.parquet",
    "sample/10BT/000_00000.parquet",
];

#[test]
fn configs_list_only_the_folders_they_need() {
    let (files, folders) = resolved(&FINEWEB_FILES, FINEWEB, None, "train").unwrap();
    assert_eq!(files.len(), 3);
    assert_eq!((files[0].as_str(), folders), ("data/CC-MAIN-2013-20/000_00000.parquet", vec!["data".to_owned()]));
    let (files, folders) = resolved(&FINEWEB_FILES, FINEWEB, Some("sample-10BT"), "train").unwrap();
    assert_eq!((files, folders), (vec![FINEWEB_FILES[4].to_owned()], vec!["sample/10BT".to_owned()]));
    let error = resolved(&FINEWEB_FILES, FINEWEB, Some("sample-10B"), "train").unwrap_err().to_string();
    assert!(error.contains("`sample-10B`") && error.contains("sample-10BT, CC-MAIN-2013-20"), "{error}");
    let error = resolved(&FINEWEB_FILES, FINEWEB, None, "test").unwrap_err().to_string();
    assert!(error.contains("no split `test`") && error.contains("train"), "{error}");
}

#[test]
fn sharded_names_imply_their_split() {
    let files = [
        "data/train-00001-of-00002.parquet",
        "data/train-00000-of-00002.parquet",
        "data/test_a-00000-of-00001-f3.parquet",
        "train.txt",
    ];
    check(&files, "train", &["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]);
    check(&files, "test_a", &["data/test_a-00000-of-00001-f3.parquet"]);
}

#[test]
fn folders_named_after_a_split_come_before_file_names() {
    let files = ["train/a.jsonl", "x/my-train-set/b.jsonl", "dev/c.jsonl", "other/train.jsonl", "trainer/d.jsonl"];
    check(&files, "train", &["train/a.jsonl", "x/my-train-set/b.jsonl"]);
    check(&files, "validation", &["dev/c.jsonl"]);
}

#[test]
fn file_names_imply_their_split() {
    let files = ["my_train_0.txt", "train.txt", "sub/valid-1.txt", "trainers.txt", "restrain.txt"];
    check(&files, "train", &["train.txt", "my_train_0.txt"]);
    check(&files, "validation", &["sub/valid-1.txt"]);
}

#[test]
fn without_split_names_the_main_format_is_train() {
    let files = ["a.parquet", "deep/er/b.parquet", "notes.txt", ".hidden/c.parquet", "__pycache__/d.parquet", "x.csv"];
    check(&files, "train", &["a.parquet", "deep/er/b.parquet"]);
    let error = resolved(&["a.csv", "README.md"], "", None, "train").unwrap_err();
    assert!(matches!(error, DataError::NoHubFiles { .. }), "{error}");
}

#[test]
fn a_config_may_be_a_folder() {
    let card =
        "configs:\n- config_name: en\n  data_dir: en\n- config_name: fr\n  data_dir: fr\n  data_files: '*.jsonl.gz'";
    let files = ["en/train.jsonl", "en/test.jsonl", "fr/a.jsonl.gz", "fr/sub/b.jsonl.gz", "train.jsonl"];
    assert_eq!(resolved(&files, card, Some("en"), "train").unwrap().0, ["en/train.jsonl"]);
    assert_eq!(resolved(&files, card, Some("fr"), "train").unwrap().0, ["fr/a.jsonl.gz"]);
    let error = resolved(&files, card, None, "train").unwrap_err().to_string();
    assert!(error.contains("several configs") && error.contains("en, fr") && error.contains("--data-config"));
}

#[test]
fn files_that_match_several_patterns_count_once() {
    let card = "configs:\n- config_name: only\n  data_files: ['**/*.txt', './a.txt', '/b/*.txt']";
    assert_eq!(resolved(&["a.txt", "b/c.txt"], card, None, "train").unwrap().0, ["a.txt", "b/c.txt"]);
}

#[test]
fn a_card_s_missing_files_are_an_error() {
    let card = "configs:\n- config_name: default\n  data_files: gone/*.parquet";
    let error = resolved(&["a.parquet"], card, None, "train").unwrap_err().to_string();
    assert!(error.contains("no file matches gone/*.parquet"), "{error}");
}
