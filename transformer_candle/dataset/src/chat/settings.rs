//! Settings of chat data.

use std::path::PathBuf;

use chrono::NaiveDate;
use run_config::{DataConfig, DataFormat, FIRST_READING_VERSION, OverlongConversations};

use crate::DataError;

/// Settings of chat data: how conversations are rendered, and which tokens the loss counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatSettings {
    /// The file of the chat template, or a built-in one's name; `None` for the tokenizer's own template.
    pub template: Option<PathBuf>,
    /// The date that templates take as today's, such as `2026-01-31`; if `None`, templates that ask for the date fail.
    pub date: Option<String>,
    /// Whether the loss counts only what the assistant says, or a completion, instead of every token.
    pub assistant_only_loss: bool,
    /// Whether conversations that are longer than a sequence are truncated or skipped.
    pub overlong: OverlongConversations,
    /// Whether text that spells a special token becomes it; if `None`, only that of a `prompt` and a `completion` that
    /// no template renders.
    pub parse_special_tokens: Option<bool>,
    /// The version of the rules by which rows become conversations (`data.reading_version`).
    pub reading_version: u32,
}

impl ChatSettings {
    /// Returns the chat settings of a config; `None` if its rows are text.
    pub fn from_config(data: &DataConfig) -> Option<Self> {
        (data.format == DataFormat::Chat).then(|| Self {
            template: data.chat_template.clone(),
            date: data.chat_template_date.clone(),
            assistant_only_loss: data.assistant_only_loss,
            overlong: data.overlong_conversations,
            parse_special_tokens: data.parse_special_tokens,
            reading_version: data.reading_version(),
        })
    }

    /// The day that templates take as today.
    pub(super) fn day(&self) -> Result<Option<NaiveDate>, DataError> {
        let date = self.date.as_deref().map(|date| NaiveDate::parse_from_str(date, "%Y-%m-%d"));
        date.transpose().map_err(|_| DataError::Setting {
            setting: "data.chat_template_date",
            must: "a day of the calendar, such as 2026-01-31",
        })
    }

    /// Whether special tokens that messages spell become those tokens.
    pub(super) fn parses_messages(&self) -> bool {
        self.parse_special_tokens == Some(true)
    }

    /// The same of a `prompt` and a `completion` that are texts.
    pub(super) fn parses_completions(&self) -> bool {
        self.parse_special_tokens.unwrap_or(self.reading_version > FIRST_READING_VERSION)
    }
}
