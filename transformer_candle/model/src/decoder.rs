//! The whole model over planned buffers: embedding, blocks, last norm, head and loss; forward beside backward.

mod plan;

use std::mem;

use kernels::{Accumulate, Buffer, DeviceKind, Recording, Upload, add_rms_norm, embedding, head_cross_entropy};

pub use plan::{DecoderPlan, DecoderSettings, dtype_of};

use crate::activations::Activations;
use crate::block::{self, BlockSettings};
use crate::parameters::{ParameterLayout, Parameters};
use crate::{ActivationRecompute, Error, ModelShape, Result};

/// A model with the buffers of a step. All of its arithmetic runs in the current rayon pool.
#[derive(Debug)]
pub struct Decoder {
    shape: ModelShape,
    settings: BlockSettings,
    layout: ParameterLayout,
    weights: Parameters,
    gradients: Buffer,
    gradient_views: Option<Parameters>,
    activations: Activations,
    logits_CW: Buffer,
    losses_N: Buffer,
    loss_1: Buffer,
    scale_1: Buffer,
    scale_upload: Upload<f32>,
    /// What `scale_1` holds.
    scale: Option<f32>,
    /// What the next micro-batch does with the gradients of matrices.
    accumulate: Accumulate,
    /// The launches of [`Decoder::forward_backward`] on a card, once they are known.
    recording: Recording,
}

impl Decoder {
    /// Begins a new sum of losses and gradients; a decoder begins with one. What [`Decoder::gradients`] holds from here to the next
    /// micro-batch is of no use.
    pub fn begin_accumulation(&mut self) -> Result<()> {
        if self.gradient_views.is_none() {
            return Err(Error::EvaluationOnly);
        }
        let (accumulate, first_added) = match self.gradients.device().kind() {
            // The first micro-batch writes the gradients of matrices. Without decay are those that are added row by row.
            DeviceKind::Cpu => (Accumulate::Begin, self.layout.decayed_elements()),
            // One recording serves every micro-batch: each adds all.
            DeviceKind::Cuda => (Accumulate::Continue, 0),
        };
        self.gradients.view(first_added, &[self.gradients.elements() - first_added])?.zero()?;
        self.accumulate = accumulate;
        Ok(self.loss_1.zero()?)
    }

    /// Adds `scale` times the summed loss of all targets to [`Decoder::loss`], and its gradients to [`Decoder::gradients`].
    ///
    /// `inputs_N` are U32 token ids, `targets_N` I32 with -100 where there is nothing to predict; N = batch times
    /// `sequence_length`. `documents_N`, I32, is for sequences that hold several documents which do not see each other: for
    /// every token the position within its sequence at which its document begins. Positions count from the sequence's start all
    /// the same; their rotations are relative, so that this changes a document's values by rounding only. For a mean over an
    /// accumulated batch `scale` is one over the targets of all its micro-batches.
    ///
    /// On a card nothing is waited for. From the second call with the same buffers on the card repeats what it was asked for as one
    /// graph: what is new is written to these, and is not checked there.
    pub fn forward_backward(
        &mut self,
        inputs_N: &Buffer,
        documents_N: Option<&Buffer>,
        targets_N: &Buffer,
        scale: f32,
    ) -> Result<()> {
        if self.gradient_views.is_none() {
            return Err(Error::EvaluationOnly);
        }
        if self.scale.map(f32::to_bits) != Some(scale.to_bits()) {
            self.scale_upload.stage()?.fill(scale);
            self.scale_upload.send()?;
            self.scale_upload.receive()?;
            self.scale = Some(scale);
        }
        let device = self.loss_1.device().clone();
        let addresses = [Some(inputs_N), documents_N, Some(targets_N)].map(|buffer| buffer.map_or(0, Buffer::address));
        let key = addresses.iter().fold(0, |key: u64, &address| key.rotate_left(21) ^ address as u64);
        let mut recording = mem::take(&mut self.recording);
        let done = recording.run(&device, key, || self.pass(inputs_N, documents_N, targets_N));
        self.recording = recording;
        done?;
        self.accumulate = Accumulate::Continue;
        Ok(())
    }

    /// Has a card be asked for every operation by itself each time, as for looking at single ones.
    pub fn run_eagerly(&mut self) {
        self.recording = Recording::eager();
    }

    /// Everything of a micro-batch that a card can repeat by itself.
    fn pass(&mut self, inputs_N: &Buffer, documents_N: Option<&Buffer>, targets_N: &Buffer) -> Result<()> {
        self.forward(inputs_N, documents_N)?;
        self.head_backward(targets_N)?;
        self.blocks_backward(documents_N)?;
        self.embedding_backward(inputs_N)
    }

