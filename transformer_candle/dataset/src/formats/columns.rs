//! Which columns of a file a row is read from.

use run_config::DataFormat;

/// The columns of conversations that trl's `SFTTrainer` reads.
pub(super) const CONVERSATION_COLUMNS: [&str; 6] =
    ["messages", "conversations", "prompt", "completion", "tools", "chat_template_kwargs"];

/// The columns that rows are read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Columns {
    /// One column of text.
    Text(String),
    /// The columns of a conversation; a document's text is the row as JSON.
    Conversation,
}

impl Columns {
    pub(crate) fn new(format: DataFormat, text_column: &str) -> Self {
        match format {
            DataFormat::Text => Self::Text(text_column.to_owned()),
            DataFormat::Chat => Self::Conversation,
        }
    }
}

/// Whether a file with these columns can have conversations.
pub(crate) fn has_conversations(names: &[&str]) -> bool {
    let has = |name| names.contains(&name);
    has("messages") || has("conversations") || (has("prompt") && has("completion"))
}

#[cfg(test)]
impl Columns {
    /// The column `text`.
    pub(crate) fn text() -> Self {
        Self::Text("text".to_owned())
    }
}
