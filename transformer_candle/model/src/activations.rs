//! The buffers that a pass through the decoder needs beside the parameters, and which blocks share them.
//!
//! With `activation_recompute: none` every block keeps its own of everything that its backward pass reads. `selective` keeps
//! neither the norms' outputs nor the `SwiGLU` product: they are recomputed into buffers that all blocks share. `block` keeps
//! a block's input only, and recomputes the rest of the block into one shared set. Without training all blocks share all.

use std::collections::BTreeMap;

use kernels::attention::AttentionShape;
use kernels::memory::{Arena, BufferId, Category, Plan};
use kernels::rope::RopeTables;
use kernels::{Buffer, DType, DeviceKind, add_rms_norm, attention, embedding, linear, rope};

use crate::{ActivationRecompute, ModelShape, Result};

/// What decides the size of the activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActivationSettings {
    /// Sequences of a pass, B.
    pub batch: usize,
    /// Positions of each, T.
    pub sequence_length: usize,
    /// Element type of activations and weights.
    pub dtype: DType,
    /// What is recomputed instead of kept.
    pub recompute: ActivationRecompute,
    /// Whether there is a backward pass at all.
    pub training: bool,
    /// Positions that the rotary embedding knows: T, or the whole context that a cache holds.
    pub positions: usize,
    /// Which kind of device it runs on.
    pub device: DeviceKind,
    /// Elements of workspace that the caller's own operations need.
    pub workspace_elements: usize,
}

/// What one block's forward pass computes. `T` is a [`BufferId`] while planning and a [`Buffer`] afterwards.
#[derive(Clone, Debug)]
pub struct BlockActivations<T> {
    /// The residual stream that enters.
    pub input_ND: T,
    /// Inverse root mean squares of the input's rows.
    pub attention_inv_rms_N: T,
    /// The normed input.
    pub attention_normed_ND: T,
    /// Queries, keys (both rotated) and values.
    pub qkv_NP: T,
    /// Attention's output before its projection.
    pub attended_NA: T,
    /// Attention's log-sum-exp of each query's scores, [B, H, T].
    pub log_sum_exp_BHT: T,
    /// The residual stream between attention and the feed-forward part.
    pub middle_ND: T,
    /// Inverse root mean squares of its rows.
    pub mlp_inv_rms_N: T,
    /// The normed middle.
    pub mlp_normed_ND: T,
    /// The gate and up projections' outputs, side by side; in the backward pass their gradients.
    pub gate_up_N2I: T,
    /// Their `SwiGLU` product.
    pub activated_NI: T,
}

/// The values of a backward pass. None is needed for longer than until the next is made, so several share memory.
#[derive(Clone, Debug)]
pub struct GradientScratch {
    /// Gradient of the residual stream; every block adds to it.
    pub residual_ND: Buffer,
    /// Gradient of a norm's output. Shares memory with `attended_NA` and with [`Activations::branch_ND`].
    pub normed_ND: Buffer,
    /// Gradient of attention's output.
    pub attended_NA: Buffer,
    /// Gradient of queries, keys and values.
    pub qkv_NP: Buffer,
}

/// The buffers of a pass through the decoder.
#[derive(Clone, Debug)]
pub struct Activations {
    /// One a block; what blocks share is the same memory in each.
    pub blocks: Vec<BlockActivations<Buffer>>,
    /// The residual stream behind the last block.
    pub output_ND: Buffer,
    /// Inverse root mean squares of its rows.
    pub final_inv_rms_N: Buffer,
    /// The normed output: what the head reads.
    pub final_normed_ND: Buffer,
    /// What a block's half adds to the residual stream; the next norm does the addition.
    pub branch_ND: Buffer,
    /// F32 workspace of every operation.
    pub workspace: Buffer,
    /// Angles of the rotary embedding.
    pub rope: RopeTables,
    /// The backward pass's values, where there is one.
    pub gradients: Option<GradientScratch>,
}

/// [`Activations`] while they are planned.
#[derive(Clone, Debug)]
pub struct ActivationPlan {
    shape: ModelShape,
    tokens: usize,
    blocks: Vec<BlockActivations<BufferId>>,
    output: BufferId,
    final_inv_rms: BufferId,
    final_normed: BufferId,
    narrow: BufferId,
    workspace: BufferId,
    /// Cosines and sines.
    rope: (BufferId, BufferId),
    /// Gradients of the residual stream and of queries, keys and values.
    gradients: Option<(BufferId, BufferId)>,
}

