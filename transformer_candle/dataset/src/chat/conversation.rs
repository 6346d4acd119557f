//! Parses and checks rows of chat data, in the formats that trl's `SFTTrainer` reads and, since reading version 2, in
//! those of Alpaca and `ShareGPT` (`other_formats`).

use run_config::FIRST_READING_VERSION;
use serde_json::{Map, Value, json};

use super::row_variables::TOOLS;
use super::special_tokens::has_reserved;
use super::{message, other_formats};
use crate::skipped_rows::SkipReason;

/// The column of variables for the template.
pub(super) const VARIABLES: &str = "chat_template_kwargs";
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

fn malformed_tools(message: &str) -> RowProblem {
    RowProblem::new(SkipReason::MalformedTools, message)
}

/// The conversation in a row.
#[derive(Debug, PartialEq)]
pub(super) enum Conversation {
    /// Messages, to be rendered by the chat template.
    Messages(Messages),
    /// A text and its completion, which are tokenized without a template.
    Completion {
        prompt: String,
        completion: String,
        /// Names of the row's other fields that have a value.
        other_fields: Vec<String>,
    },
}

/// The messages of a conversation.
#[derive(Clone, Debug, Default, PartialEq)]
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
    /// Names of the row's other fields that have a value; the template is not given them.
    pub other_fields: Vec<String>,
    /// Whether calls of functions were messages of their own, which become text where the template leaves calls out.
    pub has_call_messages: bool,
}

