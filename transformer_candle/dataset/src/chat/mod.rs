//! Chat data: rows of conversations become token ids, with a mask of those that the loss counts.
//!
//! `conversation` reads and checks a row (`other_formats`: one of Alpaca or ShareGPT); `template` renders it with the model's chat template (`python_text`: values
//! as Python prints them); `loss_spans` finds what the assistant says in it; `special_tokens` keeps the special tokens
//! of the template apart from text that spells them.

mod conversation;
mod loss_spans;
mod other_formats;
mod python_text;
mod special_tokens;
mod template;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use chrono::NaiveDate;
use run_config::{
    CHATML, DEFAULT_TEMPLATE, DataConfig, DataFormat, NamedTemplate, OverlongConversations, TokenizerFolder,
    regular_file,
};
use serde_json::{Value, json};

use self::conversation::{ASSISTANT, Conversation, Messages, RowProblem};
use self::loss_spans::Rendered;
use self::special_tokens::SpecialTokens;
use self::template::ChatTemplate;
use crate::skipped_rows::SkipReason;
use crate::tokenizer::{NamedToken, TokenizerDefinition};
use crate::{DataError, Tokenizer};

/// Name of the template that conversations with tools are rendered with, where there is one.
const TOOL_TEMPLATE: &str = "tool_use";
const CHATML_TEMPLATE: &str = include_str!("chatml.jinja");
const CHATML_END: &str = "<|im_end|>";
/// Kinds of problems of rows that are told.
const MAX_TOLD_PROBLEMS: usize = 8;

/// Settings of chat data: how conversations are rendered, and which tokens the loss counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatSettings {
    /// The file of the chat template, or `chatml`; `None` for the tokenizer's own template.
    pub template: Option<PathBuf>,
    /// The date that templates take as today's, such as `2026-01-31`; if `None`, templates that ask for the date fail.
    pub date: Option<String>,
    /// Whether the loss counts only what the assistant says, or a completion, instead of every token.
    pub assistant_only_loss: bool,
    /// Whether conversations that are longer than a sequence are truncated or skipped.
    pub overlong: OverlongConversations,
    /// The version of the rules by which rows become conversations (`data.reading_version`).
    pub reading_version: u32,
}

impl ChatSettings {
    /// Returns the chat settings of a config; `None` if its rows are text.
    pub fn from_config(data: &DataConfig) -> Option<Self> {
        (data.format == DataFormat::Chat).then(|| Self {
            template: data.chat_template.clone(),
            date: data.chat_template_date.clone(),
            assistant_only_loss: data.assistant_only_loss,
            overlong: data.overlong_conversations,
            reading_version: data.reading_version(),
        })
    }
}

/// Encodes conversations for a tokenizer. Clones share everything.
#[derive(Clone)]
pub struct ConversationEncoder(Arc<State>);

struct State {
    settings: ChatSettings,
    /// Input tokens per sequence.
    sequence_length: usize,
    /// The chat template; if `None`, only rows whose `prompt` and `completion` are texts can be encoded.
    template: Option<ChatTemplate>,
    /// The template of conversations with tools, where the model has one of their own.
    tool_template: Option<ChatTemplate>,
    /// The tokenizer, in which special tokens are named by their placeholders only.
    tokenizer: tokenizers::Tokenizer,
    path: PathBuf,
    /// The BOS token before a text that no template renders, if documents start with one; `eos` is the token after it.
    leading_bos: Option<u32>,
    eos: u32,
    end_of_turn: Option<NamedToken>,
    /// The problem of the first row that was skipped, as a sentence.
    first_problem: OnceLock<String>,
    /// The problems that were told, without their numbers.
    told_problems: Mutex<BTreeSet<String>>,
}

/// A conversation as token ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EncodedConversation {
    /// Token ids: at least 2, at most `sequence_length + 1`.
    pub ids: Vec<u32>,
    /// Whether the loss counts each token as a target; true for at least one after the first.
    pub counted: Vec<bool>,
    /// Whether its end was cut off.
    pub truncated: bool,
}

