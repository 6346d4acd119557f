//! Fills a run in from its folder: the streamed data set, the tokenizer, the special tokens, and where its output goes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf, absolute};

use crate::data::{DataFormat, is_built_in_template};
use crate::error::Problem;
use crate::format;
use crate::resolved_run::{CheckpointTokenizer, ResolvedRun};
use crate::run_folder::{CHECKPOINTS, TENSORBOARD};
use crate::streaming_config::StreamingConfig;
use crate::tokenizer::SpecialTokens;
use crate::tokenizer_file::Vocabulary;
use crate::tokenizer_folder::TokenizerReading;

/// The vocabulary size that planning assumes if nothing gives one; the demo's.
const ASSUMED_VOCABULARY: usize = 4096;

/// Path of the run's own copy of its tokenizer, in its folder.
pub const OWN_TOKENIZER: &str = "tokenizer/tokenizer.json";

/// Most bytes of a file of special tokens.
const LARGEST_TOKEN_LIST: u64 = 1 << 20;

/// Places outside the run's folder where tokenizers are looked for.
pub(crate) struct Surroundings<'a> {
    /// The folder that holds `EXPERIMENT/tokenizer.json`.
    pub tokenizer_root: PathBuf,
    /// Finds a checkpoint's tokenizer, to be used if the run's own file is gone.
    pub checkpoint_tokenizer: Option<CheckpointTokenizer<'a>>,
}

impl<'a> Surroundings<'a> {
    /// Reads `ORCHESTRATE_TOKENIZER_ROOT`.
    pub(crate) fn of_process(checkpoint_tokenizer: Option<CheckpointTokenizer<'a>>) -> Self {
        let root = std::env::var_os("ORCHESTRATE_TOKENIZER_ROOT").filter(|root| !root.is_empty());
        let tokenizer_root = root.map_or_else(|| PathBuf::from("artifacts/tokenizer"), PathBuf::from);
        Self { tokenizer_root, checkpoint_tokenizer }
    }
}

/// Fills the run in from its folder and returns what is wrong there. That a file does not exist yet
/// stops training, not planning.
pub(crate) fn resolve(run: &mut ResolvedRun, surroundings: &Surroundings, rejected: &BTreeSet<String>) -> Vec<Problem> {
    let mut problems = Vec::new();
    make_paths_absolute(run);
    find_streaming(run, &mut problems);
    find_outputs(run);
    find_tokenizer(run, surroundings);
    let vocabulary = run.config.tokenizer.tokenizer_json.as_ref().filter(|path| path.exists()).and_then(|path| {
        let vocabulary = Vocabulary::load(path, TokenizerReading::of_version(run.config.data.reading_version()));
        vocabulary
            .map_err(|problem| {
                problems.push(Problem::new("tokenizer.tokenizer_json", format!("{} {problem}", path.display())));
            })
            .ok()
    });
    find_vocab_size(run, vocabulary.as_ref(), rejected, &mut problems);
    match find_special_tokens(run, vocabulary.as_ref()) {
        Ok(tokens) => run.special_tokens = tokens,
        Err(problem) => problems.push(problem),
    }
    problems
}

/// Returns what a run lacks for training; planning can do without.
pub(crate) fn missing_for_training(run: &ResolvedRun) -> Vec<Problem> {
    let mut problems = Vec::new();
    let streaming_config = run.run_directory.join(StreamingConfig::FILE_NAME);
    let data = &run.config.data;
    let names_text = !data.train_shards.is_empty() || !data.mixture.is_empty();
    if run.streaming.is_none() && !names_text && !streaming_config.exists() {
        let message = format!(
            "names no files, and there is no {} to stream from: nothing to train on",
            streaming_config.display()
        );
        problems.push(Problem::new("data.train_shards", message).suggest(
            "name local files (data.train_shards: [\"corpus/*.parquet\"]), or let \
             `orchestrate --stream --dataset NAME --experiment NAME --launch none` write that file",
        ));
    }
    let absent = match &run.config.tokenizer.tokenizer_json {
        // A streaming config that cannot be read may name the tokenizer.
        None if run.streaming.is_none() && streaming_config.exists() => None,
        None => Some("is missing, and no streaming_config.json beside the config names a tokenizer".to_owned()),
        Some(path) => (!path.exists()).then(|| format!("{} does not exist", path.display())),
    };
    if let Some(message) = absent {
        let problem = Problem::new("tokenizer.tokenizer_json", message);
        problems.push(problem.suggest(match run.config.model.init_from {
            Some(_) => "`AutoTokenizer.from_pretrained(...).save_pretrained(...)` of transformers writes the model's",
            None => "name a tokenizer.json, or let `orchestrate` train one",
        }));
    }
    if let Some(SpecialTokens::File(path)) = run.config.tokenizer.special_tokens.as_ref()
        && !path.exists()
    {
        let problem = Problem::new("tokenizer.special_tokens", format!("{} does not exist", path.display()));
        problems.push(problem.suggest("remove the key for the tokenizer's own, or write the file"));
    }
    // Sets of conversations are small enough to be read to their end.
    let endless = data.format == DataFormat::Text
        && run.streaming.as_ref().is_some_and(|streaming| streaming.max_samples.is_none());
    if let Some(epochs) = run.config.scheduler.total_epochs.filter(|_| endless) {
        let message = format!("is {epochs}, but a stream without max_samples has no known length");
        problems.push(Problem::new("scheduler.total_epochs", message).suggest("give scheduler.total_steps instead"));
    }
    problems
}

