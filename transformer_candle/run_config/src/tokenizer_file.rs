//! Reads what a config must know of a `tokenizer.json`: the size of its vocabulary, and its tokens.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::added_tokens::{AddedTokens, ModelVocabulary};
use crate::error::{ConfigError, Problem};
use crate::format;
use crate::tokenizer_folder::{TokenizerFolder, TokenizerReading};

/// Most bytes of a `tokenizer.json`; the largest in use have some 30 MB.
const LARGEST_TOKENIZER: u64 = 256 << 20;

/// Most ids without a token: each costs a row of the embeddings, and a mistaken id would cost billions.
const MOST_UNUSED_IDS: usize = 1 << 20;

/// The vocabulary of a `tokenizer.json`.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    /// One more than the highest token id.
    pub size: usize,
    /// Ids of the tokens.
    pub ids: BTreeMap<String, u64>,
    /// The tokens that the tokenizer itself marks as special, by id.
    pub special: Vec<String>,
}

#[derive(Deserialize)]
struct File {
    model: Model,
    #[serde(default)]
    added_tokens: Value,
}

#[derive(Deserialize)]
struct Model {
    vocab: Value,
}

impl ModelVocabulary for BTreeMap<String, u64> {
    fn len(&self) -> u64 {
        self.len() as u64
    }

    fn id(&self, token: &str) -> Option<u64> {
        self.get(token).copied()
    }
}

/// Reads the size of the vocabulary of a `tokenizer.json` and the files beside it: one more than the highest token id.
pub fn vocab_size(tokenizer_json: &Path) -> Result<usize, ConfigError> {
    let vocabulary = Vocabulary::load(tokenizer_json, TokenizerReading::Folder);
    let vocabulary = vocabulary.map_err(|problem| ConfigError::one(tokenizer_json, problem))?;
    Ok(vocabulary.size)
}

impl Vocabulary {
    /// Reads the vocabulary of a `tokenizer.json` and the tokens that the files beside it add.
    pub(crate) fn load(path: &Path, reading: TokenizerReading) -> Result<Self, Problem> {
        let text = format::read_text(path, LARGEST_TOKENIZER)?;
        let not_one =
            |reason: String| Problem::of_file(format!("is not a tokenizer.json of the tokenizers library: {reason}"));
        let file: File = serde_json::from_str(&text).map_err(|error| not_one(error.to_string()))?;
        let mut ids: BTreeMap<String, u64> = match file.model.vocab {
            Value::Object(tokens) => tokens.into_iter().filter_map(|(token, id)| Some((token, id.as_u64()?))).collect(),
            Value::Array(pieces) => pieces
                .iter()
                .zip(0..)
                .filter_map(|(piece, id)| Some((piece.get(0)?.as_str()?.to_owned(), id)))
                .collect(),
            _ => BTreeMap::new(),
        };
        let mut added = AddedTokens::from_json(&file.added_tokens);
        let folder = TokenizerFolder::read(path, reading);
        folder.map_err(|error| Problem::of_file(format!("cannot be read: {error}")))?.add_to(&mut added, &ids);
        ids.extend(added.iter().map(|(id, token)| (token.content.clone(), id)));
        let last = ids.values().max().ok_or_else(|| not_one("its vocabulary is empty".to_owned()))?;
        let size = usize::try_from(*last)
            .ok()
            .and_then(|last| last.checked_add(1))
            .ok_or_else(|| not_one(format!("a token has the id {last}")))?;
        if size.saturating_sub(ids.len()) > MOST_UNUSED_IDS {
            let message = format!("has {} tokens with ids up to {last}", ids.len());
            return Err(Problem::of_file(message).suggest("number them without such a gap"));
        }
        let special = added.iter().filter(|(_, token)| token.special).map(|(_, token)| token.content.clone()).collect();
        Ok(Self { size, ids, special })
    }
}
