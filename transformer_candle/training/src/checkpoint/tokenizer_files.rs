//! The tokenizer's files inside a checkpoint, so that `AutoTokenizer.from_pretrained` works on it.

use std::io;
use std::path::{Path, PathBuf};

use dataset::{ConversationEncoder, DocumentTokens};
use run_config::regular_file;
use serde_json::{Map, Value, json};

use super::files;
use super::list::list;
use super::reader::Checkpoint;
use crate::error::checkpoint::{Result, failed};

const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Files that are copied unchanged, where they exist.
const KEPT: [&str; 2] = ["special_tokens_map.json", CHAT_TEMPLATE];

/// The path of a checkpoint's tokenizer.
pub fn tokenizer_in(checkpoint: &Path) -> PathBuf {
    checkpoint.join(files::TOKENIZER)
}

/// The tokenizer of the newest checkpoint in a folder of checkpoints that has an intact one.
pub fn newest_tokenizer(directory: &Path) -> Option<PathBuf> {
    let intact = |path: &Path| Checkpoint::open(path).and_then(|checkpoint| checkpoint.tokenizer());
    list(directory).ok()?.into_iter().rev().find_map(|listed| intact(&listed.path).ok())
}

/// The tokenizer as it was when the run started. Kept in memory, so that every checkpoint holds the tokenizer of
/// the training run even if the files change meanwhile.
#[derive(Debug, Clone)]
pub struct TokenizerFiles {
    files: Vec<(&'static str, Vec<u8>)>,
    marks: DocumentTokens,
    /// The id of the token that ends the assistant's turn; none where no conversations are trained on.
    end_of_turn: Option<u32>,
}

impl TokenizerFiles {
    /// Reads `tokenizer.json` and the files beside it: `tokenizer_config.json`, special tokens, chat template. Without
    /// a `tokenizer_config.json` a plain one is made. Its `add_bos_token` is set to what the run does where the files
    /// say otherwise.
    pub fn read(tokenizer_json: &Path, marks: &DocumentTokens, longest_text: usize) -> Result<Self> {
        let tokenizer = regular_file::read(tokenizer_json).map_err(failed("read", tokenizer_json))?;
        let mut files = vec![(files::TOKENIZER, tokenizer)];
        let mut config = beside(tokenizer_json, TOKENIZER_CONFIG)?.unwrap_or_else(|| plain_config(marks, longest_text));
        if marks.starts_with_bos != marks.files_say_bos {
            let path = tokenizer_json.with_file_name(TOKENIZER_CONFIG);
            config = with_bos(&config, marks.starts_with_bos).map_err(|error| failed("read", &path)(error.into()))?;
        }
        files.push((TOKENIZER_CONFIG, config));
        for name in KEPT {
            files.extend(beside(tokenizer_json, name)?.map(|content| (name, content)));
        }
        Ok(Self { files, marks: marks.clone(), end_of_turn: None })
    }

    /// The files with the chat template of the training, so that inference uses the same one.
    #[must_use]
    pub fn with_chat(mut self, encoder: &ConversationEncoder) -> Self {
        if let Some(template) = encoder.template() {
            self.files.retain(|(name, _)| *name != CHAT_TEMPLATE);
            self.files.push((CHAT_TEMPLATE, template.as_bytes().to_vec()));
        }
        self.end_of_turn = encoder.end_of_turn().map(|token| token.id);
        self
    }

    /// The tokens at which generation stops, of which the first ends a document.
    pub fn stop_tokens(&self) -> Vec<u32> {
        let end_of_turn = self.end_of_turn.filter(|&id| id != self.end_of_text());
        std::iter::once(self.end_of_text()).chain(end_of_turn).collect()
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

fn beside(tokenizer_json: &Path, name: &str) -> Result<Option<Vec<u8>>> {
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

/// Sets `add_bos_token` in a `tokenizer_config.json`: whether texts start with the BOS token.
fn with_bos(config: &[u8], starts_with_bos: bool) -> serde_json::Result<Vec<u8>> {
    let mut config: Map<String, Value> = serde_json::from_slice(config)?;
    config.insert("add_bos_token".to_owned(), starts_with_bos.into());
    Ok(files::pretty(&Value::Object(config)))
}
