//! Chat data: rows of conversations become token ids, with a mask of those that the loss counts (`settings`).
//!
//! `conversation` reads and checks a row (`message`: one of its messages; `other_formats`: Alpaca and `ShareGPT`);
//! `template_source` finds the chat template, `template_trial` tries it before training, and `template` renders a
//! conversation with it (`python_text`: values as Python prints them; `python_methods`: its methods; `percent_format`:
//! its operator `%`; `template_edits`: changes of its source; `row_variables`: what it reads of the row;
//! `template_limits` and `bounded_values`: that it ends, and in memory); `loss_spans` finds what the assistant says in
//! it; `special_tokens` keeps the special tokens of the template apart from text that spells them. `unused_fields`
//! names what of a row is not used, and `row_warnings` tells it.

mod bounded_values;
mod conversation;
mod loss_spans;
mod message;
mod other_formats;
mod percent_format;
mod python_methods;
mod python_text;
mod row_variables;
mod row_warnings;
mod settings;
mod special_tokens;
mod template;
mod template_edits;
mod template_limits;
mod template_source;
mod template_trial;
#[cfg(test)]
mod tests;
mod unused_fields;

use std::path::PathBuf;
use std::sync::Arc;

use run_config::{DEFAULT_TEMPLATE, FIRST_READING_VERSION, NamedTemplate, OverlongConversations};
use serde_json::Value;

use self::conversation::{Conversation, Messages, RowProblem};
use self::loss_spans::Rendered;
use self::row_warnings::RowWarnings;
pub use self::settings::ChatSettings;
use self::special_tokens::SpecialTokens;
use self::template::{ChatTemplate, PreparedMessages};
use self::template_source::{Templates, find_templates};
use self::unused_fields::unused_fields;
use crate::skipped_rows::SkipReason;
use crate::tokenizer::{NamedToken, SpelledTokens, TokenizerDefinition, library, spelled_tokens};
use crate::{DataError, Tokenizer};

/// Name of the template that conversations with tools are rendered with, where there is one.
const TOOL_TEMPLATE: &str = "tool_use";

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
    /// The source of the template for inference, if it is another one than that of training.
    inference_template: Option<String>,
    special_tokens: SpecialTokens,
    /// Finds special tokens that rows spell.
    spelled: SpelledTokens,
    /// The tokenizer, in which special tokens are named by their placeholders only.
    tokenizer: tokenizers::Tokenizer,
    path: PathBuf,
    /// The BOS token before a text that no template renders, if documents start with one; `eos` is the token after it.
    leading_bos: Option<u32>,
    eos: u32,
    end_of_turn: Option<NamedToken>,
    /// Why only the last turn of a conversation can be trained on, if it is so.
    single_turn: Option<String>,
    warnings: RowWarnings,
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
    /// Whether its text spells a special token.
    pub spells_special_token: bool,
    /// Whether its row says what neither the template nor the loss uses.
    pub has_unused_fields: bool,
}

impl ConversationEncoder {
    /// Reads the template, and checks that it can be trained with.
    pub fn new(tokenizer: &Tokenizer, settings: &ChatSettings, sequence_length: usize) -> Result<Self, DataError> {
        let path = tokenizer.path();
        let TokenizerDefinition { json, folder, additions, .. } = tokenizer.definition()?;
        let special_tokens = SpecialTokens::from_tokenizer_json(&json);
        let marks = tokenizer.document_tokens();
        let added_tokens = template_trial::added_tokens(&json);
        let eos = folder.with_role("eos_token").next().and_then(|name| special_tokens.named(name));
        let eos = eos.map_or(marks.end_of_text.id, |token| token.id);
        let renamed = special_tokens.renamed(json);
        let renamed = serde_json::to_vec(&renamed)
            .map_err(|error| error.to_string())
            .and_then(|bytes| library::load(&bytes, &renamed))
            .map_err(|message| DataError::Tokenizer { path: path.to_owned(), message })?;
        let date = settings.day()?;
        let Templates { default, of_tools, inference } = find_templates(settings, &folder, &special_tokens, marks)?;
        let roles = folder.roles();
        let compile = |NamedTemplate { origin, source, .. }: NamedTemplate| {
            let refused = |message| DataError::ChatTemplate { path: origin.clone(), message };
            if let Some(token) = additions.left_out.iter().find(|token| source.contains(token.as_str())) {
                let message = format!(
                    "it writes `{token}`, a token for which the model has no embedding: resize the model's embeddings \
                     to its tokenizer, or name another template by --chat-template (data.chat_template)"
                );
                return Err(refused(message));
            }
            ChatTemplate::compile(origin.clone(), source, &roles, special_tokens.clone(), date).map_err(refused)
        };
        let template = default.map(compile).transpose()?;
        let tool_template = of_tools.map(compile).transpose()?;
        let mut state = State {
            settings: settings.clone(),
            sequence_length,
            template,
            tool_template,
            inference_template: inference,
            spelled: tokenizer.spelled_tokens().clone(),
            special_tokens,
            tokenizer: renamed,
            path: path.to_owned(),
            leading_bos: marks.leading_bos(),
            eos,
            end_of_turn: None,
            single_turn: None,
            warnings: RowWarnings::default(),
        };
        state.try_templates(&added_tokens)?;
        Ok(Self(Arc::new(state)))
    }

