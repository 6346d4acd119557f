//! Parses and checks rows of chat data, in the formats that trl's `SFTTrainer` reads and, since reading version 2, in
//! those of Alpaca and `ShareGPT` (`other_formats`).

use run_config::FIRST_READING_VERSION;
use serde_json::{Map, Value, json};

use super::other_formats;
use super::special_tokens::has_reserved;
use crate::skipped_rows::SkipReason;

/// The roles that a message may have.
const ROLES: [&str; 9] =
    ["system", "developer", "user", "assistant", "tool", "function", "ipython", "environment", "observation"];
pub(super) const ASSISTANT: &str = "assistant";
/// Fields of a message that hold what the assistant thinks before it answers.
pub(super) const THOUGHTS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

/// The reason to skip a row, and a sentence that explains it.
#[derive(Debug, PartialEq)]
pub(super) struct RowProblem {
    pub reason: SkipReason,
    pub message: String,
}

impl RowProblem {
    pub(super) fn new(reason: SkipReason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }
}

fn malformed(message: impl Into<String>) -> RowProblem {
    RowProblem::new(SkipReason::NotConversation, message)
}

/// The conversation in a row.
#[derive(Debug, PartialEq)]
pub(super) enum Conversation {
    /// Messages, to be rendered by the chat template.
    Messages(Messages),
    /// A text and its completion, which are tokenized without a template.
    Completion { prompt: String, completion: String },
}

/// The messages of a conversation.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_field_names, reason = "`messages` is the column's name")]
pub(super) struct Messages {
    /// Objects with a `role`, at least one.
    pub messages: Vec<Value>,
    /// Number of messages at the start that are the row's `prompt`, which `assistant_only_loss` ignores.
    pub prompt: usize,
    /// Indices of the assistant's messages that the loss leaves out: their weight is 0.
    pub left_out: Vec<usize>,
    /// A list of tools, or null.
    pub tools: Value,
    /// Other variables of the template (`chat_template_kwargs`).
    pub variables: Map<String, Value>,
    /// Whether calls of functions were messages of their own, which become text where the template leaves calls out.
    pub has_call_messages: bool,
}

impl Messages {
    pub(super) fn plain(messages: Vec<Value>) -> Self {
        let (tools, variables) = (Value::Null, Map::new());
        Self { messages, prompt: 0, left_out: Vec::new(), tools, variables, has_call_messages: false }
    }

    /// Indices of the assistant's messages behind the row's `prompt`.
    pub(super) fn turns(&self) -> impl Iterator<Item = usize> {
        (self.prompt..self.messages.len()).filter(|&index| self.is_assistant(index))
    }

    pub(super) fn is_assistant(&self, index: usize) -> bool {
        self.messages[index]["role"] == ASSISTANT
    }
}

