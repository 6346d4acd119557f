//! A model and its tokenizer, loaded from a checkpoint for inference.

use std::ops::ControlFlow;

use dataset::{CancelToken, Tokenizer};
use kernels::Device;
use model::generation::PASS_TOKENS;
use model::{Generator, ModelShape, ParameterLayout, Precision, SamplingSettings, Weights, dtype_of};

use crate::checkpoint::{Checkpoint, StoredModel};
use crate::completion::{Completion, CompletionRequest, complete, generator};
use crate::device::{self, DeviceSelection};
use crate::memory_plan::require_room;
use crate::pool::{self, in_pool};
use crate::stop::StopSignal;
use crate::{Result, TrainerError};

/// A trained model in memory.
pub struct TrainedModel {
    /// The model's sizes.
    pub shape: ModelShape,
    /// The precision of its weights.
    pub precision: Precision,
    /// Its weights.
    pub weights: Weights,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// The tokens that end a text.
    pub(crate) stop_tokens: Vec<u32>,
}

impl TrainedModel {
    /// Reads a model and its tokenizer. Its weights go to the device asked for; with `auto` to a GPU that takes the
    /// model and has room for it, else they stay on the CPU. `cancel` ends reading them.
    pub fn of_checkpoint(
        checkpoint: &Checkpoint,
        requested_device: run_config::Device,
        cancel: &CancelToken,
    ) -> Result<Self> {
        pool::start()?;
        let StoredModel { shape, precision, stop_tokens } = checkpoint.model()?;
        let tokenizer = load_tokenizer(checkpoint, &stop_tokens)?;
        let dtype = dtype_of(precision);
        let elements = ParameterLayout::new(&shape).elements();
        let needed_bytes = |device: &Device| {
            let weights = (elements * dtype.size_in_bytes()) as u64;
            weights + Generator::bytes(&shape, dtype, usize::MAX, device.kind())
        };
        let DeviceSelection { device, notes } = device::select_for_inference(requested_device, &shape, needed_bytes)?;
        for note in notes {
            tracing::warn!("{note}");
        }
        let weights_bytes = (elements * dtype.size_in_bytes()) as u64;
        require_room(weights_bytes, &device, || format!("the model in {}", checkpoint.directory().display()))?;
        let mut weights = Weights::zeros(&shape, dtype, &device)?;
        checkpoint.weights(&shape, &mut weights, cancel)?;
        Ok(Self { shape, precision, weights, tokenizer, stop_tokens })
    }

    /// Continues a prompt by at most `max_tokens` tokens, up to the end of the text or of the model's context. An
    /// empty prompt starts a new text. `on_text` receives the text as it grows, whole characters at a time, and may
    /// cancel.
    pub fn complete(
        &self,
        prompt: &str,
        max_tokens: usize,
        settings: &SamplingSettings,
        on_text: impl FnMut(&str) -> ControlFlow<()> + Send,
    ) -> Result<Completion> {
        let prompt_tokens = self.tokenizer.encode_prompt(prompt)?;
        let longest = prompt_tokens.len().saturating_add(max_tokens);
        let mut generator = generator(&self.shape, &self.weights, longest)?;
        let (tokenizer, stop_tokens) = (&self.tokenizer, self.stop_tokens.as_slice());
        let request = CompletionRequest {
            prompt,
            prompt_tokens: &prompt_tokens,
            cached_tokens: 0,
            max_tokens,
            stop_tokens,
            settings,
        };
        in_pool(|| complete(&mut generator, tokenizer, &request, on_text))
    }

    /// Returns the logits after each of these tokens, `[tokens, vocab_size]`, unless the signal is raised meanwhile. The
    /// first `prompt_tokens` of them, or all where there are fewer, pass through the model together, as those of a prompt
    /// do, the others one by one, as generated ones do.
    pub fn logits(&self, tokens: &[u32], prompt_tokens: usize, stop: &StopSignal) -> Result<Vec<Vec<f32>>> {
        let mut generator = generator(&self.shape, &self.weights, tokens.len())?;
        let (prompt, others) = tokens.split_at(prompt_tokens.min(tokens.len()));
        in_pool(|| {
            let mut logits = Vec::with_capacity(tokens.len());
            for tokens in prompt.chunks(PASS_TOKENS).chain(others.chunks(1)) {
                stop.check()?;
                logits.extend(generator.logits_of_each(tokens).map_err(TrainerError::from_request)?);
            }
            Ok(logits)
        })
    }
}

/// Loads the tokenizer of a model directory; a checkpoint's is first compared with its manifest. A checkpoint stops at
/// the token that its documents were ended with; other models may stop at several, such as those that end a turn.
pub(crate) fn load_tokenizer(checkpoint: &Checkpoint, stop_tokens: &[u32]) -> Result<Tokenizer> {
    let directory = checkpoint.tokenizer_directory();
    if checkpoint.is_checkpoint() && directory == checkpoint.directory() {
        checkpoint.tokenizer()?;
        return Ok(Tokenizer::of_checkpoint(&directory, stop_tokens.first().copied())?);
    }
    Ok(Tokenizer::of_model(&directory)?)
}
