//! The fingerprint of a run's configuration: the settings that must not change on resume, because the shape of the
//! weights or the order of the data depends on them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use dataset::SourceDescription;
use run_config::{
    Algorithm, Architecture, BasePrecision, Bos, DataFormat, FIRST_READING_VERSION, Packing, Precision, ResolvedRun,
    RopeType, RunConfig,
};
use serde_json::{Value, json};

/// Values by config key, plus the tokenizer's hash and the data's size or commit.
pub type ConfigFingerprint = BTreeMap<String, Value>;

const REVISION: &str = "revision";
const PACKING: &str = "data.packing";
const READING_VERSION: &str = "data.reading_version";
const FORMAT: &str = "data.format";
const BOS: &str = "data.bos";
const PARSE: &str = "data.parse_special_tokens";
const MIXTURE: &str = "data.mixture";
const ARCHITECTURE: &str = "model.architecture";
/// Key of the hash of the tokenizer.
const TOKENIZER: &str = "tokenizer.tokenizer_json (SHA-256)";
/// Key of the precision policy.
pub(crate) const PRECISION: &str = "runtime.precision";
const ALGORITHM: &str = "optimizer.algorithm";
const BASE_PRECISION: &str = "lora.base_precision";

/// A key whose value differs between a checkpoint and a config.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The key's path, such as `model.hidden_size`.
    pub key: String,
    /// The checkpoint's value.
    pub was: Value,
    /// The config's value.
    pub is: Value,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} was {} and is {}", self.key, self.was, self.is)
    }
}

/// Returns the value that a checkpoint without this key stands for.
fn default_value(key: &str) -> Value {
    match key {
        PACKING => json!(Packing::Concat),
        READING_VERSION => json!(FIRST_READING_VERSION),
        FORMAT => json!(DataFormat::Text),
        BOS => json!(Bos::Never),
        ALGORITHM => json!(Algorithm::AdamW),
        ARCHITECTURE => json!(Architecture::Llama),
        BASE_PRECISION => json!(BasePrecision::Auto),
        _ => Value::Null,
    }
}

/// Returns the keys in which the config's fingerprint differs from the checkpoint's.
pub fn changes(checkpoint: &ConfigFingerprint, config: &ConfigFingerprint) -> Vec<Change> {
    let value = |fingerprint: &ConfigFingerprint, key: &str| {
        fingerprint.get(key).cloned().unwrap_or_else(|| default_value(key))
    };
    let keys: BTreeSet<&String> = checkpoint.keys().chain(config.keys()).collect();
    keys.into_iter()
        .map(|key| Change { key: key.clone(), was: value(checkpoint, key), is: value(config, key) })
        .filter(|change| change.was != change.is)
        .collect()
}

/// Whether a checkpoint was trained with the tokenizer of this hash.
pub fn is_tokenizer_of(checkpoint: &ConfigFingerprint, tokenizer_hash: &str) -> bool {
    checkpoint.get(TOKENIZER).is_none_or(|recorded| recorded == tokenizer_hash)
}

/// Returns the checkpoint's fingerprint with the number and size of local files of another one.
pub fn with_files_of(checkpoint: &ConfigFingerprint, other: &ConfigFingerprint) -> ConfigFingerprint {
    let is_of_files = |key: &str| key.ends_with("shards (files)") || key.ends_with("shards (bytes)");
    let files = other.iter().filter(|(key, _)| is_of_files(key) && checkpoint.contains_key(*key));
    let files: Vec<(String, Value)> = files.map(|(key, value)| (key.clone(), value.clone())).collect();
    checkpoint.clone().into_iter().chain(files).collect()
}

/// Sets the data revisions and the reading version of a checkpoint where the config names none, so that a resumed run
/// reads the same commits by the same rules.
pub fn restore_data_versions(checkpoint: &ConfigFingerprint, run: &mut ResolvedRun) {
    let restore = |key: &str, revision: &mut Option<String>| {
        let saved = checkpoint.get(key).and_then(Value::as_str);
        *revision = revision.take().or(saved.map(str::to_owned));
    };
    if let Some(streaming) = &mut run.streaming {
        restore(REVISION, &mut streaming.revision);
    }
    for (index, component) in run.config.data.mixture.iter_mut().enumerate() {
        restore(&format!("{MIXTURE}[{index}].{REVISION}"), &mut component.revision);
    }
    let version = checkpoint.get(READING_VERSION).and_then(Value::as_u64).and_then(|version| version.try_into().ok());
    let data = &mut run.config.data;
    data.reading_version.get_or_insert(version.unwrap_or(FIRST_READING_VERSION));
    data.parse_special_tokens = data.parse_special_tokens.or(checkpoint.get(PARSE).and_then(Value::as_bool));
}

