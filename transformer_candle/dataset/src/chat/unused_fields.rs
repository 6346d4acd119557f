//! Names what a row says and neither its rendering nor the loss uses, so that nothing of it is dropped silently.

use serde_json::Value;

use super::conversation::{Conversation, Messages, VARIABLES};
use super::message::{self, TRAINING_FLAGS};
use super::row_variables::{RowVariables, TOOLS};

/// Fields beside the messages that hold a part of the conversation, whether the template asks for them or not.
const PARTS_OF_CONVERSATIONS: [&str; 6] = ["documents", "functions", "images", "image", "videos", "audios"];
/// The key in which axolotl has training flags of a turn's parts.
const TRAIN_DETAIL: &str = "train_detail";

/// A field that is not used.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct UnusedField {
    pub name: String,
    /// What becomes of it, and the way out; continues "a row has `tools`, ".
    pub consequence: &'static str,
}

/// Returns the fields of a row that are not used. `of_row` are the variables that its template was rendered with; `None`
/// where no template renders the row. With `everything` the loss counts every token.
pub(super) fn unused_fields(
    conversation: &Conversation,
    of_row: Option<&RowVariables>,
    everything: bool,
) -> Vec<UnusedField> {
    match (conversation, of_row) {
        (Conversation::Messages(messages), Some(of_row)) => {
            let parts = messages.other_fields.iter().filter_map(|name| part_of_conversation(name));
            let missed = of_row.missed().filter(|name| !PARTS_OF_CONVERSATIONS.contains(name)).map(missed);
            let unread = of_row.unread().filter(|name| *name != TOOLS || !messages.tools.is_null());
            let unread = unread.map(|name| unread_variable(name, messages));
            parts.chain(missed).chain(unread).chain(unfollowed_flags(messages, everything)).collect()
        }
        (Conversation::Completion { other_fields, .. }, _) => {
            let without_template = [TOOLS, VARIABLES].into_iter().filter(|name| other_fields.iter().any(|f| f == name));
            let without_template = without_template.map(|name| UnusedField {
                name: name.to_owned(),
                consequence: "which is not used, since no template renders a `prompt` and a `completion` that are texts: \
                              make them lists of messages",
            });
            without_template.chain(other_fields.iter().filter_map(|name| part_of_conversation(name))).collect()
        }
        (Conversation::Messages(_), None) => Vec::new(),
    }
}

fn part_of_conversation(name: &str) -> Option<UnusedField> {
    let consequence = match name {
        "functions" => "which is not used: the template is given `tools`",
        "documents" => "which is not used: put it into `chat_template_kwargs`, where the template renders documents",
        _ => "which is not used: only text in the messages can be trained on",
    };
    PARTS_OF_CONVERSATIONS.contains(&name).then(|| UnusedField { name: name.to_owned(), consequence })
}

fn missed(name: &str) -> UnusedField {
    let consequence = "which the chat template reads, but is not given from there: put it into `chat_template_kwargs`";
    UnusedField { name: name.to_owned(), consequence }
}

fn unread_variable(name: &str, messages: &Messages) -> UnusedField {
    if name == TOOLS && !messages.variables.contains_key(TOOLS) {
        let consequence = "which the chat template does not use: the model is not shown them; name a template that renders \
                           tools by --chat-template (data.chat_template)";
        return UnusedField { name: name.to_owned(), consequence };
    }
    UnusedField { name: format!("{VARIABLES}.{name}"), consequence: "which the chat template does not use" }
}

/// Returns the training flags of messages that the loss does not follow.
fn unfollowed_flags(messages: &Messages, everything: bool) -> impl Iterator<Item = UnusedField> {
    let all = messages.messages.iter().enumerate();
    all.flat_map(move |(index, message)| {
        let detail = message.get(TRAIN_DETAIL).filter(|detail| !detail.is_null());
        let detail = detail.map(|_| UnusedField {
            name: TRAIN_DETAIL.to_owned(),
            consequence: "which is not followed: the loss counts a turn as a whole, or not at all with `train: false`",
        });
        let is_other = !messages.is_assistant(index) || index < messages.prompt;
        let flag = if is_other { unfollowed_flag(message, everything) } else { None };
        detail.into_iter().chain(flag)
    })
}

/// Returns the flag of a message of another role that says the opposite of what the loss does with it.
fn unfollowed_flag(message: &Value, everything: bool) -> Option<UnusedField> {
    let counts = message::counts(message).ok()?;
    let is_flagged = TRAINING_FLAGS.iter().any(|name| message[*name].is_boolean());
    match (everything, counts) {
        (false, true) if is_flagged => Some(UnusedField {
            name: "train: true".to_owned(),
            consequence: "in a message that is not an answer of the assistant, which is not followed: the loss counts \
                          answers alone, or all tokens with data.assistant_only_loss=false",
        }),
        (true, false) => Some(UnusedField {
            name: "train: false".to_owned(),
            consequence: "or a weight of 0, in a message that is not the assistant's, which is not followed: with \
                          data.assistant_only_loss=false the loss counts it",
        }),
        _ => None,
    }
}
