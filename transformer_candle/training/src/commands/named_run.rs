//! Finds the run that a command works on, by its experiment's name, its directory, a checkpoint or a config; the newest
//! run where none is named. Both programs resolve a name here.

use std::cmp::Reverse;
use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf, absolute};
use std::time::SystemTime;

use run_config::system_error::in_words;
use run_config::{ADAPTER_CONFIG, Format, RESOLVED_CONFIG, check_experiment_name, model_file_problem};
use serde::Serialize;

use super::model_source::checkpoints_in;
use super::output::print_remark;
use crate::checkpoint::{self, CheckpointEntry};
use crate::{Result, TrainerError, lock};

const TRAINING_CONFIG: &str = "training.yaml";
const METRICS: &str = "metrics.jsonl";
/// A directory that holds one of these is a run's.
const RUN_FILES: [&str; 3] = [TRAINING_CONFIG, RESOLVED_CONFIG, METRICS];
/// A search locks its directory as a run does, and holds this file.
const STUDY: &str = "study.db";
/// A directory that holds one of these is a model's.
const MODEL_FILES: [&str; 3] = ["config.json", checkpoint::MANIFEST_FILE_NAME, ADAPTER_CONFIG];
/// Runs that a message names at most.
const NAMED_RUNS: usize = 8;

/// What a name stands for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct NamedRun {
    /// The run's directory; none for a config or a model that belongs to no run.
    pub directory: Option<PathBuf>,
    /// The checkpoint, other model or folder of checkpoints that was named; none where a run or a config was.
    pub model: Option<PathBuf>,
    /// The config file that was named; none where a run or a model was.
    pub config: Option<PathBuf>,
}

impl NamedRun {
    /// Finds what `name` stands for, or the newest run; says on stderr which one that is.
    ///
    /// # Errors
    /// [`TrainerError::Request`] says what was looked for, and names the newest runs.
    pub fn find_or_newest(name: Option<&Path>) -> Result<Self> {
        if let Some(name) = name {
            return Self::find(&runs_root(), name);
        }
        let run = Self::newest(&runs_root())?;
        if let Some(directory) = &run.directory {
            print_remark(&format!("using the newest run, {}", directory.display()));
        }
        Ok(run)
    }

    /// Finds what `name` stands for: an experiment in `root`, else a path.
    ///
    /// # Errors
    /// [`TrainerError::Request`] says what was looked for, and names the newest runs of `root`.
    pub fn find(root: &Path, name: &Path) -> Result<Self> {
        let in_root = root.join(name);
        let is_experiment = name.to_str().is_some_and(|name| check_experiment_name(name).is_ok());
        if is_experiment && in_root.is_dir() {
            // A run that is about to write its first file is there by its name already.
            let unwritten = Self { directory: Some(shown(&in_root)), ..Self::default() };
            return Ok(Self::of_path(&in_root).unwrap_or(unwritten));
        }
        for path in [name, &in_root] {
            match fs::metadata(path) {
                Ok(_) => return Self::of_path(&checkpoint::pointed_checkpoint(path).unwrap_or(path.to_owned())),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => {}
                Err(error) => {
                    return Err(TrainerError::Request(format!(
                        "cannot read {}: {}",
                        shown(path).display(),
                        in_words(&error)
                    )));
                }
            }
        }
        if let Some(error) = [name, &in_root].into_iter().find_map(|path| checkpoint::removed(&shown(path))) {
            return Err(error.into());
        }
        let (name, path) = (name.display(), shown(name));
        Err(TrainerError::Request(format!(
            "there is no experiment \"{name}\" in {}, and no file or directory {}; {}",
            shown(root).display(),
            path.display(),
            known(root)
        )))
    }

    /// Returns the run in `root` that was written to last.
    ///
    /// # Errors
    /// [`TrainerError::Request`] if there is none.
    pub fn newest(root: &Path) -> Result<Self> {
        let newest = runs(root).into_iter().next().ok_or_else(|| {
            let root = shown(root);
            TrainerError::Request(format!(
                "there is no run in {}: name one, by its directory if it lies elsewhere",
                root.display()
            ))
        })?;
        Ok(Self { directory: Some(newest), ..Self::default() })
    }

