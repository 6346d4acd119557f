//! `resolved_config.json`: the config as it is trained, in the run's own folder. The folder may be moved or copied, so
//! paths inside it are written relative to it, and read against wherever it lies.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::data::{FIRST_READING_VERSION, is_built_in_template};
use crate::regular_file;
use crate::resolved_run::ResolvedRun;

/// The file's name in a run's folder.
pub const RESOLVED_CONFIG: &str = "resolved_config.json";

/// Folders in a run's folder that outputs go to if the config names none.
pub(crate) const CHECKPOINTS: &str = "checkpoints";
pub(crate) const TENSORBOARD: &str = "tensorboard";

const CHECKPOINT_DIRECTORY: &str = "/runtime/checkpoint/directory";
const TENSORBOARD_DIRECTORY: &str = "/runtime/logging/tensorboard_directory";

/// Keys that hold a path or a list of paths and patterns, as JSON pointers.
const PATHS: [&str; 13] = [
    "/model/init_from",
    "/lora/init_from",
    "/tokenizer/tokenizer_json",
    "/tokenizer/vocab",
    "/tokenizer/merges",
    "/tokenizer/special_tokens",
    "/data/train_shards",
    "/data/validation_shards",
    "/data/cache_dir",
    "/data/chat_template",
    CHECKPOINT_DIRECTORY,
    "/runtime/evaluation/best/directory",
    TENSORBOARD_DIRECTORY,
];

impl ResolvedRun {
    /// Returns the content of [`RESOLVED_CONFIG`]: the config with every value filled in, and paths inside the run's
    /// folder relative to it.
    pub fn portable_config(&self) -> Value {
        let mut document =
            serde_json::to_value(&self.config).unwrap_or_else(|_| unreachable!("a config is plain values"));
        visit(&mut document, &|path| {
            let inside = path.strip_prefix(&self.run_directory).ok()?;
            (!inside.as_os_str().is_empty()).then(|| inside.to_owned())
        });
        document
    }
}

/// Returns the checkpoint folder of the run in `run_directory`; `None` without a [`RESOLVED_CONFIG`] that names it.
pub fn checkpoint_directory(run_directory: &Path) -> Option<PathBuf> {
    let text = regular_file::read(&run_directory.join(RESOLVED_CONFIG)).ok()?;
    let mut document = serde_json::from_slice(&text).ok()?;
    locate(&mut document, run_directory);
    document.pointer(CHECKPOINT_DIRECTORY)?.as_str().map(PathBuf::from)
}

/// Makes the relative paths of a [`RESOLVED_CONFIG`] absolute, from `run_directory`, and moves those of a former
/// folder.
pub(crate) fn locate(document: &mut Value, run_directory: &Path) {
    let former = former_folder(document, run_directory);
    visit(document, &|path| {
        if is_built_in_template(path) {
            return None;
        }
        let inside = if path.is_relative() { path } else { path.strip_prefix(former.as_ref()?).ok()? };
        Some(run_directory.join(inside))
    });
}

/// Sets the reading version of a [`RESOLVED_CONFIG`] that was written before there was one.
pub(crate) fn complete_reading_version(document: &mut Value) {
    if let Some(data) = document.get_mut("data").and_then(Value::as_object_mut) {
        let version = data.entry("reading_version").or_insert(Value::Null);
        if version.is_null() {
            *version = FIRST_READING_VERSION.into();
        }
    }
}

/// Returns the folder that the run was in when an older version, which made every path absolute, wrote its config.
fn former_folder(document: &Value, run_directory: &Path) -> Option<PathBuf> {
    let folder_of = |pointer, name| -> Option<&Path> {
        let path = Path::new(document.pointer(pointer)?.as_str()?);
        path.parent().filter(|_| path.is_absolute() && path.ends_with(name))
    };
    let former = folder_of(CHECKPOINT_DIRECTORY, CHECKPOINTS)?;
    let is_former = folder_of(TENSORBOARD_DIRECTORY, TENSORBOARD) == Some(former);
    (is_former && run_directory.join(CHECKPOINTS).is_dir()).then(|| former.to_owned())
}

/// Replaces each path for which `replaced` returns another one.
fn visit(document: &mut Value, replaced: &dyn Fn(&Path) -> Option<PathBuf>) {
    let replace = |value: &mut Value| {
        let path = value.as_str().and_then(|path| replaced(Path::new(path)));
        if let Some(path) = path.as_ref().and_then(|path| path.to_str()) {
            *value = path.into();
        }
    };
    for pointer in PATHS {
        match document.pointer_mut(pointer) {
            // `special_tokens` may be a list too, but of tokens, not of paths.
            Some(Value::Array(paths)) if pointer.starts_with("/data") => paths.iter_mut().for_each(replace),
            Some(value) => replace(value),
            None => {}
        }
    }
    let mixture = document.pointer_mut("/data/mixture").and_then(Value::as_array_mut).into_iter().flatten();
    for shards in mixture.filter_map(|component| component.get_mut("shards")?.as_array_mut()) {
        shards.iter_mut().for_each(replace);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::*;

    fn config(checkpoints: &str, tensorboard: &str, tokenizer: &str) -> Value {
        json!({
            "tokenizer": {"tokenizer_json": tokenizer, "special_tokens": ["<a>"]},
            "data": {"train_shards": ["/data/*.parquet"], "mixture": [{"shards": ["text.jsonl"]}]},
            "runtime": {"checkpoint": {"directory": checkpoints}, "logging": {"tensorboard_directory": tensorboard}},
        })
    }

    #[test]
    fn relative_paths_are_those_of_the_folder_wherever_it_lies() {
        let mut document = config("checkpoints", "tensorboard", "/artifacts/tokenizer.json");
        locate(&mut document, Path::new("/moved/run"));
        let mut expected = config("/moved/run/checkpoints", "/moved/run/tensorboard", "/artifacts/tokenizer.json");
        expected["data"]["mixture"][0]["shards"][0] = "/moved/run/text.jsonl".into();
        assert_eq!(document, expected);
    }

    #[test]
    fn absolute_paths_of_an_older_version_follow_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("checkpoints")).unwrap();
        let mut document = config("/old/run/checkpoints", "/old/run/tensorboard", "/old/run/tokenizer.json");
        locate(&mut document, folder.path());
        let here = |name: &str| json!(folder.path().join(name));
        assert_eq!(document["runtime"]["checkpoint"]["directory"], here("checkpoints"));
        assert_eq!(document["tokenizer"]["tokenizer_json"], here("tokenizer.json"));
    }

    #[test]
    fn older_runs_have_the_first_reading_version() {
        let mut older = config("checkpoints", "tensorboard", "t.json");
        complete_reading_version(&mut older);
        assert_eq!(older["data"]["reading_version"], 1);
        older["data"]["reading_version"] = 2.into();
        complete_reading_version(&mut older);
        assert_eq!(older["data"]["reading_version"], 2);
    }

    #[test]
    fn checkpoints_on_another_disk_stay_there() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("checkpoints")).unwrap();
        let mut document = config("/disk/run-1", "tensorboard", "t.json");
        locate(&mut document, folder.path());
        assert_eq!(document["runtime"]["checkpoint"]["directory"], "/disk/run-1");
    }
}
