//! Tokenization with the Hugging Face tokenizers library.

mod document_tokens;
pub(crate) mod library;
#[cfg(test)]
mod sentencepiece_fixture;
pub(crate) mod spelled_tokens;
#[cfg(test)]
mod tests;
mod token_bytes;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use run_config::system_error::in_words;
use run_config::{
    Additions, FIRST_READING_VERSION, ResolvedRun, TokenizerFileError, TokenizerFolder, TokenizerReading, regular_file,
};
use serde_json::Value;
use sha2::{Digest, Sha256};

use self::document_tokens::Choice;
pub use self::document_tokens::{DocumentTokens, NamedToken};
pub(crate) use self::spelled_tokens::SpelledTokens;
use self::token_bytes::token_bytes;
use crate::DataError;
use crate::encoder::Encoder;
use crate::ledger::hex;

/// A tokenizer, identified by the hash of its file; clones share it.
///
/// Text does not become a special token: a document that spells `<|endoftext|>` is tokenized as ordinary text, so that
/// data cannot end a document or pretend to be a user; unless a run asks for it (`data.parse_special_tokens`). No
/// special tokens are added, and nothing is truncated or padded.
#[derive(Clone)]
pub struct Tokenizer(Arc<TokenizerState>);

struct TokenizerState {
    path: PathBuf,
    tokenizer: tokenizers::Tokenizer,
    encoder: Encoder,
    reading: TokenizerReading,
    content_hash: String,
    document_tokens: DocumentTokens,
    vocab_size: usize,
    token_bytes: Option<Vec<u32>>,
    spelled_tokens: SpelledTokens,
    parses_special_tokens: bool,
}

/// What a tokenizer's files say: `tokenizer.json` with the tokens that the files beside it add.
pub struct TokenizerDefinition {
    /// The `tokenizer.json`, with the added tokens.
    pub json: Value,
    /// What the files beside it say.
    pub folder: TokenizerFolder,
    /// What they add.
    pub additions: Additions,
    /// The content of `tokenizer.json`, with the added tokens.
    pub content: Vec<u8>,
}

impl TokenizerDefinition {
    fn read(path: &Path, reading: TokenizerReading) -> Result<Self, DataError> {
        let (mut content, mut json) = read_json(path)?;
        let folder = TokenizerFolder::read(path, reading)
            .map_err(|TokenizerFileError { path, message }| DataError::Tokenizer { path, message })?;
        let additions = folder.complete(&mut json);
        if additions.any {
            content = serde_json::to_vec_pretty(&json).map_err(|error| unusable(path)(error.to_string()))?;
        }
        Ok(Self { json, folder, additions, content })
    }
}

/// A tokenized text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EncodedText {
    pub ids: Vec<u32>,
    /// Bytes of the ids' tokens minus bytes of the text: 1 if the tokenizer puts a space in front, another number if it
    /// normalizes the text.
    pub surplus_bytes: i64,
    /// Whether the ids may include special tokens that the text spells.
    pub is_parsed: bool,
}

impl Tokenizer {
    /// Reads a `tokenizer.json` and what the files beside it say of its special tokens. One of them must end documents:
    /// `<|endoftext|>`, or another common name of it among `special_tokens` (where empty, the tokenizer's own), or the
    /// EOS token of `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` or `config.json`.
    /// Documents start with a BOS token if the files say so.
    pub fn load(path: &Path, special_tokens: &[String]) -> Result<Self, DataError> {
        Self::read(path, TokenizerReading::Folder, Choice { special_tokens, ..Choice::default() })
    }

    /// Loads the tokenizer of a run, with its special tokens and BOS.
    pub fn from_run(run: &ResolvedRun) -> Result<Self, DataError> {
        let path = run.config.tokenizer.tokenizer_json.as_deref().unwrap_or(Path::new("tokenizer.json"));
        let data = &run.config.data;
        let version = data.reading_version();
        let choice = Choice {
            special_tokens: &run.special_tokens,
            bos: data.bos,
            truncates: version == FIRST_READING_VERSION,
            parses_special_tokens: run.config.parses_documents(),
            ..Choice::default()
        };
        Self::read(path, TokenizerReading::of_version(version), choice)
    }

    /// Loads the tokenizer of a model directory, as its files say.
    pub fn of_model(directory: &Path) -> Result<Self, DataError> {
        Self::read(&directory.join("tokenizer.json"), TokenizerReading::Folder, Choice::default())
    }

    /// Loads the tokenizer again, with special tokens that text spells taken as tokens.
    pub fn parsing_special_tokens(&self) -> Result<Self, DataError> {
        let DocumentTokens { end_of_text, starts_with_bos, .. } = self.document_tokens();
        let end_of_text = Some(end_of_text.id);
        let choice =
            Choice { end_of_text, bos: (*starts_with_bos).into(), parses_special_tokens: true, ..Choice::default() };
        Self::read(self.path(), self.0.reading, choice)
    }

    /// Loads the tokenizer of a checkpoint, which is what its `tokenizer.json` says; `end_of_text` is the id of the
    /// token that ends documents, if that is known.
    pub fn of_checkpoint(directory: &Path, end_of_text: Option<u32>) -> Result<Self, DataError> {
        let choice = Choice { end_of_text, ..Choice::default() };
        Self::read(&directory.join("tokenizer.json"), TokenizerReading::Recorded, choice)
    }