/// Writes the resolved commits of the data sources, and the version of the rules that they are read by, into the config.
pub fn pin_data_versions(run: &mut ResolvedRun, sources: &[SourceDescription]) {
    run.config.data.reading_version = Some(run.config.data.reading_version());
    for (component, source) in run.config.data.mixture.iter_mut().zip(sources) {
        component.revision.clone_from(&source.revision);
    }
}

/// Returns the settings that must not change on resume in which `config` differs from `former`, as far as the config
/// alone has them: not the tokenizer, nor the data sources.
pub fn changed_settings(former: &RunConfig, config: &RunConfig) -> Vec<Change> {
    changes(&of_settings(former), &of_settings(config))
}

/// Computes a run's fingerprint from the model's shape, the precision and everything that determines the order of its
/// data.
pub fn compute(run: &ResolvedRun, tokenizer_hash: &str, sources: &[SourceDescription]) -> ConfigFingerprint {
    let mut fingerprint = of_settings(&run.config);
    fingerprint.insert(TOKENIZER.to_owned(), json!(tokenizer_hash));
    add_sources(&mut fingerprint, run, sources);
    fingerprint
}

fn of_settings(config: &RunConfig) -> ConfigFingerprint {
    let RunConfig { model, lora, data, optimizer, runtime, .. } = config;
    let mut fingerprint = ConfigFingerprint::new();
    let Value::Object(sizes) = json!(model) else { unreachable!("a struct is an object") };
    // Initialisation does not matter after step 0, and learning rates may change. A key at its default is left out, so
    // that checkpoints from before the key compare equal.
    let is_default = |key: &str| match key {
        "architecture" => model.architecture == Architecture::Llama,
        "head_dim" => model.head_size() * model.num_attention_heads == model.hidden_size,
        "rope_scaling" => model.rope_scaling.rope_type == RopeType::Default,
        key => ["init_from", "init_std", "base_hidden_size"].contains(&key),
    };
    let sizes = sizes.into_iter().filter(|(key, _)| !is_default(key));
    fingerprint.extend(sizes.map(|(key, value)| (format!("model.{key}"), value)));
    let mut add = |key: &str, value: Value| fingerprint.insert(key.to_owned(), value);
    if lora.rank.is_some() {
        add("lora.rank", json!(lora.rank));
        add("lora.alpha", json!(lora.alpha));
        add("lora.rslora", json!(lora.rslora));
        add("lora.target_modules", json!(lora.target_modules));
        if lora.base_precision != BasePrecision::Auto {
            add(BASE_PRECISION, json!(lora.base_precision));
        }
    }
    add(ALGORITHM, json!(optimizer.algorithm));
    add(PRECISION, json!(runtime.precision));
    if runtime.precision == Precision::Fp8 {
        add("runtime.fp8_recipe", json!(runtime.fp8_recipe));
    }
    add("runtime.seed", json!(runtime.seed));
    add("data.sequence_length", json!(data.sequence_length));
    add(PACKING, json!(data.packing));
    // Left out at their default, as keys of the model are.
    if data.bos != Bos::Never {
        add(BOS, json!(data.bos));
    }
    if let Some(is_parsed) = data.parse_special_tokens {
        add(PARSE, json!(is_parsed));
    }
    if data.reading_version() != FIRST_READING_VERSION {
        add(READING_VERSION, json!(data.reading_version()));
    }
    if data.format != DataFormat::Text {
        add(FORMAT, json!(data.format));
        add("data.chat_template_date", json!(data.chat_template_date));
        add("data.assistant_only_loss", json!(data.assistant_only_loss));
        add("data.overlong_conversations", json!(data.overlong_conversations));
    }
    add("data.shuffle_buffer_size", json!(data.shuffle_buffer_size));
    let held_out = if data.validation_shards.is_empty() { data.held_out_fraction } else { 0.0 };
    add("data.held_out_fraction (0 with data.validation_shards)", json!(held_out));
    add_stages(&mut fingerprint, config);
    fingerprint
}

/// Adds what each stage trains on.
fn add_stages(fingerprint: &mut ConfigFingerprint, config: &RunConfig) {
    let stages = config.stages.as_deref().unwrap_or_default();
    for (index, stage) in stages.iter().enumerate() {
        let mut add = |key: &str, value: Value| fingerprint.insert(format!("stages[{index}].{key}"), value);
        // The last stage may become longer, as a run without stages may.
        if index + 1 < stages.len() {
            add("steps", json!(stage.steps));
        }
        add("at", json!(stage.at));
        add("sequence_length", json!(stage.sequence_length));
        add("sequences_per_step", json!(stage.sequences_per_step));
        for weight in &stage.mixture {
            add(&format!("mixture[{}].weight", weight.source), json!(weight.weight));
        }
    }
}

