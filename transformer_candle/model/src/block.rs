//! One decoder block: pre-norm attention and pre-norm `SwiGLU`, forward beside backward.
//!
//! The residual stream is added up by the norms: each half of a block leaves its output in `branch_ND`, and the next norm, in
//! this block, in the next or behind the last one, adds it and norms the sum in one pass.

use kernels::attention::{AttentionShape, Saved};
use kernels::rope::RopeTables;
use kernels::{Accumulate, Buffer, HeadLayout, add_rms_norm, attention, linear, rope, swiglu};

use crate::activations::{BlockActivations, GradientScratch};
use crate::parameters::BlockParameters;
use crate::{ActivationRecompute, Result};

/// What every block of a model has in common.
#[derive(Clone, Debug)]
pub struct BlockSettings {
    /// How the heads lie in a packed QKV row.
    pub heads: HeadLayout,
    /// Sequences, B.
    pub batch: usize,
    /// Positions of each, T.
    pub sequence_length: usize,
    /// Added to the mean square inside of each norm.
    pub epsilon: f32,
    /// Angles of the rotary embedding.
    pub rope: RopeTables,
    /// What the backward pass recomputes.
    pub recompute: ActivationRecompute,
}

/// Runs the block on whole sequences.
///
/// `incoming_ND` is the residual stream of the block before, whose last contribution is still in `branch_ND`; without one,
/// `input_ND` holds the block's input already. `documents_N` is that of [`attention`].
pub fn forward(
    weights: &BlockParameters,
    settings: &BlockSettings,
    documents_N: Option<&Buffer>,
    incoming_ND: Option<&Buffer>,
    values: &mut BlockActivations<Buffer>,
    branch_ND: &mut Buffer,
    workspace: &mut Buffer,
) -> Result<()> {
    project(weights, settings.epsilon, incoming_ND, values, branch_ND, workspace)?;
    attend(settings, documents_N, values, workspace)?;
    attention_output(weights, settings.epsilon, values, branch_ND, workspace)?;
    feed_forward(weights, values, branch_ND, workspace)
}

/// First norm, and queries, keys and values, not rotated yet.
pub(crate) fn project(
    weights: &BlockParameters,
    epsilon: f32,
    incoming_ND: Option<&Buffer>,
    values: &mut BlockActivations<Buffer>,
    branch_ND: &Buffer,
    workspace: &mut Buffer,
) -> Result<()> {
    let BlockActivations { input_ND, attention_normed_ND, attention_inv_rms_N, qkv_NP, .. } = values;
    let norm = &weights.attention_norm;
    match incoming_ND {
        None => add_rms_norm::forward(input_ND, norm, epsilon, attention_normed_ND, attention_inv_rms_N)?,
        Some(incoming_ND) => add_rms_norm::forward_add(
            incoming_ND,
            branch_ND,
            norm,
            epsilon,
            input_ND,
            attention_normed_ND,
            attention_inv_rms_N,
        )?,
    }
    linear::forward(attention_normed_ND, &weights.qkv, qkv_NP, workspace)?;
    Ok(())
}

/// Rotation and attention over whole sequences.
fn attend(
    settings: &BlockSettings,
    documents_N: Option<&Buffer>,
    values: &mut BlockActivations<Buffer>,
    workspace: &mut Buffer,
) -> Result<()> {
    let &BlockSettings { ref heads, batch, sequence_length, .. } = settings;
    let BlockActivations { qkv_NP, attended_NA, log_sum_exp_BHT, .. } = values;
    rope::forward(qkv_NP, heads, &settings.rope, sequence_length, 0)?;
    let shape = AttentionShape { heads: *heads, batch, sequence_length };
    attention::forward(qkv_NP, documents_N, &shape, attended_NA, log_sum_exp_BHT, workspace)?;
    Ok(())
}

/// Attention's projection, and the second norm, which adds it to the residual stream.
pub(crate) fn attention_output(
    weights: &BlockParameters,
    epsilon: f32,
    values: &mut BlockActivations<Buffer>,
    branch_ND: &mut Buffer,
    workspace: &mut Buffer,
) -> Result<()> {
    let BlockActivations { input_ND, attended_NA, middle_ND, mlp_normed_ND, mlp_inv_rms_N, .. } = values;
    linear::forward(attended_NA, &weights.attention_output, branch_ND, workspace)?;
    let norm = &weights.mlp_norm;
    add_rms_norm::forward_add(input_ND, branch_ND, norm, epsilon, middle_ND, mlp_normed_ND, mlp_inv_rms_N)?;
    Ok(())
}

/// The feed-forward part; its output stays in `branch_ND`.
pub(crate) fn feed_forward(
    weights: &BlockParameters,
    values: &mut BlockActivations<Buffer>,
    branch_ND: &mut Buffer,
    workspace: &mut Buffer,
) -> Result<()> {
    let BlockActivations { mlp_normed_ND, gate_up_N2I, activated_NI, .. } = values;
    linear::forward(mlp_normed_ND, &weights.gate_up, gate_up_N2I, workspace)?;
    swiglu::forward(gate_up_N2I, activated_NI)?;
    linear::forward(activated_NI, &weights.down, branch_ND, workspace)?;
    Ok(())
}

/// Computes again what the forward pass left in buffers that other blocks have used since: all but the block's input, its
/// first norm's statistics, and what [`backward`] itself recomputes.
pub fn recompute(
    weights: &BlockParameters,
    settings: &BlockSettings,
    documents_N: Option<&Buffer>,
    values: &mut BlockActivations<Buffer>,
    branch_ND: &mut Buffer,
    workspace: &mut Buffer,
) -> Result<()> {
    normalize_input(weights, values)?;
    linear::forward(&values.attention_normed_ND, &weights.qkv, &mut values.qkv_NP, workspace)?;
    attend(settings, documents_N, values, workspace)?;
    attention_output(weights, settings.epsilon, values, branch_ND, workspace)?;
    linear::forward(&values.mlp_normed_ND, &weights.gate_up, &mut values.gate_up_N2I, workspace)?;
    Ok(())
}

