//! Tries a chat template with a short conversation before training.

use serde_json::{Value, json};

use super::conversation::{ASSISTANT, Messages, RowProblem};
use super::loss_spans::{self, Rendered};
use super::template::ChatTemplate;
use super::{State, counted};
use crate::DataError;
use crate::tokenizer::NamedToken;

/// What the assistant says in the turns that a template is tried with.
const PROBED_ANSWERS: [&str; 2] = ["Two.", "Three."];

/// Returns a conversation of one or two turns to try a template with; `content` makes a message's content from its text.
fn probe(content: &dyn Fn(&str) -> Value, turns: usize) -> Messages {
    let message = |role: &str, text: &str| json!({"role": role, "content": content(text)});
    let exchanges = ["How many?", "And then?"].into_iter().zip(PROBED_ANSWERS);
    let messages = exchanges.flat_map(|(question, answer)| [message("user", question), message(ASSISTANT, answer)]);
    Messages::plain(messages.take(2 * turns).collect())
}

impl State {
    /// Tries the templates, and finds the token with which they end a turn.
    pub(super) fn try_templates(&mut self, added_tokens: &[NamedToken]) -> Result<(), DataError> {
        let parses_messages = self.settings.parses_messages();
        if let Some(mut template) = self.template.take() {
            (self.end_of_turn, self.single_turn) = self.try_template(&mut template, added_tokens)?;
            template.parses_messages = parses_messages;
            self.template = Some(template);
        }
        if let Some(mut template) = self.tool_template.take() {
            // One that cannot be used without tools is judged by the rows that have some.
            drop(self.try_template(&mut template, added_tokens));
            template.parses_messages = parses_messages;
            self.tool_template = Some(template);
        }
        Ok(())
    }

    /// Renders a short conversation, so that a template in which the assistant's text cannot be found is refused before
    /// training starts. Finds its assembled special tokens. Returns the token that ends a turn, and why only the last turn
    /// can be trained on, if it is so.
    fn try_template(
        &self,
        template: &mut ChatTemplate,
        added_tokens: &[NamedToken],
    ) -> Result<(Option<NamedToken>, Option<String>), DataError> {
        let everything = !self.settings.assistant_only_loss;
        let attempt = |template: &ChatTemplate, messages: &Messages| {
            loss_spans::render(template, messages, &template.prepare(messages), everything)
        };
        let refused =
            |problem: RowProblem| DataError::ChatTemplate { path: template.origin.clone(), message: problem.message };
        let parts = |text: &str| json!([{"type": "text", "text": text}]);
        // Some templates take lists of parts only. One that takes texts is judged by them.
        let plain = probe(&|text| text.into(), PROBED_ANSWERS.len());
        let takes_texts = template.render(&template.prepare(&plain), plain.messages.len(), false).is_ok();
        let of_turns = |turns| if takes_texts { probe(&|text| text.into(), turns) } else { probe(&parts, turns) };
        let (mut turns, mut single_turn) = (PROBED_ANSWERS.len(), None);
        let rendered = match attempt(template, &of_turns(turns)) {
            Ok(rendered) => rendered,
            // Some templates, such as Qwen3's, render a turn otherwise once more follow.
            Err(problem) => match attempt(template, &of_turns(1)) {
                Ok(rendered) => {
                    (turns, single_turn) = (1, Some(problem.message));
                    rendered
                }
                Err(_) if takes_texts => return Err(refused(problem)),
                Err(_) => return Err(refused(attempt(template, &plain).err().unwrap_or(problem))),
            },
        };
        template.special_tokens.find_assembled(&rendered.text);
        let rendered = attempt(template, &of_turns(turns)).unwrap_or(rendered);
        let end_of_turn = self.end_of_turn(template, &rendered, PROBED_ANSWERS[turns - 1], added_tokens)?;
        Ok((end_of_turn, single_turn))
    }

    /// Returns the token behind the last answer that the loss counts: the last special one, else the first added one.
    fn end_of_turn(
        &self,
        template: &ChatTemplate,
        rendered: &Rendered,
        answer: &str,
        added_tokens: &[NamedToken],
    ) -> Result<Option<NamedToken>, DataError> {
        let answer_end = rendered.text.rfind(answer).map_or(0, |start| start + answer.len());
        let encoding = self.encode(&rendered.text)?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets()).zip(counted(&encoding, &rendered.counted));
        let end_ids: Vec<u32> = tokens
            .filter(|((_, (start, _)), is_counted)| *is_counted && *start >= answer_end)
            .map(|((id, _), _)| *id)
            .collect();
        let special = end_ids.iter().rev().find_map(|id| template.special_tokens.with_id(*id));
        let added = || end_ids.iter().find_map(|id| added_tokens.iter().find(|token| token.id == *id));
        Ok(special.or_else(added).cloned())
    }
}

/// Returns all added tokens of a `tokenizer.json`, special or not.
pub(super) fn added_tokens(tokenizer_json: &Value) -> Vec<NamedToken> {
    let added = tokenizer_json["added_tokens"].as_array().into_iter().flatten();
    let tokens = added.filter_map(|token| {
        let id = u32::try_from(token["id"].as_u64()?).ok()?;
        Some(NamedToken { id, name: token["content"].as_str()?.to_owned() })
    });
    tokens.collect()
}
