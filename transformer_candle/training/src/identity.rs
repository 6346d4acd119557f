//! What may not change on resume: whatever gives the weights their shape or the data their order.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde_json::Value;

/// Config keys (and the tokenizer's and data's own marks) with the values a checkpoint was trained with.
pub type Identity = BTreeMap<String, Value>;

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

/// The keys in which the config's identity differs from the checkpoint's.
pub fn changes(checkpoint: &Identity, config: &Identity) -> Vec<Change> {
    let value = |identity: &Identity, key: &str| identity.get(key).cloned().unwrap_or(Value::Null);
    let keys: BTreeSet<&String> = checkpoint.keys().chain(config.keys()).collect();
    keys.into_iter()
        .map(|key| Change { key: key.clone(), was: value(checkpoint, key), is: value(config, key) })
        .filter(|change| change.was != change.is)
        .collect()
}
