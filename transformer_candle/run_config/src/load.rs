//! Loads a run from a config file: what the file leaves out comes from its own folder.

use std::path::{Path, absolute};

use serde_json::{Map, Value};

use crate::check::{self, Findings};
use crate::data::{DataFormat, FIRST_READING_VERSION};
use crate::error::{ConfigError, Problem};
use crate::format::{self, Format};
use crate::resolve::{self, Surroundings};
use crate::resolved_run::{CheckpointTokenizer, ResolvedRun};
use crate::{
    RunConfig, fill, former_keys, guide, init_from, lora_init_from, overrides, rules, run_folder, schema, yaml,
};

impl RunConfig {
    /// Whether special tokens that a document spells become those tokens (`data.parse_special_tokens`).
    pub fn parses_documents(&self) -> bool {
        let data = &self.data;
        data.parse_special_tokens.unwrap_or_else(|| {
            let is_text = data.format == DataFormat::Text && data.reading_version() > FIRST_READING_VERSION;
            is_text && self.model.init_from.is_some()
        })
    }

    /// Reads a config file for training: applies the overrides (`a.b=v`), fills in what is left out
    /// from the file's own folder, and checks everything, reporting all problems at once. Reads the
    /// current folder and `ORCHESTRATE_TOKENIZER_ROOT`.
    pub fn load(path: &Path, overrides: &[String]) -> Result<ResolvedRun, ConfigError> {
        let (run, problems) = read(path, overrides, None)?;
        finish_for_training(run, problems)
    }

    /// Like [`RunConfig::load`], for a run that has checkpoints: where its tokenizer's file is gone, that of a
    /// checkpoint takes its place, and a note says so.
    pub fn load_with_checkpoint(
        path: &Path,
        overrides: &[String],
        tokenizer: CheckpointTokenizer,
    ) -> Result<ResolvedRun, ConfigError> {
        let (run, problems) = read(path, overrides, Some(tokenizer))?;
        finish_for_training(run, problems)
    }

    /// Like [`RunConfig::load`], for commands that need no data: a missing tokenizer or data set is
    /// not an error. Without a tokenizer and `model.vocab_size` a vocabulary of 4096 is assumed,
    /// and a note says so.
    pub fn load_for_planning(path: &Path, overrides: &[String]) -> Result<ResolvedRun, ConfigError> {
        let (run, problems) = read(path, overrides, None)?;
        finish(run, problems)
    }

    /// Reads a config from text: applies overrides, fills in keys that depend on others, and checks it; no file is read
    /// but the configs of `model.init_from` and `lora.init_from`.
    ///
    /// ```
    /// use run_config::{BatchSize, Format, RunConfig, presets};
    ///
    /// let overrides = ["data.batch_size=4".to_owned(), "optimizer.learning_rate=1e-3".to_owned()];
    /// let config = RunConfig::parse(presets()[0].text, Format::Yaml, &overrides)?;
    /// assert_eq!(config.data.batch_size, BatchSize::Fixed(4));
    /// assert_eq!(config.data.gradient_accumulation_steps, Some(4));
    /// # Ok::<(), run_config::ConfigError>(())
    /// ```
    pub fn parse(text: &str, format: Format, overrides: &[String]) -> Result<Self, ConfigError> {
        Self::parse_of_file(text, format, overrides, None)
    }

    /// Like [`RunConfig::parse`], for the text of a config file: errors name it, and a pretrained model that is gone
    /// is known from the run beside it.
    pub fn parse_of_file(
        text: &str,
        format: Format,
        overrides: &[String],
        file: Option<&Path>,
    ) -> Result<Self, ConfigError> {
        let failed = |problem| ConfigError::new(file, vec![problem]);
        let document = format::parse(text, format).map_err(failed)?;
        let draft = Draft::new(document, overrides, file.and_then(Path::parent)).map_err(failed)?;
        if draft.findings.problems.is_empty() {
            Ok(draft.config)
        } else {
            Err(ConfigError::new(file, draft.findings.problems))
        }
    }

    /// Formats the config as YAML that can be loaded, with every key and what it means.
    pub fn to_commented_yaml(&self) -> String {
        yaml::commented(self)
    }

    /// Returns the manual of all keys in Markdown: `docs/guide/configuration.md`.
    pub fn guide() -> String {
        guide::markdown()
    }

    /// Returns the JSON Schema of a config file, which editors check it with.
    pub fn json_schema() -> Value {
        schema::published()
    }
}

