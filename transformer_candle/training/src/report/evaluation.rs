//! The result of one evaluation, and the texts that the model wrote at it.

use super::scalar::{ComponentRecord, Record, Scalar, ShownText, Text};

/// TensorBoard's tag of the held-out loss; for a mixture's component its name is appended.
const LOSS_TAG: &str = "loss/validation";

/// The result of one evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct EvaluationReport {
    /// Optimizer steps taken before it.
    pub step: u64,
    /// Mean over the held-out target tokens, nats.
    pub loss: f64,
    /// `exp(loss)`.
    pub perplexity: f64,
    /// Bits per byte: the loss of all targets over the bytes of their text. `None` if the tokenizer's tokens have no
    /// length in bytes.
    pub bits_per_byte: Option<f64>,
    /// Target tokens evaluated.
    pub tokens: u64,
    /// The results of each component of a mixture; the numbers above are their means by mixture weight.
    pub components: Vec<ComponentEvaluation>,
    /// Completions of `runtime.evaluation.prompts`, in their order. They have records of their own.
    pub samples: Vec<SampleReport>,
}

/// The result on the held-out text of one mixture component.
#[derive(Clone, Debug, PartialEq)]
pub struct ComponentEvaluation {
    /// The data set's name, or the patterns.
    pub name: String,
    /// The component's mixture weight, a fraction of 1.
    pub share: f64,
    /// Mean loss, as in [`EvaluationReport`].
    pub loss: f64,
    /// Bits per byte, as in [`EvaluationReport`].
    pub bits_per_byte: Option<f64>,
    /// Number of target tokens, as in [`EvaluationReport`].
    pub tokens: u64,
}

impl EvaluationReport {
    /// Returns the logged numbers of an evaluation, without the step and the components' numbers.
    pub fn scalars(&self) -> Vec<Scalar> {
        vec![
            Scalar::curve("loss", LOSS_TAG, self.loss),
            Scalar::curve("perplexity", "perplexity/validation", self.perplexity),
            Scalar::optional_curve("bits_per_byte", "bits_per_byte/validation", self.bits_per_byte),
            Scalar::plain("tokens", self.tokens),
        ]
    }

    /// Returns the record that metrics sinks receive.
    pub fn record(&self) -> Record {
        let components = self.components.iter().map(ComponentEvaluation::component).collect();
        Record { scalars: self.scalars(), components, ..Record::new("evaluation", self.step) }
    }
}

impl ComponentEvaluation {
    fn component(&self) -> ComponentRecord {
        let scalars = vec![
            Scalar::plain("share", self.share),
            Scalar::curve("loss", LOSS_TAG, self.loss),
            Scalar::optional_plain("bits_per_byte", self.bits_per_byte),
            Scalar::plain("tokens", self.tokens),
        ];
        ComponentRecord { name: self.name.clone(), scalars }
    }
}

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
            shown_text: Some(ShownText {
                tag: format!("sample/{}", self.index + 1),
                text: format!("{}{}", self.prompt, self.text),
            }),
            ..Record::new("sample", self.step)
        }
    }
}
