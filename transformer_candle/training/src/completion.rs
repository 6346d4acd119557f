//! Text completion: samples tokens one by one and decodes them incrementally.

#[cfg(test)]
#[path = "../../dataset/src/tokenizer/sentencepiece_fixture.rs"]
mod sentencepiece_fixture;

use std::ops::ControlFlow;
use std::time::Instant;

use dataset::Tokenizer;
use model::{Generator, ModelShape, SamplingSettings, Weights};
use serde::Serialize;

use crate::memory_plan::require_room;
use crate::{Result, TrainerError};

/// A prompt and the text that a model continues it with.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Completion {
    /// The text that was continued.
    pub prompt: String,
    /// The generated text.
    pub completion: String,
    /// The generated token ids.
    pub tokens: Vec<u32>,
    /// Tokens generated over the seconds that prompt and tokens took.
    pub tokens_per_second: f64,
}

/// Returns a generator for sequences of at most `max_tokens`, if there is room for its KV cache.
///
/// # Errors
/// [`TrainerError::NoRoom`]
pub(crate) fn generator(shape: &ModelShape, weights: &Weights, max_tokens: usize) -> Result<Generator> {
    let max_tokens = max_tokens.min(shape.max_position_embeddings);
    let (dtype, device) = (weights.flat.dtype(), weights.flat.device());
    let needed_bytes = Generator::bytes(shape, dtype, max_tokens, device.kind());
    require_room(needed_bytes, device, || format!("a context of {max_tokens} tokens"))?;
    Ok(Generator::new(shape, weights, max_tokens)?)
}

/// A completion request.
#[derive(Clone, Copy, Debug)]
pub struct CompletionRequest<'a> {
    /// The text to continue.
    pub prompt: &'a str,
    /// The prompt's token ids, at least one.
    pub prompt_tokens: &'a [u32],
    /// How many of them are in the generator's KV cache already, fewer than all.
    pub cached_tokens: usize,
    /// Maximum number of tokens to generate.
    pub max_tokens: usize,
    /// The tokens that end a text.
    pub stop_tokens: &'a [u32],
    /// How tokens are sampled.
    pub settings: &'a SamplingSettings,
}

/// Continues tokens with any generator, such as a running trainer's. `on_text` gets the text as it grows, and may end
/// it.
pub fn complete(
    generator: &mut Generator,
    tokenizer: &Tokenizer,
    request: &CompletionRequest<'_>,
    mut on_text: impl FnMut(&str) -> ControlFlow<()>,
) -> Result<Completion> {
    let &CompletionRequest { prompt, prompt_tokens, cached_tokens, max_tokens, stop_tokens, settings } = request;
    let start = Instant::now();
    let mut text = StreamingDecoder::behind(tokenizer, prompt_tokens);
    let mut unreadable = None;
    let on_token = |token| match text.push(token) {
        Ok(Some(piece)) => on_text(&piece),
        Ok(None) => ControlFlow::Continue(()),
        Err(error) => {
            unreadable = Some(error);
            ControlFlow::Break(())
        }
    };
    generator.truncate(cached_tokens);
    let tokens = generator
        .extend(&prompt_tokens[cached_tokens..], max_tokens, stop_tokens, settings, on_token)
        .map_err(TrainerError::from_request)?;
    if let Some(error) = unreadable {
        return Err(error);
    }
    if let Some(rest) = text.finish()? {
        let _ = on_text(&rest);
    }
    let seconds = start.elapsed().as_secs_f64();
    let completion = text_behind(tokenizer, prompt_tokens, &tokens)?;
    let tokens_per_second = tokens.len() as f64 / seconds.max(f64::MIN_POSITIVE);
    Ok(Completion { prompt: prompt.to_owned(), completion, tokens, tokens_per_second })
}

/// Decodes `tokens` that follow `prompt_tokens`: some tokenizers drop a text's first space, which here separates words.
fn text_behind(tokenizer: &Tokenizer, prompt_tokens: &[u32], tokens: &[u32]) -> Result<String> {
    let whole = tokenizer.decode(&[prompt_tokens, tokens].concat())?;
    match whole.strip_prefix(&tokenizer.decode(prompt_tokens)?) {
        Some(text) => Ok(text.to_owned()),
        None => Ok(tokenizer.decode(tokens)?),
    }
}

