//! The files of a tokenizer's folder, read with the precedence of transformers: which tokens they add to
//! `tokenizer.json`, which roles tokens have, and which chat templates there are.
//!
//! | what | where it is read, the first that has it |
//! |---|---|
//! | added tokens | `added_tokens_decoder` of `tokenizer_config.json`, whose properties override those of `tokenizer.json`; without that key `added_tokens.json`. Tokens with a role and extra special tokens that are in none of them are added too |
//! | roles | `special_tokens_map.json`, unless there is an `added_tokens_decoder`; `tokenizer_config.json` |
//! | templates | `chat_template.jinja` and `additional_chat_templates/*.jinja`; else `chat_template` of `tokenizer_config.json`, one or a list of named ones |

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::FIRST_READING_VERSION;
use crate::added_tokens::{AddedToken, AddedTokens, ModelVocabulary};
use crate::regular_file;

/// File of the default chat template.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// File of the roles of tokens, and of added tokens and templates.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Name of the template that conversations without tools are rendered with.
pub const DEFAULT_TEMPLATE: &str = "default";
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
const ADDED_TOKENS: &str = "added_tokens.json";
const ADDITIONAL_TEMPLATES: &str = "additional_chat_templates";
const MODEL_CONFIG: &str = "config.json";
const ADDED_TOKENS_DECODER: &str = "added_tokens_decoder";
/// The roles that transformers knows, in its order.
const ROLES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Which files of the folder count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TokenizerReading {
    /// All, as transformers reads them.
    #[default]
    Folder,
    /// `tokenizer.json` has every token, roles are first those of `tokenizer_config.json`, and there is one template:
    /// how checkpoints are read, which have their tokens there, and how runs of the first version have read theirs.
    Recorded,
}

impl TokenizerReading {
    /// How a run of this `data.reading_version` reads its tokenizer.
    pub fn of_version(reading_version: u32) -> Self {
        if reading_version == FIRST_READING_VERSION { Self::Recorded } else { Self::Folder }
    }
}

/// A file of the folder that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{}: {message}", path.display())]
pub struct TokenizerFileError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub message: String,
}

type Result<T> = std::result::Result<T, TokenizerFileError>;

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

/// What the files beside a `tokenizer.json` say.
#[derive(Debug, Clone)]
pub struct TokenizerFolder {
    /// Which files count.
    reading: TokenizerReading,
    /// Roles, such as `bos_token`, and the tokens that have them, the decisive one of a role first.
    roles: Vec<(String, AddedToken)>,
    /// Roles of a `special_tokens_map.json` that transformers does not read: they count where nothing else has a role.
    unread_roles: Vec<(String, AddedToken)>,
    /// Tokens to add, by the ids that files give them, in whose order they are added.
    added: BTreeMap<u64, AddedToken>,
    /// Whether `added` is what `added_tokens_decoder` lists: `tokenizer.json` does not override its properties.
    overrides: bool,
    /// Special tokens without a role that are added unless the vocabulary has them as added tokens.
    extra: Vec<AddedToken>,
    /// The chat templates; `default` first.
    pub templates: Vec<NamedTemplate>,
    /// `add_bos_token`, if that is a boolean.
    pub adds_bos: Option<bool>,
    /// The size of the vocabulary that the model in this folder has.
    model_vocabulary: Option<u64>,
}

/// What a folder adds to the `tokenizer.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Additions {
    /// Whether `tokenizer.json` lacked a token or a property.
    pub any: bool,
    /// Tokens that are left out, because the model in the folder has no row for their ids.
    pub left_out: Vec<String>,
}