/// Adds what determines which text is read: the sources with their versions and sizes, and their weights.
fn add_sources(fingerprint: &mut ConfigFingerprint, run: &ResolvedRun, sources: &[SourceDescription]) {
    let data = &run.config.data;
    let mut add = |key: &str, value: Value| fingerprint.insert(key.to_owned(), value);
    if let Some(streaming) = &run.streaming {
        add("dataset", json!(streaming.dataset));
        add("split", json!(streaming.split));
        add("config", json!(streaming.config));
        add(REVISION, json!(sources[0].revision));
        add("max_samples", json!(streaming.max_samples));
        add("text_column", json!(streaming.text_column));
    } else if data.mixture.is_empty() {
        add("data.train_shards (files)", json!(sources[0].files));
        add("data.train_shards (bytes)", json!(sources[0].bytes));
        add("data.text_column", json!(data.text_column));
        if data.split.is_some() {
            add("data.split", json!(data.split));
        }
        if data.max_samples.is_some() {
            add("data.max_samples", json!(data.max_samples));
        }
    }
    for (index, (component, source)) in data.mixture.iter().zip(sources).enumerate() {
        let mut add = |key: &str, value: Value| add(&format!("{MIXTURE}[{index}].{key}"), value);
        add("weight", json!(component.weight));
        add("text_column", json!(component.text_column.as_ref().unwrap_or(&data.text_column)));
        if let Some(dataset) = &component.dataset {
            add("dataset", json!(dataset));
            add("split", json!(component.split()));
            add("config", json!(component.config));
            add(REVISION, json!(source.revision));
        } else {
            add("shards (files)", json!(source.files));
            add("shards (bytes)", json!(source.bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn different_and_missing_keys_are_changes() {
        let fingerprint = |values: &[(&str, u64)]| -> ConfigFingerprint {
            values.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect()
        };
        let changes =
            changes(&fingerprint(&[("a", 1), ("b", 2), ("c", 3)]), &fingerprint(&[("a", 1), ("b", 4), ("d", 5)]));
        let texts: Vec<String> = changes.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["b was 2 and is 4", "c was 3 and is null", "d was null and is 5"]);
    }

    #[test]
    fn the_optimizer_defaults_to_adamw_in_old_checkpoints() {
        let with = |algorithm: &str| ConfigFingerprint::from([(ALGORITHM.to_owned(), json!(algorithm))]);
        assert_eq!(changes(&ConfigFingerprint::new(), &with("adamw")), []);
        let changes: Vec<String> = changes(&with("muon"), &with("adamw")).iter().map(ToString::to_string).collect();
        assert_eq!(changes, [r#"optimizer.algorithm was "muon" and is "adamw""#]);
    }

    #[test]
    fn documents_of_old_checkpoints_start_without_bos() {
        let now = |bos: Bos| ConfigFingerprint::from([(BOS.to_owned(), json!(bos))]);
        assert_eq!(changes(&ConfigFingerprint::new(), &now(Bos::Never)), []);
        let changes: Vec<String> =
            changes(&ConfigFingerprint::new(), &now(Bos::Always)).iter().map(ToString::to_string).collect();
        assert_eq!(changes, ["data.bos was false and is true"]);
    }

    #[test]
    fn old_checkpoints_have_the_first_reading_version() {
        let resumed = |checkpoint: &ConfigFingerprint, config: Option<u32>| {
            let mut run = ResolvedRun {
                config: RunConfig::default(),
                streaming: None,
                run_directory: PathBuf::new(),
                special_tokens: Vec::new(),
                config_path: PathBuf::new(),
                notes: Vec::new(),
            };
            run.config.data.reading_version = config;
            restore_data_versions(checkpoint, &mut run);
            run.config.data.reading_version
        };
        let (old, new) = (ConfigFingerprint::new(), ConfigFingerprint::from([(READING_VERSION.to_owned(), json!(2))]));
        assert_eq!((resumed(&old, None), resumed(&new, None), resumed(&old, Some(2))), (Some(1), Some(2), Some(2)));
        let changes: Vec<String> = changes(&old, &new).iter().map(ToString::to_string).collect();
        assert_eq!(changes, ["data.reading_version was 1 and is 2"]);
    }

    #[test]
    fn packing_defaults_to_concat_in_old_checkpoints() {
        let now = |packing: Packing| ConfigFingerprint::from([(PACKING.to_owned(), json!(packing))]);
        assert_eq!(changes(&ConfigFingerprint::new(), &now(Packing::Concat)), []);
        let changes: Vec<String> =
            changes(&ConfigFingerprint::new(), &now(Packing::Documents)).iter().map(ToString::to_string).collect();
        assert_eq!(changes, ["data.packing was \"concat\" and is \"documents\""]);
    }
}
