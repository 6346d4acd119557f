//! Tokenization with the Hugging Face tokenizers library.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use rayon::prelude::*;
use run_config::regular_file;
use sha2::{Digest, Sha256};
use tokenizers::DecoderWrapper;

use crate::DataError;
use crate::encoder::Encoder;

/// The token that ends a document.
const END_OF_TEXT: &str = "<|endoftext|>";
/// Other common names of it. One is used only if it is among the run's special tokens.
const END_OF_TEXT_ALIASES: [&str; 6] = ["<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end|>", "[EOS]"];

/// A tokenizer, identified by the hash of its file; clones share it.
///
/// Text never becomes a special token: a document that spells `<|endoftext|>` is tokenized as ordinary text, so that
/// data cannot end a document or pretend to be a user. No special tokens are added, and nothing is truncated or padded.
#[derive(Clone)]
pub struct Tokenizer(Arc<TokenizerState>);

struct TokenizerState {
    path: PathBuf,
    tokenizer: tokenizers::Tokenizer,
    encoder: Encoder,
    content_hash: String,
    end_of_text: u32,
    end_of_text_name: &'static str,
    vocab_size: usize,
    /// UTF-8 bytes of each token, if they do not depend on its position.
    token_bytes: Option<Vec<u32>>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. It must have the token `<|endoftext|>`, or `special_tokens` must contain another
    /// common name of it (`</s>`, `<eos>`, ...).
    pub fn load(path: &Path, special_tokens: &[String]) -> Result<Self, DataError> {
        let error = |message: String| DataError::Tokenizer { path: path.to_owned(), message };
        let bytes = regular_file::read(path).map_err(|cause| error(cause.to_string()))?;
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|cause| error(cause.to_string()))?;
        tokenizer.with_truncation(None).map_err(|cause| error(cause.to_string()))?;
        tokenizer.with_padding(None);
        tokenizer.set_encode_special_tokens(true);
        let named = END_OF_TEXT_ALIASES.into_iter().filter(|name| special_tokens.iter().any(|token| token == name));
        let mut names = [END_OF_TEXT].into_iter().chain(named);
        let found = names.find_map(|name| Some((tokenizer.token_to_id(name)?, name)));
        let (end_of_text, end_of_text_name) = found.ok_or_else(|| {
            error(format!(
                "it has no token `{END_OF_TEXT}` to end a document with; train it with that token, or name its own \
                 (such as `</s>`) in tokenizer.special_tokens"
            ))
        })?;
        let vocab_size = tokenizer.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        let token_bytes = token_bytes(&tokenizer, vocab_size);
        let encoder = Encoder::choose(&tokenizer, &bytes);
        let content_hash = format!("{:x}", Bytes::copy_from_slice(&Sha256::digest(&bytes)));
        Ok(Self(Arc::new(TokenizerState {
            path: path.to_owned(),
            tokenizer,
            encoder,
            content_hash,
            end_of_text,
            end_of_text_name,
            vocab_size,
            token_bytes,
        })))
    }

    /// The ids of each text, computed in the threads of the current rayon pool.
    pub fn encode_batch(&self, texts: &[String]) -> Result<Vec<Vec<u32>>, DataError> {
        texts.par_iter().map(|text| self.encode(text)).collect()
    }

    /// The ids of a text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.0.encoder.encode(&self.0.tokenizer, text).map_err(|error| self.error(error.as_ref()))
    }

    /// The text of ids, without special tokens.
    pub fn decode(&self, ids: &[u32]) -> Result<String, DataError> {
        self.0.tokenizer.decode(ids, true).map_err(|error| self.error(error.as_ref()))
    }

    /// The highest id plus one.
    pub fn vocab_size(&self) -> usize {
        self.0.vocab_size
    }

    /// The id that ends a document.
    pub fn end_of_text(&self) -> u32 {
        self.0.end_of_text
    }

    /// The name of [`Self::end_of_text`].
    pub fn end_of_text_name(&self) -> &str {
        self.0.end_of_text_name
    }

    /// SHA-256 of the file, in hexadecimal.
    pub fn content_hash(&self) -> &str {
        &self.0.content_hash
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// UTF-8 bytes of each id (none for special tokens); `None` where the length of a token depends on its position, as
    /// in tokenizers that are not byte-level.
    pub fn token_bytes(&self) -> Option<&[u32]> {
        self.0.token_bytes.as_deref()
    }

    fn error(&self, error: &(dyn std::error::Error + Send + Sync)) -> DataError {
        DataError::Tokenizer { path: self.0.path.clone(), message: error.to_string() }
    }
}

/// In a byte-level vocabulary each character of a token is one byte of text.
fn token_bytes(tokenizer: &tokenizers::Tokenizer, vocab_size: usize) -> Option<Vec<u32>> {
    if !matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
        return None;
    }
    let mut bytes = vec![0; vocab_size];
    for (token, id) in tokenizer.get_vocab(false) {
        bytes[id as usize] = token.chars().count() as u32;
    }
    for (id, token) in tokenizer.get_added_tokens_decoder() {
        bytes[id as usize] = if token.special { 0 } else { token.content.len() as u32 };
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A byte-level BPE of the 256 bytes, five merges and end-of-text, whose file asks to truncate texts to four
    /// tokens.
    const JSON: &str = include_str!("../tests/fixtures/tokenizer.json");

    fn byte_tokenizer() -> Tokenizer {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, JSON).unwrap();
        Tokenizer::load(&path, &[]).unwrap()
    }

    #[test]
    fn texts_round_trip_and_bytes_add_up() {
        let tokenizer = byte_tokenizer();
        let token_bytes = tokenizer.token_bytes().unwrap();
        for text in
            ["the docking thing", "\u{e9}\u{4e2d}\u{1f600}\r\n\0", "", "longer than the file's truncation allows"]
        {
            let ids = tokenizer.encode(text).unwrap();
            assert_eq!(tokenizer.decode(&ids).unwrap(), text);
            assert_eq!(ids.iter().map(|&id| token_bytes[id as usize]).sum::<u32>() as usize, text.len(), "{text}");
        }
        assert_eq!(token_bytes[tokenizer.end_of_text() as usize], 0);
        assert_eq!(tokenizer.vocab_size(), 262);
    }

    #[test]
    fn text_never_becomes_a_special_token() {
        let tokenizer = byte_tokenizer();
        let ids = tokenizer.encode("a <|endoftext|> b").unwrap();
        assert!(!ids.contains(&tokenizer.end_of_text()));
        assert_eq!(tokenizer.decode(&ids).unwrap(), "a <|endoftext|> b");
    }

    #[test]
    fn special_tokens_may_name_another_end_of_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, JSON.replace(END_OF_TEXT, "</s>")).unwrap();
        let error = Tokenizer::load(&path, &[]).err().unwrap().to_string();
        assert!(error.contains("<|endoftext|>") && error.contains("tokenizer.json"), "{error}");
        let tokenizer = Tokenizer::load(&path, &["<pad>".to_owned(), "</s>".to_owned()]).unwrap();
        assert_eq!((tokenizer.end_of_text(), tokenizer.end_of_text_name()), (261, "</s>"));
    }

    #[test]
    fn missing_and_invalid_files_are_named_in_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        for content in [None, Some("{}"), Some("not json")] {
            if let Some(content) = content {
                std::fs::write(&path, content).unwrap();
            }
            let error = Tokenizer::load(&path, &[]).err().unwrap().to_string();
            assert!(error.contains("tokenizer.json"), "{error}");
        }
    }
}