    /// Returns the names and sources of the chat templates for inference, to be saved with the weights: one named
    /// `default`, if the model has any, and perhaps one for conversations with tools.
    pub fn templates(&self) -> Vec<(&'static str, &str)> {
        let mut templates = self.0.templates();
        if let (Some((_, default)), Some(inference)) = (templates.first_mut(), &self.0.inference_template) {
            *default = inference;
        }
        templates
    }

    /// The token with which the assistant ends its turns; `None` if no token does, or the loss does not count it.
    pub fn end_of_turn(&self) -> Option<&NamedToken> {
        self.0.end_of_turn.as_ref()
    }

    /// What a user must know of the template before training, one sentence each.
    pub fn notes(&self) -> Vec<String> {
        let Some(template) = &self.0.template else { return Vec::new() };
        let template_name = format!("the chat template {}", template.origin.display());
        let mut notes = Vec::new();
        if self.0.end_of_turn.is_none() {
            notes.push(format!(
                "{template_name} ends what the assistant says without a token of its own, so that the model does not \
                 learn to stop: `chat` will end an answer only at --max-tokens; a template such as `chatml` \
                 (--chat-template) has such a token"
            ));
        }
        if let Some(problem) = &self.0.single_turn {
            notes.push(format!(
                "{template_name} suits conversations of one turn; those of several turns are skipped: {problem}"
            ));
        }
        notes
    }

    /// Fails if the model has no chat template.
    pub fn check_template(&self) -> Result<(), DataError> {
        self.0.template(false).map(drop)
    }

    /// Encodes a conversation so far, followed by the template's generation prompt.
    ///
    /// # Errors
    /// [`DataError::NoChatTemplate`] if the model has none, [`DataError::ChatTemplate`] for messages that it refuses or
    /// that contain characters reserved for placeholders.
    pub fn encode_prompt(&self, messages: &[Value]) -> Result<Vec<u32>, DataError> {
        let template = self.0.template(false)?;
        let refused = |message: String| DataError::ChatTemplate { path: template.origin.clone(), message };
        if messages.iter().any(special_tokens::has_reserved) {
            return Err(refused("a message contains noncharacters of Unicode (U+FDD0 to U+FDD4)".to_owned()));
        }
        let prepared = template.prepare(&Messages::plain(messages.to_vec()));
        let text = template.render(&prepared, messages.len(), true).map_err(refused)?;
        let text: String = text.chars().filter(|character| !special_tokens::GENERATION.contains(character)).collect();
        Ok(self.0.encode(&text)?.get_ids().to_vec())
    }

    /// Returns the problem of the first row that was skipped, in a sentence.
    pub(crate) fn first_problem(&self) -> Option<&str> {
        self.0.warnings.first_problem()
    }

    /// Returns the settings that the data order depends on, for the fingerprint.
    pub(crate) fn identity(&self) -> Vec<String> {
        let ChatSettings { date, assistant_only_loss, overlong, reading_version, .. } = &self.0.settings;
        let sources: Vec<&str> = self.0.templates().into_iter().map(|(_, source)| source).collect();
        let mut identity = vec![
            sources.join("\0"),
            date.clone().unwrap_or_default(),
            assistant_only_loss.to_string(),
            format!("{overlong:?}"),
        ];
        if *reading_version != FIRST_READING_VERSION {
            identity.push(format!("{:?}", self.0.settings.parse_special_tokens));
        }
        identity
    }

    /// Encodes a row, or returns why it is skipped.
    pub(crate) fn encode_row(&self, row: &str) -> Result<Result<EncodedConversation, SkipReason>, DataError> {
        let encoded = match Conversation::parse(row, self.0.settings.reading_version) {
            Ok(conversation) => self.0.encode_conversation(&conversation)?,
            Err(problem) => Err(problem),
        };
        Ok(encoded.map_err(|problem| self.0.warnings.skipped(problem)))
    }
}

