//! Text from a model: a pass over the prompt, then one token at a time, with the keys and values of all tokens so far
//! kept.
//!
//! With BF16 weights the matmuls' operands are BF16, as in training. On a CPU the residual stream and the logits are F32
//! all the same: no backward pass reads them, and rounding them takes most of the error of BF16 and ties close calls.

use std::ops::ControlFlow;

use kernels::memory::{Arena, Category, allocate, count};
use kernels::rope::RopeTables;
use kernels::{Buffer, DType, DeviceKind, linear};

use crate::activations::ActivationSettings;
use crate::attention::KeyValueCache;
use crate::backbone::{Backbone, rope_tables};
use crate::layout::ParameterLayout;
use crate::parameters::Parameters;
use crate::sampling::{SamplingSettings, sample};
use crate::weight::Weight;
use crate::weights::{BASE_BLOCK, Weights};
use crate::{ActivationRecompute, Error, ModelShape, Result};

/// Maximum number of tokens of a prompt that pass through the model together.
pub const PASS_TOKENS: usize = 128;

/// A model with a key/value cache for one sequence.
#[derive(Debug)]
pub struct Generator {
    shape: ModelShape,
    weights: Parameters<Weight>,
    /// The memory of the backbone's buffers.
    arena: Arena,
    settings: ActivationSettings,
    rope: RopeTables,
    /// The key/value cache of each block.
    caches: Vec<KeyValueCache>,
    /// The backbone for passes of as many tokens as the last one had.
    backbone: Backbone,
    ids_S: Buffer,
    logits_1V: Buffer,
    /// Tokens in the cache.
    past: usize,
    capacity: usize,
}

impl Generator {
    /// A generator over a model's weights, for sequences of at most `max_tokens`, prompt included.
    ///
    /// The context never exceeds the model's `max_position_embeddings`: [`Generator::capacity`] is the smaller of the
    /// two.
    pub fn new(shape: &ModelShape, weights: &Weights, max_tokens: usize) -> Result<Self> {
        let device = weights.flat.device();
        allocate(device, |arena| Self::take(shape, weights, max_tokens, device.kind(), arena))
    }

    /// Bytes that such a generator takes beside the weights.
    #[expect(clippy::missing_panics_doc, reason = "buffers without memory are never refused")]
    pub fn bytes(shape: &ModelShape, dtype: DType, max_tokens: usize, device: DeviceKind) -> u64 {
        let weights = Weights::take(&ParameterLayout::new(shape), dtype, BASE_BLOCK, &mut Arena::counting());
        let arena_bytes = count(|arena| Self::take(shape, &weights, max_tokens, device, arena));
        arena_bytes.expect("buffers without memory are never refused").1.bytes()
    }

    /// [`Generator::new`] with the buffers of an arena.
    pub fn take(
        shape: &ModelShape,
        weights: &Weights,
        max_tokens: usize,
        device: DeviceKind,
        arena: &mut Arena,
    ) -> Result<Self> {
        let (capacity, dtype) = (max_tokens.min(shape.max_position_embeddings).max(1), weights.flat.dtype());
        let rows = PASS_TOKENS.min(capacity);
        // A GPU's kernels are compiled for one element type.
        let sums_dtype = if device == DeviceKind::Cpu { DType::F32 } else { dtype };
        let settings = ActivationSettings {
            batch: 1,
            sequence_length: rows,
            dtype,
            residual_dtype: sums_dtype,
            recompute: ActivationRecompute::None,
            training: false,
            fp8: None,
            workspace_elements: linear::workspace_elements(1, shape.hidden_size, shape.padded_vocab_size, device),
            device,
        };
        let weights = ParameterLayout::new(shape).weights(weights, None)?;
        let cached = [capacity, shape.heads().key_width()];
        let mut cache = |layer: usize, name: &str| {
            arena.take(format!("layers.{layer}.{name}"), Category::KeyValueCache, dtype, &cached)
        };
        let cache = |layer| KeyValueCache { keys_CKE: cache(layer, "keys"), values_CKE: cache(layer, "values") };
        let caches: Vec<_> = (0..shape.num_layers).map(cache).collect();
        let rope = rope_tables(shape, capacity, arena)?;
        let ids_S = arena.take("ids", Category::Batch, DType::U32, &[rows]);
        let logits_1V = arena.take("logits", Category::Scratch, sums_dtype, &[1, shape.padded_vocab_size]);
        let backbone_arena = arena.rest();
        let backbone = Backbone::new(shape, &settings, &weights, rope.clone(), &caches, arena)?;
        // Passes of fewer tokens have the same workspace.
        let workspace_elements = backbone.scratch.workspace.elements();
        let settings = ActivationSettings { workspace_elements, ..settings };
        Ok(Self {
            shape: shape.clone(),
            weights,
            arena: backbone_arena,
            settings,
            rope,
            caches,
            backbone,
            ids_S,
            logits_1V,
            past: 0,
            capacity,
        })
    }

