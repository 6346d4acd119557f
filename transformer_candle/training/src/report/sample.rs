//! A text that the model wrote during training.

use serde::{Serialize, Serializer};

use super::scalar::{Record, ShownText, Text};

/// A prompt of `runtime.evaluation.prompts` and the model's completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleReport {
    /// Optimizer steps taken before it.
    pub step: u64,
    /// Index of the prompt in the config.
    pub index: usize,
    /// The prompt.
    pub prompt: String,
    /// The generated text that follows the prompt.
    pub text: String,
}

impl SampleReport {
    /// Returns the record that metrics sinks receive.
    pub fn record(&self) -> Record {
        Record {
            texts: vec![Text::new("prompt", &self.prompt), Text::new("text", &self.text)],
            shown: Some(ShownText {
                tag: format!("sample/{}", self.index + 1),
                text: format!("{}{}", self.prompt, self.text),
            }),
            ..Record::new("sample", self.step)
        }
    }
}

impl Serialize for SampleReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.record().serialize(serializer)
    }
}