impl Conversation {
    /// Parses a row: `messages` (or `conversations`), `prompt` and `completion`, or the columns of Alpaca; with `tools`,
    /// `chat_template_kwargs` and `system`. `reading_version` is that
    /// of the run.
    pub(super) fn parse(row: &str, reading_version: u32) -> Result<Self, RowProblem> {
        let mut row: Map<String, Value> =
            serde_json::from_str(row).map_err(|error| malformed(format!("the row is no JSON object: {error}")))?;
        if has_reserved(&Value::Object(row.clone())) {
            return Err(malformed("the row contains noncharacters of Unicode (U+FDD0 to U+FDD4)"));
        }
        let reads_other_formats = reading_version >= 2;
        if reads_other_formats && let Some(messages) = other_formats::of_instruction(&mut row).map_err(malformed)? {
            row.insert("messages".to_owned(), messages.into());
        }
        let mut take = |name: &str| row.remove(name).filter(|value| !value.is_null());
        let system = take("system").filter(|_| reads_other_formats);
        let (tools, variables) = (take("tools"), take("chat_template_kwargs"));
        let (mut messages, mut prompt) = match (take("messages").or_else(|| take("conversations")), take("prompt")) {
            (Some(messages), _) => (list("messages", messages)?, 0),
            (None, Some(prompt)) => {
                let completion = take("completion").ok_or_else(|| malformed("there is a prompt, but no completion"))?;
                match (prompt, completion) {
                    (Value::String(_), Value::String(completion)) if completion.is_empty() => {
                        return Err(malformed("the completion is empty"));
                    }
                    (Value::String(prompt), Value::String(completion)) => {
                        return Ok(Self::Completion { prompt, completion });
                    }
                    (prompt, completion) => {
                        let mut messages = list("prompt", prompt)?;
                        let length = messages.len();
                        messages.extend(list("completion", completion)?);
                        (messages, length)
                    }
                }
            }
            (None, None) => return Err(malformed("there are no messages, and no prompt with a completion")),
        };
        let (mut has_call_messages, mut left_out) = (false, Vec::new());
        for (index, message) in messages.iter_mut().enumerate() {
            let in_message = |problem: String| malformed(format!("message {} {problem}", index + 1));
            if reads_other_formats {
                has_call_messages |= other_formats::rename(message).map_err(in_message)?;
            }
            check_message(message, reading_version).map_err(in_message)?;
            if reading_version > FIRST_READING_VERSION && !counts(message).map_err(in_message)? {
                left_out.push(index);
            }
        }
        if let Some(Value::String(system)) = system
            && !system.trim().is_empty()
            && messages[0]["role"] != "system"
        {
            messages.insert(0, json!({"role": "system", "content": system}));
            prompt += usize::from(prompt > 0);
            for index in &mut left_out {
                *index += 1;
            }
        }
        let (tools, variables) = (parse_tools(tools)?, parse_variables(variables)?);
        let mut conversation = Messages { messages, prompt, left_out: Vec::new(), tools, variables, has_call_messages };
        left_out.retain(|&index| conversation.is_assistant(index));
        conversation.left_out = left_out;
        if conversation.turns().next().is_none() {
            return Err(RowProblem::new(SkipReason::NoTarget, "the assistant says nothing in it"));
        }
        if conversation.turns().all(|index| conversation.left_out.contains(&index)) {
            return Err(RowProblem::new(SkipReason::NoTarget, "all that the assistant says has weight 0"));
        }
        Ok(Self::Messages(conversation))
    }

    /// Whether a text of the conversation fulfils a condition.
    pub(super) fn any_text(&self, mut condition: impl FnMut(&str) -> bool) -> bool {
        match self {
            Self::Completion { prompt, completion } => condition(prompt) || condition(completion),
            Self::Messages(conversation) => {
                conversation.messages.iter().any(|message| any_string(message, &mut condition))
            }
        }
    }
}

fn any_string(value: &Value, condition: &mut impl FnMut(&str) -> bool) -> bool {
    match value {
        Value::String(text) => condition(text),
        Value::Array(items) => items.iter().any(|item| any_string(item, condition)),
        Value::Object(fields) => fields.values().any(|field| any_string(field, condition)),
        _ => false,
    }
}

/// Whether the loss counts a message of the assistant: `weight`, 0 or 1, as `OpenAI` has it for fine-tuning, or
/// `train` as axolotl has it.
fn counts(message: &Value) -> Result<bool, String> {
    for name in ["train", "training"] {
        match &message[name] {
            Value::Null => {}
            Value::Bool(counts) => return Ok(*counts),
            other => return Err(format!("has a `{name}` that is {other}; it must be true or false")),
        }
    }
    match &message["weight"] {
        Value::Null => Ok(true),
        weight => match weight.as_f64() {
            Some(0.0) => Ok(false),
            Some(1.0) => Ok(true),
            _ => Err(format!("has the weight {weight}; it must be 0 or 1")),
        },
    }
}

fn list(name: &str, value: Value) -> Result<Vec<Value>, RowProblem> {
    match value {
        Value::Array(messages) if messages.is_empty() => Err(malformed(format!("its {name} are empty"))),
        Value::Array(messages) => Ok(messages),
        _ => Err(malformed(format!("its {name} are no list of messages"))),
    }
}