    fn of_path(path: &Path) -> Result<Self> {
        // A path that ends in `..` has the name of a checkpoint only when it is resolved.
        let path = if path.file_name().is_some() { shown(path) } else { path.canonicalize().unwrap_or(shown(path)) };
        let run = path.ancestors().find(|folder| is_run(folder)).map(Path::to_owned);
        if path.is_dir() {
            let is_model = MODEL_FILES.iter().any(|name| path.join(name).exists());
            let holds_checkpoints = || checkpoint::list(&checkpoints_in(&path)).is_ok_and(|list| !list.is_empty());
            if run.as_ref() == Some(&path) {
                return Ok(Self { directory: run, ..Self::default() });
            }
            if is_model || CheckpointEntry::from_path(&path).is_some() || (run.is_none() && holds_checkpoints()) {
                return Ok(Self { directory: run, model: Some(path), config: None });
            }
        } else if Format::from_path(&path).is_ok() {
            let run = path.parent().filter(|folder| is_run(folder)).map(Path::to_owned);
            return Ok(Self { directory: run, model: None, config: Some(path) });
        }
        if run.is_some() {
            return Ok(Self { directory: run, ..Self::default() });
        }
        if let Some(problem) = model_file_problem(&path) {
            return Err(TrainerError::Request(problem));
        }
        let kind = if path.is_dir() { "directory" } else { "file" };
        Err(TrainerError::Request(format!(
            "{} is no run {kind}: it has none of {}, and is neither a model nor a config (.yaml, .toml, .json)",
            path.display(),
            RUN_FILES.join(", ")
        )))
    }

    /// Returns the directory of the run.
    ///
    /// # Errors
    /// [`TrainerError::Request`] if what was named belongs to no run.
    pub fn run_directory(self) -> Result<PathBuf> {
        let path = self.config.or(self.model).unwrap_or_default();
        self.directory.ok_or_else(|| {
            TrainerError::Request(format!("{} belongs to no run: name a run or its directory", path.display()))
        })
    }

    /// Returns the config to train, plan or measure: the one that was named, else the run's.
    ///
    /// # Errors
    /// [`TrainerError::Request`] if there is none.
    pub fn config_file(self) -> Result<PathBuf> {
        if let Some(config) = self.config {
            return Ok(config);
        }
        let directory = self.run_directory()?;
        let files = [TRAINING_CONFIG, RESOLVED_CONFIG].map(|name| directory.join(name));
        files.into_iter().find(|file| file.is_file()).ok_or_else(|| {
            TrainerError::Request(format!("{} holds no {TRAINING_CONFIG}: name a config", directory.display()))
        })
    }

    /// Returns the directory to find the model in: the one that was named, else the run's.
    ///
    /// # Errors
    /// [`TrainerError::Request`] for a config of no run.
    pub fn model_folder(self) -> Result<PathBuf> {
        self.model.clone().map_or_else(|| self.run_directory(), Ok)
    }
}

/// Returns the directory of all runs: `ORCHESTRATE_RUNS_ROOT`, or `runs` in the current folder.
pub fn runs_root() -> PathBuf {
    let root = env::var_os("ORCHESTRATE_RUNS_ROOT").filter(|root| !root.is_empty());
    root.map_or_else(|| PathBuf::from("runs"), PathBuf::from)
}

/// Returns the directories of the runs in `root` whose names are UTF-8, the one that was written to last first.
pub fn runs(root: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(shown(root)).into_iter().flatten().flatten();
    let folders = entries.map(|entry| entry.path()).filter(|path| path.to_str().is_some() && is_run(path));
    let mut runs: Vec<PathBuf> = folders.collect();
    runs.sort_by_cached_key(|folder| (Reverse(last_change(folder)), folder.clone()));
    runs
}

/// Returns which runs there are, as the end of a sentence.
pub(super) fn known(root: &Path) -> String {
    let runs = runs(root);
    let names = runs.iter().take(NAMED_RUNS).filter_map(|run| run.file_name()?.to_str());
    match names.collect::<Vec<_>>().as_slice() {
        [] => "there are no runs yet".to_owned(),
        names => format!("the newest runs are: {}", names.join(", ")),
    }
}

