//! A model and its tokenizer, read from a checkpoint and ready to be asked.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use dataset::Tokenizer;
use kernels::{Buffer, DType, Device};
use model::{Generator, ModelShape, ParameterLayout, Precision, SamplingSettings};
use serde::Serialize;
use serde_json::Value;

use crate::checkpoint::{self, StoredModel};
use crate::{Result, TrainerError};

/// The token that ends a text where a tokenizer's files name none.
const USUAL_END_OF_TEXT: &str = "<|endoftext|>";

/// A trained model in memory.
pub struct TrainedModel {
    /// Its sizes.
    pub shape: ModelShape,
    /// The type of its weights.
    pub precision: Precision,
    /// Flat weights, laid out as `model::parameters` says.
    pub weights: Buffer,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    stop_token: Option<u32>,
}

/// A continued text.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Completion {
    /// The text that was continued.
    pub prompt: String,
    /// What the model wrote.
    pub completion: String,
    /// The same as token ids.
    pub tokens: Vec<u32>,
    /// Tokens written over the seconds that prompt and tokens took.
    pub tokens_per_second: f64,
}

impl TrainedModel {
    /// Reads a model directory: a checkpoint, or any Llama model with its tokenizer in Hugging Face's format.
    pub fn open(directory: &Path) -> Result<Self> {
        let StoredModel { shape, precision, end_of_text } = checkpoint::stored_model(directory)?;
        let tokenizer = load_tokenizer(directory)?;
        let dtype = match precision {
            Precision::Fp32 => DType::F32,
            Precision::Bf16 => DType::BF16,
        };
        let mut weights = Buffer::zeros(&[ParameterLayout::new(&shape).elements()], dtype, &Device::Cpu)?;
        checkpoint::load_weights(directory, &shape, &mut weights)?;
        Ok(Self { shape, precision, weights, tokenizer, stop_token: end_of_text })
    }

    /// Continues a prompt by at most `max_tokens` tokens, up to the end of the text or of the model's context. An
    /// empty prompt starts a new text. `on_text` gets the text as it grows, whole characters at a time, and may break
    /// off.
    pub fn complete(
        &self,
        prompt: &str,
        max_tokens: usize,
        settings: &SamplingSettings,
        on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Completion> {
        let mut prompt_tokens = self.tokenizer.encode(prompt)?;
        if prompt_tokens.is_empty() {
            prompt_tokens.push(self.tokenizer.end_of_text());
        }
        let mut generator =
            Generator::new(&self.shape, self.weights.clone(), prompt_tokens.len().saturating_add(max_tokens))?;
        complete(
            &mut generator,
            &self.tokenizer,
            prompt,
            &prompt_tokens,
            max_tokens,
            self.stop_token,
            settings,
            on_text,
        )
    }

    /// The logits behind each of these tokens, one row of `vocab_size` a token.
    pub fn logits(&self, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
        let mut generator = Generator::new(&self.shape, self.weights.clone(), tokens.len())?;
        tokens.iter().map(|&token| generator.step(token).map_err(refused)).collect()
    }
}

/// Continues tokens with any generator, such as a running trainer's.
pub fn complete(
    generator: &mut Generator,
    tokenizer: &Tokenizer,
    prompt: &str,
    prompt_tokens: &[u32],
    max_tokens: usize,
    stop_token: Option<u32>,
    settings: &SamplingSettings,
    mut on_text: impl FnMut(&str) -> ControlFlow<()>,
) -> Result<Completion> {
    let started = Instant::now();
    let mut text = GrowingText::new(tokenizer);
    let mut unreadable = None;
    let on_token = |token| match text.push(token) {
        Ok(Some(piece)) => on_text(&piece),
        Ok(None) => ControlFlow::Continue(()),
        Err(error) => {
            unreadable = Some(error);
            ControlFlow::Break(())
        }
    };
    let tokens = generator.generate(prompt_tokens, max_tokens, stop_token, settings, on_token).map_err(refused)?;
    if let Some(error) = unreadable {
        return Err(error);
    }
    if let Some(rest) = text.finish()? {
        let _ = on_text(&rest);
    }
    let seconds = started.elapsed().as_secs_f64();
    let completion = tokenizer.decode(&tokens)?;
    let tokens_per_second = tokens.len() as f64 / seconds.max(f64::MIN_POSITIVE);
    Ok(Completion { prompt: prompt.to_owned(), completion, tokens, tokens_per_second })
}

/// Text that grows token by token, handed out in whole characters: a token may be part of one.
struct GrowingText<'a> {
    tokenizer: &'a Tokenizer,
    /// The last tokens handed out, then those that are held back.
    tokens: Vec<u32>,
    handed_out: usize,
}

/// Tokens held back at most; more are no unfinished character but bytes that make none.
const LONGEST_CHARACTER: usize = 8;

impl<'a> GrowingText<'a> {
    fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, tokens: Vec::new(), handed_out: 0 }
    }

    /// What the token adds, if that is whole.
    fn push(&mut self, token: u32) -> Result<Option<String>> {
        self.tokens.push(token);
        let waiting = self.tokens.len() - self.handed_out;
        let whole = self.tokenizer.decode(&self.tokens)?;
        if whole.ends_with(char::REPLACEMENT_CHARACTER) && waiting < LONGEST_CHARACTER {
            return Ok(None);
        }
        self.hand_out(&whole).map(Some)
    }

    /// What is held back at the end makes no whole character any more.
    fn finish(mut self) -> Result<Option<String>> {
        if self.tokens.len() == self.handed_out {
            return Ok(None);
        }
        let whole = self.tokenizer.decode(&self.tokens)?;
        self.hand_out(&whole).map(Some)
    }

    /// Behind the tokens before it, because some tokenizers drop a text's first space.
    fn hand_out(&mut self, whole: &str) -> Result<String> {
        let before = self.tokenizer.decode(&self.tokens[..self.handed_out])?;
        let piece = match whole.strip_prefix(&before) {
            Some(piece) => piece.to_owned(),
            None => self.tokenizer.decode(&self.tokens[self.handed_out..])?,
        };
        self.tokens.drain(..self.handed_out);
        self.handed_out = self.tokens.len();
        Ok(piece)
    }
}

/// What a model refuses about a prompt or the settings was asked of it: exit code 2.
fn refused(error: model::Error) -> TrainerError {
    match error {
        model::Error::ContextFull { .. } | model::Error::UnknownToken { .. } | model::Error::Sampling { .. } => {
            TrainerError::Request(error.to_string())
        }
        other => other.into(),
    }
}

/// The tokenizer of a model directory.
pub(super) fn load_tokenizer(directory: &Path) -> Result<Tokenizer> {
    Ok(Tokenizer::load(&directory.join("tokenizer.json"), &[end_of_text_of(directory)])?)
}

/// The name of the token that ends a text, from `tokenizer_config.json`: a string, or an object with its content.
fn end_of_text_of(directory: &Path) -> String {
    let config = fs::read(directory.join("tokenizer_config.json")).ok();
    let config: Option<Value> = config.and_then(|text| serde_json::from_slice(&text).ok());
    let token = config.as_ref().and_then(|config| config.get("eos_token"));
    let name = token.and_then(|token| token.as_str().or_else(|| token.get("content")?.as_str()));
    name.unwrap_or(USUAL_END_OF_TEXT).to_owned()
}
