//! The tokens that begin and end a document, as a tokenizer's files name them.

use std::io;
use std::path::{Path, PathBuf};

use run_config::{Bos, TokenizerFolder, regular_file, wrong_token_ids};
use serde_json::Value;
use tokenizers::Tokenizer;

use crate::DataError;

/// The usual token that ends a document.
const END_OF_TEXT: &str = "<|endoftext|>";
/// Other common names of that token. A token that ends a turn of a conversation, such as `<|eot_id|>`, is none.
const END_OF_TEXT_ALIASES: [&str; 6] = ["<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end|>", "[EOS]"];

/// A token and its id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedToken {
    /// The token's id.
    pub id: u32,
    /// The token's text.
    pub name: String,
}

/// The tokens that begin and end a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DocumentTokens {
    /// The token that ends each document.
    pub end_of_text: NamedToken,
    /// The BOS token; `None` if the tokenizer has none other than [`Self::end_of_text`].
    pub bos: Option<NamedToken>,
    /// Whether each document starts with the BOS token.
    pub starts_with_bos: bool,
    /// Whether the tokenizer's files say that each document starts with the BOS token.
    pub files_say_bos: bool,
}

/// The caller's choice of the tokens that begin and end a document, where the tokenizer's files leave one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Choice<'a> {
    /// The run's special tokens; if empty, the tokenizer's own.
    pub special_tokens: &'a [String],
    /// The id that is known to end a document, such as that of a checkpoint.
    pub end_of_text: Option<u32>,
    pub bos: Bos,
    /// Whether the file's `truncation` applies to documents where the fast encoder takes the tokenizer: how runs of the
    /// first reading version encode.
    pub truncates: bool,
    /// Whether special tokens that text spells are taken as tokens.
    pub parses_special_tokens: bool,
}

impl DocumentTokens {
    /// Creates document tokens of a token that ends each document, and no BOS token.
    pub fn ended_by(id: u32, name: &str) -> Self {
        let end_of_text = NamedToken { id, name: name.to_owned() };
        Self { end_of_text, bos: None, starts_with_bos: false, files_say_bos: false }
    }

    /// Id of the BOS token; `None` unless each document starts with it.
    pub fn leading_bos(&self) -> Option<u32> {
        self.bos.as_ref().filter(|_| self.starts_with_bos).map(|bos| bos.id)
    }

    /// Finds the tokens of the tokenizer at `path`, whose content is `json` and beside which are the files of `folder`.
    /// The token that ends a document is the
    /// first of these that there is:
    ///
    /// 1. the one that [`Choice::end_of_text`] says;
    /// 2. `<|endoftext|>`;
    /// 3. another common name of it among the special tokens;
    /// 4. of the tokens that the files beside `path` call EOS ([`RoleFiles`]) one with a common name, else the first.
    pub(super) fn find(
        tokenizer: &Tokenizer,
        path: &Path,
        (json, folder): (&Value, &TokenizerFolder),
        choice: Choice,
    ) -> Result<Self, DataError> {
        let files = RoleFiles { tokenizer, tokenizer_json: path, folder };
        let end_of_text = find_end_of_text(&files, json, choice)?;
        let template = first_of_template(json).and_then(|name| files.named(name));
        let bos = files.tokens("bos")?.into_iter().next().or_else(|| template.clone());
        let files_say_bos = match folder.adds_bos {
            Some(adds_bos) => adds_bos && bos.is_some(),
            None => bos.is_some() && bos == template,
        };
        if choice.bos == Bos::Always {
            let problem = match &bos {
                None => Some("the tokenizer has no BOS token".to_owned()),
                Some(bos) if *bos == end_of_text => {
                    Some(format!("its BOS token `{}` also ends documents and so precedes each anyway", bos.name))
                }
                Some(_) => None,
            };
            if let Some(problem) = problem {
                return Err(DataError::NoBos { path: path.to_owned(), problem });
            }
        }
        // A token that ends the document before is not repeated.
        let bos = bos.filter(|bos| *bos != end_of_text);
        let files_say_bos = files_say_bos && bos.is_some();
        let starts_with_bos = match choice.bos {
            Bos::Auto => files_say_bos,
            Bos::Always => true,
            Bos::Never => false,
        };
        Ok(Self { end_of_text, bos, starts_with_bos, files_say_bos })
    }
}