    /// The loss of each target in nats, F32 `[N]`, zero where there is none. Gradients stay as they are. The arguments are those of
    /// [`Decoder::forward_backward`].
    pub fn evaluate(&mut self, inputs_N: &Buffer, documents_N: Option<&Buffer>, targets_N: &Buffer) -> Result<&Buffer> {
        self.forward(inputs_N, documents_N)?;
        let Activations { final_normed_ND: hidden_ND, workspace, .. } = &mut self.activations;
        let (weight_VD, vocab_size) = (&self.weights.head, self.shape.vocab_size);
        let inputs = head_cross_entropy::Inputs { hidden_ND, weight_VD, targets_N, vocab_size };
        head_cross_entropy::forward(&inputs, &mut self.losses_N, &mut self.logits_CW, workspace)?;
        Ok(&self.losses_N)
    }

    fn forward(&mut self, inputs_N: &Buffer, documents_N: Option<&Buffer>) -> Result<()> {
        let Self { weights, activations, settings, .. } = self;
        let Activations { blocks, output_ND, final_inv_rms_N, final_normed_ND, branch_ND, workspace, .. } = activations;
        embedding::forward(&weights.embed_tokens, inputs_N, &mut blocks[0].input_ND)?;
        let mut residual_ND = None;
        for (weights, values) in weights.blocks.iter().zip(blocks) {
            block::forward(weights, settings, documents_N, residual_ND.as_ref(), values, branch_ND, workspace)?;
            residual_ND = Some(values.middle_ND.clone());
        }
        let residual_ND = residual_ND.expect("a validated model has a block");
        add_rms_norm::forward_add(
            &residual_ND,
            branch_ND,
            &weights.final_norm,
            settings.epsilon,
            output_ND,
            final_normed_ND,
            final_inv_rms_N,
        )?;
        Ok(())
    }

    /// Loss, head and last norm: leaves the gradient of the last block's output in `residual_ND`.
    fn head_backward(&mut self, targets_N: &Buffer) -> Result<()> {
        let Self { weights, gradient_views, activations, .. } = self;
        let Activations { output_ND, final_inv_rms_N, final_normed_ND, workspace, gradients: scratch, .. } =
            activations;
        let (Some(gradients), Some(scratch)) = (gradient_views, scratch) else {
            return Err(Error::EvaluationOnly);
        };
        let inputs = head_cross_entropy::Inputs {
            hidden_ND: final_normed_ND,
            weight_VD: &weights.head,
            targets_N,
            vocab_size: self.shape.vocab_size,
        };
        let head_gradients = head_cross_entropy::Gradients {
            dhidden_ND: &mut scratch.normed_ND,
            dweight_VD: &mut gradients.head,
            accumulate: self.accumulate,
        };
        let logits_CW = &mut self.logits_CW;
        head_cross_entropy::forward_backward(
            &inputs,
            &self.scale_1,
            &mut self.loss_1,
            head_gradients,
            logits_CW,
            workspace,
        )?;
        scratch.residual_ND.zero()?;
        let (norm, dnorm) = (&weights.final_norm, &mut gradients.final_norm);
        let (dnormed_ND, residual_ND) = (&scratch.normed_ND, &mut scratch.residual_ND);
        add_rms_norm::backward(output_ND, norm, final_inv_rms_N, dnormed_ND, residual_ND, dnorm, workspace)?;
        Ok(())
    }

    fn blocks_backward(&mut self, documents_N: Option<&Buffer>) -> Result<()> {
        let Self { weights, gradient_views, activations, settings, .. } = self;
        let Activations { blocks, branch_ND, workspace, gradients: scratch, .. } = activations;
        let (Some(gradients), Some(scratch)) = (gradient_views, scratch) else {
            return Err(Error::EvaluationOnly);
        };
        let last = blocks.len() - 1;
        for (layer, values) in blocks.iter_mut().enumerate().rev() {
            let (weights, gradients) = (&weights.blocks[layer], &mut gradients.blocks[layer]);
            // The last block's values are still there from the forward pass.
            if settings.recompute == ActivationRecompute::Block && layer != last {
                block::recompute(weights, settings, documents_N, values, branch_ND, workspace)?;
            }
            block::backward(weights, settings, documents_N, values, gradients, self.accumulate, scratch, workspace)?;
        }
        Ok(())
    }

    fn embedding_backward(&mut self, inputs_N: &Buffer) -> Result<()> {
        let Activations { gradients: scratch, workspace, .. } = &mut self.activations;
        let (Some(gradients), Some(scratch)) = (&mut self.gradient_views, scratch) else {
            return Err(Error::EvaluationOnly);
        };
        Ok(embedding::backward(inputs_N, &scratch.residual_ND, &mut gradients.embed_tokens, workspace)?)
    }

    /// Positions of each sequence, T.
    pub fn sequence_length(&self) -> usize {
        self.settings.sequence_length
    }

    /// The sizes of the model.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Where each parameter lies in the flat buffers.
    pub fn layout(&self) -> &ParameterLayout {
        &self.layout
    }

    /// All weights, F32 or BF16.
    pub fn weights(&self) -> &Buffer {
        &self.weights.flat
    }

    /// All weights, to be written.
    pub fn weights_mut(&mut self) -> &mut Buffer {
        &mut self.weights.flat
    }

    /// The accumulated gradients, F32; empty without training.
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
