//! Text to token ids.

use std::path::Path;

use crate::DataError;

/// A tokenizer whose bytes are pinned by a hash; cloning shares it.
#[derive(Clone)]
pub struct Tokenizer {}

impl Tokenizer {
    /// Reads `tokenizer.json`; `end_of_text` names the token that ends a document (`<|endoftext|>`).
    pub fn load(_path: &Path, _end_of_text: &str) -> Result<Self, DataError> {
        unimplemented!()
    }

    /// Ids of each text, no special tokens added.
    pub fn encode_batch(&self, _texts: &[String]) -> Result<Vec<Vec<u32>>, DataError> {
        unimplemented!()
    }

    /// Ids of one text.
    pub fn encode(&self, _text: &str) -> Result<Vec<u32>, DataError> {
        unimplemented!()
    }

    /// Text of ids; special tokens leave no text.
    pub fn decode(&self, _ids: &[u32]) -> Result<String, DataError> {
        unimplemented!()
    }

    /// Number of tokens, added ones included (the highest id plus one).
    pub fn vocab_size(&self) -> usize {
        unimplemented!()
    }

    /// The id that ends a document.
    pub fn end_of_text(&self) -> u32 {
        unimplemented!()
    }

    /// SHA-256 of the file, in hexadecimal.
    pub fn content_hash(&self) -> &str {
        unimplemented!()
    }
}
