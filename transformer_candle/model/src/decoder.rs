//! The whole model: the backbone, the head and the loss; forward beside backward.

mod settings;

use std::mem;

use kernels::memory::{Arena, Category};
use kernels::{Buffer, DType, DeviceKind, GraphCache, Upload, WriteMode, dropout, head_cross_entropy, timing};

pub use settings::{DecoderSettings, dtype_of, head_chunk_rows};

use crate::activations::ActivationSettings;
use crate::backbone::{Backbone, rope_tables};
use crate::layout::ParameterLayout;
use crate::weight::Weight;
use crate::weights::{BASE_BLOCK, Weights};
use crate::{Error, ModelShape, Result};

/// Inputs, documents and targets, as [`Decoder::forward_backward`] has them.
type MicroBatch<'a> = (&'a Buffer, Option<&'a Buffer>, &'a Buffer);

/// A model with the buffers of a step. All of its arithmetic runs in the current rayon pool.
#[derive(Debug)]
pub struct Decoder {
    shape: ModelShape,
    layout: ParameterLayout,
    weights: Weights,
    gradients: Buffer,
    backbone: Backbone,
    head: Weight,
    logits_CW: Buffer,
    losses_N: Buffer,
    loss_1: Buffer,
    scale_1: Buffer,
    scale_upload: Upload<f32>,
    /// The value that `scale_1` holds; None where it has to be written again.
    scale: Option<f32>,
    /// Whether the next micro-batch overwrites or accumulates the gradients of matrices.
    write_mode: WriteMode,
    /// Coefficient of the z-loss.
    z_loss: f32,
    /// The key of adapters' dropout in the next micro-batch.
    dropout: dropout::Key,
    /// Whether the blocks have rounded the weights as they are to fp8, where GEMMs are in fp8.
    has_rounded_weights: bool,
    /// The captured CUDA graphs, by the addresses of inputs, documents and targets, and by the part of a micro-batch;
    /// None for a whole one.
    graphs: GraphCache<([usize; 3], Option<usize>)>,
}

impl Decoder {
    /// A decoder whose weights are zero.
    pub fn new(shape: &ModelShape, settings: &DecoderSettings, arena: &mut Arena) -> Result<Self> {
        let layout = ParameterLayout::new(shape);
        let &DecoderSettings { batch, sequence_length, recompute, training, device, .. } = settings;
        let (dtype, n, v) = (dtype_of(settings.precision), batch * sequence_length, shape.padded_vocab_size);
        let rows = head_chunk_rows(n, v, device);
        let weights = Weights::take(&layout, dtype, settings.fp8.unwrap_or(BASE_BLOCK), arena);
        let gradient_elements = if training { layout.trainable_elements() } else { 0 };
        let gradients = arena.take("gradients", Category::Gradients, DType::F32, &[gradient_elements]);
        let parameters = layout.weights(&weights, training.then_some(&gradients))?;
        let activations = ActivationSettings {
            batch,
            sequence_length,
            dtype,
            residual_dtype: dtype,
            recompute,
            training,
            fp8: settings.fp8,
            device,
            workspace_elements: head_cross_entropy::workspace_elements(rows, shape.hidden_size, v, device),
        };
        let rope = rope_tables(shape, sequence_length, arena)?;
        let backbone = Backbone::new(shape, &activations, &parameters, rope, &[], arena)?;
        let logits = [rows, head_cross_entropy::logits_width(v, device)];
        let mut take = |name, category, shape: &[usize]| arena.take(name, category, DType::F32, shape);
        let (logits_CW, losses_N) =
            (take("logits", Category::Scratch, &logits), take("losses", Category::Scratch, &[n]));
        let (loss_1, scale_1) = (take("loss", Category::Scratch, &[1]), take("loss_scale", Category::Batch, &[1]));
        let staging = (device == DeviceKind::Cuda).then(|| take("loss_scale.staging", Category::Batch, &[1]));
        Ok(Self {
            shape: shape.clone(),
            layout,
            weights,
            gradients,
            backbone,
            head: parameters.head,
            logits_CW,
            losses_N,
            loss_1,
            scale_upload: Upload::new(scale_1.clone(), staging)?,
            scale_1,
            scale: None,
            // All that was allocated is zero.
            write_mode: WriteMode::Accumulate,
            z_loss: settings.z_loss,
            dropout: dropout::Key { seed: 0, first_row: 0, enabled: true },
            has_rounded_weights: false,
            graphs: GraphCache::default(),
        })
    }