impl ActivationPlan {
    /// Adds the buffers to a memory plan.
    pub fn new(shape: &ModelShape, settings: &ActivationSettings, plan: &mut Plan) -> Self {
        let ActivationSettings { batch, sequence_length, dtype, training, .. } = *settings;
        let (n, d) = (batch * sequence_length, shape.hidden_size);
        let mut shared = BTreeMap::new();
        let blocks = (0..shape.num_layers).map(|layer| plan_block(shape, settings, layer, &mut shared, plan)).collect();
        let kept = if training { Category::SavedActivations } else { Category::Scratch };
        // The widest of the values that a linear map exchanges with the residual stream.
        let narrow = if training { d.max(shape.heads().query_width()) } else { d };
        let angles = [settings.positions, shape.head_size / 2];
        let workspace = workspace_elements(shape, settings).max(settings.workspace_elements).max(1);
        Self {
            shape: shape.clone(),
            tokens: n,
            blocks,
            output: plan.add("output", kept, dtype, &[n, d]),
            final_inv_rms: plan.add("final_inv_rms", kept, DType::F32, &[n]),
            final_normed: plan.add("final_normed", kept, dtype, &[n, d]),
            narrow: plan.add("branch", Category::Scratch, dtype, &[n * narrow]),
            workspace: plan.add("workspace", Category::Scratch, DType::F32, &[workspace]),
            rope: (
                plan.add("rope_cosines", Category::Scratch, DType::F32, &angles),
                plan.add("rope_sines", Category::Scratch, DType::F32, &angles),
            ),
            gradients: training.then(|| {
                let residual = plan.add("residual_gradient", Category::Scratch, dtype, &[n, d]);
                (residual, plan.add("qkv_gradient", Category::Scratch, dtype, &[n, shape.heads().packed_width()]))
            }),
        }
    }

    /// The planned buffers, the rotary embedding's angles filled in.
    pub fn bind(&self, arena: &Arena) -> Result<Activations> {
        let (n, d, heads) = (self.tokens, self.shape.hidden_size, self.shape.heads());
        let narrow = arena.buffer(self.narrow);
        let gradients = match self.gradients {
            None => None,
            Some((residual, qkv)) => Some(GradientScratch {
                residual_ND: arena.buffer(residual),
                normed_ND: narrow.view(0, &[n, d])?,
                attended_NA: narrow.view(0, &[n, heads.query_width()])?,
                qkv_NP: arena.buffer(qkv),
            }),
        };
        Ok(Activations {
            blocks: self.blocks.iter().map(|block| block.try_map(|&id| Ok(arena.buffer(id)))).collect::<Result<_>>()?,
            output_ND: arena.buffer(self.output),
            final_inv_rms_N: arena.buffer(self.final_inv_rms),
            final_normed_ND: arena.buffer(self.final_normed),
            branch_ND: narrow.view(0, &[n, d])?,
            workspace: arena.buffer(self.workspace),
            rope: self.bind_rope(arena)?,
            gradients,
        })
    }

    fn bind_rope(&self, arena: &Arena) -> Result<RopeTables> {
        let (mut cos_TE2, mut sin_TE2) = (arena.buffer(self.rope.0), arena.buffer(self.rope.1));
        let (positions, device) = (cos_TE2.shape()[0], cos_TE2.device());
        let tables = rope::tables(positions, self.shape.head_size, self.shape.rope_theta, device)?;
        cos_TE2.copy_from(&tables.cos_TE2)?;
        sin_TE2.copy_from(&tables.sin_TE2)?;
        Ok(RopeTables { cos_TE2, sin_TE2 })
    }
}

/// One block's buffers. What is not kept is shared, by name.
fn plan_block(
    shape: &ModelShape,
    settings: &ActivationSettings,
    layer: usize,
    shared: &mut BTreeMap<&'static str, BufferId>,
    plan: &mut Plan,
) -> BlockActivations<BufferId> {
    let mut add = |kept: bool, name: &'static str, dtype: DType, shape: &[usize]| {
        let mut add = |name, category| plan.add(name, category, dtype, shape);
        if kept {
            add(format!("layers.{layer}.{name}"), Category::SavedActivations)
        } else {
            let id = shared.entry(name);
            *id.or_insert_with(|| add(format!("layers.{name}"), Category::Scratch))
        }
    };
    let (x, f32) = (settings.dtype, DType::F32);
    let (b, t, d) = (settings.batch, settings.sequence_length, shape.hidden_size);
    let (n, i, heads) = (b * t, shape.intermediate_size, shape.heads());
    let start = settings.training;
    let inside = start && settings.recompute != ActivationRecompute::Block;
    let all = start && settings.recompute == ActivationRecompute::None;
    // Recomputed norm outputs are needed one after the other: one buffer serves both.
    let normed = |name: &'static str| if all { name } else { "normed" };
    BlockActivations {
        input_ND: add(start, "input", x, &[n, d]),
        attention_inv_rms_N: add(start, "attention_inv_rms", f32, &[n]),
        attention_normed_ND: add(all, normed("attention_normed"), x, &[n, d]),
        qkv_NP: add(inside, "qkv", x, &[n, heads.packed_width()]),
        attended_NA: add(inside, "attended", x, &[n, heads.query_width()]),
        log_sum_exp_BHT: add(inside, "log_sum_exp", f32, &[b, heads.heads, t]),
        middle_ND: add(inside, "middle", x, &[n, d]),
        mlp_inv_rms_N: add(inside, "mlp_inv_rms", f32, &[n]),
        mlp_normed_ND: add(all, normed("mlp_normed"), x, &[n, d]),
        gate_up_N2I: add(inside, "gate_up", x, &[n, 2 * i]),
        activated_NI: add(all, "activated", x, &[n, i]),
    }
}