impl TokenizerFolder {
    /// Reads the files beside a `tokenizer.json`.
    ///
    /// # Errors
    /// If one exists and cannot be read.
    pub fn read(tokenizer_json: &Path, reading: TokenizerReading) -> Result<Self> {
        let beside = |name: &str| read_object(&tokenizer_json.with_file_name(name));
        let (config, map) = (beside(TOKENIZER_CONFIG)?, beside(SPECIAL_TOKENS_MAP)?);
        let adds_bos = config.get("add_bos_token").and_then(Value::as_bool);
        let (mut config_roles, map_roles) = (roles_of(&config), roles_of(&map));
        if reading == TokenizerReading::Recorded {
            return Ok(Self {
                reading,
                unread_roles: Vec::new(),
                roles: config_roles.into_iter().chain(map_roles).collect(),
                added: BTreeMap::new(),
                overrides: false,
                extra: Vec::new(),
                templates: recorded_template(tokenizer_json, &config)?.into_iter().collect(),
                adds_bos,
                model_vocabulary: None,
            });
        }
        config_roles.extend(named_extra_tokens(&config));
        let decoder = config.get(ADDED_TOKENS_DECODER).and_then(Value::as_object);
        let (roles, unread_roles, extra) = match decoder {
            Some(_) => (config_roles, map_roles, extra_tokens(&config)),
            None => {
                let extra = [extra_tokens(&config), extra_tokens(&map)].concat();
                (map_roles.into_iter().chain(config_roles).collect(), Vec::new(), extra)
            }
        };
        let added = match decoder {
            Some(decoder) => {
                let by_id = decoder
                    .iter()
                    .filter_map(|(id, token)| Some((id.parse::<u64>().ok()?, AddedToken::from_json(token)?)));
                by_id.collect()
            }
            None => added_tokens_file(&beside(ADDED_TOKENS)?, &roles, &extra),
        };
        let model_vocabulary = beside(MODEL_CONFIG)?.get("vocab_size").and_then(Value::as_u64);
        let templates = templates(tokenizer_json, &config)?;
        let overrides = decoder.is_some();
        Ok(Self { reading, roles, unread_roles, added, overrides, extra, templates, adds_bos, model_vocabulary })
    }

    /// The tokens that have a role, such as `eos_token`, the decisive one first.
    pub fn with_role(&self, role: &str) -> impl Iterator<Item = &str> {
        let roles = self.roles.iter().chain(&self.unread_roles);
        roles.filter(move |(name, _)| name == role).map(|(_, token)| token.content.as_str())
    }

    /// Every role and the token that has it.
    pub fn roles(&self) -> Vec<(String, String)> {
        let mut roles: Vec<(String, String)> = Vec::new();
        for (role, token) in &self.roles {
            if !roles.iter().any(|(known, _)| known == role) {
                roles.push((role.clone(), token.content.clone()));
            }
        }
        roles
    }

    /// Adds the tokens of the folder to the `added_tokens` of a `tokenizer.json`.
    pub fn complete(&self, tokenizer_json: &mut Value) -> Additions {
        let former = AddedTokens::from_json(&tokenizer_json["added_tokens"]);
        let mut tokens = former.clone();
        let left_out = self.add_to(&mut tokens, &JsonVocabulary(&tokenizer_json["model"]["vocab"]));
        let any = tokens != former;
        if any {
            tokenizer_json["added_tokens"] = tokens.to_json();
        }
        Additions { any, left_out }
    }

    /// Adds the tokens of the folder; returns those that have no row in the model.
    pub(crate) fn add_to(&self, tokens: &mut AddedTokens, model: &dyn ModelVocabulary) -> Vec<String> {
        if self.reading == TokenizerReading::Recorded {
            return Vec::new();
        }
        let roles = self.roles();
        let mut listed = self.added.clone();
        if !self.overrides {
            listed.extend(tokens.iter().map(|(id, token)| (id, token.clone())));
        }
        let mut new: Vec<AddedToken> = listed.into_values().collect();
        for token in &mut new {
            token.special |= roles.iter().any(|(_, name)| *name == token.content);
        }
        let known_roles = ROLES.into_iter().filter_map(|known| self.roles.iter().find(|(role, _)| role == known));
        let other_roles = self.roles.iter().filter(|(role, _)| !ROLES.contains(&role.as_str()));
        let named = known_roles.chain(other_roles).map(|(_, token)| token).chain(&self.extra);
        let is_in = |known: &AddedToken, token: &AddedToken| known.content == token.content;
        let absent = named
            .filter(|token| !tokens.iter().any(|(_, known)| is_in(known, token)))
            .filter(|token| !new.iter().any(|known| is_in(known, token)));
        // Of several with one name and different properties the last decides, as in transformers.
        let mut distinct: Vec<AddedToken> = Vec::new();
        for token in absent {
            if !distinct.contains(token) {
                distinct.push(token.clone());
            }
        }
        new.extend(distinct);
        tokens.extend(new, model, self.model_vocabulary)
    }
}

/// The vocabulary of the `model` of a `tokenizer.json`: ids by token, or for Unigram pairs in the order of the ids.
struct JsonVocabulary<'a>(&'a Value);

impl ModelVocabulary for JsonVocabulary<'_> {
    fn len(&self) -> u64 {
        match self.0 {
            Value::Object(tokens) => tokens.len() as u64,
            Value::Array(pieces) => pieces.len() as u64,
            _ => 0,
        }
    }

    fn id(&self, token: &str) -> Option<u64> {
        match self.0 {
            Value::Object(tokens) => tokens.get(token)?.as_u64(),
            Value::Array(pieces) => pieces.iter().position(|piece| piece[0] == token).map(|id| id as u64),
            _ => None,
        }
    }
}

