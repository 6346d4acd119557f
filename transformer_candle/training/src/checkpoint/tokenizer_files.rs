//! The tokenizer's files inside a checkpoint, so that `AutoTokenizer.from_pretrained` works on it.

use std::io;
use std::path::{Path, PathBuf};

use run_config::regular_file;
use serde_json::json;

use super::files;
use super::list::list;
use super::reader::Checkpoint;
use crate::error::checkpoint::{Result, failed};

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
    end_of_text: u32,
}

impl TokenizerFiles {
    /// Reads `tokenizer.json`, and `tokenizer_config.json` and `special_tokens_map.json` where they stand beside it.
    /// Without a `tokenizer_config.json` a plain one is made, in which `end_of_text` begins and ends a text.
    pub fn read(tokenizer_json: &Path, end_of_text: &str, end_of_text_id: u32, longest_text: usize) -> Result<Self> {
        let tokenizer = regular_file::read(tokenizer_json).map_err(failed("read", tokenizer_json))?;
        let mut files = vec![(files::TOKENIZER, tokenizer)];
        let config =
            beside(tokenizer_json, "tokenizer_config.json")?.unwrap_or_else(|| plain_config(end_of_text, longest_text));
        files.push(("tokenizer_config.json", config));
        files.extend(beside(tokenizer_json, "special_tokens_map.json")?.map(|map| ("special_tokens_map.json", map)));
        Ok(Self { files, end_of_text: end_of_text_id })
    }

    /// The id of the token that ends a document.
    pub fn end_of_text(&self) -> u32 {
        self.end_of_text
    }

    /// The size of all files.
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

fn plain_config(end_of_text: &str, longest_text: usize) -> Vec<u8> {
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "model_max_length": longest_text,
        "clean_up_tokenization_spaces": false,
    });
    files::pretty(&config)
}