/// Checks a message and renames `from` and `value` to `role` and `content`; an error's text continues "message 1".
fn check_message(message: &mut Value, reading_version: u32) -> Result<(), String> {
    let Value::Object(fields) = message else {
        return Err("is no object with a role and a content".to_owned());
    };
    for (name, usual) in [("from", "role"), ("value", "content")] {
        if !fields.contains_key(usual)
            && let Some(value) = fields.remove(name)
        {
            let value = match value.as_str() {
                Some("human") if usual == "role" => "user".into(),
                Some("gpt") if usual == "role" => ASSISTANT.into(),
                _ => value,
            };
            fields.insert(usual.to_owned(), value);
        }
    }
    let role = match fields.get("role") {
        None | Some(Value::Null) => return Err("has no role".to_owned()),
        Some(role) => role
            .as_str()
            .filter(|role| ROLES.contains(role))
            .map(str::to_owned)
            .ok_or_else(|| format!("has the role {role}, which is none of {}", ROLES.join(", ")))?,
    };
    let calls = fields.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty());
    let thinks = reading_version > FIRST_READING_VERSION
        && THOUGHTS.iter().any(|name| fields.get(*name).and_then(Value::as_str).is_some_and(|text| !text.is_empty()));
    let must_speak = (role == "user" || role == ASSISTANT) && !calls && !thinks;
    match fields.get("content") {
        Some(Value::String(text)) if must_speak && text.trim().is_empty() => Err(format!("({role}) is empty")),
        Some(Value::Array(parts)) => check_parts(parts),
        None | Some(Value::Null) if must_speak => Err(format!("({role}) has no content")),
        None | Some(Value::Null | Value::String(_)) => Ok(()),
        Some(_) => Err(format!("({role}) has a content that is neither a text nor a list of parts")),
    }
}

fn check_parts(parts: &[Value]) -> Result<(), String> {
    match parts.iter().find(|part| part["type"] != "text" || !part["text"].is_string()) {
        Some(part) => {
            let kind = part["type"].as_str().unwrap_or("unknown");
            Err(format!("has a part of the type {kind}: only text can be trained on"))
        }
        None if parts.is_empty() => Err("has a content without parts".to_owned()),
        None => Ok(()),
    }
}

/// Parses `tools`: a list, which some data sets store as JSON in a string; null for none, as in transformers.
fn parse_tools(tools: Option<Value>) -> Result<Value, RowProblem> {
    let tools = match tools {
        None => return Ok(Value::Null),
        Some(Value::String(json)) => {
            serde_json::from_str(&json).map_err(|_| malformed("its tools are a string that is no JSON"))?
        }
        Some(tools) => tools,
    };
    match tools {
        Value::Array(list) if list.is_empty() => Ok(Value::Null),
        Value::Array(_) | Value::Null => Ok(tools),
        _ => Err(malformed("its tools are no list")),
    }
}

fn parse_variables(variables: Option<Value>) -> Result<Map<String, Value>, RowProblem> {
    match variables {
        None => Ok(Map::new()),
        Some(Value::Object(variables)) => Ok(variables),
        Some(_) => Err(malformed("its chat_template_kwargs are no object")),
    }
}

#[cfg(test)]
mod tests {
    use run_config::NEWEST_READING_VERSION;

    use super::*;

    fn problem(row: &Value) -> (SkipReason, String) {
        let problem = Conversation::parse(&row.to_string(), NEWEST_READING_VERSION).unwrap_err();
        (problem.reason, problem.message)
    }