/// Returns the roles, such as `bos_token`, and the tokens that a file gives them.
fn roles_of(config: &Map<String, Value>) -> Vec<(String, AddedToken)> {
    let roles = config.iter().filter(|(role, _)| role.ends_with("_token"));
    roles.filter_map(|(role, token)| Some((role.clone(), AddedToken::special_from_json(token)?))).collect()
}

/// Returns the tokens with roles of the model's own, such as `image_token`.
fn named_extra_tokens(config: &Map<String, Value>) -> Vec<(String, AddedToken)> {
    let named = config.get("extra_special_tokens").and_then(Value::as_object).into_iter().flatten();
    named.filter_map(|(role, token)| Some((role.clone(), AddedToken::special_from_json(token)?))).collect()
}

/// Returns the special tokens without a role that a file lists.
fn extra_tokens(config: &Map<String, Value>) -> Vec<AddedToken> {
    let listed = ["extra_special_tokens", "additional_special_tokens"]
        .into_iter()
        .filter_map(|key| config.get(key)?.as_array())
        .find(|listed| !listed.is_empty());
    listed.into_iter().flatten().filter_map(AddedToken::special_from_json).collect()
}

/// Returns the tokens of an `added_tokens.json`, which has ids by token.
fn added_tokens_file(
    file: &Map<String, Value>,
    roles: &[(String, AddedToken)],
    extra: &[AddedToken],
) -> BTreeMap<u64, AddedToken> {
    let known = ROLES.into_iter().filter_map(|known| roles.iter().find(|(role, _)| role == known));
    let special: Vec<&AddedToken> = known.map(|(_, token)| token).chain(extra).collect();
    let token = |(name, id): (&String, &Value)| {
        let special = special.iter().any(|token| token.content == *name);
        Some((id.as_u64()?, AddedToken { special, normalized: !special, ..AddedToken::special(name) }))
    };
    file.iter().filter_map(token).collect()
}