impl Messages {
    pub(super) fn plain(messages: Vec<Value>) -> Self {
        Self { messages, ..Self::default() }
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
    /// `chat_template_kwargs` and `system`. `reading_version` is that of the run.
    pub(super) fn parse(row: &str, reading_version: u32) -> Result<Self, RowProblem> {
        let mut row: Map<String, Value> =
            serde_json::from_str(row).map_err(|error| malformed(format!("the row is no JSON object: {error}")))?;
        if has_reserved(&Value::Object(row.clone())) {
            let message = "the row contains noncharacters of Unicode (U+FDD0 to U+FDD4)";
            return Err(RowProblem::new(SkipReason::Noncharacters, message));
        }
        let reads_other_formats = reading_version >= 2;
        if reads_other_formats && let Some(messages) = other_formats::of_instruction(&mut row)? {
            row.insert("messages".to_owned(), messages.into());
        }
        let mut take = |name: &str| row.remove(name).filter(|value| !value.is_null());
        let system = take("system").filter(|_| reads_other_formats);
        let (tools, variables) = (take(TOOLS), take(VARIABLES));
        let (mut messages, mut prompt) = match (take("messages").or_else(|| take("conversations")), take("prompt")) {
            (Some(messages), _) => (list("messages", messages)?, 0),
            (None, Some(prompt)) => {
                let completion = take("completion").ok_or_else(|| malformed("there is a prompt, but no completion"))?;
                match (prompt, completion) {
                    (Value::String(_), Value::String(completion)) if completion.is_empty() => {
                        return Err(RowProblem::new(SkipReason::EmptyMessage, "the completion is empty"));
                    }
                    (Value::String(prompt), Value::String(completion)) => {
                        let given_values = [(TOOLS, tools), (VARIABLES, variables)];
                        let given_values =
                            given_values.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
                        row.extend(given_values);
                        return Ok(Self::Completion { prompt, completion, other_fields: with_values(&row) });
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
            let in_message = |RowProblem { reason, message }: RowProblem| {
                RowProblem::new(reason, format!("message {} {message}", index + 1))
            };
            if reads_other_formats {
                has_call_messages |= other_formats::rename(message).map_err(in_message)?;
            }
            message::check(message, reading_version).map_err(in_message)?;
            if reading_version > FIRST_READING_VERSION && !message::counts(message).map_err(in_message)? {
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
        let other_fields = with_values(&row);
        let mut conversation =
            Messages { messages, prompt, left_out: Vec::new(), tools, variables, other_fields, has_call_messages };
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
            Self::Completion { prompt, completion, .. } => condition(prompt) || condition(completion),
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

/// Returns the names of the fields that are neither null nor empty.
fn with_values(row: &Map<String, Value>) -> Vec<String> {
    let has_value = |value: &Value| match value {
        Value::Null => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => true,
    };
    row.iter().filter(|(_, value)| has_value(value)).map(|(name, _)| name.clone()).collect()
}

fn list(name: &str, value: Value) -> Result<Vec<Value>, RowProblem> {
    match value {
        Value::Array(messages) if messages.is_empty() => Err(malformed(format!("its {name} are empty"))),
        Value::Array(messages) => Ok(messages),
        _ => Err(malformed(format!("its {name} are no list of messages"))),
    }
}

/// Parses `tools`: a list, which some data sets store as JSON in a string; null for none, as in transformers.
fn parse_tools(tools: Option<Value>) -> Result<Value, RowProblem> {
    let tools = match tools {
        None => return Ok(Value::Null),
        Some(Value::String(json)) => {
            serde_json::from_str(&json).map_err(|_| malformed_tools("its tools are a string that is no JSON"))?
        }
        Some(tools) => tools,
    };
    match tools {
        Value::Array(list) if list.is_empty() => Ok(Value::Null),
        Value::Array(_) | Value::Null => Ok(tools),
        _ => Err(malformed_tools("its tools are no list")),
    }
}

fn parse_variables(variables: Option<Value>) -> Result<Map<String, Value>, RowProblem> {
    match variables {
        None => Ok(Map::new()),
        Some(Value::Object(variables)) => Ok(variables),
        Some(_) => Err(malformed_tools("its chat_template_kwargs are no object")),
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
        use SkipReason::{
            EmptyMessage, InvalidWeight, MalformedTools, Noncharacters, NotConversation, NotText, UnknownRole,
        };
        let turn = |role: &str, content: &str| json!({"role": role, "content": content});
        let answer = turn("assistant", "yes");
        let cases = [
            (json!({"text": "x"}), NotConversation, "there are no messages"),
            (json!({"messages": []}), NotConversation, "its messages are empty"),
            (json!({"messages": "x"}), NotConversation, "its messages are no list"),
            (json!({"messages": ["x"]}), NotConversation, "message 1 is no object"),
            (json!({"prompt": "x"}), NotConversation, "no completion"),
            (json!({"messages": [{"content": "x"}, answer]}), UnknownRole, "message 1 has no role"),
            (json!({"messages": [turn("user", "x"), turn("bot", "y")]}), UnknownRole, "message 2 has the role \"bot\""),
            (json!({"messages": [turn("user", " \n"), answer]}), EmptyMessage, "message 1 (user) is empty"),
            (
                json!({"messages": [turn("user", "x"), {"role": "assistant"}]}),
                EmptyMessage,
                "message 2 (assistant) has no content",
            ),
            (
                json!({"messages": [turn("user", "x"), {"role": "assistant", "content": "", "thinking": ""}]}),
                EmptyMessage,
                "is empty",
            ),
            (json!({"prompt": "x", "completion": ""}), EmptyMessage, "the completion is empty"),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "image"}]}, answer]}),
                NotText,
                "of the type image",
            ),
            (json!({"messages": [{"role": "user", "content": 3}, answer]}), NotText, "neither a text nor a list"),
            (
                json!({"messages": [turn("user", "x"), {"role": "assistant", "content": "y", "weight": 0.5}]}),
                InvalidWeight,
                "weight 0.5",
            ),
            (
                json!({"messages": [turn("user", "x"), {"role": "assistant", "content": "y", "train": 0}]}),
                InvalidWeight,
                "`train`",
            ),
            (json!({"messages": [turn("user", "\u{fdd0}"), answer]}), Noncharacters, "noncharacters"),
            (json!({"messages": [turn("user", "x"), answer], "tools": "["}), MalformedTools, "its tools are a string"),
            (
                json!({"messages": [turn("user", "x"), answer], "chat_template_kwargs": []}),
                MalformedTools,
                "chat_template_kwargs",
            ),
        ];
        for (row, expected_reason, expected) in cases {
            let (reason, message) = problem(&row);
            assert_eq!(reason, expected_reason, "{row}");
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
