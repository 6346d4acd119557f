//! What a row says and neither the chat template nor the loss uses.

use super::*;
use crate::chat::unused_fields::{UnusedField, unused_fields};

/// Returns the names of the fields of a row that are not used, with this template.
fn unused(template: &str, row: &Value, everything: bool) -> Vec<String> {
    let model = model(Some(template));
    let encoder = model.encoder(&ChatSettings { assistant_only_loss: !everything, ..settings() }).unwrap();
    let encoded = encoder.encode_row(&row.to_string()).unwrap().unwrap();
    let conversation = Conversation::parse(&row.to_string(), NEWEST_READING_VERSION).unwrap();
    let of_row = if let Conversation::Messages(messages) = &conversation {
        let template = encoder.0.template(false).unwrap();
        let prepared = template.prepare(messages);
        template.render(&prepared, messages.messages.len(), false).unwrap();
        Some(prepared.of_row)
    } else {
        None
    };
    let unused = unused_fields(&conversation, of_row.as_deref(), everything);
    assert_eq!(encoded.has_unused_fields, !unused.is_empty(), "{row}");
    let mut names: Vec<String> = unused.into_iter().map(|UnusedField { name, .. }| name).collect();
    names.sort();
    names
}

/// Reads its variables as published templates do: after setting them, in conditions, in macros.
const READS_VARIABLES: &str = "{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}\
    {% if tools %}{{ tools | length }}{% endif %}{% set enable_thinking = enable_thinking | default(true) %}\
    {% if not enable_thinking %}short{% endif %}{% for _ in range(add_generation_prompt | int) %}{% endfor %}";

fn with(fields: &Value) -> Value {
    let mut row = dialogue();
    row.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    row
}

#[test]
fn fields_that_the_template_does_not_use_are_named() {
    let reading = format!("{READS_VARIABLES}{PLAIN}");
    let tools = json!({"tools": [{"type": "function", "function": {"name": "f"}}]});
    let variables = json!({"chat_template_kwargs": {"enable_thinking": true, "style": "terse"}});
    for (template, fields, expected) in [
        (PLAIN, tools.clone(), vec!["tools"]),
        (&reading, tools, vec![]),
        (PLAIN, variables.clone(), vec!["chat_template_kwargs.enable_thinking", "chat_template_kwargs.style"]),
        (&reading, variables, vec!["chat_template_kwargs.style"]),
        (PLAIN, json!({"enable_thinking": false, "id": 3, "source": "x"}), vec![]),
        (&reading, json!({"enable_thinking": false}), vec!["enable_thinking"]),
        (&reading, json!({"range": 3, "add_generation_prompt": true}), vec![]),
        (&reading, json!({"enable_thinking": null, "tools": [], "documents": []}), vec![]),
        (PLAIN, json!({"documents": [{"text": "x"}], "functions": [{"name": "f"}]}), vec!["documents", "functions"]),
    ] {
        assert_eq!(unused(template, &with(&fields), false), expected, "{fields}");
    }
    let texts = json!({"prompt": "a", "completion": "b", "tools": [{"name": "f"}], "documents": ["x"]});
    assert_eq!(unused(PLAIN, &texts, false), ["documents", "tools"]);
}

#[test]
fn training_flags_that_are_not_followed_are_named() {
    let flagged = |message: usize, key: &str, value: Value| {
        let mut row = dialogue();
        row["messages"][message][key] = value;
        row
    };
    let detail = json!([{"begin_offset": 0, "end_offset": 1, "train": false}]);
    for (row, of_answers, of_all) in [
        (flagged(2, "train_detail", detail), vec!["train_detail"], vec!["train_detail"]),
        (flagged(1, "train", true.into()), vec!["train: true"], vec![]),
        (flagged(1, "train", false.into()), vec![], vec!["train: false"]),
        (flagged(1, "weight", 0.into()), vec![], vec!["train: false"]),
        (flagged(1, "weight", 1.into()), vec![], vec![]),
        (flagged(2, "train", false.into()), vec![], vec![]),
    ] {
        assert_eq!(unused(PLAIN, &row, false), of_answers, "{row}");
        assert_eq!(unused(PLAIN, &row, true), of_all, "{row}");
    }
}

#[test]
fn each_reason_and_each_field_is_warned_of_once() {
    let warnings = row_warnings::RowWarnings::default();
    let problem = |reason, message: String| RowProblem { reason, message };
    for role in "abcdefghijkl".chars() {
        warnings.skipped(problem(SkipReason::UnknownRole, format!("message 2 has the role {role}")));
    }
    for _ in 0..2 {
        warnings.skipped(problem(SkipReason::NotText, "it has an image".to_owned()));
        warnings.unused(vec![UnusedField { name: "tools".to_owned(), consequence: "which is not used" }]);
    }
    assert_eq!(warnings.first_problem(), Some("message 2 has the role a"));
    assert_eq!(warnings.counts(), (9, 1), "a reason is named even after many messages of another one");
}