    /// Tokens that a sequence can have.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) {
        self.truncate(0);
    }

    /// Forgets all but the first tokens of the sequence.
    pub fn truncate(&mut self, tokens: usize) {
        self.past = self.past.min(tokens);
    }

    /// Tokens of the sequence so far.
    pub fn past(&self) -> usize {
        self.past
    }

    /// Appends tokens to the sequence and returns the logits of the token after them, one for each of the vocabulary.
    pub fn prefill(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        self.check(tokens)?;
        let mut last_row = None;
        for tokens in tokens.chunks(PASS_TOKENS) {
            self.pass(tokens)?;
            last_row = Some(tokens.len() - 1);
        }
        self.logits(last_row.ok_or(Error::EmptyPrompt)?)
    }

    /// Appends tokens to the sequence and returns the logits after each of them: those of [`Generator::prefill`] with
    /// the tokens up to there.
    pub fn logits_of_each(&mut self, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
        self.check(tokens)?;
        let mut logits_SV = Vec::with_capacity(tokens.len());
        for tokens in tokens.chunks(PASS_TOKENS) {
            self.pass(tokens)?;
            for row in 0..tokens.len() {
                logits_SV.push(self.logits(row)?);
            }
        }
        Ok(logits_SV)
    }

    /// Appends one token and returns the logits of the next.
    pub fn step(&mut self, token: u32) -> Result<Vec<f32>> {
        self.prefill(&[token])
    }

    /// Continues a prompt by at most `max_tokens` tokens. Stops before one of `stop_tokens`, when `on_token` breaks, or
    /// when the context is full ([`Generator::capacity`]). Returns the tokens behind the prompt.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        max_tokens: usize,
        stop_tokens: &[u32],
        settings: &SamplingSettings,
        on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Vec<u32>> {
        self.reset();
        self.extend(prompt, max_tokens, stop_tokens, settings, on_token)
    }

    /// Like [`Generator::generate`], behind the tokens that the sequence has already.
    pub fn extend(
        &mut self,
        prompt: &[u32],
        max_tokens: usize,
        stop_tokens: &[u32],
        settings: &SamplingSettings,
        mut on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Vec<u32>> {
        settings.check()?;
        let mut logits = self.prefill(prompt)?;
        let mut completion = Vec::new();
        while completion.len() < max_tokens {
            if logits.iter().all(|logit| logit.is_nan()) {
                return Err(Error::NotFinite);
            }
            let token = sample(&logits, settings, completion.len() as u64);
            if stop_tokens.contains(&token) {
                break;
            }
            completion.push(token);
            let enough = completion.len() == max_tokens || self.past == self.capacity;
            if on_token(token).is_break() || enough {
                break;
            }
            logits = self.step(token)?;
        }
        Ok(completion)
    }

    fn check(&self, tokens: &[u32]) -> Result<()> {
        let (tokens_needed, vocab_size) = (self.past + tokens.len(), self.shape.vocab_size);
        if tokens_needed > self.capacity {
            return Err(Error::ContextFull { tokens: tokens_needed, capacity: self.capacity });
        }
        match tokens.iter().find(|&&token| token as usize >= vocab_size) {
            Some(&token) => Err(Error::UnknownToken { token, vocab_size }),
            None => Ok(()),
        }
    }

    /// Runs the blocks on at most [`PASS_TOKENS`] tokens.
    fn pass(&mut self, tokens: &[u32]) -> Result<()> {
        let s = tokens.len();
        if self.backbone.settings.attention.sequence_length != s {
            let Self { shape, weights, arena, rope, caches, .. } = self;
            let settings = ActivationSettings { sequence_length: s, ..self.settings };
            arena.rewind();
            self.backbone = Backbone::new(shape, &settings, weights, rope.clone(), caches, arena)?;
        }
        let mut ids_S = self.ids_S.view(0, &[s])?;
        ids_S.write(tokens)?;
        self.backbone.forward(&ids_S, None, self.past)?;
        self.past += s;
        Ok(())
    }

    /// Runs the head on a token of the last pass; returns its logits, one for each of the vocabulary.
    fn logits(&mut self, row: usize) -> Result<Vec<f32>> {
        let d = self.shape.hidden_size;
        let hidden_1D = self.backbone.hidden_ND().view(row * d, &[1, d])?;
        let workspace = &mut self.backbone.scratch.workspace;
        linear::forward(&hidden_1D, &self.weights.head.values, &mut self.logits_1V, workspace)?;
        let mut logits = self.logits_1V.read_f32()?;
        logits.truncate(self.shape.vocab_size);
        Ok(logits)
    }
}
