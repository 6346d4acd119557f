//! `docs/guide/configuration.md`, made from the schema so that the manual is what the program does.

use std::fmt::Write;

use serde_json::Value;

use crate::check::expectation;
use crate::schema::{self, DERIVED};
use crate::yaml;

/// The part of the guide that no key describes.
const INTRODUCTION: &str = include_str!("guide_introduction.md");

/// The text of `docs/guide/configuration.md`.
pub(crate) fn markdown() -> String {
    let mut text = INTRODUCTION.to_owned();
    write_section(&mut text, schema::schema(), "");
    text
}

fn write_section(text: &mut String, schema: &Value, path: &str) {
    let (sections, keys): (Vec<_>, Vec<_>) =
        schema::properties(schema).partition(|(_, schema)| schema::is_section(schema));
    let lists = keys.iter().filter_map(|(key, schema)| Some((format!("{key}[]"), schema::item(schema)?)));
    let inner: Vec<_> = lists.chain(sections.iter().map(|(key, schema)| ((*key).to_owned(), *schema))).collect();
    // The only key outside of all sections is a list, whose items are described below.
    if !path.is_empty() {
        let level = "#".repeat(path.matches('.').count() + 3);
        let _ = writeln!(text, "\n{level} `{path}`\n\n{}\n", yaml::description(schema));
        write_table(text, schema, &keys, path);
    }
    for (key, schema) in inner {
        write_section(text, schema, &schema::join(path, &key));
    }
}

fn write_table(text: &mut String, section: &Value, keys: &[(&str, &Value)], path: &str) {
    text.push_str("| key | value | default | meaning |\n|---|---|---|---|\n");
    let required: Vec<_> = schema::required(section).collect();
    for (key, schema) in keys {
        let path = schema::join(path, key);
        let meaning = yaml::description(schema).replace('|', "\\|");
        let default = if required.contains(key) { "**required**".to_owned() } else { default(schema, &path) };
        let _ = writeln!(text, "| `{key}` | {} | {default} | {meaning} |", expectation(schema));
    }
}

fn default(schema: &Value, path: &str) -> String {
    match schema.get("default") {
        _ if DERIVED.contains(&path) => "see text".to_owned(),
        None | Some(Value::Null) => "none".to_owned(),
        Some(default) => format!("`{}`", yaml::scalar(default)),
    }
}
