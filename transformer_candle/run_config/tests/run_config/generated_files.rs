//! The files in the repository that are generated from the types are up to date.

use std::path::{Path, PathBuf};

use run_config::RunConfig;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Compares a file with what it should be, or writes it where `UPDATE` is set.
fn assert_fresh(path: &str, expected: &str) {
    let file = root().join(path);
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&file, expected).expect("the repository is writable");
    }
    let actual = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(actual == expected, "{path} is out of date: run `UPDATE=1 cargo test -p run_config` and commit it");
}

#[test]
fn the_json_schema_is_fresh() {
    let schema = serde_json::to_string_pretty(&RunConfig::json_schema()).expect("a schema is JSON");
    assert_fresh("configs/schema.json", &format!("{schema}\n"));
}

#[test]
fn the_guide_is_fresh() {
    assert_fresh("docs/guide/configuration.md", &RunConfig::guide());
}
