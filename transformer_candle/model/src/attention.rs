//! Attention with its norm and its projections, forward beside backward.

use kernels::attention::{AttentionShape, Saved as SavedAttention};
use kernels::{Buffer, DType, attention, bias, qk_norm, rope};

use crate::activations::{ActivationSettings, BlockBuffers, Saved};
use crate::fp8::{self, Fp8Fusion};
use crate::linear::Linear;
use crate::lora::{self, MakeAdapters};
use crate::norm::{Norm, NormActivations};
use crate::parameters::BlockParameters;
use crate::pass::{GradientScratch, Pass};
use crate::qk_norm::QkNorm;
use crate::weight::Weight;
use crate::{ModelShape, Result};

/// The keys and values of the tokens so far, [C, K * E].
#[derive(Clone, Debug)]
pub struct KeyValueCache {
    /// Rotated keys.
    pub keys_CKE: Buffer,
    /// Values.
    pub values_CKE: Buffer,
}

/// Norm, query, key and value projections, norms of heads, rotary embedding, attention, output projection.
#[derive(Clone, Debug)]
pub struct Attention {
    norm: Norm,
    qkv: Linear,
    qk_norm: Option<QkNorm>,
    output: Linear,
    /// Queries, keys (both rotated) and values.
    qkv_NP: Buffer,
    /// Attention's output before its projection.
    attended_NA: Buffer,
    /// The log-sum-exp of each query's scores.
    log_sum_exp_BHT: Buffer,
    /// The key/value cache: then a pass holds the next tokens of one sequence. None for passes over whole sequences.
    cache: Option<KeyValueCache>,
}

impl Attention {
    /// The attention of a block; `previous_ND` is the residual stream that the norm before its own wrote, None in the
    /// first block.
    pub(crate) fn new(
        shape: &ModelShape,
        weights: &BlockParameters<Weight>,
        previous_ND: Option<Buffer>,
        adapters: MakeAdapters<'_>,
        cache: Option<KeyValueCache>,
        buffers: &mut BlockBuffers<'_>,
    ) -> Result<Self> {
        let &ActivationSettings { batch, sequence_length, dtype, residual_dtype, .. } = buffers.settings;
        let (n, d, heads) = (batch * sequence_length, shape.hidden_size, shape.heads());
        let (norm_weight, [qkv, output]) = (weights.attention_norm.clone(), [&weights.qkv, &weights.attention_output]);
        let values = NormActivations {
            residual_ND: buffers.take("input", Saved::BlockInput, residual_dtype, &[n, d]),
            inv_rms_N: buffers.take("attention_inv_rms", Saved::BlockInput, DType::F32, &[n]),
            normed_ND: buffers.take_normed("attention_normed", &[n, d]),
        };
        // Queries, keys and values as they were projected.
        let mut projected = || buffers.take("projected", Saved::Inner, dtype, &[n, heads.packed_width()]);
        let qk_norm = weights.qk_norm.clone().map(|weight_2E| QkNorm::new(weight_2E, projected()));
        // Norms and rotation are cheap to compute again.
        let saved = if qk_norm.is_some() { Saved::Recomputable } else { Saved::Inner };
        Ok(Self {
            norm: Norm::new(norm_weight, previous_ND, values).with_fusion(Fp8Fusion::of(shape, buffers.settings)),
            qkv: Linear::new(
                shape,
                "qkv",
                qkv.clone(),
                weights.qkv_bias.clone(),
                adapters(&weights.adapters.qkv)?,
                buffers,
            )?,
            qk_norm,
            output: Linear::new(
                shape,
                "attention_output",
                output.clone(),
                None,
                adapters(&weights.adapters.attention_output)?,
                buffers,
            )?,
            qkv_NP: buffers.take("qkv", saved, dtype, &[n, heads.packed_width()]),
            attended_NA: buffers.take("attended", Saved::Inner, dtype, &[n, heads.query_width()]),
            log_sum_exp_BHT: buffers.take(
                "log_sum_exp",
                Saved::Inner,
                DType::F32,
                &[batch, heads.heads, sequence_length],
            ),
            cache,
        })
    }

    /// Rounds the weights to fp8, where GEMMs are in fp8.
    pub(crate) fn round_weights(&mut self, workspace: &mut Buffer) -> Result<()> {
        self.qkv.round_weight(workspace)?;
        self.output.round_weight(workspace)
    }

    /// The residual stream that enters the block.
    pub fn residual_ND(&self) -> &Buffer {
        &self.norm.values.residual_ND
    }

    /// The residual stream that enters the block, for the embedding to write.
    pub fn residual_mut(&mut self) -> &mut Buffer {
        &mut self.norm.values.residual_ND
    }

    /// Writes what attention adds to the residual stream to `layer_output_ND`.
    pub fn forward(&mut self, pass: &mut Pass<'_>) -> Result<()> {
        self.norm.forward(pass)?;
        self.attend(pass)
    }

    /// Computes [`Attention::forward`] again, where the residual stream and its statistics were kept.
    pub fn recompute(&mut self, pass: &mut Pass<'_>) -> Result<()> {
        self.norm.recompute()?;
        self.attend(pass)
    }

