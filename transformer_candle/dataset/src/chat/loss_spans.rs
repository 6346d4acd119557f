//! Finds the parts of a rendered conversation that the loss counts.
//!
//! If the template marks what the assistant says (`{% generation %}`), the marked text counts. Otherwise it is what a
//! turn of the assistant adds: from the end of the prompt that a model is given to answer (the messages before, with
//! the generation prompt) to the end of what is rendered with the answer, its end-of-turn token included. That is only
//! defined if the renderings of the first messages are prefixes of the rendering of all.

use std::ops::Range;

use super::conversation::{Messages, RowProblem};
use super::special_tokens::{GENERATION, RESERVED};
use super::template::ChatTemplate;
use crate::skipped_rows::SkipReason;

/// A rendered conversation, with placeholders for special tokens.
#[derive(Debug, PartialEq)]
pub(super) struct Rendered {
    pub text: String,
    /// Byte ranges of the text that the loss counts, ascending.
    pub counted: Vec<Range<usize>>,
}

/// Renders a conversation and finds the text that the loss counts: what the assistant says, or all with `everything`.
///
/// The message of an error has the template as its subject.
pub(super) fn render(
    template: &ChatTemplate,
    conversation: &Messages,
    everything: bool,
) -> Result<Rendered, RowProblem> {
    let raises = |message: String| RowProblem::new(SkipReason::Template, format!("it says: {message}"));
    let prepared = template.prepare(conversation);
    let part =
        |count, prompt| template.render(&prepared, count, prompt).map(|text| unmarked(&text).text).map_err(raises);
    let whole = template.render(&prepared, conversation.messages.len(), false).map_err(raises)?;
    let Rendered { text, counted: marked } = unmarked(&whole);
    if everything {
        let counted = std::iter::once(0..text.len()).collect();
        return Ok(Rendered { text, counted });
    }
    let mut counted = Vec::new();
    if template.marks_generation {
        let prompt_end = match conversation.prompt {
            0 => 0,
            prompt => common_prefix(&part(prompt, true)?, &text),
        };
        let after_prompt = marked.into_iter().map(|span| span.start.max(prompt_end)..span.end);
        counted.extend(after_prompt.filter(|span| !span.is_empty()));
    } else {
        for index in
            (conversation.prompt..conversation.messages.len()).filter(|&index| conversation.is_assistant(index))
        {
            let before = if index == 0 { String::new() } else { part(index, false)? };
            let prompt = part(index, true)?;
            let answered = part(index + 1, false)?;
            if !answered.starts_with(&before) || !text.starts_with(&answered) {
                return Err(RowProblem::new(SkipReason::Template, not_nested(index + 1)));
            }
            let start = common_prefix(&prompt, &answered).max(before.len());
            counted.push(start..answered.len());
        }
    }
    Ok(Rendered { text, counted })
}

fn not_nested(messages: usize) -> String {
    format!(
        "it renders the first {messages} messages otherwise when more follow, so that what the assistant adds is not \
         defined: name one that marks it with {{% generation %}} in data.chat_template, or chatml"
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
        let rendered = unmarked(&format!("ab{open}c\u{e9}{close}d{open}{close}{open}e{close}"));
        assert_eq!(rendered, Rendered { text: "abc\u{e9}de".to_owned(), counted: vec![2..5, 6..7] });
    }

    #[test]
    fn common_starts_end_before_placeholders_that_differ() {
        assert_eq!(common_prefix("ab\u{e9}x", "ab\u{e9}y"), 4);
        assert_eq!(common_prefix("a\u{fdd0}12\u{fdd1}", "a\u{fdd0}13\u{fdd1}"), 1);
        assert_eq!(common_prefix("a\u{fdd0}12\u{fdd1}b", "a\u{fdd0}12\u{fdd1}c"), 1 + 3 + 2 + 3);
    }
}
