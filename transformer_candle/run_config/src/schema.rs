//! The JSON Schema of a config file, made from the types and their doc comments. Checking, the
//! commented YAML and the guide all read it, so that a key is described once.

use std::sync::LazyLock;

use schemars::generate::SchemaSettings;
use serde_json::{Value, json};

use crate::RunConfig;

/// Keys that a config must give, because no default suits everyone.
pub(crate) const REQUIRED: [&str; 5] = [
    "model.hidden_size",
    "model.intermediate_size",
    "model.num_layers",
    "model.num_attention_heads",
    "data.sequence_length",
];

/// Keys whose default depends on other keys; `fill.rs` says how.
pub(crate) const DERIVED: [&str; 10] = [
    "lora.alpha",
    "model.num_key_value_heads",
    "model.max_position_embeddings",
    "data.batch_size",
    "data.gradient_accumulation_steps",
    "data.sequences_per_step",
    "scheduler.strategy",
    "scheduler.warmup_steps",
    "scheduler.total_steps",
    "scheduler.min_lr",
];

static SCHEMA: LazyLock<Value> = LazyLock::new(generate);

/// The JSON Schema of a config file.
pub(crate) fn schema() -> &'static Value {
    &SCHEMA
}

/// Returns the schema for editors, in which a model with `init_from` needs no sizes.
pub(crate) fn published() -> Value {
    let mut schema = SCHEMA.clone();
    let model = schema.pointer_mut("/properties/model").and_then(Value::as_object_mut);
    if let Some((model, sizes)) = model.and_then(|model| model.remove("required").map(|sizes| (model, sizes))) {
        model.insert("anyOf".to_owned(), json!([{ "required": ["init_from"] }, { "required": sizes }]));
    }
    schema
}

/// Returns the keys of an object's schema with their schemas, in the order of the types; none for a leaf.
pub(crate) fn properties(schema: &Value) -> impl Iterator<Item = (&str, &Value)> {
    let properties = schema.get("properties").and_then(Value::as_object);
    properties.into_iter().flatten().map(|(key, schema)| (key.as_str(), schema))
}

/// Whether a schema describes a section rather than a value.
pub(crate) fn is_section(schema: &Value) -> bool {
    schema.get("properties").is_some()
}

/// Returns the schema of a list's items, if these are sections.
pub(crate) fn item(schema: &Value) -> Option<&Value> {
    schema.get("items").filter(|item| is_section(item))
}

/// Returns the keys that a section of a list must have.
pub(crate) fn required(schema: &Value) -> impl Iterator<Item = &str> {
    schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
}

/// Joins a path: `section.key`, or `key` at the top level.
pub(crate) fn join(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

fn generate() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let mut schema = settings.into_generator().into_root_schema_for::<RunConfig>().to_value();
    schema["title"] = json!("Training run");
    tidy(&mut schema, "");
    schema
}

/// Names required keys, drops defaults that are not the real ones, and puts descriptions on one
/// line.
fn tidy(schema: &mut Value, path: &str) {
    let Some(object) = schema.as_object_mut() else {
        return;
    };
    if let Some(Value::String(description)) = object.get_mut("description") {
        *description = description.split_whitespace().collect::<Vec<_>>().join(" ");
    }
    if let Some(item) = object.get_mut("items") {
        tidy(item, path);
    }
    for variant in object.get_mut("oneOf").and_then(Value::as_array_mut).into_iter().flatten() {
        tidy(variant, path);
    }
    if REQUIRED.contains(&path) || DERIVED.contains(&path) || object.contains_key("properties") {
        object.remove("default");
    }
    let Some(Value::Object(properties)) = object.get_mut("properties") else {
        return;
    };
    let mut required = Vec::new();
    for (key, property) in properties.iter_mut() {
        let path = join(path, key);
        tidy(property, &path);
        if REQUIRED.iter().any(|name| *name == path || name.starts_with(&format!("{path}."))) {
            required.push(Value::from(key.as_str()));
        }
    }
    if !required.is_empty() {
        object.insert("required".to_owned(), required.into());
    }
}

/// Returns the values that an enumeration allows, with what each means.
pub(crate) fn choices(schema: &Value) -> Vec<(&str, &str)> {
    let variants = schema.get("oneOf").and_then(Value::as_array);
    variants
        .into_iter()
        .flatten()
        .filter_map(|variant| Some((variant.get("const")?.as_str()?, variant.get("description")?.as_str()?)))
        .collect()
}