fn make_paths_absolute(run: &mut ResolvedRun) {
    let config = &mut run.config;
    let special_tokens = match &mut config.tokenizer.special_tokens {
        Some(SpecialTokens::File(path)) => Some(path),
        _ => None,
    };
    let paths = [
        config.model.init_from.as_mut(),
        config.lora.init_from.as_mut(),
        config.tokenizer.tokenizer_json.as_mut(),
        config.tokenizer.vocab.as_mut(),
        config.tokenizer.merges.as_mut(),
        special_tokens,
        config.data.cache_dir.as_mut(),
        config.data.chat_template.as_mut().filter(|path| !is_built_in_template(path)),
        config.runtime.checkpoint.directory.as_mut(),
        config.runtime.evaluation.best.directory.as_mut(),
        config.runtime.logging.tensorboard_directory.as_mut(),
    ];
    for path in paths.into_iter().flatten() {
        *path = whole(path);
    }
    let data = &mut config.data;
    let mixed = data.mixture.iter_mut().flat_map(|component| &mut component.shards);
    for pattern in data.train_shards.iter_mut().chain(&mut data.validation_shards).chain(mixed) {
        *pattern = whole(Path::new(pattern)).to_string_lossy().into_owned();
    }
}

/// Makes a relative path absolute, from the current folder.
fn whole(path: &Path) -> PathBuf {
    absolute(path).unwrap_or_else(|_| path.to_path_buf())
}

fn find_streaming(run: &mut ResolvedRun, problems: &mut Vec<Problem>) {
    let path = run.run_directory.join(StreamingConfig::FILE_NAME);
    if !path.exists() {
        return;
    }
    if !run.config.data.train_shards.is_empty() {
        run.notes.push(format!("data.train_shards is not read: {} says what is streamed", path.display()));
    }
    if !run.config.data.mixture.is_empty() {
        let message = format!("names sources to train on, but {} says what is streamed", path.display());
        problems.push(
            Problem::new("data.mixture", message).suggest("remove the one or the other: a mixture can name it too"),
        );
    }
    match StreamingConfig::load(&path) {
        Ok(mut streaming) => {
            let located = |tokenizer: PathBuf| {
                let own = run.run_directory.join(&tokenizer);
                if own.exists() { own } else { whole(&tokenizer) }
            };
            streaming.tokenizer = streaming.tokenizer.map(located);
            run.streaming = Some(streaming);
        }
        Err(error) => problems.push(Problem::of_file(error.to_string())),
    }
}

fn find_outputs(run: &mut ResolvedRun) {
    let runtime = &mut run.config.runtime;
    let checkpoints = runtime.checkpoint.directory.get_or_insert_with(|| run.run_directory.join(CHECKPOINTS));
    runtime.evaluation.best.directory.take_if(|best| best == checkpoints);
    runtime.logging.tensorboard_directory.get_or_insert_with(|| run.run_directory.join(TENSORBOARD));
}

/// Sets the tokenizer to the one that the config names, the one beside its `vocab.json`, or the run's own. Where that
/// file is gone, to a checkpoint's, which the run was trained with, or else to the first of these: the pretrained
/// model's, the one that the streaming config names, the one trained for the experiment.
fn find_tokenizer(run: &mut ResolvedRun, surroundings: &Surroundings) {
    let tokenizer = &run.config.tokenizer;
    let beside_vocab = || Some(tokenizer.vocab.as_ref()?.with_file_name("tokenizer.json"));
    let configured = tokenizer.tokenizer_json.clone().or_else(beside_vocab);
    let expected = configured.clone().unwrap_or_else(|| run.run_directory.join(OWN_TOKENIZER));
    let of_checkpoint = || surroundings.checkpoint_tokenizer?(run.config.runtime.checkpoint.directory.as_deref()?);
    let tokenizer_json_path = if expected.exists() {
        Some(expected)
    } else if let Some(recorded) = of_checkpoint() {
        run.notes.push(format!(
            "{} does not exist: the tokenizer is the checkpoint's, {}",
            expected.display(),
            recorded.display()
        ));
        Some(recorded)
    } else {
        configured.or_else(|| tokenizer_outside(run, surroundings))
    };
    run.config.tokenizer.tokenizer_json = tokenizer_json_path;
}

