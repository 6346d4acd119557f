//! Chat data: rows of conversations become token ids, with a mask of those that the loss counts.
//!
//! `conversation` reads and checks a row; `template` renders it with the model's chat template (`python_text`: values
//! as Python prints them; `percent_format`: its operator `%`); `loss_spans` finds what the assistant says in it; `special_tokens` keeps the special tokens
//! of the template apart from text that spells them.

mod conversation;
mod loss_spans;
mod percent_format;
mod python_text;
mod special_tokens;
mod template;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use chrono::NaiveDate;
use run_config::{CHATML, DataConfig, DataFormat, FIRST_READING_VERSION, OverlongConversations, QWEN3, regular_file};
use serde_json::{Map, Value, json};

use self::conversation::{ASSISTANT, Conversation, Messages, RowProblem};
use self::loss_spans::Rendered;
use self::special_tokens::SpecialTokens;
use self::template::ChatTemplate;
use crate::skipped_rows::SkipReason;
use crate::tokenizer::{NamedToken, SpelledTokens, spelled_tokens};
use crate::{DataError, DocumentTokens, Tokenizer};

const TEMPLATE_FILE: &str = "chat_template.jinja";
const CHATML_TEMPLATE: &str = include_str!("chatml.jinja");
const QWEN3_TEMPLATE: &str = include_str!("qwen3.jinja");
/// The token that ends a turn in the built-in templates.
const TURN_END: &str = "<|im_end|>";

/// Settings of chat data: how conversations are rendered, and which tokens the loss counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatSettings {
    /// The file of the chat template, or a built-in one's name; `None` for the tokenizer's own template.
    pub template: Option<PathBuf>,
    /// The date that templates take as today's, such as `2026-01-31`; if `None`, templates that ask for the date fail.
    pub date: Option<String>,
    /// Whether the loss counts only what the assistant says, or a completion, instead of every token.
    pub assistant_only_loss: bool,
    /// Whether conversations that are longer than a sequence are truncated or skipped.
    pub overlong: OverlongConversations,
    /// Whether text that spells a special token becomes it; if `None`, only that of a `prompt` and a `completion` that
    /// no template renders.
    pub parse_special_tokens: Option<bool>,
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
            parse_special_tokens: data.parse_special_tokens,
            reading_version: data.reading_version(),
        })
    }

    fn parses_messages(&self) -> bool {
        self.parse_special_tokens == Some(true)
    }

    fn parses_completions(&self) -> bool {
        self.parse_special_tokens.unwrap_or(self.reading_version > FIRST_READING_VERSION)
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
    /// The template for inference, if it is another one: the model's own where that of training only adds marks.
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
    /// The problem of the first row that was skipped, as a sentence.
    first_problem: OnceLock<String>,
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
}

impl ConversationEncoder {
    /// Reads the template, and checks that it can be trained with.
    pub fn new(tokenizer: &Tokenizer, settings: &ChatSettings, sequence_length: usize) -> Result<Self, DataError> {
        let path = tokenizer.path();
        let json: Value = read_json(path)?;
        let special_tokens = SpecialTokens::from_tokenizer_json(&json);
        let config = object(read_beside(path, "tokenizer_config.json")?);
        let mut named_tokens = named_tokens(&object(read_beside(path, "special_tokens_map.json")?));
        named_tokens.extend(self::named_tokens(&config));
        let eos_name = named_tokens.iter().rev().find(|(role, _)| role == "eos_token").map(|(_, name)| name.as_str());
        let marks = tokenizer.document_tokens();
        let eos = eos_name.and_then(|name| special_tokens.named(name)).map_or(marks.end_of_text.id, |token| token.id);
        let added_tokens = added_tokens(&json);
        let renamed = serde_json::to_vec(&special_tokens.renamed(json))
            .map_err(|error| error.to_string())
            .and_then(|bytes| load(&bytes))
            .map_err(|message| DataError::Tokenizer { path: path.to_owned(), message })?;
        let date = settings.date.as_deref().map(parse_date).transpose()?;
        let own = || own_template(path, &config);
        let source = match &settings.template {
            None => own()?,
            Some(name) => Some((name.clone(), named_template(name, settings, &special_tokens, marks)?)),
        };
        let inference_template = match &settings.template {
            Some(name) if name.as_os_str() == QWEN3 => own()?.map(|(_, source)| source),
            _ => None,
        };
        let template = match source {
            None => None,
            Some((origin, source)) => {
                let tokens = special_tokens.clone();
                let compiled = ChatTemplate::compile(origin.clone(), source, &named_tokens, tokens, date);
                Some(compiled.map_err(|message| DataError::ChatTemplate { path: origin, message })?)
            }
        };
        let mut state = State {
            settings: settings.clone(),
            sequence_length,
            template,
            inference_template,
            special_tokens,
            spelled: tokenizer.spelled_tokens().clone(),
            tokenizer: renamed,
            path: path.to_owned(),
            leading_bos: marks.leading_bos(),
            eos,
            end_of_turn: None,
            single_turn: None,
            first_problem: OnceLock::new(),
        };
        state.try_template(&added_tokens)?;
        Ok(Self(Arc::new(state)))
    }

