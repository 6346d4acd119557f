//! `--override a.b=v`: one key of the config replaced on the command line.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::error::Problem;
use crate::format::{self, Format};

/// The three keys of which two give the third. `tokens_per_step` is another spelling of the last.
const BATCH_KEYS: [&str; 3] = ["batch_size", "gradient_accumulation_steps", SEQUENCES];
const SEQUENCES: &str = "sequences_per_step";
const TOKENS: &str = "tokens_per_step";

/// Puts the overrides into the document and returns the keys they set. A value is written as in
/// YAML: `3e-4`, `auto`, `null`, `[a, b]`.
pub(crate) fn apply(
    document: &mut Map<String, Value>,
    overrides: &[String],
    problems: &mut Vec<Problem>,
) -> BTreeSet<String> {
    let mut keys = BTreeSet::new();
    for text in overrides {
        match split(text).and_then(|(key, value)| insert(document, key, value).map(|()| key)) {
            Ok(key) => {
                keys.insert(key.to_owned());
            }
            Err(problem) => problems.push(problem),
        }
    }
    release_batch_keys(document, &keys);
    keys
}

fn split(text: &str) -> Result<(&str, Value), Problem> {
    let form = || Problem::new("--override", format!("{text:?} is not of the form section.key=value"));
    let (key, value) = text.split_once('=').ok_or_else(form)?;
    let key = key.trim();
    if key.is_empty() || key.split('.').any(str::is_empty) {
        return Err(form());
    }
    if value.trim().is_empty() {
        return Err(Problem::new(key, "has an override without a value").suggest("write null to leave the key out"));
    }
    let value = format::parse(value, Format::Yaml).map_err(|problem| {
        Problem::new(key, format!("the value of the override {value:?} {}", problem.message))
            .suggest("put a string in quotes")
    })?;
    Ok((key, value))
}

fn insert(document: &mut Map<String, Value>, key: &str, value: Value) -> Result<(), Problem> {
    let (section, leaf) = key.rsplit_once('.').unwrap_or(("", key));
    let mut place = document;
    for name in section.split('.').filter(|name| !name.is_empty()) {
        let inner = place.entry(name).or_insert(Value::Null);
        if inner.is_null() {
            *inner = Value::Object(Map::new());
        }
        place = inner
            .as_object_mut()
            .ok_or_else(|| Problem::new(key, format!("`{name}` is a value, it has no keys of its own")))?;
    }
    place.insert(leaf.to_owned(), value);
    Ok(())
}

/// Drops batch keys of the file that contradict overrides. If two of the three are given on the command line, the
/// file's third is dropped; if one is, the file's `sequences_per_step` stays and the split follows (a new
/// `sequences_per_step` keeps the file's `batch_size`).
fn release_batch_keys(document: &mut Map<String, Value>, keys: &BTreeSet<String>) {
    let Some(data) = document.get_mut("data").and_then(Value::as_object_mut) else {
        return;
    };
    release_other_spelling(data, keys);
    let is_given = |data: &Map<String, Value>, name: &str| {
        spellings(&name).iter().any(|name| data.get(*name).is_some_and(|value| !value.is_null()))
    };
    let is_overridden = |name: &str| spellings(&name).iter().any(|name| keys.contains(&format!("data.{name}")));
    let overridden: Vec<&str> =
        BATCH_KEYS.into_iter().filter(|name| is_overridden(name) && is_given(data, name)).collect();
    let rank: [&str; 2] = match overridden.as_slice() {
        ["batch_size"] => ["sequences_per_step", "gradient_accumulation_steps"],
        ["gradient_accumulation_steps"] => ["sequences_per_step", "batch_size"],
        ["sequences_per_step"] => ["batch_size", "gradient_accumulation_steps"],
        [_, _] => {
            data.retain(|name, _| {
                let name = if name == TOKENS { SEQUENCES } else { name.as_str() };
                !BATCH_KEYS.contains(&name) || overridden.contains(&name)
            });
            return;
        }
        _ => return,
    };
    if rank.iter().all(|name| is_given(data, name)) {
        data.shift_remove(rank[1]);
    }
}

/// Drops the file's `tokens_per_step` if `sequences_per_step` is overridden, and the other way round.
fn release_other_spelling(data: &mut Map<String, Value>, keys: &BTreeSet<String>) {
    let [tokens, sequences] = [TOKENS, SEQUENCES].map(|name| keys.contains(&format!("data.{name}")));
    match (tokens, sequences) {
        (true, false) => drop(data.shift_remove(SEQUENCES)),
        (false, true) => drop(data.shift_remove(TOKENS)),
        _ => {}
    }
}

/// Returns a batch key and its other spelling, if it has one.
fn spellings<'a>(name: &'a &'a str) -> &'a [&'a str] {
    if *name == SEQUENCES { &[SEQUENCES, TOKENS] } else { std::slice::from_ref(name) }
}