/// Returns the templates, the default one first.
fn templates(tokenizer_json: &Path, config: &Map<String, Value>) -> Result<Vec<NamedTemplate>> {
    let mut found = Vec::new();
    let file = tokenizer_json.with_file_name(CHAT_TEMPLATE);
    if file.exists() {
        found.push(NamedTemplate { name: DEFAULT_TEMPLATE.to_owned(), source: read_text(&file)?, origin: file });
    }
    let folder = tokenizer_json.with_file_name(ADDITIONAL_TEMPLATES);
    let mut files: Vec<PathBuf> = folder.read_dir().into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "jinja"));
    files.sort_unstable();
    for file in files {
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        found.push(NamedTemplate { name, source: read_text(&file)?, origin: file });
    }
    if found.is_empty() {
        found = config_templates(tokenizer_json, config);
    }
    found.sort_by_key(|template| template.name != DEFAULT_TEMPLATE);
    Ok(found)
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
        Some(Value::Array(named)) => {
            let read = |entry: &Value| Some(template(entry["name"].as_str()?, entry["template"].as_str()?));
            named.iter().filter_map(read).collect()
        }
        Some(Value::Object(named)) => {
            named.iter().filter_map(|(name, source)| Some(template(name, source.as_str()?))).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the template of a checkpoint: its file, else that of its config, of several the default one.
fn recorded_template(tokenizer_json: &Path, config: &Map<String, Value>) -> Result<Option<NamedTemplate>> {
    let file = tokenizer_json.with_file_name(CHAT_TEMPLATE);
    if file.exists() {
        let source = read_text(&file)?;
        return Ok(Some(NamedTemplate { name: DEFAULT_TEMPLATE.to_owned(), source, origin: file }));
    }
    let mut named = config_templates(tokenizer_json, config);
    let chosen = named.iter().position(|template| template.name == DEFAULT_TEMPLATE).unwrap_or(0);
    Ok((!named.is_empty()).then(|| named.swap_remove(chosen)))
}

fn read_text(path: &Path) -> Result<String> {
    let refused = |message: String| TokenizerFileError { path: path.to_owned(), message };
    let bytes = regular_file::read(path).map_err(|error| refused(error.to_string()))?;
    String::from_utf8(bytes).map_err(|_| refused("it is not UTF-8".to_owned()))
}

/// Reads a JSON object; an empty one if the file does not exist, or holds another value.
fn read_object(path: &Path) -> Result<Map<String, Value>> {
    let refused = |message: String| TokenizerFileError { path: path.to_owned(), message };
    match regular_file::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Map::new()),
        Err(error) => Err(refused(error.to_string())),
        Ok(bytes) => match serde_json::from_slice(&bytes).map_err(|error| refused(error.to_string()))? {
            Value::Object(object) => Ok(object),
            _ => Ok(Map::new()),
        },
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;

    use serde_json::json;
    use tempfile::TempDir;

    use super::*;

    /// A tokenizer of three words and one special token, with files beside it.
    fn folder(files: &[(&str, Value)]) -> (TempDir, Value) {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            fs::write(folder.path().join(name), content.to_string()).unwrap();
        }
        let end = AddedTokens::from_json(&json!([{ "id": 3, "content": "<end>", "special": true }]));
        let vocab = json!({ "a": 0, "b": 1, "<s>": 2 });
        (folder, json!({ "model": { "vocab": vocab }, "added_tokens": end.to_json() }))
    }

    fn read(folder: &TempDir, reading: TokenizerReading) -> TokenizerFolder {
        TokenizerFolder::read(&folder.path().join("tokenizer.json"), reading).unwrap()
    }

    fn names(tokenizer_json: &Value) -> Vec<(u64, &str)> {
        let added = tokenizer_json["added_tokens"].as_array().unwrap().iter();
        added.map(|token| (token["id"].as_u64().unwrap(), token["content"].as_str().unwrap())).collect()
    }

    #[test]
    fn tokens_get_the_next_free_ids() {
        let decoder =
            json!({ "9": { "content": "<turn>", "special": true }, "3": { "content": "<end>", "lstrip": true } });
        let config =
            json!({ "added_tokens_decoder": decoder, "bos_token": "<s>", "pad_token": { "content": "<pad>" } });
        let (folder, mut json) = folder(&[("tokenizer_config.json", config)]);
        let additions = read(&folder, TokenizerReading::Folder).complete(&mut json);
        assert_eq!(additions, Additions { any: true, left_out: Vec::new() });
        assert_eq!(names(&json), [(2, "<s>"), (3, "<end>"), (4, "<turn>"), (5, "<pad>")]);
        assert_eq!(json["added_tokens"][1]["lstrip"], true, "the config's properties override the tokenizer's");
        let again = read(&folder, TokenizerReading::Folder).complete(&mut json);
        assert!(!again.any, "what is complete stays as it is");
    }

    #[test]
    fn tokens_without_an_embedding_are_left_out() {
        let added = json!({ "<turn>": 4, "<pad>": 5 });
        let (folder, mut json) = folder(&[("added_tokens.json", added), ("config.json", json!({ "vocab_size": 5 }))]);
        let additions = read(&folder, TokenizerReading::Folder).complete(&mut json);
        assert_eq!(additions.left_out, ["<pad>"]);
        assert_eq!(names(&json), [(3, "<end>"), (4, "<turn>")]);
    }

    #[test]
    fn a_recorded_tokenizer_is_its_own_file() {
        let files = [
            ("added_tokens.json", json!({ "<turn>": 4 })),
            ("tokenizer_config.json", json!({ "eos_token": "<end>" })),
            ("special_tokens_map.json", json!({ "eos_token": "<s>", "bos_token": "<s>" })),
        ];
        let (folder, mut json) = folder(&files);
        let recorded = read(&folder, TokenizerReading::Recorded);
        assert!(!recorded.complete(&mut json).any);
        let role = |name: &str, token: &str| (name.to_owned(), token.to_owned());
        assert_eq!(recorded.roles(), [role("eos_token", "<end>"), role("bos_token", "<s>")]);
        assert_eq!(read(&folder, TokenizerReading::Folder).with_role("eos_token").next(), Some("<s>"));
    }

    #[test]
    fn files_of_templates_hide_those_of_the_config() {
        let list = json!([{ "name": "tool_use", "template": "T" }, { "name": "default", "template": "D" }]);
        let (folder, _) = folder(&[("tokenizer_config.json", json!({ "chat_template": list }))]);
        let found = |reading| {
            let templates = read(&folder, reading).templates.into_iter();
            templates.map(|template| (template.name, template.source)).collect::<Vec<_>>()
        };
        let template = |name: &str, source: &str| (name.to_owned(), source.to_owned());
        assert_eq!(found(TokenizerReading::Folder), [template("default", "D"), template("tool_use", "T")]);
        assert_eq!(found(TokenizerReading::Recorded), [template("default", "D")]);
        fs::write(folder.path().join(CHAT_TEMPLATE), "F").unwrap();
        assert_eq!(found(TokenizerReading::Folder), [template("default", "F")]);
        fs::create_dir(folder.path().join(ADDITIONAL_TEMPLATES)).unwrap();
        fs::write(folder.path().join(ADDITIONAL_TEMPLATES).join("tool_use.jinja"), "A").unwrap();
        assert_eq!(found(TokenizerReading::Folder), [template("default", "F"), template("tool_use", "A")]);
    }
}
