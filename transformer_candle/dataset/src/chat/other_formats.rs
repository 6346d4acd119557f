//! Rows in the formats of Alpaca and `ShareGPT`, as LLaMA-Factory and axolotl read them, become messages.

use serde_json::{Map, Value, json};

use super::conversation::{ASSISTANT, RowProblem};
use super::message::rename_fields;
use crate::skipped_rows::SkipReason;

/// The roles of `ShareGPT`, and those that chat templates know.
const ROLES: [(&str, &str); 5] = [
    ("human", "user"),
    ("gpt", ASSISTANT),
    (FUNCTION_CALL, ASSISTANT),
    ("function_response", TOOL),
    ("observation", TOOL),
];
const FUNCTION_CALL: &str = "function_call";
const TOOL: &str = "tool";

/// Takes the messages of an Alpaca row: an `instruction` with its `input` (or `context`) below it, the `output` (or
/// `response`), and the pairs of earlier turns in `history`. `None` for a row of another format.
pub(super) fn of_instruction(row: &mut Map<String, Value>) -> Result<Option<Vec<Value>>, RowProblem> {
    let is_other =
        ["messages", "conversations", "prompt"].iter().any(|name| row.get(*name).is_some_and(|v| !v.is_null()));
    if is_other || row.get("instruction").is_none_or(Value::is_null) {
        return Ok(None);
    }
    let mut take_text = |names: &[&str]| match names.iter().find_map(|name| row.remove(*name).filter(|v| !v.is_null()))
    {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err(RowProblem::new(SkipReason::NotText, format!("its {} is no text", names[0]))),
    };
    let mut instruction = take_text(&["instruction"])?;
    let input = take_text(&["input", "context"])?;
    let output = take_text(&["output", "response"])?;
    if !instruction.is_empty() && !input.is_empty() {
        instruction.push('\n');
    }
    instruction.push_str(&input);
    if output.trim().is_empty() {
        return Err(RowProblem::new(SkipReason::EmptyMessage, "its output is empty"));
    }
    let mut messages = Vec::new();
    let history = row.remove("history").unwrap_or_default();
    for pair in history.as_array().into_iter().flatten() {
        let [Value::String(question), Value::String(answer)] = pair.as_array().map_or(&[][..], Vec::as_slice) else {
            let message = "its history is no list of pairs of texts";
            return Err(RowProblem::new(SkipReason::NotConversation, message));
        };
        messages.extend([json!({"role": "user", "content": question}), json!({"role": ASSISTANT, "content": answer})]);
    }
    messages.extend([json!({"role": "user", "content": instruction}), json!({"role": ASSISTANT, "content": output})]);
    Ok(Some(messages))
}

/// Gives a message the names that chat templates know: `from` and `value` become `role` and `content`, and a message
/// that is a function call becomes the assistant's call of a tool. Returns whether it is one; an error's text continues
/// "message 1".
pub(super) fn rename(message: &mut Value) -> Result<bool, RowProblem> {
    let Value::Object(fields) = message else { return Ok(false) };
    let is_share_gpt = fields.contains_key("from") && !fields.contains_key("role");
    rename_fields(fields);
    let Some(role) = fields.get("role").and_then(Value::as_str).map(str::to_owned) else { return Ok(false) };
    // A template may know `observation` as a role of its own; ShareGPT means the answer of a tool.
    let role_names = ROLES.iter().find(|(name, _)| *name == role && (is_share_gpt || role != "observation"));
    let Some((_, usual)) = role_names else { return Ok(false) };
    fields.insert("role".to_owned(), (*usual).into());
    if role != FUNCTION_CALL {
        return Ok(false);
    }
    let calls = fields.get("content").and_then(Value::as_str).map(parse_calls);
    let calls = calls.flatten().ok_or_else(|| {
        let message = "(function_call) is no JSON object with a name and arguments";
        RowProblem::new(SkipReason::MalformedTools, message)
    })?;
    fields.insert("content".to_owned(), "".into());
    fields.insert("tool_calls".to_owned(), calls);
    Ok(true)
}

/// Parses a call, or a list of them, to the form of `tool_calls`.
fn parse_calls(text: &str) -> Option<Value> {
    let calls = match serde_json::from_str(text).ok()? {
        Value::Array(calls) if !calls.is_empty() => calls,
        call @ Value::Object(_) => vec![call],
        _ => return None,
    };
    let call = |call: Value| {
        let name = call.get("name")?.as_str()?;
        let arguments = match call.get("arguments") {
            Some(Value::String(json)) => serde_json::from_str(json).unwrap_or_else(|_| json.as_str().into()),
            Some(arguments) => arguments.clone(),
            None => json!({}),
        };
        Some(json!({"type": "function", "function": {"name": name, "arguments": arguments}}))
    };
    calls.into_iter().map(call).collect()
}

/// Whether a rendered text has the name of every function that the messages call.
pub(super) fn has_calls(rendered: &str, messages: &[Value]) -> bool {
    functions(messages).all(|function| function["name"].as_str().is_some_and(|name| rendered.contains(name)))
}