    fn read(path: &Path, reading: TokenizerReading, choice: Choice) -> Result<Self, DataError> {
        let error = unusable(path);
        let TokenizerDefinition { mut json, folder, content, .. } = TokenizerDefinition::read(path, reading)?;
        let mut tokenizer = library::load(&content, &json).map_err(&error)?;
        let parses_special_tokens = choice.parses_special_tokens;
        tokenizer.set_encode_special_tokens(!parses_special_tokens);
        let spelled_tokens = SpelledTokens::of_tokenizer_json(&json);
        let document_tokens = DocumentTokens::find(&tokenizer, path, (&json, &folder), choice)?;
        let vocab_size = tokenizer.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        let token_bytes = library::call(|| Ok(token_bytes(&tokenizer, &json, vocab_size))).map_err(&error)?;
        if !choice.truncates {
            json["truncation"] = Value::Null;
        }
        // Texts are encoded one by one: padding would only lengthen them.
        json["padding"] = Value::Null;
        let encoder = library::call(|| Ok(Encoder::choose(&tokenizer, json, parses_special_tokens))).map_err(&error)?;
        let content_hash = hex(&Sha256::digest(&content));
        Ok(Self(Arc::new(TokenizerState {
            path: path.to_owned(),
            tokenizer,
            encoder,
            reading,
            content_hash,
            document_tokens,
            vocab_size,
            token_bytes,
            spelled_tokens,
            parses_special_tokens,
        })))
    }

    /// Tokenizes a document's text, or a part of it.
    pub(crate) fn encode_document(&self, text: &str) -> Result<EncodedText, DataError> {
        let ids = self.encode(text)?;
        let is_parsed = self.0.parses_special_tokens && self.0.spelled_tokens.find(text).is_some();
        let surplus_bytes = match self.token_bytes().filter(|_| is_parsed || !self.0.encoder.keeps_bytes()) {
            Some(bytes) => ids.iter().map(|&id| i64::from(bytes[id as usize])).sum::<i64>() - text.len() as i64,
            None => 0,
        };
        Ok(EncodedText { ids, surplus_bytes, is_parsed })
    }

    /// Encodes a text as token ids.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        library::call(|| self.0.encoder.encode(&self.0.tokenizer, text)).map_err(unusable(self.path()))
    }

    /// Encodes a text to continue, as at least one id: the BOS token if documents start with it, and the text. An empty
    /// text without BOS gives the token that ends documents, after which a new one begins.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let mut ids: Vec<u32> = self.document_tokens().leading_bos().into_iter().collect();
        ids.extend(self.encode(text)?);
        if ids.is_empty() {
            ids.push(self.end_of_text());
        }
        Ok(ids)
    }

    /// Whether special tokens that text spells are taken as tokens.
    pub fn parses_special_tokens(&self) -> bool {
        self.0.parses_special_tokens
    }

    /// The first special token that a text spells.
    pub fn spelled_special_token<'a>(&'a self, text: &str) -> Option<&'a str> {
        self.0.spelled_tokens.find(text)
    }

    pub(crate) fn spelled_tokens(&self) -> &SpelledTokens {
        &self.0.spelled_tokens
    }

    /// Decodes ids to text, without special tokens.
    pub fn decode(&self, ids: &[u32]) -> Result<String, DataError> {
        library::call(|| self.0.tokenizer.decode(ids, true)).map_err(unusable(self.path()))
    }

    /// Decodes ids to text, with special tokens as they are spelled.
    pub fn decode_with_special_tokens(&self, ids: &[u32]) -> Result<String, DataError> {
        library::call(|| self.0.tokenizer.decode(ids, false)).map_err(unusable(self.path()))
    }

    /// The highest token id plus one.
    pub fn vocab_size(&self) -> usize {
        self.0.vocab_size
    }

    /// The tokens that begin and end a document.
    pub fn document_tokens(&self) -> &DocumentTokens {
        &self.0.document_tokens
    }

    /// The id that ends a document.
    pub fn end_of_text(&self) -> u32 {
        self.0.document_tokens.end_of_text.id
    }

    /// What its files say, read anew.
    pub fn definition(&self) -> Result<TokenizerDefinition, DataError> {
        TokenizerDefinition::read(&self.0.path, self.0.reading)
    }

    /// SHA-256 of the `tokenizer.json` with the added tokens, in hexadecimal.
    pub fn content_hash(&self) -> &str {
        &self.0.content_hash
    }

    /// Path of the `tokenizer.json`.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// UTF-8 bytes of text that each id stands for (0 for special tokens); `None` if the length of a token depends on
    /// its position. A tokenizer may put a space in front of a text or normalize it: the bytes of the tokens of a text
    /// are then not those of the text, which [`crate::Batch::target_bytes`] corrects.
    pub fn token_bytes(&self) -> Option<&[u32]> {
        self.0.token_bytes.as_deref()
    }
}

/// Checks that a `tokenizer.json` can be read.
///
/// # Errors
/// [`DataError::Tokenizer`] if it cannot.
pub fn check_tokenizer_json(path: &Path) -> Result<(), DataError> {
    let (content, json) = read_json(path)?;
    library::load(&content, &json).map(drop).map_err(unusable(path))
}

/// Reads a `tokenizer.json`: its content, and what it says.
fn read_json(path: &Path) -> Result<(Vec<u8>, Value), DataError> {
    let content = regular_file::read(path).map_err(|error| unusable(path)(in_words(&error)))?;
    let json = serde_json::from_slice(&content).map_err(|error| unusable(path)(error.to_string()))?;
    Ok((content, json))
}

/// Makes errors of the tokenizer at a path.
fn unusable(path: &Path) -> impl Fn(String) -> DataError {
    move |message| DataError::Tokenizer { path: path.to_owned(), message }
}