    /// Returns the source of the chat template for inference, to be saved with the weights; `None` if the model has
    /// none.
    pub fn template(&self) -> Option<&str> {
        let own = self.0.template.as_ref().map(|template| template.source.as_str());
        self.0.inference_template.as_deref().or(own)
    }

    /// The token with which the assistant ends its turns; `None` if no token does, or the loss does not count it.
    pub fn end_of_turn(&self) -> Option<&NamedToken> {
        self.0.end_of_turn.as_ref()
    }

    /// What a user must know of the template before training, one sentence each.
    pub fn notes(&self) -> Vec<String> {
        let Some(template) = &self.0.template else { return Vec::new() };
        let named = format!("the chat template {}", template.origin.display());
        let mut notes = Vec::new();
        if self.0.end_of_turn.is_none() {
            notes.push(format!(
                "{named} ends what the assistant says without a token of its own, so that the model does not learn to \
                 stop: `chat` will end an answer only at --max-tokens; a template such as `chatml` \
                 (--chat-template) has such a token"
            ));
        }
        if let Some(problem) = &self.0.single_turn {
            notes.push(format!(
                "{named} suits conversations of one turn; those of several turns are skipped: {problem}"
            ));
        }
        notes
    }

    /// Fails if the model has no chat template.
    pub fn check_template(&self) -> Result<(), DataError> {
        self.0.template().map(drop)
    }

    /// Encodes a conversation so far, followed by the template's generation prompt.
    ///
    /// # Errors
    /// [`DataError::NoChatTemplate`] if the model has none, [`DataError::ChatTemplate`] for messages that it refuses or
    /// that contain characters reserved for placeholders.
    pub fn encode_prompt(&self, messages: &[Value]) -> Result<Vec<u32>, DataError> {
        let template = self.0.template()?;
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
    pub(crate) fn identity(&self) -> Vec<String> {
        let ChatSettings { date, assistant_only_loss, overlong, reading_version, .. } = &self.0.settings;
        let source = self.0.template.as_ref().map(|template| template.source.clone());
        let mut identity = vec![
            source.unwrap_or_default(),
            date.clone().unwrap_or_default(),
            assistant_only_loss.to_string(),
            format!("{overlong:?}"),
        ];
        if *reading_version != FIRST_READING_VERSION {
            identity.push(format!("reading version {reading_version}"));
            identity.push(format!("{:?}", self.0.settings.parse_special_tokens));
        }
        identity
    }

    /// Encodes a row, or returns why it is skipped.
    pub(crate) fn encode_row(&self, row: &str) -> Result<Result<EncodedConversation, SkipReason>, DataError> {
        let state = &self.0;
        let encoded = match Conversation::parse(row, state.settings.reading_version) {
            Ok(conversation) => state.encode_conversation(&conversation)?,
            Err(problem) => Err(problem),
        };
        Ok(encoded.map_err(|RowProblem { reason, message }| {
            if state.first_problem.set(message.clone()).is_ok() {
                tracing::warn!("a row is skipped: {message}");
            }
            reason
        }))
    }
}

impl State {
    fn template(&self) -> Result<&ChatTemplate, DataError> {
        self.template.as_ref().ok_or_else(|| DataError::NoChatTemplate { path: self.path.clone() })
    }

