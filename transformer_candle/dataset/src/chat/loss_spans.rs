//! Finds the parts of a rendered conversation that the loss counts.
//!
//! If the template marks what the assistant says (`{% generation %}`), the marked text counts. Otherwise it is what a
//! turn of the assistant adds: from the end of the prompt that a model is given to answer (the messages before, with
//! the generation prompt) to the end of what is rendered with the answer, its end-of-turn token included. That is only
//! defined if the renderings of the first messages are prefixes of the rendering of all.
//!
//! Turns of weight 0 are left out. In a template with marks they are found by a second rendering, in which their text
//! ends in [`LEFT_OUT`].

use std::ops::Range;

use serde_json::Value;

use super::conversation::{Messages, RowProblem, THOUGHTS};
use super::special_tokens::{GENERATION, LEFT_OUT, RESERVED};
use super::template::{ChatTemplate, PreparedMessages};
use crate::skipped_rows::SkipReason;

/// A rendered conversation, with placeholders for special tokens.
#[derive(Debug, PartialEq)]
pub(super) struct Rendered {
    pub text: String,
    /// Byte ranges of the text that the loss counts, ascending.
    pub counted: Vec<Range<usize>>,
}

/// Renders a conversation and finds the text that the loss counts: what the assistant says, or all with `everything`;
/// without turns of weight 0. `prepared` are the conversation's values for this template.
///
/// The message of an error has the template as its subject.
pub(super) fn render(
    template: &ChatTemplate,
    conversation: &Messages,
    prepared: &PreparedMessages,
    everything: bool,
) -> Result<Rendered, RowProblem> {
    let Rendered { text, counted: marked } = part(template, prepared, conversation.messages.len(), false)?;
    if everything && conversation.left_out.is_empty() {
        let counted = std::iter::once(0..text.len()).collect();
        return Ok(Rendered { text, counted });
    }
    let turns = if template.marks_generation {
        marked_turns(template, conversation, prepared, &text, marked)?
    } else {
        added_turns(template, conversation, prepared, &text)?
    };
    let counted = if everything {
        outside(turns.into_iter().filter(|turn| turn.is_left_out), text.len())
    } else {
        turns.into_iter().filter(|turn| !turn.is_left_out).map(|turn| turn.span).collect()
    };
    Ok(Rendered { text, counted })
}

/// What the assistant says in one of its turns, or in a part of one.
struct Turn {
    span: Range<usize>,
    is_left_out: bool,
}

/// Renders the first `count` messages.
fn part(
    template: &ChatTemplate,
    prepared: &PreparedMessages,
    count: usize,
    prompt: bool,
) -> Result<Rendered, RowProblem> {
    let raised = |message: String| RowProblem::new(SkipReason::Template, format!("it says: {message}"));
    template.render(prepared, count, prompt).map(|text| unmarked(&text)).map_err(raised)
}

/// Returns what the template marks behind the row's prompt.
fn marked_turns(
    template: &ChatTemplate,
    conversation: &Messages,
    prepared: &PreparedMessages,
    text: &str,
    marked: Vec<Range<usize>>,
) -> Result<Vec<Turn>, RowProblem> {
    let prompt_end = match conversation.prompt {
        0 => 0,
        prompt => common_prefix(&part(template, prepared, prompt, true)?.text, text),
    };
    let left_out = left_out_marks(template, conversation, marked.len())?;
    let turns = marked
        .into_iter()
        .zip(left_out)
        .map(|(span, is_left_out)| Turn { span: span.start.max(prompt_end)..span.end, is_left_out });
    Ok(turns.filter(|turn| !turn.span.is_empty()).collect())
}

/// Returns for each of the marks whether it holds a turn of weight 0.
fn left_out_marks(template: &ChatTemplate, conversation: &Messages, marks: usize) -> Result<Vec<bool>, RowProblem> {
    if conversation.left_out.is_empty() {
        return Ok(vec![false; marks]);
    }
    let mut labelled = conversation.clone();
    conversation.left_out.iter().for_each(|&index| label(&mut labelled.messages[index]));
    let prepared = template.prepare(&labelled);
    let Rendered { text, counted } = part(template, &prepared, labelled.messages.len(), false)?;
    let flags: Vec<bool> = counted.into_iter().map(|span| text[span].contains(LEFT_OUT)).collect();
    if flags.len() == marks && flags.contains(&true) {
        return Ok(flags);
    }
    let message = "what it marks does not show which turn has weight 0".to_owned();
    Err(RowProblem::new(SkipReason::Template, message))
}