fn find_end_of_text(files: &RoleFiles, json: &Value, choice: Choice) -> Result<NamedToken, DataError> {
    if let Some(token) = choice.end_of_text.and_then(|id| files.with_id(u64::from(id))) {
        return Ok(token);
    }
    let is_special = |name: &str| match choice.special_tokens {
        [] => own_special_tokens(json).any(|token| token == name),
        tokens => tokens.iter().any(|token| token == name),
    };
    let aliases = END_OF_TEXT_ALIASES.into_iter().filter(|name| is_special(name));
    if let Some(common) = [END_OF_TEXT].into_iter().chain(aliases).find_map(|name| files.named(name)) {
        return Ok(common);
    }
    let mut called_eos = files.tokens("eos")?;
    let common = called_eos.iter().position(|token| END_OF_TEXT_ALIASES.contains(&token.name.as_str()));
    if called_eos.is_empty() {
        let message = format!(
            "it has no token `{END_OF_TEXT}` to end a document with, and no tokenizer_config.json beside it names an \
             eos_token; train it with that token, or name its own (such as `</s>`) in tokenizer.special_tokens"
        );
        return Err(DataError::Tokenizer { path: files.tokenizer_json.to_owned(), message });
    }
    Ok(called_eos.swap_remove(common.unwrap_or(0)))
}

/// Returns the tokens that a `tokenizer.json` marks as special.
fn own_special_tokens(json: &Value) -> impl Iterator<Item = &str> {
    let added = json["added_tokens"].as_array().into_iter().flatten();
    added.filter(|token| token["special"] == true).filter_map(|token| token["content"].as_str())
}

/// Returns the special token that the post-processor of a `tokenizer.json` puts in front of a text.
fn first_of_template(json: &Value) -> Option<&str> {
    let processor = &json["post_processor"];
    let processors = processor["processors"].as_array().map_or(std::slice::from_ref(processor), Vec::as_slice);
    let template = processors.iter().find(|processor| processor["type"] == "TemplateProcessing")?;
    let id = template["single"][0]["SpecialToken"]["id"].as_str()?;
    template["special_tokens"][id]["tokens"][0].as_str().or(Some(id))
}

/// What the files beside a `tokenizer.json` say of the tokens with a role, in order of precedence: the tokenizer's by
/// name, `generation_config.json` and `config.json` by id, of which there may be several.
struct RoleFiles<'a> {
    tokenizer: &'a Tokenizer,
    tokenizer_json: &'a Path,
    folder: &'a TokenizerFolder,
}

impl RoleFiles<'_> {
    /// Returns the tokens that the files give the role `bos` or `eos`, as far as the tokenizer has them.
    fn tokens(&self, role: &str) -> Result<Vec<NamedToken>, DataError> {
        let names = self.folder.with_role(&format!("{role}_token")).map(str::to_owned).collect::<Vec<_>>();
        let mut tokens: Vec<_> = names.iter().filter_map(|name| self.named(name)).collect();
        for file in ["generation_config.json", "config.json"] {
            let config = self.read(file)?;
            if let Some(message) = wrong_token_ids(&config) {
                return Err(DataError::Tokenizer { path: self.tokenizer_json.with_file_name(file), message });
            }
            let ids = &config[format!("{role}_token_id")];
            let ids = ids.as_array().map_or(std::slice::from_ref(ids), Vec::as_slice);
            tokens.extend(ids.iter().filter_map(Value::as_u64).filter_map(|id| self.with_id(id)));
        }
        Ok(tokens)
    }

    fn named(&self, name: &str) -> Option<NamedToken> {
        let id = self.tokenizer.token_to_id(name)?;
        Some(NamedToken { id, name: name.to_owned() })
    }

    fn with_id(&self, id: u64) -> Option<NamedToken> {
        let id = u32::try_from(id).ok()?;
        let name = self.tokenizer.id_to_token(id)?;
        Some(NamedToken { id, name })
    }

    /// Reads a JSON file in the tokenizer's folder; null if it does not exist.
    fn read(&self, name: &str) -> Result<Value, DataError> {
        let path: PathBuf = self.tokenizer_json.with_file_name(name);
        let refused = |message: String| DataError::Tokenizer { path: path.clone(), message };
        match regular_file::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| refused(error.to_string())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Value::Null),
            Err(error) => Err(refused(error.to_string())),
        }
    }
}