impl ConversationEncoder {
    /// Reads the template, and checks that it can be trained with.
    pub fn new(tokenizer: &Tokenizer, settings: &ChatSettings, sequence_length: usize) -> Result<Self, DataError> {
        let path = tokenizer.path();
        let TokenizerDefinition { json, folder, additions, .. } = tokenizer.definition()?;
        let special_tokens = SpecialTokens::from_tokenizer_json(&json);
        let end_of_text = tokenizer.document_tokens().end_of_text.clone();
        let eos = folder.with_role("eos_token").next().and_then(|name| special_tokens.named(name));
        let eos = eos.map_or(end_of_text.id, |token| token.id);
        let renamed = serde_json::to_vec(&special_tokens.renamed(json))
            .map_err(|error| error.to_string())
            .and_then(|bytes| load(&bytes))
            .map_err(|message| DataError::Tokenizer { path: path.to_owned(), message })?;
        let date = settings.date.as_deref().map(parse_date).transpose()?;
        let [template, tool_template] = find_templates(settings, &folder, &special_tokens, &end_of_text.name)?;
        let roles = folder.roles();
        let compile = |NamedTemplate { origin, source, .. }: NamedTemplate| {
            let refused = |message| DataError::ChatTemplate { path: origin.clone(), message };
            if let Some(token) = additions.left_out.iter().find(|token| source.contains(token.as_str())) {
                let message = format!(
                    "it writes `{token}`, a token for which the model has no embedding: resize the model's embeddings \
                     to its tokenizer, or name another template in data.chat_template"
                );
                return Err(refused(message));
            }
            ChatTemplate::compile(origin.clone(), source, &roles, special_tokens.clone(), date).map_err(refused)
        };
        let template = template.map(compile).transpose()?;
        let tool_template = tool_template.map(compile).transpose()?;
        let mut state = State {
            settings: settings.clone(),
            sequence_length,
            template,
            tool_template,
            tokenizer: renamed,
            path: path.to_owned(),
            leading_bos: tokenizer.document_tokens().leading_bos(),
            eos,
            end_of_turn: None,
            first_problem: OnceLock::new(),
            told_problems: Mutex::default(),
        };
        state.try_templates()?;
        Ok(Self(Arc::new(state)))
    }

    /// Returns the names and sources of the chat templates, to be saved with the weights: one named `default`, if the
    /// model has any, and perhaps one for conversations with tools.
    pub fn templates(&self) -> Vec<(&'static str, &str)> {
        let State { template, tool_template, .. } = &*self.0;
        let named = [(DEFAULT_TEMPLATE, template), (TOOL_TEMPLATE, tool_template)];
        named.into_iter().filter_map(|(name, template)| Some((name, template.as_ref()?.source.as_str()))).collect()
    }

    /// The special token with which the assistant ends its turns.
    pub fn end_of_turn(&self) -> Option<&NamedToken> {
        self.0.end_of_turn.as_ref()
    }

    /// Fails if the model has no chat template.
    pub fn check_template(&self) -> Result<(), DataError> {
        self.0.template(false).map(drop)
    }

    /// Encodes a conversation so far, followed by the template's generation prompt.
    ///
    /// # Errors
    /// [`DataError::ChatTemplate`] if the model has no template, or for messages that it refuses or that contain
    /// characters reserved for placeholders.
    pub fn encode_prompt(&self, messages: &[Value]) -> Result<Vec<u32>, DataError> {
        let template = self.0.template(false)?;
        if messages.iter().any(special_tokens::has_reserved) {
            let message = "a message contains noncharacters of Unicode (U+FDD0 to U+FDD4)".to_owned();
            return Err(DataError::ChatTemplate { path: template.origin.clone(), message });
        }
        let prepared = template.prepare(&Messages::plain(messages.to_vec()));
        let text = template
            .render(&prepared, messages.len(), true)
            .map_err(|message| DataError::ChatTemplate { path: template.origin.clone(), message })?;
        let text: String = text.chars().filter(|character| !special_tokens::GENERATION.contains(character)).collect();
        Ok(self.0.encode(&text)?.get_ids().to_vec())
    }

    /// Returns the problem of the first row that was skipped, in a sentence.
    pub(crate) fn first_problem(&self) -> Option<&str> {
        self.0.first_problem.get().map(String::as_str)
    }

    /// Returns the settings that the data order depends on, for the fingerprint.
    pub(crate) fn identity(&self) -> [String; 4] {
        let ChatSettings { date, assistant_only_loss, overlong, .. } = &self.0.settings;
        let sources: Vec<&str> = self.templates().into_iter().map(|(_, source)| source).collect();
        [sources.join("\0"), date.clone().unwrap_or_default(), assistant_only_loss.to_string(), format!("{overlong:?}")]
    }

    /// Encodes a row, or returns why it is skipped.
    pub(crate) fn encode_row(&self, row: &str) -> Result<Result<EncodedConversation, SkipReason>, DataError> {
        let encoded = match Conversation::parse(row, self.0.settings.reading_version) {
            Ok(conversation) => self.0.encode_conversation(&conversation)?,
            Err(problem) => Err(problem),
        };
        Ok(encoded.map_err(|RowProblem { reason, message }| {
            self.0.tell(&message);
            let _ = self.0.first_problem.set(message);
            reason
        }))
    }
}

