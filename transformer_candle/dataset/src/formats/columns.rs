//! Which columns of a file a row is read from, and by which version of the rules.

use run_config::DataFormat;

/// The columns of conversations: those that trl's `SFTTrainer` reads.
const CONVERSATION_COLUMNS: [&str; 6] =
    ["messages", "conversations", "prompt", "completion", "tools", "chat_template_kwargs"];
/// The columns of Alpaca and ShareGPT rows, which LLaMA-Factory and axolotl read; since reading version 2.
const INSTRUCTION_COLUMNS: [&str; 6] = ["instruction", "input", "output", "response", "system", "history"];

/// How the rows of a file are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReadingRules {
    /// The columns that rows are read from.
    pub columns: Columns,
    /// The version of the rules (`data.reading_version`).
    pub version: u32,
}

/// The columns that rows are read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Columns {
    /// One column of text.
    Text(String),
    /// The columns of a conversation; a document's text is the row as JSON.
    Conversation,
}

impl ReadingRules {
    pub(crate) fn new(format: DataFormat, text_column: &str, version: u32) -> Self {
        let columns = match format {
            DataFormat::Text => Columns::Text(text_column.to_owned()),
            DataFormat::Chat => Columns::Conversation,
        };
        Self { columns, version }
    }

    /// Whether a conversation is read from this column.
    pub(super) fn is_conversation_column(&self, name: &str) -> bool {
        CONVERSATION_COLUMNS.contains(&name) || (self.version >= 2 && INSTRUCTION_COLUMNS.contains(&name))
    }

    /// Whether a file with these columns can have conversations.
    pub(crate) fn has_conversations(&self, names: &[&str]) -> bool {
        let has = |name| names.contains(&name);
        let has_instructions = has("instruction") && (has("output") || has("response"));
        has("messages")
            || has("conversations")
            || (has("prompt") && has("completion"))
            || (self.version >= 2 && has_instructions)
    }
}

#[cfg(test)]
impl ReadingRules {
    /// The newest rules for the column `text`.
    pub(crate) fn text() -> Self {
        Self::of_column("text")
    }

    /// The newest rules for a column of text.
    pub(crate) fn of_column(name: &str) -> Self {
        Self { columns: Columns::Text(name.to_owned()), version: 2 }
    }
}