    /// Starts a new sum of losses and gradients; a decoder is made with one started. What [`Decoder::gradients`] holds
    /// from here to the next micro-batch is of no use.
    pub fn begin_accumulation(&mut self) -> Result<()> {
        self.check_training()?;
        let (write_mode, first_added) = match self.gradients.device().kind() {
            // The first micro-batch overwrites the gradients of matrices. Those without decay are added row by row,
            // from zero.
            DeviceKind::Cpu => (WriteMode::Overwrite, self.layout.decayed_elements()),
            // One CUDA graph serves every micro-batch: each accumulates all.
            DeviceKind::Cuda => (WriteMode::Accumulate, 0),
        };
        self.gradients.view(first_added, &[self.gradients.elements() - first_added])?.zero()?;
        self.write_mode = write_mode;
        Ok(self.loss_1.zero()?)
    }

    /// Adds `scale` times the summed loss of all targets to [`Decoder::loss`], and its gradients to
    /// [`Decoder::gradients`].
    ///
    /// `inputs_N` are U32 token ids, `targets_N` I32 with -100 where there is nothing to predict; N = batch times
    /// `sequence_length`. `documents_N`, I32, is for sequences that hold several documents which do not see each other:
    /// for every token the position within its sequence at which its document begins. Positions count from the
    /// sequence's start all the same; their rotations are relative, so that this changes a document's values by
    /// rounding only. For a mean over an accumulated batch `scale` is one over the targets of all its micro-batches.
    ///
    /// On a GPU nothing is waited for. The second call with the same buffers captures a CUDA graph, which it and every
    /// later call replay: the next micro-batch is written to these buffers, and is not checked there.
    pub fn forward_backward(
        &mut self,
        inputs_N: &Buffer,
        documents_N: Option<&Buffer>,
        targets_N: &Buffer,
        scale: f32,
    ) -> Result<()> {
        self.begin_micro_batch(scale)?;
        self.replay((inputs_N, documents_N, targets_N), None)?;
        self.write_mode = WriteMode::Accumulate;
        Ok(())
    }