    /// Computes everything after the norm: projections, attention and output projection.
    fn attend(&mut self, pass: &mut Pass<'_>) -> Result<()> {
        let projected_NP = self.qk_norm.as_mut().map_or(&mut self.qkv_NP, |qk_norm| &mut qk_norm.projected_NP);
        self.qkv.forward(&self.norm.values.normed_ND, projected_NP, &mut pass.scratch.workspace)?;
        self.norm_and_rotate(pass)?;
        let shape @ AttentionShape { heads, .. } = &pass.settings.attention;
        let (layer_output_ND, workspace) = (&mut pass.scratch.layer_output_ND, &mut pass.scratch.workspace);
        let Self { qkv_NP, attended_NA, log_sum_exp_BHT, .. } = self;
        match &mut self.cache {
            None => attention::forward(qkv_NP, pass.documents_N, shape, attended_NA, log_sum_exp_BHT, workspace)?,
            Some(KeyValueCache { keys_CKE, values_CKE }) => {
                attention::decode(qkv_NP, heads, pass.past, keys_CKE, values_CKE, attended_NA, workspace)?;
            }
        }
        self.output.forward(attended_NA, layer_output_ND, workspace)
    }

    /// Makes queries, keys and values of the projections' output: norms of heads, where there are any, and rotary
    /// embedding.
    fn norm_and_rotate(&mut self, pass: &Pass<'_>) -> Result<()> {
        if let Some(qk_norm) = &self.qk_norm {
            qk_norm.forward(&mut self.qkv_NP, pass.settings)?;
        }
        let AttentionShape { heads, sequence_length, .. } = &pass.settings.attention;
        Ok(rope::forward(&mut self.qkv_NP, heads, &pass.settings.rope, *sequence_length, pass.past)?)
    }

    /// Turns `dresidual_ND` from the gradient of the residual stream after attention into that of the block's input,
    /// and computes the gradients of the parameters.
    pub fn backward(&mut self, pass: &mut Pass<'_>) -> Result<()> {
        self.norm.begin_backward(pass)?;
        if pass.recomputes() && self.qk_norm.is_some() {
            self.norm_and_rotate(pass)?;
        }
        let shape @ AttentionShape { heads, sequence_length, .. } = &pass.settings.attention;
        let (write_mode, (scratch, workspace)) = (pass.write_mode, pass.scratch.backward()?);
        let GradientScratch { dresidual_ND, dnormed_ND, dattended_NA, dqkv_NP } = scratch;
        self.output.begin_backward(dresidual_ND, workspace)?;
        self.output.backward_weight(dresidual_ND, &self.attended_NA, write_mode, workspace)?;
        self.output.backward_input(dresidual_ND, dattended_NA, workspace)?;
        let saved = SavedAttention {
            qkv_NP: &self.qkv_NP,
            documents_N: pass.documents_N,
            out_NHE: &self.attended_NA,
            lse_BHT: &self.log_sum_exp_BHT,
        };
        attention::backward(&saved, dattended_NA, shape, dqkv_NP, workspace)?;
        rope::backward(dqkv_NP, heads, &pass.settings.rope, *sequence_length, pass.past)?;
        if let Some(qk_norm) = &mut self.qk_norm {
            qk_norm.backward(dqkv_NP, pass.settings, workspace)?;
        }
        self.qkv.begin_backward(dqkv_NP, workspace)?;
        self.norm.backward_projection(&mut self.qkv, dqkv_NP, write_mode, workspace)?;
        self.qkv.backward_input(dqkv_NP, dnormed_ND, workspace)?;
        self.norm.backward(scratch, workspace)
    }

    /// Elements of workspace for the projections, the norms of heads and attention.
    pub(crate) fn workspace_elements(shape: &ModelShape, settings: &ActivationSettings) -> usize {
        let &ActivationSettings { batch, sequence_length, training, device, .. } = settings;
        let (n, d, heads) = (batch * sequence_length, shape.hidden_size, shape.heads());
        let sizes = AttentionShape { heads, batch, sequence_length };
        let attention = if training {
            attention::workspace_elements(&sizes, device)
        } else {
            let decode = attention::decode_workspace_elements(&heads, sequence_length, device);
            attention::forward_workspace_elements(&sizes, device).max(decode)
        };
        let qkv = fp8::workspace_elements(settings, n, d, heads.packed_width());
        let of_part = |exists: bool, elements: usize| if exists && training { elements } else { 0 };
        let architecture = shape.architecture;
        let bias = of_part(architecture.has_qkv_bias(), bias::workspace_elements(n, heads.packed_width(), device));
        let qk_norm = of_part(architecture.has_qk_norm(), qk_norm::workspace_elements(n, heads.head_size, device));
        let output = fp8::workspace_elements(settings, n, heads.query_width(), d);
        let modules = [[d, heads.query_width()], [d, heads.key_width()], [heads.query_width(), d]];
        let adapters = modules.map(|sizes| lora::workspace_elements(shape, settings, sizes));
        adapters.into_iter().fold(attention.max(qkv).max(bias).max(qk_norm).max(output), usize::max)
    }
}
