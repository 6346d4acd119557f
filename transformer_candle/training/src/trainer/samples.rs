//! Samples of a model in training: its completions of `runtime.evaluation.prompts`.

use std::ops::ControlFlow;

use dataset::Tokenizer;
use model::{Generator, SamplingSettings};
use run_config::RunConfig;

use crate::{
    completion::{CompletionRequest, complete},
    error::{Result, TrainerError},
    report::SampleReport,
    stop::StopSignal,
};

/// Tokens generated for each prompt before the first step.
const WARM_UP_TOKENS: usize = 2;

/// The prompts of a run, as text and as tokens, and their sampling settings.
pub(super) struct Prompts {
    encoded: Vec<(String, Vec<u32>)>,
    max_tokens: usize,
    settings: SamplingSettings,
}

impl Prompts {
    /// Encodes the prompts.
    ///
    /// # Errors
    /// [`TrainerError::Request`] if one leaves the model no token to write.
    pub(super) fn new(config: &RunConfig, tokenizer: &Tokenizer, generator: Option<&Generator>) -> Result<Self> {
        let evaluation = &config.runtime.evaluation;
        let capacity = generator.map_or(0, Generator::capacity);
        let encode = |(index, prompt): (usize, &String)| {
            let tokens = tokenizer.encode_prompt(prompt)?;
            if tokens.len() < capacity {
                return Ok((prompt.clone(), tokens));
            }
            Err(TrainerError::Request(format!(
                "runtime.evaluation.prompts[{index}] has {} tokens, and there is room for {capacity} with the text behind it \
                 (model.max_position_embeddings is {}): shorten it",
                tokens.len(),
                config.model.max_position_embeddings
            )))
        };
        Ok(Self {
            encoded: evaluation.prompts.iter().enumerate().map(encode).collect::<Result<_>>()?,
            max_tokens: evaluation.prompt_tokens,
            settings: SamplingSettings {
                temperature: evaluation.prompt_temperature,
                seed: config.runtime.seed,
                ..SamplingSettings::default()
            },
        })
    }

    /// Generates a few tokens on a GPU, so that the algorithms of the GEMMs are chosen, and saved with the first
    /// checkpoint, before they are needed: a resumed run then generates the same texts.
    pub(super) fn warm_up(&self, generator: &mut Generator) -> Result<()> {
        for (_, tokens) in &self.encoded {
            generator.generate(tokens, WARM_UP_TOKENS, &[], &self.settings, |_| ControlFlow::Continue(()))?;
        }
        Ok(())
    }

    /// Continues each prompt; returns None if the signal is raised before the last token.
    pub(super) fn continued(
        &self,
        generator: &mut Generator,
        tokenizer: &Tokenizer,
        step: u64,
        stop: &StopSignal,
    ) -> Result<Option<Vec<SampleReport>>> {
        let stop_tokens = &[tokenizer.end_of_text()];
        let mut samples = Vec::with_capacity(self.encoded.len());
        for (index, (prompt, prompt_tokens)) in self.encoded.iter().enumerate() {
            let (max_tokens, settings) = (self.max_tokens, &self.settings);
            let request =
                CompletionRequest { prompt, prompt_tokens, cached_tokens: 0, max_tokens, stop_tokens, settings };
            let completion = complete(generator, tokenizer, &request, |_| stop.flow())?;
            if stop.requested().is_some() {
                return Ok(None);
            }
            samples.push(SampleReport { step, index, prompt: completion.prompt, text: completion.completion });
        }
        Ok(Some(samples))
    }
}