impl State {
    /// Returns the names and sources of the chat templates.
    fn templates(&self) -> Vec<(&'static str, &str)> {
        let pairs = [(DEFAULT_TEMPLATE, &self.template), (TOOL_TEMPLATE, &self.tool_template)];
        pairs.into_iter().filter_map(|(name, template)| Some((name, template.as_ref()?.source.as_str()))).collect()
    }

    /// Returns the template of a conversation with or without tools.
    fn template(&self, has_tools: bool) -> Result<&ChatTemplate, DataError> {
        let of_tools = self.tool_template.as_ref().filter(|_| has_tools);
        let template = of_tools.or(self.template.as_ref());
        template.ok_or_else(|| DataError::NoChatTemplate { path: self.path.clone() })
    }

    fn encode(&self, text: &str) -> Result<tokenizers::Encoding, DataError> {
        let encoding = library::call(|| self.tokenizer.encode(text, false));
        encoding.map_err(|message| DataError::Tokenizer { path: self.path.clone(), message })
    }

    fn encode_conversation(
        &self,
        conversation: &Conversation,
    ) -> Result<Result<EncodedConversation, RowProblem>, DataError> {
        let everything = !self.settings.assistant_only_loss;
        let mut of_row = None;
        let (rendered, bos, eos) = match conversation {
            Conversation::Messages(messages) => {
                let template = self.template(!messages.tools.is_null())?;
                let prepared = template.prepare(messages);
                match render(template, messages, &prepared, everything) {
                    Ok(rendered) => {
                        of_row = Some(prepared.of_row);
                        (rendered, None, None)
                    }
                    Err(RowProblem { reason, message }) => {
                        let message = format!("the chat template {} refuses it: {message}", template.origin.display());
                        return Ok(Err(RowProblem { reason, message }));
                    }
                }
            }
            Conversation::Completion { prompt, completion, .. } => {
                let parses = self.settings.parses_completions();
                let [prompt, completion] = [prompt, completion]
                    .map(|text| if parses { self.special_tokens.parsed(text) } else { text.clone() });
                let text = format!("{prompt}{completion}");
                let start = if everything { 0 } else { prompt.len() };
                let counted = std::iter::once(start..text.len()).collect();
                (Rendered { text, counted }, self.leading_bos, Some(self.eos))
            }
        };
        let encoding = self.encode(&rendered.text)?;
        let text_counts = counted(&encoding, &rendered.counted);
        let text_ids = encoding.get_ids();
        // A text that spells them has them already.
        let bos = bos.filter(|bos| text_ids.first() != Some(bos));
        let eos = eos.filter(|eos| text_ids.last() != Some(eos));
        let ids = bos.into_iter().chain(text_ids.iter().copied()).chain(eos).collect();
        let counted = bos.map(|_| false).into_iter().chain(text_counts).chain(eos.map(|_| true)).collect();
        let spells_special_token =
            conversation.any_text(|text| self.spelled.tell(text, || self.spelling_note(conversation)));
        let unused = unused_fields(conversation, of_row.as_deref(), everything);
        let has_unused_fields = !unused.is_empty();
        self.warnings.unused(unused);
        let fitted = self.fit(ids, counted);
        Ok(fitted.map(|fitted| EncodedConversation { spells_special_token, has_unused_fields, ..fitted }))
    }

    /// Says what becomes of a special token that a conversation spells.
    fn spelling_note(&self, conversation: &Conversation) -> &'static str {
        let is_parsed = match conversation {
            Conversation::Messages(_) => self.settings.parses_messages(),
            Conversation::Completion { .. } => self.settings.parses_completions(),
        };
        spelled_tokens::consequence(is_parsed)
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
        Ok(EncodedConversation { ids, counted, truncated, ..EncodedConversation::default() })
    }
}

/// Renders messages. Calls that the template leaves out are rendered as text if the row has them as messages.
fn render(
    template: &ChatTemplate,
    messages: &Messages,
    prepared: &PreparedMessages,
    everything: bool,
) -> Result<Rendered, RowProblem> {
    let rendered = loss_spans::render(template, messages, prepared, everything)?;
    if !messages.has_call_messages || other_formats::has_calls(&rendered.text, &messages.messages) {
        return Ok(rendered);
    }
    let messages = Messages { messages: other_formats::calls_as_text(&messages.messages), ..messages.clone() };
    loss_spans::render(template, &messages, &template.prepare(&messages), everything)
}

/// Returns for each token whether it overlaps one of the byte ranges of the text.
fn counted(encoding: &tokenizers::Encoding, spans: &[std::ops::Range<usize>]) -> Vec<bool> {
    let overlaps = |&(start, end): &(usize, usize)| {
        let next = spans.partition_point(|span| span.end <= start);
        start < end && spans.get(next).is_some_and(|span| span.start < end)
    };
    encoding.get_offsets().iter().map(overlaps).collect()
}