/// Turns `scratch.residual_ND` from the gradient of the block's output into that of its input, and adds the gradients of the
/// block's matrices to `gradients`, or writes them there; its norms' are added always. Values that are not needed any more are overwritten.
pub fn backward(
    weights: &BlockParameters,
    settings: &BlockSettings,
    documents_N: Option<&Buffer>,
    values: &mut BlockActivations<Buffer>,
    gradients: &mut BlockParameters,
    accumulate: Accumulate,
    scratch: &mut GradientScratch,
    workspace: &mut Buffer,
) -> Result<()> {
    if settings.recompute != ActivationRecompute::None {
        let BlockActivations { middle_ND, mlp_inv_rms_N, mlp_normed_ND, .. } = values;
        add_rms_norm::normalize(middle_ND, &weights.mlp_norm, mlp_inv_rms_N, mlp_normed_ND)?;
    }
    feed_forward_backward(weights, settings.recompute, values, gradients, accumulate, scratch, workspace)?;
    if settings.recompute != ActivationRecompute::None {
        normalize_input(weights, values)?;
    }
    attention_backward(weights, settings, documents_N, values, gradients, accumulate, scratch, workspace)
}

fn normalize_input(weights: &BlockParameters, values: &mut BlockActivations<Buffer>) -> Result<()> {
    let BlockActivations { input_ND, attention_inv_rms_N, attention_normed_ND, .. } = values;
    Ok(add_rms_norm::normalize(input_ND, &weights.attention_norm, attention_inv_rms_N, attention_normed_ND)?)
}

fn feed_forward_backward(
    weights: &BlockParameters,
    recompute: ActivationRecompute,
    values: &mut BlockActivations<Buffer>,
    gradients: &mut BlockParameters,
    accumulate: Accumulate,
    scratch: &mut GradientScratch,
    workspace: &mut Buffer,
) -> Result<()> {
    let GradientScratch { residual_ND, normed_ND: dnormed_ND, .. } = scratch;
    let BlockActivations { middle_ND, mlp_inv_rms_N, mlp_normed_ND, gate_up_N2I, activated_NI, .. } = values;
    // One buffer for the product of gate and up and for its gradient, whichever is needed first.
    if recompute == ActivationRecompute::None {
        linear::backward_weight(residual_ND, activated_NI, &mut gradients.down, accumulate, workspace)?;
        linear::backward_input(residual_ND, &weights.down, activated_NI, workspace)?;
        swiglu::backward(gate_up_N2I, activated_NI)?;
    } else {
        linear::backward_input(residual_ND, &weights.down, activated_NI, workspace)?;
        swiglu::backward_recomputing(gate_up_N2I, activated_NI)?;
        linear::backward_weight(residual_ND, activated_NI, &mut gradients.down, accumulate, workspace)?;
    }
    let dgate_up_N2I = gate_up_N2I;
    linear::backward_weight(dgate_up_N2I, mlp_normed_ND, &mut gradients.gate_up, accumulate, workspace)?;
    linear::backward_input(dgate_up_N2I, &weights.gate_up, dnormed_ND, workspace)?;
    let (norm, dnorm) = (&weights.mlp_norm, &mut gradients.mlp_norm);
    add_rms_norm::backward(middle_ND, norm, mlp_inv_rms_N, dnormed_ND, residual_ND, dnorm, workspace)?;
    Ok(())
}

fn attention_backward(
    weights: &BlockParameters,
    settings: &BlockSettings,
    documents_N: Option<&Buffer>,
    values: &mut BlockActivations<Buffer>,
    gradients: &mut BlockParameters,
    accumulate: Accumulate,
    scratch: &mut GradientScratch,
    workspace: &mut Buffer,
) -> Result<()> {
    let &BlockSettings { ref heads, batch, sequence_length: t, .. } = settings;
    let GradientScratch { residual_ND, normed_ND: dnormed_ND, attended_NA: dattended_NA, qkv_NP: dqkv_NP, .. } =
        scratch;
    let BlockActivations { input_ND, attention_inv_rms_N, attention_normed_ND, qkv_NP, attended_NA, .. } = values;
    linear::backward_weight(residual_ND, attended_NA, &mut gradients.attention_output, accumulate, workspace)?;
    linear::backward_input(residual_ND, &weights.attention_output, dattended_NA, workspace)?;
    let log_sum_exp_BHT = &values.log_sum_exp_BHT;
    let saved = Saved { qkv_NP, documents_N, out_NHE: attended_NA, lse_BHT: log_sum_exp_BHT };
    let shape = AttentionShape { heads: *heads, batch, sequence_length: t };
    attention::backward(&saved, dattended_NA, &shape, dqkv_NP, workspace)?;
    rope::backward(dqkv_NP, heads, &settings.rope, t, 0)?;
    linear::backward_weight(dqkv_NP, attention_normed_ND, &mut gradients.qkv, accumulate, workspace)?;
    linear::backward_input(dqkv_NP, &weights.qkv, dnormed_ND, workspace)?;
    let (norm, dnorm) = (&weights.attention_norm, &mut gradients.attention_norm);
    add_rms_norm::backward(input_ND, norm, attention_inv_rms_N, dnormed_ND, residual_ND, dnorm, workspace)?;
    Ok(())
}
