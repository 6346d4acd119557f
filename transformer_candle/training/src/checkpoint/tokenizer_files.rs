//! The tokenizer's files inside a checkpoint, so that `AutoTokenizer.from_pretrained` works on it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use dataset::{ConversationEncoder, DocumentTokens, Tokenizer, TokenizerDefinition};
use run_config::{CHAT_TEMPLATE, DEFAULT_TEMPLATE, NamedTemplate, TOKENIZER_CONFIG, regular_file};
use serde_json::{Map, Value, json};

use super::files;
use super::list::list;
use super::reader::{Checkpoint, end_tokens};
use crate::atomic_file;
use crate::error::checkpoint::{Result, failed};

/// Files that are copied unchanged, where they exist.
const KEPT: [&str; 2] = [SPECIAL_TOKENS_MAP, CHAT_TEMPLATE];
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
/// Files beside `tokenizer.json`.
pub(super) const NAMES: [&str; 3] = [TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, CHAT_TEMPLATE];

/// Keys of `generation_config.json` that a checkpoint has of its own.
const OWN_GENERATION_KEYS: [&str; 4] = ["bos_token_id", "eos_token_id", "_from_model_config", "transformers_version"];
const PAD: &str = "pad_token_id";

/// The path of a checkpoint's tokenizer.
pub fn tokenizer_in(checkpoint: &Path) -> PathBuf {
    checkpoint.join(files::TOKENIZER)
}

/// The tokenizer of the newest checkpoint in a folder of checkpoints that has an intact one.
pub fn newest_tokenizer(directory: &Path) -> Option<PathBuf> {
    let intact = |path: &Path| Checkpoint::open(path).and_then(|checkpoint| checkpoint.tokenizer());
    list(directory).ok()?.into_iter().rev().find_map(|listed| intact(&listed.path).ok())
}

/// Copies the files of a checkpoint's tokenizer into a folder, and those that name the tokens at which texts end. The
/// last of them is `tokenizer.json`, without which the folder holds no tokenizer.
pub fn restore_tokenizer(checkpoint: &Path, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(failed("create", folder))?;
    for name in NAMES.into_iter().chain([files::GENERATION_CONFIG, files::CONFIG, files::TOKENIZER]) {
        if let Some(content) = sibling_file(&checkpoint.join(name), name)? {
            let target = folder.join(name);
            atomic_file::replace(&target, &content).map_err(failed("write", &target))?;
        }
    }
    Ok(())
}

/// The tokenizer as it was when the run started. Kept in memory, so that every checkpoint holds the tokenizer of
/// the training run even if the files change meanwhile.
#[derive(Debug, Clone)]
pub struct TokenizerFiles {
    files: Vec<(&'static str, Vec<u8>)>,
    marks: DocumentTokens,
    /// The id of the token that ends the assistant's turn; none where no conversations are trained on.
    end_of_turn: Option<u32>,
    /// Tokens at which the model that training started from stops too.
    other_stop_tokens: Vec<u32>,
    /// The other keys of that model's `generation_config.json`.
    generation_settings: Map<String, Value>,
    /// The default template, where `tokenizer_config.json` has it in a list of several.
    listed_default: Option<String>,
}

impl TokenizerFiles {
    /// Reads the files of a tokenizer, so that they say the same where `tokenizer.json` is read alone: it gets the tokens
    /// that other files add, and `tokenizer_config.json` the roles of `special_tokens_map.json` and, in a list, the chat
    /// templates of which there are several.
    pub fn of(tokenizer: &Tokenizer, longest_text: usize) -> crate::Result<Self> {
        let TokenizerDefinition { folder, additions, content, .. } = tokenizer.definition()?;
        let mut files = Self::read(tokenizer.path(), tokenizer.document_tokens(), longest_text)?;
        if additions.any {
            files.set(super::files::TOKENIZER, content);
        }
        let outcome = files.edit_config(tokenizer.path(), |config| {
            let roles = folder.roles().into_iter();
            let other = roles.filter(|(role, name)| {
                let own = config.get(role);
                own.and_then(|own| own.as_str().or_else(|| own["content"].as_str())).is_some_and(|own| own != name)
            });
            let other: Vec<_> = other.collect();
            let any = !other.is_empty() || folder.templates.len() > 1;
            config.extend(other.into_iter().map(|(role, name)| (role, name.into())));
            if folder.templates.len() > 1 {
                config.insert("chat_template".to_owned(), list_of(&folder.templates));
            }
            any
        });
        outcome?;
        if folder.templates.len() > 1 {
            files.files.retain(|(name, _)| *name != CHAT_TEMPLATE);
            let default = folder.templates.into_iter().find(|template| template.name == DEFAULT_TEMPLATE);
            files.listed_default = default.map(|template| template.source);
        }
        Ok(files)
    }

    /// Reads `tokenizer.json` and the files beside it: `tokenizer_config.json`, special tokens, chat template. Without
    /// a `tokenizer_config.json` a plain one is made. Its `add_bos_token` is set to what the run does where the files
    /// say otherwise.
    pub fn read(tokenizer_json: &Path, marks: &DocumentTokens, longest_text: usize) -> Result<Self> {
        let tokenizer = regular_file::read(tokenizer_json).map_err(failed("read", tokenizer_json))?;
        let config =
            sibling_file(tokenizer_json, TOKENIZER_CONFIG)?.unwrap_or_else(|| plain_config(marks, longest_text));
        let mut files = vec![(files::TOKENIZER, tokenizer), (TOKENIZER_CONFIG, config)];
        for name in KEPT {
            files.extend(sibling_file(tokenizer_json, name)?.map(|content| (name, content)));
        }
        let mut files = Self {
            files,
            marks: marks.clone(),
            end_of_turn: None,
            other_stop_tokens: Vec::new(),
            generation_settings: Map::new(),
            listed_default: None,
        };
        if marks.starts_with_bos != marks.files_say_bos {
            files.edit_config(tokenizer_json, |config| {
                config.insert("add_bos_token".to_owned(), marks.starts_with_bos.into());
                true
            })?;
        }
        Ok(files)
    }

