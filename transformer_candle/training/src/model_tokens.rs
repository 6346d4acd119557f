//! The special tokens of a model: what its files say, and at which tokens an answer of it ends.

use std::collections::BTreeMap;

use run_config::NamedTemplate;
use serde::Serialize;
use serde_json::{Value, json};

use crate::Result;
use crate::chat::{ChatOptions, conversation_encoder};
use crate::checkpoint::{Checkpoint, StoredModel};
use crate::trained_model::load_tokenizer;

/// The tokenizer of a model with its special tokens, as training and `chat` use it.
#[derive(Debug, Serialize)]
pub struct ModelTokens {
    /// The `tokenizer.json`, with the tokens that the files beside it add.
    pub tokenizer_json: Value,
    /// Roles, such as `bos_token`, and the tokens that have them.
    pub roles: BTreeMap<String, String>,
    /// `add_bos_token`, where the files have it.
    pub adds_bos: Option<bool>,
    /// Sources of the chat templates by name; that of conversations without tools is `default`, or the only one.
    pub templates: BTreeMap<String, String>,
    /// The ids of the tokens that end a text, the first of which ends a document.
    pub stop_tokens: Vec<u32>,
    /// The id of the token that ends the assistant's turn, if the default template writes one.
    pub end_of_turn: Option<u32>,
    /// Whether the default template starts with the BOS token; `None` without one that can be used.
    pub conversations_start_with_bos: Option<bool>,
    /// Tokens of the files for which the model has no embedding.
    pub left_out: Vec<String>,
}

/// Reads the special tokens of a model directory; `date` stands for today in templates that name it.
///
/// # Errors
/// If a file of the tokenizer cannot be read, or the model is none.
pub fn model_tokens(checkpoint: &Checkpoint, date: Option<String>) -> Result<ModelTokens> {
    let StoredModel { shape, stop_tokens, .. } = checkpoint.model()?;
    let tokenizer = load_tokenizer(checkpoint, &stop_tokens)?;
    let definition = tokenizer.definition()?;
    // A template that cannot be used ends no turns; `chat` says what is wrong with it.
    let encoder = conversation_encoder(checkpoint, &tokenizer, &shape, ChatOptions { template: None, date }).ok();
    let end_of_turn = encoder.as_ref().and_then(|encoder| Some(encoder.end_of_turn()?.id));
    let bos = tokenizer.document_tokens().bos.as_ref().map(|bos| bos.id);
    let prompt = encoder.and_then(|encoder| encoder.encode_prompt(&[json!({"role": "user", "content": "Hi"})]).ok());
    let conversations_start_with_bos = prompt.map(|prompt| bos.is_some() && prompt.first().copied() == bos);
    let pair = |NamedTemplate { name, source, .. }: NamedTemplate| (name, source);
    Ok(ModelTokens {
        tokenizer_json: definition.json,
        roles: definition.folder.roles().into_iter().collect(),
        adds_bos: definition.folder.adds_bos,
        templates: definition.folder.templates.into_iter().map(pair).collect(),
        stop_tokens,
        end_of_turn,
        conversations_start_with_bos,
        left_out: definition.additions.left_out,
    })
}
