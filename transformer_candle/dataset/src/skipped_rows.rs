//! Skipped rows, counted by reason.

use std::fmt;
use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

/// How many rows were skipped, and why. Which rows are skipped depends on the data alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedRows {
    /// The text column is null, or the JSON object lacks the field.
    pub null: u64,
    /// The text is empty.
    pub empty: u64,
    /// The bytes are not UTF-8.
    pub not_utf8: u64,
    /// The line is not a JSON object with a string in the field.
    pub malformed: u64,
    /// The text is longer than 16 MiB.
    pub too_long: u64,
    /// The row is not a conversation: it lacks messages, or a message lacks its role or content.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub not_conversation: u64,
    /// The chat template refuses the conversation.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub template: u64,
    /// The assistant says nothing in the conversation, or in the part of it that fits into a sequence.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub no_target: u64,
    /// The conversation is longer than a sequence (`overlong_conversations: skip`).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub overlong: u64,
}

/// Whether a count is 0 and so not written: ledgers of text keep the form that they had before there was chat data.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
pub(crate) fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl SkippedRows {
    /// The sum over all reasons.
    pub fn total(&self) -> u64 {
        SkipReason::ALL.iter().map(|&reason| self.count_of(reason)).sum()
    }

    /// The count of each reason, by the name of its field.
    pub fn counts(&self) -> [(&'static str, u64); 9] {
        let Self { null, empty, not_utf8, malformed, too_long, not_conversation, template, no_target, overlong } =
            *self;
        [
            ("null", null),
            ("empty", empty),
            ("not_utf8", not_utf8),
            ("malformed", malformed),
            ("too_long", too_long),
            ("not_conversation", not_conversation),
            ("template", template),
            ("no_target", no_target),
            ("overlong", overlong),
        ]
    }

    pub(crate) fn count(&mut self, reason: SkipReason) {
        *self.counter(reason) += 1;
    }

    fn count_of(mut self, reason: SkipReason) -> u64 {
        *self.counter(reason)
    }

    fn counter(&mut self, reason: SkipReason) -> &mut u64 {
        match reason {
            SkipReason::Null => &mut self.null,
            SkipReason::Empty => &mut self.empty,
            SkipReason::NotUtf8 => &mut self.not_utf8,
            SkipReason::Malformed => &mut self.malformed,
            SkipReason::TooLong => &mut self.too_long,
            SkipReason::NotConversation => &mut self.not_conversation,
            SkipReason::Template => &mut self.template,
            SkipReason::NoTarget => &mut self.no_target,
            SkipReason::Overlong => &mut self.overlong,
        }
    }
}

impl AddAssign for SkippedRows {
    fn add_assign(&mut self, other: Self) {
        for reason in SkipReason::ALL {
            *self.counter(reason) += other.count_of(reason);
        }
    }
}

impl Add for SkippedRows {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

impl fmt::Display for SkippedRows {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = SkipReason::ALL.iter().map(|&reason| (self.count_of(reason), reason.describe()));
        let named: Vec<String> =
            counts.filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
        formatter.write_str(&named.join(", "))
    }
}

/// Why a row is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SkipReason {
    Null,
    Empty,
    NotUtf8,
    Malformed,
    TooLong,
    NotConversation,
    Template,
    NoTarget,
    Overlong,
}

impl SkipReason {
    const ALL: [Self; 9] = [
        Self::Null,
        Self::Empty,
        Self::NotUtf8,
        Self::Malformed,
        Self::TooLong,
        Self::NotConversation,
        Self::Template,
        Self::NoTarget,
        Self::Overlong,
    ];

    /// Returns the words that follow the number of rows skipped for this reason, as in "3 empty".
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Self::Null => "without text",
            Self::Empty => "empty",
            Self::NotUtf8 => "not UTF-8",
            Self::Malformed => "not a JSON object with a string",
            Self::TooLong => "over 16 MiB",
            Self::NotConversation => "not a conversation",
            Self::Template => "refused by the chat template",
            Self::NoTarget => "in which the assistant says nothing",
            Self::Overlong => "longer than a sequence",
        }
    }
}
