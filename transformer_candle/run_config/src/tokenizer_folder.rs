//! The files of a tokenizer's folder, read with the precedence of transformers: which tokens they add to
//! `tokenizer.json`, which roles tokens have, and which chat templates there are.
//!
//! | what | where it is read, the first that has it |
//! |---|---|
//! | added tokens | `added_tokens_decoder` of `tokenizer_config.json`, whose properties override those of `tokenizer.json`; without that key `added_tokens.json`. Tokens with a role and extra special tokens that are in none of them are added too |
//! | roles | `special_tokens_map.json`, unless there is an `added_tokens_decoder`; `tokenizer_config.json` |
//! | templates | `chat_template.jinja` and `additional_chat_templates/*.jinja`; else `chat_template` of `tokenizer_config.json`, one or a list of named ones |

mod templates;
#[cfg(test)]
mod tests;
mod types;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::FIRST_READING_VERSION;
use crate::added_tokens::{AddedToken, AddedTokens, ModelVocabulary};
use crate::regular_file;
use crate::system_error::in_words;

pub use self::templates::{CHAT_TEMPLATE, DEFAULT_TEMPLATE, NamedTemplate};
use self::templates::{recorded_template, templates};
pub use self::types::wrong_token_ids;

/// File of the roles of tokens, and of added tokens and templates.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
const ADDED_TOKENS: &str = "added_tokens.json";
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
    /// If one exists and cannot be read, or a key of one has a value of the wrong type.
    pub fn read(tokenizer_json: &Path, reading: TokenizerReading) -> Result<Self> {
        let read_beside = |name: &str| read_object(&tokenizer_json.with_file_name(name));
        let (config, map) = (read_beside(TOKENIZER_CONFIG)?, read_beside(SPECIAL_TOKENS_MAP)?);
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
        let added_tokens = read_beside(ADDED_TOKENS)?;
        for (name, problem) in [
            (TOKENIZER_CONFIG, types::of_roles(&config)),
            (SPECIAL_TOKENS_MAP, types::of_roles(&map)),
            (ADDED_TOKENS, types::of_added_tokens(&added_tokens)),
        ] {
            if let Some(message) = problem {
                return Err(TokenizerFileError { path: tokenizer_json.with_file_name(name), message });
            }
        }
        config_roles.extend(named_extra_tokens(&config));
        let decoder = config.get(ADDED_TOKENS_DECODER).and_then(Value::as_object);
        let (roles, unread_roles, extra) = if decoder.is_some() {
            (config_roles, map_roles, extra_tokens(&config))
        } else {
            let extra = [extra_tokens(&config), extra_tokens(&map)].concat();
            (map_roles.into_iter().chain(config_roles).collect(), Vec::new(), extra)
        };
        let added = match decoder {
            Some(decoder) => {
                let by_id = decoder
                    .iter()
                    .filter_map(|(id, token)| Some((id.parse::<u64>().ok()?, AddedToken::from_json(token)?)));
                by_id.collect()
            }
            None => added_tokens_file(&added_tokens, &roles, &extra),
        };
        let model_vocabulary = read_beside(MODEL_CONFIG)?.get("vocab_size").and_then(Value::as_u64);
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
            if !roles.iter().any(|(other, _)| other == role) {
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
        let known_roles = ROLES.into_iter().filter_map(|name| self.roles.iter().find(|(role, _)| role == name));
        let other_roles = self.roles.iter().filter(|(role, _)| !ROLES.contains(&role.as_str()));
        let role_tokens = known_roles.chain(other_roles).map(|(_, token)| token).chain(&self.extra);
        let is_in = |other: &AddedToken, token: &AddedToken| other.content == token.content;
        let absent = role_tokens
            .filter(|token| !tokens.iter().any(|(_, other)| is_in(other, token)))
            .filter(|token| !new.iter().any(|other| is_in(other, token)));
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
    let tokens = config.get("extra_special_tokens").and_then(Value::as_object).into_iter().flatten();
    tokens.filter_map(|(role, token)| Some((role.clone(), AddedToken::special_from_json(token)?))).collect()
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
    let role_tokens = ROLES.into_iter().filter_map(|name| roles.iter().find(|(role, _)| role == name));
    let special: Vec<&AddedToken> = role_tokens.map(|(_, token)| token).chain(extra).collect();
    let token = |(name, id): (&String, &Value)| {
        let special = special.iter().any(|token| token.content == *name);
        Some((id.as_u64()?, AddedToken { special, normalized: !special, ..AddedToken::special(name) }))
    };
    file.iter().filter_map(token).collect()
}

fn read_text(path: &Path) -> Result<String> {
    let refused = |message: String| TokenizerFileError { path: path.to_owned(), message };
    let bytes = regular_file::read(path).map_err(|error| refused(in_words(&error)))?;
    String::from_utf8(bytes).map_err(|_| refused("it is not UTF-8".to_owned()))
}

/// Reads a JSON object; an empty one if the file does not exist.
fn read_object(path: &Path) -> Result<Map<String, Value>> {
    let refused = |message: String| TokenizerFileError { path: path.to_owned(), message };
    match regular_file::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Map::new()),
        Err(error) => Err(refused(in_words(&error))),
        Ok(bytes) => match serde_json::from_slice(&bytes).map_err(|error| refused(error.to_string()))? {
            Value::Object(object) => Ok(object),
            _ => Err(refused("it must hold a JSON object".to_owned())),
        },
    }
}
