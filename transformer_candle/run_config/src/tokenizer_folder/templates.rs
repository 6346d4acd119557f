//! The chat templates of a tokenizer's folder.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{Result, TOKENIZER_CONFIG, read_text};

/// File of the default chat template.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Name of the template that conversations without tools are rendered with.
pub const DEFAULT_TEMPLATE: &str = "default";
/// Folder of the other templates.
pub(super) const ADDITIONAL_TEMPLATES: &str = "additional_chat_templates";

/// A chat template and its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedTemplate {
    /// `default`, `tool_use`, or another name.
    pub name: String,
    /// The file that it was read from.
    pub origin: PathBuf,
    /// The template.
    pub source: String,
}

/// Returns the templates, the default one first.
pub(super) fn templates(tokenizer_json: &Path, config: &Map<String, Value>) -> Result<Vec<NamedTemplate>> {
    let mut templates = Vec::new();
    let file = tokenizer_json.with_file_name(CHAT_TEMPLATE);
    if file.exists() {
        templates.push(NamedTemplate { name: DEFAULT_TEMPLATE.to_owned(), source: read_text(&file)?, origin: file });
    }
    let folder = tokenizer_json.with_file_name(ADDITIONAL_TEMPLATES);
    let mut files: Vec<PathBuf> = folder.read_dir().into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "jinja"));
    files.sort_unstable();
    for file in files {
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        templates.push(NamedTemplate { name, source: read_text(&file)?, origin: file });
    }
    if templates.is_empty() {
        templates = config_templates(tokenizer_json, config);
    }
    templates.sort_by_key(|template| template.name != DEFAULT_TEMPLATE);
    Ok(templates)
}

/// Returns the templates in `chat_template` of a `tokenizer_config.json`: one, or a list of named ones.
fn config_templates(tokenizer_json: &Path, config: &Map<String, Value>) -> Vec<NamedTemplate> {
    let template = |name: &str, source: &str| NamedTemplate {
        name: name.to_owned(),
        origin: tokenizer_json.with_file_name(TOKENIZER_CONFIG),
        source: source.to_owned(),
    };
    match config.get("chat_template") {
        Some(Value::String(source)) => vec![template(DEFAULT_TEMPLATE, source)],
        Some(Value::Array(templates)) => {
            let read = |entry: &Value| Some(template(entry["name"].as_str()?, entry["template"].as_str()?));
            templates.iter().filter_map(read).collect()
        }
        Some(Value::Object(templates)) => {
            templates.iter().filter_map(|(name, source)| Some(template(name, source.as_str()?))).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the template of a checkpoint: its file, else that of its config, of several the default one.
pub(super) fn recorded_template(tokenizer_json: &Path, config: &Map<String, Value>) -> Result<Option<NamedTemplate>> {
    let file = tokenizer_json.with_file_name(CHAT_TEMPLATE);
    if file.exists() {
        let source = read_text(&file)?;
        return Ok(Some(NamedTemplate { name: DEFAULT_TEMPLATE.to_owned(), source, origin: file }));
    }
    let mut templates = config_templates(tokenizer_json, config);
    let default = templates.iter().position(|template| template.name == DEFAULT_TEMPLATE).unwrap_or(0);
    Ok((!templates.is_empty()).then(|| templates.swap_remove(default)))
}