    /// Renders a short conversation, so that a template in which the assistant's text cannot be found is refused before
    /// training starts. Finds its assembled special tokens and its end-of-turn token.
    fn try_template(&mut self, added_tokens: &[NamedToken]) -> Result<(), DataError> {
        let parses_messages = self.settings.parses_messages();
        let Some(template) = &mut self.template else { return Ok(()) };
        let everything = !self.settings.assistant_only_loss;
        let attempt = |template: &ChatTemplate, messages: &Messages| loss_spans::render(template, messages, everything);
        let refused =
            |problem: RowProblem| DataError::ChatTemplate { path: template.origin.clone(), message: problem.message };
        let parts = |text: &str| json!([{"type": "text", "text": text}]);
        // Some templates take lists of parts only. One that takes texts is judged by them.
        let plain = probe(&|text| text.into(), PROBE_TURNS);
        let takes_texts = template.render(&template.prepare(&plain), plain.messages.len(), false).is_ok();
        let of_turns = |turns| if takes_texts { probe(&|text| text.into(), turns) } else { probe(&parts, turns) };
        let mut messages = of_turns(PROBE_TURNS);
        let rendered = match attempt(template, &messages) {
            Ok(rendered) => rendered,
            // Some templates, such as Qwen3's, render a turn otherwise once more follow.
            Err(problem) => match attempt(template, &of_turns(1)) {
                Ok(rendered) => {
                    self.single_turn = Some(problem.message);
                    messages = of_turns(1);
                    rendered
                }
                Err(_) if takes_texts => return Err(refused(problem)),
                Err(_) => return Err(refused(attempt(template, &plain).err().unwrap_or(problem))),
            },
        };
        template.special_tokens.find_assembled(&rendered.text);
        let probed = template.clone();
        template.parses_messages = parses_messages;
        let rendered = attempt(&probed, &messages).unwrap_or(rendered);
        let encoding = self.encode(&rendered.text)?;
        let last = messages.messages.len() / 2 - 1;
        let said_until = rendered.text.rfind(PROBED_ANSWERS[last]).map_or(0, |at| at + PROBED_ANSWERS[last].len());
        let counted = counted(&encoding, &rendered.counted);
        let said = encoding.get_ids().iter().zip(encoding.get_offsets()).zip(counted);
        let behind = said.filter(|((_, (start, _)), counted)| *counted && *start >= said_until).map(|((id, _), _)| *id);
        let behind: Vec<u32> = behind.collect();
        let special = |id: &u32| probed.special_tokens.with_id(*id).map(|token| (token.id, token.name.clone()));
        let added = |id: &u32| added_tokens.iter().find(|token| token.id == *id).cloned();
        self.end_of_turn = behind
            .iter()
            .rev()
            .find_map(special)
            .map(|(id, name)| NamedToken { id, name })
            .or_else(|| behind.iter().find_map(added));
        Ok(())
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
            Conversation::Messages(messages) => match loss_spans::render(self.template()?, messages, everything) {
                Ok(rendered) => (rendered, None, None),
                Err(RowProblem { reason, message }) => {
                    let message =
                        format!("the chat template {} refuses it: {message}", self.template()?.origin.display());
                    return Ok(Err(RowProblem { reason, message }));
                }
            },
            Conversation::Completion { prompt, completion } => {
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
        Ok(self.fit(ids, counted).map(|fitted| EncodedConversation { spells_special_token, ..fitted }))
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
        Ok(EncodedConversation { ids, counted, truncated, spells_special_token: false })
    }
}

/// What the assistant says in the turns that a template is tried with.
const PROBED_ANSWERS: [&str; PROBE_TURNS] = ["Two.", "Three."];
const PROBE_TURNS: usize = 2;

/// Returns a conversation of one or two turns to try a template with; `content` makes a message's content from its text.
fn probe(content: &dyn Fn(&str) -> Value, turns: usize) -> Messages {
    let message = |role: &str, text: &str| json!({"role": role, "content": content(text)});
    let asked = ["How many?", "And then?"].into_iter().zip(PROBED_ANSWERS);
    let said = asked.flat_map(|(question, answer)| [message("user", question), message(ASSISTANT, answer)]);
    Messages::plain(said.take(2 * turns).collect())
}

/// Returns for each token whether it overlaps one of the byte ranges of the text.
fn counted(encoding: &tokenizers::Encoding, spans: &[std::ops::Range<usize>]) -> Vec<bool> {
    let overlaps = |&(start, end): &(usize, usize)| {
        let next = spans.partition_point(|span| span.end <= start);
        start < end && spans.get(next).is_some_and(|span| span.start < end)
    };
    encoding.get_offsets().iter().map(overlaps).collect()
}

/// Returns the source of a built-in template, or reads that of a file.
fn named_template(
    name: &Path,
    settings: &ChatSettings,
    special_tokens: &SpecialTokens,
    marks: &DocumentTokens,
) -> Result<String, DataError> {
    let mut template = match name.to_str() {
        Some(CHATML) => CHATML_TEMPLATE.trim_end().to_owned(),
        Some(QWEN3) => QWEN3_TEMPLATE.trim_end().to_owned(),
        _ => return read_template(name),
    };
    if special_tokens.named(TURN_END).is_none() {
        // The end of a turn must be a token that generation can stop at.
        template = template.replace(TURN_END, &marks.end_of_text.name);
    }
    let bos = marks.bos.as_ref().filter(|_| marks.starts_with_bos && settings.reading_version > FIRST_READING_VERSION);
    if let Some(bos) = bos {
        // As a model's own template does whose texts start with BOS.
        let quoted = bos.name.replace('\\', "\\\\").replace('\'', "\\'");
        template = format!("{{{{- '{quoted}' }}}}\n{template}");
    }
    Ok(template)
}

fn read_template(path: &Path) -> Result<String, DataError> {
    let refused = |message: String| DataError::ChatTemplate { path: path.to_owned(), message };
    let bytes = regular_file::read(path).map_err(|error| refused(error.to_string()))?;
    String::from_utf8(bytes).map_err(|_| refused("it is not UTF-8".to_owned()))
}

/// Returns the file that has the tokenizer's own template, and its source; `None` if there is none.
fn own_template(tokenizer: &Path, config: &Map<String, Value>) -> Result<Option<(PathBuf, String)>, DataError> {
    let beside = tokenizer.with_file_name(TEMPLATE_FILE);
    if beside.exists() {
        let template = read_template(&beside)?;
        return Ok(Some((beside, template)));
    }
    let origin = tokenizer.with_file_name("tokenizer_config.json");
    Ok(template::of_config(config).map(|template| (origin, template.to_owned())))
}

/// Returns all added tokens of a `tokenizer.json`, special or not.
fn added_tokens(tokenizer_json: &Value) -> Vec<NamedToken> {
    let added = tokenizer_json["added_tokens"].as_array().into_iter().flatten();
    let named = added.filter_map(|token| {
        let id = u32::try_from(token["id"].as_u64()?).ok()?;
        Some(NamedToken { id, name: token["content"].as_str()?.to_owned() })
    });
    named.collect()
}

/// Returns the roles, such as `bos_token`, and the tokens that a tokenizer's config file gives them.
fn named_tokens(config: &Map<String, Value>) -> Vec<(String, String)> {
    let tokens = config.iter().filter(|(role, _)| role.ends_with("_token"));
    let named = tokens.filter_map(|(role, token)| {
        let name = token.as_str().or_else(|| token["content"].as_str())?;
        Some((role.clone(), name.to_owned()))
    });
    named.collect()
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

fn read_json(path: &Path) -> Result<Value, DataError> {
    let refused = |message: String| DataError::Tokenizer { path: path.to_owned(), message };
    let bytes = regular_file::read(path).map_err(|error| refused(error.to_string()))?;
    serde_json::from_slice(&bytes).map_err(|error| refused(error.to_string()))
}

/// Reads a JSON file in the tokenizer's folder; null if it does not exist.
fn read_beside(tokenizer: &Path, name: &str) -> Result<Value, DataError> {
    let path = tokenizer.with_file_name(name);
    match path.metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Value::Null),
        _ => read_json(&path),
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(object) => object,
        _ => Map::new(),
    }
}
