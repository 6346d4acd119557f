//! What may not change on resume: whatever gives the weights their shape or the data their order.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use dataset::SourceDescription;
use run_config::{Algorithm, Packing, ResolvedRun, RunConfig};
use serde_json::{Value, json};

/// Config keys (and the tokenizer's and data's own marks) with the values a checkpoint was trained with.
pub type ConfigFingerprint = BTreeMap<String, Value>;

const REVISION: &str = "revision";
const PACKING: &str = "data.packing";
const MIXTURE: &str = "data.mixture";
const ALGORITHM: &str = "optimizer.algorithm";

/// One key that differs.
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

/// What runs did before there was a key for it: their checkpoints lack the key.
fn before(key: &str) -> Value {
    match key {
        PACKING => json!(Packing::Concat),
        ALGORITHM => json!(Algorithm::AdamW),
        _ => Value::Null,
    }
}

/// The keys in which the config's fingerprint differs from the checkpoint's.
pub fn changes(checkpoint: &ConfigFingerprint, config: &ConfigFingerprint) -> Vec<Change> {
    let value =
        |fingerprint: &ConfigFingerprint, key: &str| fingerprint.get(key).cloned().unwrap_or_else(|| before(key));
    let keys: BTreeSet<&String> = checkpoint.keys().chain(config.keys()).collect();
    keys.into_iter()
        .map(|key| Change { key: key.clone(), was: value(checkpoint, key), is: value(config, key) })
        .filter(|change| change.was != change.is)
        .collect()
}

/// Names the commits that a checkpoint was trained with, where the run does not name any itself: the data sets may have
/// moved on since, and a run goes on with what it began with.
pub fn restore_revisions(checkpoint: &ConfigFingerprint, run: &mut ResolvedRun) {
    let recall = |key: &str, revision: &mut Option<String>| {
        let began_with = checkpoint.get(key).and_then(Value::as_str);
        *revision = revision.take().or(began_with.map(str::to_owned));
    };
    if let Some(streaming) = &mut run.streaming {
        recall(REVISION, &mut streaming.revision);
    }
    for (index, component) in run.config.data.mixture.iter_mut().enumerate() {
        recall(&format!("{MIXTURE}[{index}].{REVISION}"), &mut component.revision);
    }
}

/// Writes the commits that a run reads into its config.
pub fn pin_revisions(run: &mut ResolvedRun, sources: &[SourceDescription]) {
    for (component, source) in run.config.data.mixture.iter_mut().zip(sources) {
        component.revision.clone_from(&source.revision);
    }
}

/// The fingerprint of a run: the model's sizes, the arithmetic, and everything that the order of its data follows from.
pub fn compute(run: &ResolvedRun, tokenizer_hash: &str, sources: &[SourceDescription]) -> ConfigFingerprint {
    let RunConfig { model, data, optimizer, runtime, .. } = &run.config;
    let mut fingerprint = ConfigFingerprint::new();
    let Value::Object(sizes) = json!(model) else { unreachable!("a struct is an object") };
    // How the first weights were drawn no longer matters once they are trained.
    fingerprint.extend(
        sizes.into_iter().filter(|(key, _)| key != "init_std").map(|(key, value)| (format!("model.{key}"), value)),
    );
    let mut add = |key: &str, value: Value| fingerprint.insert(key.to_owned(), value);
    add(ALGORITHM, json!(optimizer.algorithm));
    add("runtime.precision", json!(runtime.precision));
    add("runtime.seed", json!(runtime.seed));
    add("data.sequence_length", json!(data.sequence_length));
    add(PACKING, json!(data.packing));
    add("data.shuffle_buffer_size", json!(data.shuffle_buffer_size));
    add("tokenizer.tokenizer_json (SHA-256)", json!(tokenizer_hash));
    let held_out = if data.validation_shards.is_empty() { data.held_out_fraction } else { 0.0 };
    add("data.held_out_fraction (0 with data.validation_shards)", json!(held_out));
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
    fingerprint
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_and_missing_keys_are_changes() {
        let fingerprint = |values: &[(&str, u64)]| -> ConfigFingerprint {
            values.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect()
        };
        let found =
            changes(&fingerprint(&[("a", 1), ("b", 2), ("c", 3)]), &fingerprint(&[("a", 1), ("b", 4), ("d", 5)]));
        let told: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(told, ["b was 2 and is 4", "c was 3 and is null", "d was null and is 5"]);
    }

    #[test]
    fn the_optimizer_defaults_to_adamw_in_old_checkpoints() {
        let with = |algorithm: &str| ConfigFingerprint::from([(ALGORITHM.to_owned(), json!(algorithm))]);
        assert_eq!(changes(&ConfigFingerprint::new(), &with("adamw")), []);
        let told: Vec<String> = changes(&with("muon"), &with("adamw")).iter().map(ToString::to_string).collect();
        assert_eq!(told, [r#"optimizer.algorithm was "muon" and is "adamw""#]);
    }

    #[test]
    fn packing_defaults_to_concat_in_old_checkpoints() {
        let now = |packing: Packing| ConfigFingerprint::from([(PACKING.to_owned(), json!(packing))]);
        assert_eq!(changes(&ConfigFingerprint::new(), &now(Packing::Concat)), []);
        let told: Vec<String> =
            changes(&ConfigFingerprint::new(), &now(Packing::Documents)).iter().map(ToString::to_string).collect();
        assert_eq!(told, ["data.packing was \"concat\" and is \"documents\""]);
    }
}