impl State {
    /// Warns of the first row with each kind of problem: what a message says without its numbers.
    fn tell(&self, message: &str) {
        let kind: String = message.chars().filter(|character| !character.is_ascii_digit()).collect();
        let mut told = self.told_problems.lock().unwrap_or_else(PoisonError::into_inner);
        if told.len() < MAX_TOLD_PROBLEMS && told.insert(kind) {
            tracing::warn!("a row is skipped: {message}");
        }
    }

    /// Returns the template of a conversation with or without tools.
    fn template(&self, has_tools: bool) -> Result<&ChatTemplate, DataError> {
        let of_tools = self.tool_template.as_ref().filter(|_| has_tools);
        of_tools.or(self.template.as_ref()).ok_or_else(|| {
            let message = "the model has no chat template: name one in data.chat_template (`chatml`, or a Jinja file)";
            DataError::ChatTemplate { path: self.path.clone(), message: message.to_owned() }
        })
    }

    /// Tries the templates, and finds the token with which they end a turn.
    fn try_templates(&mut self) -> Result<(), DataError> {
        if let Some(template) = &mut self.template.take() {
            self.end_of_turn = self.try_template(template)?;
            self.template = Some(template.clone());
        }
        if let Some(template) = &mut self.tool_template.take() {
            // One that cannot be used without tools is judged by the rows that have some.
            drop(self.try_template(template));
            self.tool_template = Some(template.clone());
        }
        Ok(())
    }

    /// Renders a short conversation, so that a template in which the assistant's text cannot be found is refused before
    /// training starts. Finds its assembled special tokens; returns its end-of-turn token.
    fn try_template(&self, template: &mut ChatTemplate) -> Result<Option<NamedToken>, DataError> {
        let everything = !self.settings.assistant_only_loss;
        let plain = probe(&|text| text.into());
        let parts = probe(&|text| json!([{"type": "text", "text": text}]));
        let attempt = |template: &ChatTemplate, messages: &Messages| loss_spans::render(template, messages, everything);
        let refused =
            |problem: RowProblem| DataError::ChatTemplate { path: template.origin.clone(), message: problem.message };
        // Some templates take lists of parts only. One that takes texts is judged by them.
        let takes_texts = template.render(&template.prepare(&plain), plain.messages.len(), false).is_ok();
        let (messages, rendered) = match attempt(template, &plain) {
            Err(problem) if !takes_texts => {
                let rendered = attempt(template, &parts).map_err(|_| refused(problem))?;
                (parts, rendered)
            }
            rendered => (plain, rendered.map_err(refused)?),
        };
        template.special_tokens.find_assembled(&rendered.text);
        let rendered = attempt(template, &messages).unwrap_or(rendered);
        let encoding = self.encode(&rendered.text)?;
        let counted = counted(&encoding, &rendered.counted);
        let said = encoding.get_ids().iter().zip(counted).filter(|(_, counted)| *counted).map(|(id, _)| *id);
        let last = said.rev().find_map(|id| template.special_tokens.with_id(id));
        Ok(last.map(|token| NamedToken { id: token.id, name: token.name.clone() }))
    }

    fn encode(&self, text: &str) -> Result<tokenizers::Encoding, DataError> {
        let encoding = self.tokenizer.encode(text, false);
        encoding.map_err(|error| DataError::Tokenizer { path: self.path.clone(), message: error.to_string() })
    }

    fn encode_conversation(
        &self,
        conversation: &Conversation,
    ) -> Result<Result<EncodedConversation, RowProblem>, DataError> {
        let everything = !self.settings.assistant_only_loss;
        let (rendered, bos, eos) = match conversation {
            Conversation::Messages(messages) => {
                let template = self.template(!messages.tools.is_null())?;
                match render(template, messages, everything) {
                    Ok(rendered) => (rendered, None, None),
                    Err(RowProblem { reason, message }) => {
                        let message = format!("the chat template {} refuses it: {message}", template.origin.display());
                        return Ok(Err(RowProblem { reason, message }));
                    }
                }
            }
            Conversation::Completion { prompt, completion } => {
                let text = format!("{prompt}{completion}");
                let start = if everything { 0 } else { prompt.len() };
                let counted = std::iter::once(start..text.len()).collect();
                (Rendered { text, counted }, self.leading_bos, Some(self.eos))
            }
        };
        let encoding = self.encode(&rendered.text)?;
        let text_counts = counted(&encoding, &rendered.counted);
        let ids = bos.into_iter().chain(encoding.get_ids().iter().copied()).chain(eos).collect();
        let counted = bos.map(|_| false).into_iter().chain(text_counts).chain(eos.map(|_| true)).collect();
        Ok(self.fit(ids, counted))
    }