/// Decodes tokens incrementally into whole characters: a token may hold only part of one.
struct StreamingDecoder<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens of the prompt or those emitted last, `emitted` of them, then the pending ones.
    tokens: Vec<u32>,
    emitted: usize,
}

/// Maximum number of pending tokens; more are invalid bytes rather than an incomplete character.
const MAX_PENDING_TOKENS: usize = 8;

impl<'a> StreamingDecoder<'a> {
    /// Returns a decoder for the tokens that follow a prompt.
    fn behind(tokenizer: &'a Tokenizer, prompt_tokens: &[u32]) -> Self {
        Self { tokenizer, tokens: prompt_tokens.to_owned(), emitted: prompt_tokens.len() }
    }

    /// Adds a token; returns the new text if it ends with a whole character.
    fn push(&mut self, token: u32) -> Result<Option<String>> {
        self.tokens.push(token);
        let text = self.pending_text()?;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && self.tokens.len() - self.emitted < MAX_PENDING_TOKENS {
            return Ok(None);
        }
        self.tokens.drain(..self.emitted);
        self.emitted = self.tokens.len();
        Ok(Some(text))
    }

    /// Returns the text of the tokens that are still pending.
    fn finish(self) -> Result<Option<String>> {
        if self.tokens.len() == self.emitted { Ok(None) } else { self.pending_text().map(Some) }
    }

    fn pending_text(&self) -> Result<String> {
        let (emitted, pending) = self.tokens.split_at(self.emitted);
        text_behind(self.tokenizer, emitted, pending)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::sentencepiece_fixture::{Form, sentencepiece};
    use super::*;

    fn tokenizer(form: Form) -> Tokenizer {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), sentencepiece(form).to_string()).unwrap();
        Tokenizer::of_model(folder.path()).unwrap()
    }

    /// Decodes the tokens behind the first `count`, one by one and all at once.
    fn decoded_behind(tokenizer: &Tokenizer, tokens: &[u32], count: usize) -> (String, String) {
        let (prompt, completion) = tokens.split_at(count);
        let mut decoder = StreamingDecoder::behind(tokenizer, prompt);
        let mut pieces: Vec<String> = completion.iter().filter_map(|&token| decoder.push(token).unwrap()).collect();
        pieces.extend(decoder.finish().unwrap());
        (pieces.concat(), text_behind(tokenizer, prompt, completion).unwrap())
    }

    #[test]
    fn a_word_behind_a_prompt_keeps_its_space() {
        let tokenizer = tokenizer(Form::Prepend);
        let tokens = tokenizer.encode_prompt("the do").unwrap();
        assert_eq!(tokens.len(), 3, "<s>, the, do");
        let decoded = |count| decoded_behind(&tokenizer, &tokens, count);
        assert_eq!(decoded(2), (" do".to_owned(), " do".to_owned()));
        assert_eq!(decoded(1), ("the do".to_owned(), "the do".to_owned()), "in front of a text there is none");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn streamed_text_is_the_text(
            prompt in "( |the|do|ing|\u{e9}|\u{4e2d}|\n){0,12}",
            completion in "( |the|do|ing|x|\u{e9}|\u{4e2d}|\u{1f600}|\n){0,30}",
        ) {
            for form in [Form::Prepend, Form::Metaspace] {
                let tokenizer = tokenizer(form);
                let text = format!("{prompt}{completion}");
                let [start, tokens] = [&prompt, &text].map(|text| tokenizer.encode_prompt(text).unwrap());
                // Where merges reach across the border the tokens of the text do not begin with those of the prompt.
                prop_assume!(tokens.starts_with(&start));
                let whole = tokenizer.decode(&tokens).unwrap();
                let (streamed, at_once) = decoded_behind(&tokenizer, &tokens, start.len());
                prop_assert_eq!(&at_once, &whole[tokenizer.decode(&start).unwrap().len()..]);
                prop_assert_eq!(streamed, at_once);
            }
        }
    }
}
