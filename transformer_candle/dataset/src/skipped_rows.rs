//! Skipped rows, counted by reason.

use std::fmt;
use std::ops::{Add, AddAssign};

use run_config::grouped;
use serde::{Deserialize, Serialize};

/// Whether a count is 0 and so not written: ledgers of text keep the form that they had before there was chat data.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
pub(crate) fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Makes [`SkippedRows`] and [`SkipReason`] of one list: a counter's name, its reason, and the words that follow the
/// number of rows skipped for this reason, as in "3 empty".
macro_rules! skip_reasons {
    ($($(#[$attribute:meta])* $counter:ident: $reason:ident, $words:literal;)+) => {
        /// How many rows were skipped, and why. Which rows are skipped depends on the data alone.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub struct SkippedRows {
            $($(#[$attribute])* pub $counter: u64,)+
        }

        /// Why a row is skipped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum SkipReason {
            $($reason,)+
        }

        impl SkippedRows {
            /// The count of each reason, by the name of its field.
            pub fn counts(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($counter), self.$counter),)+]
            }

            fn counter(&mut self, reason: SkipReason) -> &mut u64 {
                match reason {
                    $(SkipReason::$reason => &mut self.$counter,)+
                }
            }
        }

        impl SkipReason {
            const ALL: &[Self] = &[$(Self::$reason,)+];

            /// Returns the words that follow the number of rows skipped for this reason, as in "3 empty".
            pub(crate) fn describe(self) -> &'static str {
                match self {
                    $(Self::$reason => $words,)+
                }
            }
        }
    };
}

skip_reasons! {
    /// The text column is null, or the JSON object lacks the field.
    null: Null, "without text";
    /// The text is empty.
    empty: Empty, "empty";
    /// The bytes are not UTF-8.
    not_utf8: NotUtf8, "not UTF-8";
    /// The line is not a JSON object with a string in the field.
    malformed: Malformed, "not a JSON object with a string";
    /// The text is longer than 16 MiB.
    too_long: TooLong, "over 16 MiB";
    /// The row is not a conversation: it has no messages, and no prompt with a completion. In the records of runs begun
    /// with earlier versions also for the six reasons that follow, which had no counts of their own.
    #[serde(default, skip_serializing_if = "is_zero")]
    not_conversation: NotConversation, "not a conversation";
    /// A message has no role, or an unknown one.
    #[serde(default, skip_serializing_if = "is_zero")]
    unknown_role: UnknownRole, "with a message of no known role";
    /// A message, a completion or an output is empty or missing.
    #[serde(default, skip_serializing_if = "is_zero")]
    empty_message: EmptyMessage, "with an empty message";
    /// A message holds something else than text, such as an image.
    #[serde(default, skip_serializing_if = "is_zero")]
    not_text: NotText, "with a message that is not text";
    /// A message's weight or training flag has a value that cannot be followed.
    #[serde(default, skip_serializing_if = "is_zero")]
    invalid_weight: InvalidWeight, "with an invalid weight";
    /// Tools, a call of one, or the variables of the template do not have their form.
    #[serde(default, skip_serializing_if = "is_zero")]
    malformed_tools: MalformedTools, "with malformed tools, function calls or chat_template_kwargs";
    /// The row has noncharacters of Unicode that are reserved for placeholders.
    #[serde(default, skip_serializing_if = "is_zero")]
    noncharacters: Noncharacters, "with noncharacters of Unicode";
    /// The chat template refuses the conversation.
    #[serde(default, skip_serializing_if = "is_zero")]
    template: Template, "refused by the chat template";
    /// The assistant says nothing in the conversation, or in the part of it that fits into a sequence.
    #[serde(default, skip_serializing_if = "is_zero")]
    no_target: NoTarget, "in which the assistant says nothing";
    /// The conversation is longer than a sequence (`overlong_conversations: skip`).
    #[serde(default, skip_serializing_if = "is_zero")]
    overlong: Overlong, "longer than a sequence";
}

impl SkippedRows {
    /// The sum over all reasons.
    pub fn total(&self) -> u64 {
        SkipReason::ALL.iter().map(|&reason| self.count_of(reason)).sum()
    }

    pub(crate) fn count(&mut self, reason: SkipReason) {
        *self.counter(reason) += 1;
    }

    fn count_of(mut self, reason: SkipReason) -> u64 {
        *self.counter(reason)
    }
}

impl AddAssign for SkippedRows {
    fn add_assign(&mut self, other: Self) {
        for &reason in SkipReason::ALL {
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
        let counts_text: Vec<String> =
            counts.filter(|(count, _)| *count > 0).map(|(count, what)| format!("{} {what}", grouped(count))).collect();
        formatter.write_str(&counts_text.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_earlier_versions_are_read() {
        let earlier = r#"{"null":0,"empty":2,"not_utf8":0,"malformed":0,"too_long":0,"not_conversation":3}"#;
        let skipped: SkippedRows = serde_json::from_str(earlier).unwrap();
        assert_eq!((skipped.not_conversation, skipped.total()), (3, 5));
        assert_eq!(serde_json::to_string(&skipped).unwrap(), earlier);
    }
}