    /// Truncates a conversation to one sequence, or returns why its row is skipped.
    fn fit(&self, mut ids: Vec<u32>, mut counted: Vec<bool>) -> Result<EncodedConversation, RowProblem> {
        let (tokens, longest) = (ids.len(), self.sequence_length + 1);
        let truncated = tokens > longest;
        if truncated && self.settings.overlong == OverlongConversations::Skip {
            let message = format!("it has {tokens} tokens, and a sequence {}", self.sequence_length);
            return Err(RowProblem::new(SkipReason::Overlong, message));
        }
        ids.truncate(longest);
        counted.truncate(longest);
        if !counted.iter().skip(1).any(|&counted| counted) {
            let message = if truncated {
                format!(
                    "the assistant says nothing in the first {longest} of its {tokens} tokens: raise data.sequence_length"
                )
            } else {
                "the assistant says nothing in it".to_owned()
            };
            return Err(RowProblem::new(SkipReason::NoTarget, message));
        }
        Ok(EncodedConversation { ids, counted, truncated })
    }
}

/// Renders messages. Calls that the template leaves out are rendered as text if the row has them as messages.
fn render(template: &ChatTemplate, messages: &Messages, everything: bool) -> Result<Rendered, RowProblem> {
    let rendered = loss_spans::render(template, messages, everything)?;
    if !messages.has_call_messages || other_formats::has_calls(&rendered.text, &messages.messages) {
        return Ok(rendered);
    }
    let messages = Messages { messages: other_formats::calls_as_text(&messages.messages), ..messages.clone() };
    loss_spans::render(template, &messages, everything)
}

/// Returns a conversation of two turns to try a template with; `content` makes a message's content from its text.
fn probe(content: &dyn Fn(&str) -> Value) -> Messages {
    let turn = |role: &str, text: &str| json!({"role": role, "content": content(text)});
    Messages::plain(vec![
        turn("user", "How many?"),
        turn(ASSISTANT, "Two."),
        turn("user", "And then?"),
        turn(ASSISTANT, "Three."),
    ])
}

/// Returns for each token whether it overlaps one of the byte ranges of the text.
fn counted(encoding: &tokenizers::Encoding, spans: &[std::ops::Range<usize>]) -> Vec<bool> {
    let overlaps = |&(start, end): &(usize, usize)| {
        let next = spans.partition_point(|span| span.end <= start);
        start < end && spans.get(next).is_some_and(|span| span.start < end)
    };
    encoding.get_offsets().iter().map(overlaps).collect()
}

/// Finds a run's templates: the default one, and one of conversations with tools.
fn find_templates(
    settings: &ChatSettings,
    folder: &TokenizerFolder,
    special_tokens: &SpecialTokens,
    end_of_text: &str,
) -> Result<[Option<NamedTemplate>; 2], DataError> {
    let named = |origin: &Path, source| {
        Some(NamedTemplate { name: DEFAULT_TEMPLATE.to_owned(), origin: origin.to_owned(), source })
    };
    match &settings.template {
        Some(name) if name.as_os_str() == CHATML => {
            let mut template = CHATML_TEMPLATE.trim_end().to_owned();
            if special_tokens.named(CHATML_END).is_none() {
                // The end of a turn must be a token that generation can stop at.
                template = template.replace(CHATML_END, end_of_text);
            }
            Ok([named(name, template), None])
        }
        Some(path) => {
            let refused = |message: String| DataError::ChatTemplate { path: path.clone(), message };
            let bytes = regular_file::read(path).map_err(|error| refused(error.to_string()))?;
            let source = String::from_utf8(bytes).map_err(|_| refused("it is not UTF-8".to_owned()))?;
            Ok([named(path, source), None])
        }
        None => {
            let of_tools = folder.templates.iter().find(|template| template.name == TOOL_TEMPLATE);
            Ok([folder.templates.first().cloned(), of_tools.cloned()])
        }
    }
}

fn load(bytes: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    let mut tokenizer = tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| error.to_string())?;
    tokenizer.with_truncation(None).map_err(|error| error.to_string())?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

fn parse_date(date: &str) -> Result<NaiveDate, DataError> {
    NaiveDate::parse_from_str(date, "%Y-%m-%d").map_err(|_| DataError::Setting {
        setting: "data.chat_template_date",
        must: "a day of the calendar, such as 2026-01-31",
    })
}