/// Appends [`LEFT_OUT`] to what a message says.
fn label(message: &mut Value) {
    let Value::Object(fields) = message else { return };
    for name in ["content"].iter().chain(&THOUGHTS) {
        match fields.get_mut(*name) {
            Some(Value::String(text)) => text.push_str(LEFT_OUT),
            Some(Value::Array(parts)) => {
                if let Some(Value::String(text)) = parts.last_mut().and_then(|part| part.get_mut("text")) {
                    text.push_str(LEFT_OUT);
                }
            }
            _ => {}
        }
    }
    for call in fields.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        let function = if call["function"].is_object() { &mut call["function"] } else { call };
        if let Some(Value::String(name)) = function.get_mut("name") {
            name.push_str(LEFT_OUT);
        }
    }
}

/// Returns what each turn of the assistant adds to the rendering of the messages before it.
fn added_turns(
    template: &ChatTemplate,
    conversation: &Messages,
    prepared: &PreparedMessages,
    text: &str,
) -> Result<Vec<Turn>, RowProblem> {
    let part = |count, prompt| part(template, prepared, count, prompt).map(|rendered| rendered.text);
    let mut turns = Vec::new();
    for index in conversation.turns() {
        let prefix = if index == 0 { String::new() } else { part(index, false)? };
        let prompt = part(index, true)?;
        let text_with_answer = part(index + 1, false)?;
        if !text_with_answer.starts_with(&prefix) || !text.starts_with(&text_with_answer) {
            return Err(RowProblem::new(SkipReason::Template, not_nested(index + 1)));
        }
        let start = common_prefix(&prompt, &text_with_answer).max(prefix.len());
        turns.push(Turn { span: start..text_with_answer.len(), is_left_out: conversation.left_out.contains(&index) });
    }
    Ok(turns)
}

/// Returns the parts of a text of this length that are outside of the turns.
fn outside(turns: impl Iterator<Item = Turn>, length: usize) -> Vec<Range<usize>> {
    let (mut parts, mut start) = (Vec::new(), 0);
    for Turn { span, .. } in turns {
        parts.push(start..span.start);
        start = span.end;
    }
    parts.push(start..length);
    parts.retain(|part| !part.is_empty());
    parts
}

fn not_nested(messages: usize) -> String {
    format!(
        "it renders the first {messages} messages otherwise when more follow, so that what the assistant adds is not \
         defined: take one that marks it with {{% generation %}}, such as the built-in `qwen3` or `chatml`, by \
         --chat-template (data.chat_template)"
    )
}

/// Returns the length in bytes of the longest common prefix of two texts that does not end inside a placeholder.
fn common_prefix(a: &str, b: &str) -> usize {
    let equal = a.char_indices().zip(b.chars()).take_while(|((_, a), b)| a == b);
    let end = equal.last().map_or(0, |((start, last), _)| start + last.len_utf8());
    let placeholder = a[..end].rfind(*RESERVED.start());
    placeholder.filter(|&start| !a[start..end].contains('\u{fdd1}')).unwrap_or(end)
}

/// Removes the generation marks from a rendered text; returns the text and the byte ranges that were marked.
fn unmarked(rendered: &str) -> Rendered {
    let (mut text, mut counted, mut start) = (String::with_capacity(rendered.len()), Vec::new(), 0);
    for piece in rendered.split_inclusive(GENERATION) {
        let mark = piece.chars().next_back().filter(|last| GENERATION.contains(last));
        text.push_str(piece.strip_suffix(GENERATION).unwrap_or(piece));
        match mark {
            Some(mark) if mark == GENERATION[0] => start = text.len(),
            Some(_) if start < text.len() => counted.push(start..text.len()),
            _ => {}
        }
    }
    Rendered { text, counted }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_become_ranges() {
        let [open, close] = GENERATION;
        let text = unmarked(&format!("ab{open}c\u{e9}{close}d{open}{close}{open}e{close}"));
        assert_eq!(text, Rendered { text: "abc\u{e9}de".to_owned(), counted: vec![2..5, 6..7] });
    }

    #[test]
    fn common_starts_end_before_placeholders_that_differ() {
        assert_eq!(common_prefix("ab\u{e9}x", "ab\u{e9}y"), 4);
        assert_eq!(common_prefix("a\u{fdd0}12\u{fdd1}", "a\u{fdd0}13\u{fdd1}"), 1);
        assert_eq!(common_prefix("a\u{fdd0}12\u{fdd1}b", "a\u{fdd0}12\u{fdd1}c"), 1 + 3 + 2 + 3);
    }
}