    /// [`Decoder::forward_backward`] in [`ParameterLayout::backward_parts`] parts, and a CUDA graph for each.
    /// `after_part` is called after each of them: [`ParameterLayout::completed_by`] says which gradients do not change
    /// any more. On a GPU the part is launched by then, and no work behind it is.
    pub fn forward_backward_in_parts<E: From<Error>>(
        &mut self,
        inputs_N: &Buffer,
        documents_N: Option<&Buffer>,
        targets_N: &Buffer,
        scale: f32,
        mut after_part: impl FnMut(&Self, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        self.begin_micro_batch(scale)?;
        for part in 0..self.layout.backward_parts() {
            self.replay((inputs_N, documents_N, targets_N), Some(part))?;
            after_part(self, part)?;
        }
        self.write_mode = WriteMode::Accumulate;
        Ok(())
    }

    /// Writes the scale and the dropout key of a micro-batch to the buffers that its operations read.
    fn begin_micro_batch(&mut self, scale: f32) -> Result<()> {
        self.check_training()?;
        self.round_weights()?;
        if self.scale.map(f32::to_bits) != Some(scale.to_bits()) {
            self.scale_upload.stage()?.fill(scale);
            self.scale_upload.send()?;
            self.scale_upload.receive()?;
            self.scale = Some(scale);
        }
        self.write_dropout_key(self.dropout)
    }

    /// Rounds the weights to fp8 if they have changed, where GEMMs are in fp8.
    fn round_weights(&mut self) -> Result<()> {
        if !self.has_rounded_weights {
            timing::scope("weights", || self.backbone.round_weights())?;
            self.has_rounded_weights = true;
        }
        Ok(())
    }

    /// Must be called where an optimizer has changed what trains.
    pub fn trained_weights_have_changed(&mut self) {
        // Beside adapters the blocks' weights stay as they are.
        self.has_rounded_weights &= self.shape.lora.is_some();
    }

    /// Runs a part of a micro-batch or all of them, on a GPU from the second time on as a CUDA graph.
    fn replay(&mut self, micro_batch: MicroBatch<'_>, part: Option<usize>) -> Result<()> {
        let (inputs_N, documents_N, targets_N) = micro_batch;
        let device = self.loss_1.device().clone();
        let addresses = [Some(inputs_N), documents_N, Some(targets_N)].map(|buffer| buffer.map_or(0, Buffer::address));
        let parts = part.map_or(0..self.layout.backward_parts(), |part| part..part + 1);
        let mut graphs = mem::take(&mut self.graphs);
        let result = graphs
            .run(&device, (addresses, part), || parts.clone().try_for_each(|part| self.run_part(micro_batch, part)));
        self.graphs = graphs;
        result
    }

    /// Sets the key of adapters' dropout in the next micro-batch: a seed that is the optimizer step's, and the index of
    /// the micro-batch's first token among those of the step, so that masks do not depend on how a step is divided.
    /// Without dropout it has no effect.
    pub fn set_dropout(&mut self, seed: u64, first_token: u64) {
        self.dropout = dropout::Key { seed, first_row: first_token, enabled: true };
    }

    fn write_dropout_key(&mut self, key: dropout::Key) -> Result<()> {
        self.backbone.dropout_key.as_mut().map_or(Ok(()), |buffer| buffer.write(key))
    }

    /// Must be called where another decoder has used the same memory since the last micro-batch: the scale and the rounded
    /// weights that the memory held are then written again.
    pub fn invalidate_memory(&mut self) {
        self.scale = None;
        self.has_rounded_weights = false;
    }

    /// Disables CUDA graphs: every operation is launched by itself each time, as for looking at single ones.
    pub fn run_eagerly(&mut self) {
        self.graphs = GraphCache::eager();
    }

    fn check_training(&self) -> Result<()> {
        if self.backbone.scratch.gradients.is_some() { Ok(()) } else { Err(Error::EvaluationOnly) }
    }

    /// Runs a part of a micro-batch. Part 0 is the forward pass and the gradients of head and last norm, each further
    /// one the backward pass of a block, from the last to the first; the embedding's follows that of the first block.
    fn run_part(&mut self, (inputs_N, documents_N, targets_N): MicroBatch<'_>, part: usize) -> Result<()> {
        if part == 0 {
            timing::scope("forward", || self.backbone.forward(inputs_N, documents_N, 0))?;
            timing::scope("head", || self.head_forward_backward(targets_N))?;
            return timing::scope("backward", || self.backbone.backward_final_norm());
        }
        let layer = self.backbone.blocks.len() - part;
        timing::scope("backward", || {
            self.backbone.backward_block(layer, documents_N, self.write_mode)?;
            if layer == 0 { self.backbone.backward_embedding(inputs_N) } else { Ok(()) }
        })
    }

    /// Computes the loss and the head's gradients; writes the gradient of the backbone's output to where its backward
    /// pass reads it.
    fn head_forward_backward(&mut self, targets_N: &Buffer) -> Result<()> {
        let Self { backbone: Backbone { final_norm, scratch, .. }, head, shape, loss_1, logits_CW, z_loss, .. } = self;
        let ((scratch, workspace), (weight_VD, dweight_VD)) = (scratch.backward()?, head.with_gradient());
        let (hidden_ND, vocab_size) = (&final_norm.values.normed_ND, shape.vocab_size);
        let (dhidden_ND, write_mode) = (&mut scratch.dnormed_ND, self.write_mode);
        let inputs = head_cross_entropy::Inputs { hidden_ND, weight_VD, targets_N, vocab_size };
        let gradients = head_cross_entropy::Gradients { dhidden_ND, dweight_VD, write_mode, z_loss: *z_loss };
        Ok(head_cross_entropy::forward_backward(&inputs, &self.scale_1, loss_1, gradients, logits_CW, workspace)?)
    }

    /// Returns the loss of each target in nats, F32 `[N]`, zero where there is none. Gradients stay as they are. The
    /// arguments are those of [`Decoder::forward_backward`].
    pub fn evaluate(&mut self, inputs_N: &Buffer, documents_N: Option<&Buffer>, targets_N: &Buffer) -> Result<&Buffer> {
        self.round_weights()?;
        self.write_dropout_key(dropout::Key { enabled: false, ..self.dropout })?;
        self.backbone.forward(inputs_N, documents_N, 0)?;
        let Backbone { final_norm, scratch, .. } = &mut self.backbone;
        let (hidden_ND, weight_VD, vocab_size) =
            (&final_norm.values.normed_ND, &self.head.values, self.shape.vocab_size);
        let inputs = head_cross_entropy::Inputs { hidden_ND, weight_VD, targets_N, vocab_size };
        head_cross_entropy::forward(&inputs, &mut self.losses_N, &mut self.logits_CW, &mut scratch.workspace)?;
        Ok(&self.losses_N)
    }

    /// Positions of each sequence, T.
    pub fn sequence_length(&self) -> usize {
        self.backbone.settings.attention.sequence_length
    }

    /// The sizes of the model.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// The layout of the flat buffers: the place of each parameter.
    pub fn layout(&self) -> &ParameterLayout {
        &self.layout
    }

    /// All weights.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// All weights, to be written.
    pub fn weights_mut(&mut self) -> &mut Weights {
        self.has_rounded_weights = false;
        &mut self.weights
    }

    /// The accumulated gradients of what trains, F32; empty without training.
    pub fn gradients(&self) -> &Buffer {
        &self.gradients
    }

    /// The accumulated gradients, to be written.
    pub fn gradients_mut(&mut self) -> &mut Buffer {
        &mut self.gradients
    }

    /// The accumulated loss, F32 `[1]`.
    pub fn loss(&self) -> &Buffer {
        &self.loss_1
    }
}