    #[test]
    fn malformed_conversations_are_named() {
        let turn = |role: &str, content: &str| json!({"role": role, "content": content});
        let answer = turn("assistant", "yes");
        let cases = [
            (json!({"text": "x"}), "there are no messages"),
            (json!({"messages": []}), "its messages are empty"),
            (json!({"messages": "x"}), "its messages are no list"),
            (json!({"messages": ["x"]}), "message 1 is no object"),
            (json!({"messages": [{"content": "x"}, answer]}), "message 1 has no role"),
            (json!({"messages": [turn("user", "x"), turn("bot", "y")]}), "message 2 has the role \"bot\""),
            (json!({"messages": [turn("user", " \n"), answer]}), "message 1 (user) is empty"),
            (json!({"messages": [turn("user", "x"), {"role": "assistant"}]}), "message 2 (assistant) has no content"),
            (json!({"messages": [{"role": "user", "content": [{"type": "image"}]}, answer]}), "of the type image"),
            (json!({"messages": [{"role": "user", "content": 3}, answer]}), "neither a text nor a list"),
            (
                json!({"messages": [turn("user", "x"), {"role": "assistant", "content": "", "thinking": ""}]}),
                "is empty",
            ),
            (
                json!({"messages": [turn("user", "x"), {"role": "assistant", "content": "y", "weight": 0.5}]}),
                "weight 0.5",
            ),
            (json!({"messages": [turn("user", "x"), {"role": "assistant", "content": "y", "train": 0}]}), "`train`"),
            (json!({"prompt": "x"}), "no completion"),
            (json!({"prompt": "x", "completion": ""}), "the completion is empty"),
            (json!({"messages": [turn("user", "\u{fdd0}"), answer]}), "noncharacters"),
            (json!({"messages": [turn("user", "x"), answer], "tools": "["}), "its tools are a string"),
            (json!({"messages": [turn("user", "x"), answer], "chat_template_kwargs": []}), "chat_template_kwargs"),
        ];
        for (row, expected) in cases {
            let (reason, message) = problem(&row);
            assert_eq!(reason, SkipReason::NotConversation, "{row}");
            assert!(message.contains(expected), "{row}: {message}");
        }
        assert_eq!(problem(&json!({"messages": [turn("user", "x")]})).0, SkipReason::NoTarget);
        let answered_before = json!({"prompt": [turn("user", "x"), answer], "completion": [turn("user", "y")]});
        assert_eq!(problem(&answered_before).0, SkipReason::NoTarget);
    }

    #[test]
    fn turns_of_weight_0_are_left_out() {
        let parse = |keys: &Value, version| {
            let mut first = json!({"role": "assistant", "content": "a"});
            first.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
            let user = json!({"role": "user", "content": "x", "weight": 0});
            let row = json!({"messages": [user, first, user, {"role": "assistant", "content": "b", "weight": 1}]});
            match Conversation::parse(&row.to_string(), version).unwrap() {
                Conversation::Messages(messages) => messages.left_out,
                Conversation::Completion { .. } => unreachable!(),
            }
        };
        for (keys, expected) in [
            (json!({"weight": 0}), vec![1]),
            (json!({"weight": 0.0}), vec![1]),
            (json!({"train": false}), vec![1]),
            (json!({"training": false}), vec![1]),
            (json!({"weight": 1, "train": null}), vec![]),
            (json!({"train": true}), vec![]),
        ] {
            assert_eq!(parse(&keys, NEWEST_READING_VERSION), expected, "{keys}");
            assert_eq!(parse(&keys, FIRST_READING_VERSION), Vec::<usize>::new());
        }
        let silent = json!({"role": "assistant", "content": "a", "weight": 0});
        assert_eq!(problem(&json!({"messages": [{"role": "user", "content": "x"}, silent]})).0, SkipReason::NoTarget);
    }

    #[test]
    fn an_empty_answer_may_have_a_thought() {
        let answer = json!({"role": "assistant", "content": "", "reasoning_content": "hm"});
        let row = json!({"messages": [{"role": "user", "content": "x"}, answer]}).to_string();
        assert!(Conversation::parse(&row, NEWEST_READING_VERSION).is_ok());
        assert!(Conversation::parse(&row, FIRST_READING_VERSION).is_err(), "earlier versions skipped it");
    }

    #[test]
    fn names_of_other_formats_are_translated() {
        let row =
            json!({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "tools": []});
        let expected = vec![json!({"role": "user", "content": "a"}), json!({"role": "assistant", "content": "b"})];
        let parsed = Conversation::parse(&row.to_string(), NEWEST_READING_VERSION).unwrap();
        assert_eq!(parsed, Conversation::Messages(Messages::plain(expected)));
    }
}