/// Returns the messages with calls as the text `<tool_call>...</tool_call>`, as models of Hermes and Qwen write them.
pub(super) fn calls_as_text(messages: &[Value]) -> Vec<Value> {
    let as_text = |message: &Value| {
        let calls =
            functions(std::slice::from_ref(message)).map(|function| format!("<tool_call>\n{function}\n</tool_call>"));
        let calls: Vec<String> = calls.collect();
        if calls.is_empty() { message.clone() } else { json!({"role": ASSISTANT, "content": calls.join("\n")}) }
    };
    messages.iter().map(as_text).collect()
}

fn functions(messages: &[Value]) -> impl Iterator<Item = &Value> {
    let calls = messages.iter().filter_map(|message| message.get("tool_calls")?.as_array());
    calls.flatten().map(|call| &call["function"])
}

#[cfg(test)]
mod tests {
    use super::super::conversation::{Conversation, Messages};
    use super::*;

    fn messages(row: &Value) -> Messages {
        match Conversation::parse(&row.to_string(), 2).unwrap() {
            Conversation::Messages(messages) => messages,
            Conversation::Completion { .. } => panic!("a completion"),
        }
    }

    fn turn(role: &str, content: &str) -> Value {
        json!({"role": role, "content": content})
    }

    #[test]
    fn alpaca_rows_become_conversations() {
        let row = json!({"instruction": "add", "input": "1 2", "output": "3", "text": "unused", "system": "be", "history": [["a", "b"]]});
        let expected = [
            turn("system", "be"),
            turn("user", "a"),
            turn("assistant", "b"),
            turn("user", "add\n1 2"),
            turn("assistant", "3"),
        ];
        assert_eq!(messages(&row).messages, expected);
        let dolly = json!({"instruction": "add", "context": "", "response": "3", "category": "x"});
        assert_eq!(messages(&dolly).messages, [turn("user", "add"), turn("assistant", "3")]);
    }

    #[test]
    fn share_gpt_rows_become_conversations() {
        let turns = [
            json!({"from": "human", "value": "weather?"}),
            json!({"from": "function_call", "value": "{\"name\": \"get\", \"arguments\": {\"city\": \"Bonn\"}}"}),
            json!({"from": "observation", "value": "rain"}),
            json!({"from": "gpt", "value": "It rains."}),
        ];
        let conversation = messages(&json!({"conversations": turns, "system": "be", "tools": "[{\"name\": \"get\"}]"}));
        let call = json!([{"type": "function", "function": {"name": "get", "arguments": {"city": "Bonn"}}}]);
        let call_message = json!({"role": "assistant", "content": "", "tool_calls": call});
        assert_eq!(
            conversation.messages,
            [
                turn("system", "be"),
                turn("user", "weather?"),
                call_message,
                turn("tool", "rain"),
                turn("assistant", "It rains.")
            ]
        );
        assert_eq!((conversation.tools, conversation.has_call_messages), (json!([{"name": "get"}]), true));
        let text = &calls_as_text(&conversation.messages)[2];
        let expected = "<tool_call>\n{\"arguments\":{\"city\":\"Bonn\"},\"name\":\"get\"}\n</tool_call>";
        assert!(
            text["content"] == expected
                || text["content"]
                    == expected.replace(
                        "\"arguments\":{\"city\":\"Bonn\"},\"name\":\"get\"",
                        "\"name\":\"get\",\"arguments\":{\"city\":\"Bonn\"}"
                    ),
            "{text}"
        );
    }

    #[test]
    fn the_system_message_of_a_row_comes_first() {
        let prompt = json!({"prompt": [turn("user", "a")], "completion": [turn("assistant", "b")], "system": "be"});
        let conversation = messages(&prompt);
        assert_eq!((conversation.messages.len(), conversation.prompt), (3, 2));
        let twice =
            json!({"messages": [turn("system", "own"), turn("user", "a"), turn("assistant", "b")], "system": "be"});
        assert_eq!(messages(&twice).messages.len(), 3);
    }

    #[test]
    fn malformed_rows_of_other_formats_are_named() {
        let call = json!({"from": "function_call", "value": "get(Bonn)"});
        let cases = [
            (json!({"instruction": "a", "output": " "}), SkipReason::EmptyMessage, "its output is empty"),
            (json!({"instruction": ["a"], "output": "b"}), SkipReason::NotText, "its instruction is no text"),
            (json!({"instruction": "a", "output": "b", "history": ["x"]}), SkipReason::NotConversation, "its history"),
            (
                json!({"conversations": [{"from": "human", "value": "a"}, call]}),
                SkipReason::MalformedTools,
                "message 2 (function_call)",
            ),
            (
                json!({"conversations": [{"from": "narrator", "value": "a"}]}),
                SkipReason::UnknownRole,
                "has the role \"narrator\"",
            ),
        ];
        for (row, reason, expected) in cases {
            let problem = Conversation::parse(&row.to_string(), 2).unwrap_err();
            assert_eq!(problem.reason, reason);
            assert!(problem.message.contains(expected), "{row}: {}", problem.message);
        }
    }

    #[test]
    fn version_1_reads_no_other_formats() {
        let alpaca = json!({"instruction": "a", "output": "b"}).to_string();
        assert!(Conversation::parse(&alpaca, 1).is_err());
        let system = json!({"messages": [turn("user", "a"), turn("assistant", "b")], "system": "be"}).to_string();
        let Ok(Conversation::Messages(conversation)) = Conversation::parse(&system, 1) else { panic!("no messages") };
        assert_eq!(conversation.messages.len(), 2);
    }
}
