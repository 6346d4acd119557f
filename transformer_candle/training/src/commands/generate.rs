//! `generate`: a trained model continues a text.

use std::ops::ControlFlow;
use std::path::PathBuf;

use clap::Args;
use model::SamplingSettings;
use run_config::system_error::in_words;
use run_config::{Device, regular_file};

use super::count::at_least_one;
use super::output::delivered;
use super::{ModelSource, Output};
use crate::checkpoint::Checkpoint;
use crate::completion::Completion;
use crate::stop::StopSignal;
use crate::trained_model::TrainedModel;
use crate::{Result, TrainerError};

/// What `generate` takes.
#[derive(Debug, Clone, Args)]
pub struct GenerateOptions {
    /// The model that writes.
    #[command(flatten)]
    pub model: ModelSource,
    /// The text to continue.
    #[command(flatten)]
    pub prompt: Prompt,
    /// Take special tokens that the prompt spells, such as `<|im_start|>`, as tokens, as transformers does.
    #[arg(long)]
    pub special: bool,
    /// Tokens to write at most.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least_one::<usize>)]
    pub max_tokens: usize,
    /// How each token is chosen.
    #[command(flatten)]
    pub sampling: SamplingSettings,
    /// Where to compute: auto, cpu, cuda or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value_t = Device::Auto)]
    pub device: Device,
    /// Print one JSON object with the prompt, the completion, its tokens and the speed.
    #[arg(long)]
    pub json: bool,
}

/// The text to continue.
#[derive(Debug, Clone, Args)]
#[group(required = true, multiple = false)]
pub struct Prompt {
    /// The text to continue; an empty one starts a new text.
    #[arg(long = "prompt", value_name = "TEXT")]
    pub text: Option<String>,
    /// A file that holds the text to continue.
    #[arg(long = "prompt-file", value_name = "FILE")]
    pub file: Option<PathBuf>,
}

impl Prompt {
    fn read(&self) -> Result<String> {
        match (&self.text, &self.file) {
            (Some(text), _) => Ok(text.clone()),
            (None, Some(file)) => regular_file::read_to_string(file).map_err(|error| {
                TrainerError::Request(format!("cannot read the prompt in {}: {}", file.display(), in_words(&error)))
            }),
            (None, None) => Ok(String::new()),
        }
    }
}

/// Continues the text, unless the signal is raised meanwhile.
pub fn run(options: &GenerateOptions, stop: &StopSignal) -> Result<Completion> {
    let Generator { model, prompt } = Generator::open(options, stop)?;
    let completion = model.complete(&prompt, options.max_tokens, &options.sampling, |_| stop.flow())?;
    stop.check().map(|()| completion)
}

pub(super) fn main(options: &GenerateOptions, output: &mut dyn Output, stop: &StopSignal) -> Result<u8> {
    if options.json {
        output.print_json(&run(options, stop)?)?;
        return Ok(0);
    }
    let Generator { model, prompt } = Generator::open(options, stop)?;
    // The prompt is printed with the first text behind it: before that the model may still refuse it.
    let mut due = Some(prompt.as_str());
    let mut outcome = Ok(());
    model.complete(&prompt, options.max_tokens, &options.sampling, |text| {
        outcome = output.write_exactly(due.take().unwrap_or_default()).and_then(|()| output.write_exactly(text));
        if outcome.is_ok() { stop.flow() } else { ControlFlow::Break(()) }
    })?;
    stop.check()?;
    let rest = format!("{}\n", due.unwrap_or_default());
    delivered(outcome.and_then(|()| output.write_exactly(&rest)))?;
    Ok(0)
}

/// The model and the prompt of a request, both checked before the first token.
struct Generator {
    model: TrainedModel,
    prompt: String,
}

impl Generator {
    fn open(options: &GenerateOptions, stop: &StopSignal) -> Result<Self> {
        options.sampling.check().map_err(|error| TrainerError::Request(error.to_string()))?;
        let prompt = options.prompt.read()?;
        let cancel = stop.cancel_token();
        let open = |checkpoint: &Checkpoint| TrainedModel::of_checkpoint(checkpoint, options.device, &cancel);
        let mut model = options.model.read(&cancel, open)?;
        if options.special {
            model.tokenizer = model.tokenizer.parsing_special_tokens()?;
        } else if let Some(name) = model.tokenizer.spelled_special_token(&prompt) {
            tracing::warn!(
                "the prompt spells the special token {name}, which is read as characters; --special reads it as that token"
            );
        }
        Ok(Self { model, prompt })
    }
}