    /// Changes `tokenizer_config.json`; `change` returns whether it has changed anything.
    fn edit_config(
        &mut self,
        tokenizer_json: &Path,
        change: impl FnOnce(&mut Map<String, Value>) -> bool,
    ) -> Result<()> {
        let Some((_, content)) = self.files.iter_mut().find(|(name, _)| *name == TOKENIZER_CONFIG) else {
            return Ok(());
        };
        let path = tokenizer_json.with_file_name(TOKENIZER_CONFIG);
        let mut config: Map<String, Value> =
            serde_json::from_slice(content).map_err(|error| failed("read", &path)(error.into()))?;
        if change(&mut config) {
            *content = files::pretty(&Value::Object(config));
        }
        Ok(())
    }

    /// Replaces the content of a file.
    fn set(&mut self, name: &'static str, content: Vec<u8>) {
        self.files.retain(|(other, _)| *other != name);
        self.files.push((name, content));
    }

    /// The files with the chat template of the training, so that inference uses the same one.
    #[must_use]
    pub fn with_chat(mut self, encoder: &ConversationEncoder) -> Self {
        let templates = encoder.templates();
        let default = templates.iter().find(|(name, _)| *name == DEFAULT_TEMPLATE).map(|(_, source)| *source);
        // Beside a list, a template's file would hide the others.
        if let Some(template) = default.filter(|template| self.listed_default.as_deref() != Some(template)) {
            self.set(CHAT_TEMPLATE, template.as_bytes().to_vec());
        }
        self.end_of_turn = encoder.end_of_turn().map(|token| token.id);
        self
    }

    /// The files with the generation settings of the model that training starts from: its other stop tokens, padding,
    /// sampling. They are read beside the tokenizer, else in the model's directory.
    ///
    /// # Errors
    /// If its `generation_config.json` or `config.json` cannot be read.
    pub fn with_generation_of(mut self, tokenizer_json: &Path, model: &Path) -> Result<Self> {
        let object = |name: &str| {
            let own = sibling_file(tokenizer_json, name)?.map(|content| (tokenizer_json.with_file_name(name), content));
            let content = match own {
                Some(own) => Some(own),
                None => sibling_file(&model.join(name), name)?.map(|content| (model.join(name), content)),
            };
            let Some((path, content)) = content else { return Ok(Map::new()) };
            serde_json::from_slice(&content).map_err(|error| failed("read", &path)(error.into()))
        };
        let (mut settings, config): (Map<String, Value>, Map<String, Value>) =
            (object(files::GENERATION_CONFIG)?, object(files::CONFIG)?);
        let stop_tokens = settings.get("eos_token_id").or_else(|| config.get("eos_token_id"));
        self.other_stop_tokens = stop_tokens.map(end_tokens).unwrap_or_default();
        settings.retain(|key, value| !OWN_GENERATION_KEYS.contains(&key.as_str()) && !value.is_null());
        if let Some(pad) = config.get(PAD).filter(|pad| pad.is_u64()) {
            settings.entry(PAD).or_insert_with(|| pad.clone());
        }
        self.generation_settings = settings;
        Ok(self)
    }

    /// The keys of `generation_config.json` other than the tokens with which generation starts and stops.
    pub fn generation_settings(&self) -> &Map<String, Value> {
        &self.generation_settings
    }

    /// The tokens at which generation stops, of which the first ends a document.
    pub fn stop_tokens(&self) -> Vec<u32> {
        let mut ids = vec![self.end_of_text()];
        for &id in self.end_of_turn.iter().chain(&self.other_stop_tokens) {
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        ids
    }

    /// The id of the token that ends a document.
    pub fn end_of_text(&self) -> u32 {
        self.marks.end_of_text.id
    }

    /// The id of the BOS token; without one, of the token that ends a document, which then precedes the next.
    pub fn bos(&self) -> u32 {
        self.marks.bos.as_ref().unwrap_or(&self.marks.end_of_text).id
    }

    /// Bytes of all files together.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, content)| content.len() as u64).sum()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        self.files.iter().map(|(name, content)| (*name, content.as_slice()))
    }
}

fn sibling_file(tokenizer_json: &Path, name: &str) -> Result<Option<Vec<u8>>> {
    let path = tokenizer_json.with_file_name(name);
    match regular_file::read(&path) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("read", &path)(error)),
    }
}

fn plain_config(marks: &DocumentTokens, longest_text: usize) -> Vec<u8> {
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": marks.bos.as_ref().unwrap_or(&marks.end_of_text).name,
        "eos_token": marks.end_of_text.name,
        "model_max_length": longest_text,
        "clean_up_tokenization_spaces": false,
    });
    files::pretty(&config)
}

/// Returns templates as the list that `tokenizer_config.json` has of several.
fn list_of(templates: &[NamedTemplate]) -> Value {
    templates.iter().map(|NamedTemplate { name, source, .. }| json!({ "name": name, "template": source })).collect()
}
