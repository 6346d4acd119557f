//! Conversations with a trained model: its chat template renders them, and the model answers turn by turn.

use std::ops::ControlFlow;
use std::path::PathBuf;

use dataset::{CancelToken, ChatSettings, ConversationEncoder, DataError, Tokenizer};
use model::{Generator, ModelShape, SamplingSettings};
use run_config::{NEWEST_READING_VERSION, OverlongConversations};
use serde::Serialize;
use serde_json::Value;

use crate::checkpoint::Checkpoint;
use crate::completion::{CompletionRequest, complete, generator};
use crate::pool::in_pool;
use crate::stop::StopSignal;
use crate::trained_model::TrainedModel;
use crate::{Result, TrainerError};

/// Key of a checkpoint's fingerprint: the date that its run's chat template took for today.
const DATE: &str = "data.chat_template_date";
/// Tokens of a conversation that are prefilled between two checks of the stop signal.
const PIECE: usize = 128;
/// Minimum number of tokens that a sequence's KV cache has room for; the model's context limits it.
const SMALLEST_CAPACITY: usize = 1024;

/// The chat template and date of conversations, where they are not the model's own.
#[derive(Debug, Clone, Default)]
pub struct ChatOptions {
    /// A template's file, or a built-in one's name; None for the model's own.
    pub template: Option<PathBuf>,
    /// The day that templates take for today where the model's run has pinned none, `2026-01-31`.
    pub date: Option<String>,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its turn.
    Stop,
    /// The answer has as many tokens as were asked for.
    Length,
    /// The model's context is full.
    Context,
    /// The caller has cancelled the answer.
    Cancelled,
}

/// A model's answer to a conversation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Reply {
    /// Its text.
    pub text: String,
    /// Number of its tokens.
    pub tokens: usize,
    /// Number of tokens of the conversation before it.
    pub prompt_tokens: usize,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Tokens generated over the seconds that prompt and tokens took.
    pub tokens_per_second: f64,
}

/// A model that answers in conversations. The keys and values of a conversation are kept from turn to turn.
pub struct ChatModel {
    model: TrainedModel,
    encoder: ConversationEncoder,
    stop_tokens: Vec<u32>,
    sequence: Option<Sequence>,
}

/// Reads the chat template of a model, or the one that the options name.
pub(crate) fn conversation_encoder(
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
    shape: &ModelShape,
    options: ChatOptions,
) -> Result<ConversationEncoder> {
    let state = checkpoint.state().ok();
    let pinned = state.as_ref().and_then(|state| state.fingerprint.get(DATE)?.as_str().map(str::to_owned));
    let settings = ChatSettings {
        template: options.template,
        date: pinned.or(options.date),
        assistant_only_loss: false,
        overlong: OverlongConversations::Truncate,
        parse_special_tokens: Some(false),
        reading_version: NEWEST_READING_VERSION,
    };
    Ok(ConversationEncoder::new(tokenizer, &settings, shape.max_position_embeddings)?)
}

/// A generator, and the tokens in its KV cache.
struct Sequence {
    generator: Generator,
    tokens: Vec<u32>,
}

impl Sequence {
    /// Makes the KV cache hold `tokens`: keeps their common prefix with what it holds and prefills the rest; returns
    /// their number. On an error it holds the first of them.
    fn read(&mut self, tokens: &[u32], stop: &StopSignal) -> Result<usize> {
        let same = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        self.tokens.truncate(same);
        self.generator.truncate(same);
        for piece in tokens[same..].chunks(PIECE) {
            stop.check()?;
            self.generator.prefill(piece).map_err(TrainerError::from_request)?;
            self.tokens.extend_from_slice(piece);
        }
        Ok(tokens.len())
    }
}

impl ChatModel {
    /// Reads a model and its chat template; `cancel` ends reading.
    ///
    /// # Errors
    /// Those of [`TrainedModel::of_checkpoint`]; [`TrainerError::Request`] for a model without a template,
    /// [`DataError::ChatTemplate`] for one that cannot be used.
    pub fn open(
        checkpoint: &Checkpoint,
        options: ChatOptions,
        device: run_config::Device,
        cancel: &CancelToken,
    ) -> Result<Self> {
        let model = TrainedModel::of_checkpoint(checkpoint, device, cancel)?;
        let encoder = conversation_encoder(checkpoint, &model.tokenizer, &model.shape, options)?;
        encoder.check_template().map_err(|error| match error {
            DataError::NoChatTemplate { path } => TrainerError::Request(format!(
                "the model in {0} has no chat template: a base model continues texts (`orchestrate generate {0} --prompt \
                 TEXT`); for a fine-tuned one give the template by --chat-template, `chatml`, `qwen3` or a Jinja file",
                path.parent().unwrap_or(&path).display()
            )),
            error => error.into(),
        })?;
        let end_of_turn = encoder.end_of_turn().map(|token| token.id);
        let stop_tokens = model.stop_tokens.iter().copied().chain(end_of_turn).collect();
        Ok(Self { model, encoder, stop_tokens, sequence: None })
    }