/// The largest workspace of a block's operations.
fn workspace_elements(shape: &ModelShape, settings: &ActivationSettings) -> usize {
    let &ActivationSettings { batch, sequence_length, training, device, .. } = settings;
    let (n, d, i, heads) = (batch * sequence_length, shape.hidden_size, shape.intermediate_size, shape.heads());
    let maps = [(d, heads.packed_width()), (heads.query_width(), d), (d, 2 * i), (i, d)];
    let linear = maps.iter().map(|&(inputs, outputs)| linear::workspace_elements(n, inputs, outputs, device)).max();
    let norm = if training { add_rms_norm::workspace_elements(n, d, device) } else { 0 };
    let attention_shape = AttentionShape { heads, batch, sequence_length };
    let attention = if training {
        attention::workspace_elements(&attention_shape, device)
    } else {
        let decode = attention::decode_workspace_elements(&heads, sequence_length, device);
        attention::forward_workspace_elements(&attention_shape, device).max(decode)
    };
    let embedding = if training { embedding::workspace_elements(n, device) } else { 0 };
    linear.unwrap_or(0).max(norm).max(attention).max(embedding)
}

impl<T> BlockActivations<T> {
    /// The same fields with each value replaced.
    pub fn try_map<U>(&self, mut of: impl FnMut(&T) -> Result<U>) -> Result<BlockActivations<U>> {
        Ok(BlockActivations {
            input_ND: of(&self.input_ND)?,
            attention_inv_rms_N: of(&self.attention_inv_rms_N)?,
            attention_normed_ND: of(&self.attention_normed_ND)?,
            qkv_NP: of(&self.qkv_NP)?,
            attended_NA: of(&self.attended_NA)?,
            log_sum_exp_BHT: of(&self.log_sum_exp_BHT)?,
            middle_ND: of(&self.middle_ND)?,
            mlp_inv_rms_N: of(&self.mlp_inv_rms_N)?,
            mlp_normed_ND: of(&self.mlp_normed_ND)?,
            gate_up_N2I: of(&self.gate_up_N2I)?,
            activated_NI: of(&self.activated_NI)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::tests::one_billion;

    fn planned(recompute: ActivationRecompute, training: bool, batch: usize) -> Plan {
        let settings = ActivationSettings {
            batch,
            sequence_length: 2048,
            dtype: DType::BF16,
            recompute,
            training,
            positions: 2048,
            device: DeviceKind::Cpu,
            workspace_elements: 0,
        };
        let mut plan = Plan::new();
        ActivationPlan::new(&one_billion(), &settings, &mut plan);
        plan
    }

    fn saved(recompute: ActivationRecompute) -> f64 {
        planned(recompute, true, 1).bytes_of(Category::SavedActivations) as f64 / 1e9
    }

    #[test]
    fn a_billion_parameters_save_the_gigabytes_that_the_design_says() {
        assert!((saved(ActivationRecompute::None) - 3.10).abs() < 0.03, "{}", saved(ActivationRecompute::None));
        assert!((saved(ActivationRecompute::Selective) - 2.10).abs() < 0.03);
        assert!((0.1..0.3).contains(&saved(ActivationRecompute::Block)));
        let all_of_block = planned(ActivationRecompute::Block, true, 1).bytes() as f64 / 1e9;
        assert!((0.2..0.6).contains(&all_of_block), "{all_of_block}");
    }

    #[test]
    fn scratch_does_not_grow_with_the_layers() {
        for recompute in [ActivationRecompute::None, ActivationRecompute::Selective] {
            let plan = planned(recompute, true, 1);
            assert!(plan.bytes_of(Category::Scratch) < 300_000_000, "{}", plan.bytes_of(Category::Scratch));
        }
        let evaluation = planned(ActivationRecompute::None, false, 1);
        assert_eq!(evaluation.bytes_of(Category::SavedActivations), 0);
        assert!(evaluation.bytes() < planned(ActivationRecompute::Block, true, 1).bytes());
    }

    #[test]
    fn saved_bytes_grow_in_proportion_to_the_tokens() {
        let of = |batch| planned(ActivationRecompute::Selective, true, batch).bytes_of(Category::SavedActivations);
        assert_eq!(of(4), 4 * of(1));
    }
}