fn is_run(folder: &Path) -> bool {
    let has = |name: &str| folder.join(name).symlink_metadata().is_ok();
    RUN_FILES.into_iter().any(has) || (has(lock::FILE_NAME) && !has(STUDY))
}

/// Returns when a run last wrote a line, or when its directory changed if it has none.
fn last_change(folder: &Path) -> SystemTime {
    let modified = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    modified(&folder.join(METRICS)).or_else(|| modified(folder)).unwrap_or(SystemTime::UNIX_EPOCH)
}

fn shown(path: &Path) -> PathBuf {
    absolute(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of runs: `first` with a checkpoint, then `second`.
    fn runs_folder() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (seconds, name) in [(1, "first"), (2, "second")] {
            let run = root.path().join(name);
            fs::create_dir_all(run.join("checkpoints")).unwrap();
            fs::write(run.join(TRAINING_CONFIG), "").unwrap();
            fs::write(run.join(METRICS), "").unwrap();
            let file = fs::File::options().append(true).open(run.join(METRICS)).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds)).unwrap();
        }
        let checkpoint = root.path().join("first/checkpoints/step-00000005");
        fs::create_dir(&checkpoint).unwrap();
        fs::write(checkpoint.join("config.json"), "{}").unwrap();
        root
    }

    #[test]
    fn a_name_a_path_and_a_file_lead_to_the_same_run() {
        let root = runs_folder();
        let first = root.path().join("first");
        let run_of = |name: &Path| NamedRun::find(root.path(), name).unwrap();
        for name in [Path::new("first"), &first, &first.join(METRICS), &first.join("checkpoints")] {
            assert_eq!(run_of(name), NamedRun { directory: Some(first.clone()), ..NamedRun::default() }, "{name:?}");
        }
        let config = run_of(&first.join(TRAINING_CONFIG));
        assert_eq!((config.directory, config.config), (Some(first.clone()), Some(first.join(TRAINING_CONFIG))));
        assert_eq!(run_of(Path::new("first")).config_file().unwrap(), first.join(TRAINING_CONFIG));
    }

    #[test]
    fn a_checkpoint_is_named_by_its_pointer_too() {
        let root = runs_folder();
        let checkpoints = root.path().join("first/checkpoints");
        let expected = checkpoints.join("step-00000005");
        for pointer in ["latest", "best"] {
            fs::write(checkpoints.join(pointer), "step-00000005\n").unwrap();
            let run = NamedRun::find(root.path(), &checkpoints.join(pointer)).unwrap();
            assert_eq!(run.model, Some(expected.clone()));
            assert_eq!(run.config_file().unwrap(), root.path().join("first").join(TRAINING_CONFIG));
        }
        let inside = NamedRun::find(root.path(), Path::new("first/checkpoints/latest")).unwrap();
        assert_eq!(inside.model_folder().unwrap(), expected);
    }

    #[test]
    fn the_newest_run_is_the_one_written_to_last() {
        let root = runs_folder();
        assert_eq!(NamedRun::newest(root.path()).unwrap().directory, Some(root.path().join("second")));
        let empty = tempfile::tempdir().unwrap();
        assert!(NamedRun::newest(empty.path()).unwrap_err().to_string().contains("there is no run"));
    }

    #[test]
    fn a_search_is_no_run() {
        let root = runs_folder();
        let study = root.path().join("second-tune");
        fs::create_dir(&study).unwrap();
        fs::write(study.join(lock::FILE_NAME), "").unwrap();
        assert_eq!(runs(root.path()).len(), 3, "a run that is about to write its first file");
        fs::write(study.join(STUDY), "").unwrap();
        assert_eq!(runs(root.path()).len(), 2);
    }

    #[test]
    fn a_missing_run_is_refused_with_those_there_are() {
        let root = runs_folder();
        let error = NamedRun::find(root.path(), Path::new("third")).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        for words in ["\"third\"", "no file or directory", "the newest runs are: second, first"] {
            assert!(error.to_string().contains(words), "{error}");
        }
        let other = tempfile::tempdir().unwrap();
        assert!(NamedRun::find(root.path(), other.path()).unwrap_err().to_string().contains("is no run directory"));
    }
}