    /// Whether the template ends the assistant's turns with a token, at which answers end.
    pub fn ends_turns(&self) -> bool {
        self.encoder.end_of_turn().is_some()
    }

    /// Tokens that a conversation may have.
    pub fn context(&self) -> usize {
        self.model.shape.max_position_embeddings
    }

    /// Answers a conversation, whose messages are objects with `role` and `content`, by at most `max_tokens` tokens.
    /// `on_text` receives the answer as it grows, and may cancel it; the signal ends it too.
    ///
    /// # Errors
    /// [`TrainerError::Interrupted`] if the signal is raised before the first token;
    /// [`TrainerError::Request`] for a conversation that leaves no room in the context for an answer, and settings out of
    /// range; [`DataError::ChatTemplate`] for messages that the template refuses.
    pub fn reply(
        &mut self,
        messages: &[Value],
        max_tokens: usize,
        settings: &SamplingSettings,
        stop: &StopSignal,
        mut on_text: impl FnMut(&str) -> ControlFlow<()> + Send,
    ) -> Result<Reply> {
        settings.check().map_err(TrainerError::from_request)?;
        let prompt_tokens = self.encoder.encode_prompt(messages)?;
        let (count, context) = (prompt_tokens.len(), self.context());
        if count == 0 {
            let problem = "the chat template makes an empty text of the conversation: name another one";
            return Err(TrainerError::Request(problem.to_owned()));
        }
        if count >= context {
            let problem = format!(
                "the conversation has {count} tokens, which leaves no room for an answer in the model's context of \
                 {context}: start a new one"
            );
            return Err(TrainerError::Request(problem));
        }
        let longest = count.saturating_add(max_tokens).min(context);
        let mut sequence = self.sequence_of(longest)?;
        let cached_tokens = in_pool(|| sequence.read(&prompt_tokens[..count - 1], stop));
        let Sequence { generator, tokens } = self.sequence.insert(sequence);
        let cached_tokens = cached_tokens?;
        let mut is_cancelled = false;
        let on_text = |text: &str| {
            let flow = if stop.requested().is_some() { ControlFlow::Break(()) } else { on_text(text) };
            is_cancelled |= flow.is_break();
            flow
        };
        let (tokenizer, stop_tokens) = (&self.model.tokenizer, self.stop_tokens.as_slice());
        let prompt_tokens = prompt_tokens.as_slice();
        let request = CompletionRequest { prompt: "", prompt_tokens, cached_tokens, max_tokens, stop_tokens, settings };
        let completion = in_pool(|| complete(generator, tokenizer, &request, on_text))?;
        tokens.extend_from_slice(&prompt_tokens[cached_tokens..]);
        tokens.extend_from_slice(&completion.tokens);
        tokens.truncate(generator.past());
        let generated = completion.tokens.len();
        let finish_reason = match generated {
            _ if is_cancelled => FinishReason::Cancelled,
            _ if generated == max_tokens => FinishReason::Length,
            _ if count + generated > generator.capacity() => FinishReason::Context,
            _ => FinishReason::Stop,
        };
        Ok(Reply {
            text: completion.completion,
            tokens: generated,
            prompt_tokens: count,
            finish_reason,
            tokens_per_second: completion.tokens_per_second,
        })
    }

    /// Takes the current sequence if it has room for `longest` tokens, else returns an empty one that has, with some to
    /// spare.
    fn sequence_of(&mut self, longest: usize) -> Result<Sequence> {
        match self.sequence.take() {
            Some(sequence) if longest <= sequence.generator.capacity() => Ok(sequence),
            former => {
                drop(former); // its memory may be needed
                let capacity = longest.next_power_of_two().max(SMALLEST_CAPACITY);
                let generator = generator(&self.model.shape, &self.model.weights, capacity)?;
                Ok(Sequence { generator, tokens: Vec::new() })
            }
        }
    }
}