impl ResolvedRun {
    fn missing_for_training(&self) -> Vec<Problem> {
        resolve::missing_for_training(self)
    }
}

/// A config parsed from its text, before anything is taken from its folder.
struct Draft {
    config: RunConfig,
    findings: Findings,
    notes: Vec<String>,
}

impl Draft {
    /// Parses and checks a document; `run_directory` is the folder of its file, if it has one.
    fn new(document: Value, overrides: &[String], run_directory: Option<&Path>) -> Result<Self, Problem> {
        let mut document = match document {
            Value::Object(document) => document,
            Value::Null => Map::new(),
            other => {
                return Err(Problem::of_file(format!(
                    "is {}, but must be sections such as `model:` and `data:`",
                    check::shown(&other)
                )));
            }
        };
        let (mut notes, mut problems) = (Vec::new(), Vec::new());
        let overridden = overrides::apply(&mut document, overrides, &mut problems);
        former_keys::translate(&mut document, &mut notes, &mut problems);
        lora_init_from::apply(&mut document, &mut problems);
        init_from::apply(&mut document, run_directory, &mut problems);
        let mut findings = check::check(&mut document);
        let mut config: RunConfig =
            serde_json::from_value(Value::Object(document)).map_err(|error| Problem::of_file(error.to_string()))?;
        fill::fill(&mut config, &mut findings);
        rules::check(&config, &mut findings);
        if problems.iter().any(|problem| problem.path == init_from::KEY) {
            // The keys that the pretrained model would have given are not missing.
            findings.problems.retain(|problem| !problem.path.starts_with("model."));
        }
        findings.problems.splice(0..0, problems);
        for problem in &mut findings.problems {
            if overridden.contains(&problem.path) {
                problem.given_by = Some("--override".to_owned());
            }
        }
        Ok(Self { config, findings, notes })
    }
}

/// Reads a config and its folder. The problems that stop planning come beside the run, so that
/// those that stop training can join them.
fn read(
    path: &Path,
    overrides: &[String],
    checkpoint_tokenizer: Option<CheckpointTokenizer>,
) -> Result<(ResolvedRun, Vec<Problem>), ConfigError> {
    let fatal = |problem| ConfigError::one(path, problem);
    let config_path = absolute(path).map_err(|error| fatal(Problem::of_file(error.to_string())))?;
    let mut document = Format::from_path(path)
        .and_then(|format| format::parse(&format::read_text(path, format::LARGEST_CONFIG)?, format))
        .map_err(fatal)?;
    let run_directory = config_path.parent().map(Path::to_path_buf).unwrap_or_default();
    if config_path.ends_with(run_folder::RESOLVED_CONFIG) {
        run_folder::locate(&mut document, &run_directory);
        run_folder::complete_reading_version(&mut document);
    }
    let mut draft = Draft::new(document, overrides, Some(&run_directory)).map_err(fatal)?;
    if run_directory.to_str().is_none() {
        draft.findings.problems.push(Problem::of_file("lies in a folder whose name is not UTF-8").suggest("move it"));
        return Err(ConfigError::new(Some(path), draft.findings.problems));
    }
    let mut run = ResolvedRun {
        config: draft.config,
        streaming: None,
        run_directory,
        special_tokens: Vec::new(),
        config_path,
        notes: draft.notes,
    };
    let mut problems = draft.findings.problems;
    problems.extend(resolve::resolve(
        &mut run,
        &Surroundings::of_process(checkpoint_tokenizer),
        &draft.findings.rejected,
    ));
    Ok((run, problems))
}

/// Like [`finish`], but also reports what only training needs and the run lacks.
fn finish_for_training(run: ResolvedRun, mut problems: Vec<Problem>) -> Result<ResolvedRun, ConfigError> {
    let problems_for_training = run.missing_for_training();
    // If the pretrained model cannot be used, its tokenizer is not asked for either.
    let is_refused = problems.iter().any(|problem| problem.path == init_from::KEY);
    problems.extend(
        problems_for_training.into_iter().filter(|problem| !(is_refused && problem.path == "tokenizer.tokenizer_json")),
    );
    finish(run, problems)
}

fn finish(run: ResolvedRun, problems: Vec<Problem>) -> Result<ResolvedRun, ConfigError> {
    if problems.is_empty() { Ok(run) } else { Err(ConfigError::new(Some(&run.config_path), problems)) }
}