/// Returns the tokenizer of a run that has no checkpoint, from outside its folder.
fn tokenizer_outside(run: &ResolvedRun, surroundings: &Surroundings) -> Option<PathBuf> {
    let streaming = run.streaming.as_ref();
    let folder_name = run.run_directory.file_name().and_then(|name| name.to_str());
    let experiment = streaming.map(|streaming| streaming.experiment.as_str()).or(folder_name).unwrap_or_default();
    let trained = surroundings.tokenizer_root.join(experiment).join("tokenizer.json");
    let of_model = run.config.model.init_from.as_ref().map(|model| model.join("tokenizer.json"));
    of_model.or_else(|| streaming?.tokenizer.clone()).or_else(|| trained.exists().then(|| whole(&trained)))
}

fn find_vocab_size(
    run: &mut ResolvedRun,
    vocabulary: Option<&Vocabulary>,
    rejected: &BTreeSet<String>,
    problems: &mut Vec<Problem>,
) {
    if rejected.contains("model.vocab_size") {
        return;
    }
    match (run.config.model.vocab_size, vocabulary) {
        (Some(size), Some(vocabulary)) if size < vocabulary.size => {
            let message = format!("is {size}, less than the tokenizer's {}", vocabulary.size);
            let tokenizer = run.config.tokenizer.tokenizer_json.as_deref().and_then(Path::parent);
            let way_out = match run.config.model.init_from.as_deref() {
                Some(model) if tokenizer == Some(model) => {
                    "the tokenizer.json in the model's folder is another model's"
                }
                Some(_) => "train on with the tokenizer of the model",
                None => "leave it out to take the tokenizer's",
            };
            problems.push(Problem::new("model.vocab_size", message).suggest(way_out));
        }
        (Some(_), _) => {}
        (None, Some(vocabulary)) => run.config.model.vocab_size = Some(vocabulary.size),
        (None, None) => {
            run.config.model.vocab_size = Some(ASSUMED_VOCABULARY);
            run.notes.push(format!(
                "there is no tokenizer yet: a vocabulary of {ASSUMED_VOCABULARY} is assumed \
                 (--override model.vocab_size=N for another)"
            ));
        }
    }
}

/// Returns the special tokens that the config, `special_tokens.txt` beside it or the tokenizer names.
fn find_special_tokens(run: &mut ResolvedRun, vocabulary: Option<&Vocabulary>) -> Result<Vec<String>, Problem> {
    let file = run.run_directory.join("special_tokens.txt");
    let special_tokens = &mut run.config.tokenizer.special_tokens;
    if special_tokens.is_none() && file.exists() {
        *special_tokens = Some(SpecialTokens::File(file));
    }
    let (tokens, source) = match special_tokens {
        None => {
            return Ok(vocabulary.map(|vocabulary| vocabulary.special.clone()).unwrap_or_default());
        }
        Some(SpecialTokens::List(tokens)) => (tokens.clone(), String::new()),
        Some(SpecialTokens::File(path)) if !path.exists() => return Ok(Vec::new()),
        Some(SpecialTokens::File(path)) => {
            let problem = |problem: Problem| {
                Problem::new("tokenizer.special_tokens", format!("{} {}", path.display(), problem.message))
            };
            (read_special_tokens(path).map_err(problem)?, format!("{} ", path.display()))
        }
    };
    let Some(vocabulary) = vocabulary else {
        return Ok(tokens);
    };
    let missing_tokens: Vec<_> =
        tokens.iter().filter(|token| !vocabulary.ids.contains_key(*token)).map(|token| format!("{token:?}")).collect();
    if missing_tokens.is_empty() {
        return Ok(tokens);
    }
    let message = format!("{source}names {}, not in the tokenizer's vocabulary", missing_tokens.join(", "));
    Err(Problem::new("tokenizer.special_tokens", message).suggest("remove it, or train the tokenizer with it"))
}

fn read_special_tokens(path: &Path) -> Result<Vec<String>, Problem> {
    let text = format::read_text(path, LARGEST_TOKEN_LIST)?;
    if text.trim_start().starts_with('[') {
        let invalid =
            |error| Problem::of_file(format!("starts like a JSON array but is not an array of strings: {error}"));
        return serde_json::from_str(&text).map_err(invalid);
    }
    Ok(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::RunConfig;

    #[test]
    fn the_default_tokenizer_is_the_experiments() {
        let folder = tempfile::tempdir().unwrap();
        let trained = folder.path().join("tokenizers/e1/tokenizer.json");
        std::fs::create_dir_all(trained.parent().unwrap()).unwrap();
        std::fs::write(&trained, r#"{"model": {"vocab": {"a": 0, "b": 6}}}"#).unwrap();
        let mut run = ResolvedRun {
            config: RunConfig::default(),
            streaming: None,
            run_directory: folder.path().join("e1"),
            special_tokens: Vec::new(),
            config_path: folder.path().join("e1/training.yaml"),
            notes: Vec::new(),
        };
        let surroundings =
            Surroundings { tokenizer_root: folder.path().join("tokenizers"), checkpoint_tokenizer: None };
        assert_eq!(resolve(&mut run, &surroundings, &BTreeSet::new()), []);
        assert_eq!(run.config.tokenizer.tokenizer_json, Some(trained));
        assert_eq!(run.config.model.vocab_size, Some(7), "the highest id counts");
    }
}
