//! Every buffer of a pass beside the parameters, listed before any is allocated.

use kernels::attention::AttentionShape;
use kernels::memory::{Arena, BufferId, Category, Plan};
use kernels::rope::RopeTables;
use kernels::{Buffer, DType, add_rms_norm, embedding, rope};

use super::Backbone;
use crate::activations::{ActivationSettings, BlockPlanner};
use crate::attention::{Attention, KeyValueCache};
use crate::block::{Block, BlockActivations};
use crate::lora::{AdapterBinder, AdapterPlan};
use crate::mlp::Mlp;
use crate::norm::{Norm, NormActivations};
use crate::parameters::Parameters;
use crate::pass::{GradientScratch, PassSettings, Scratch};
use crate::weight::Weight;
use crate::{ModelShape, Result};

/// A backbone whose buffers are listed but not allocated.
#[derive(Clone, Debug)]
pub struct BackbonePlan {
    shape: ModelShape,
    settings: ActivationSettings,
    blocks: Vec<BlockActivations<BufferId>>,
    final_norm: NormActivations<BufferId>,
    layer_output: BufferId,
    workspace: BufferId,
    /// Cosines and sines of the rotary embedding.
    rope: (BufferId, BufferId),
    /// The scratch buffers that adapters share; None without adapters.
    adapters: Option<AdapterPlan>,
    /// Gradients of the residual stream and of queries, keys and values; None without training.
    gradients: Option<(BufferId, BufferId)>,
}

impl BackbonePlan {
    /// Adds the buffers to a memory plan.
    pub fn new(shape: &ModelShape, settings: &ActivationSettings, plan: &mut Plan) -> Self {
        let &ActivationSettings { batch, sequence_length, dtype, residual_dtype, training, .. } = settings;
        let (n, d) = (batch * sequence_length, shape.hidden_size);
        let mut planner = BlockPlanner::new(settings, plan);
        let plan_block = |_| {
            let block = BlockActivations::plan(shape, &mut planner);
            planner.next_block();
            block
        };
        let blocks = (0..shape.num_layers).map(plan_block).collect();
        let kept = if training { Category::SavedActivations } else { Category::Scratch };
        // The widest of the values that a linear map exchanges with the residual stream.
        let narrow = if training { d.max(shape.heads().query_width()) } else { d };
        let angles = [settings.positions, shape.head_size / 2];
        Self {
            shape: shape.clone(),
            settings: *settings,
            blocks,
            final_norm: NormActivations {
                residual_ND: plan.add("output", kept, residual_dtype, &[n, d]),
                inv_rms_N: plan.add("final_inv_rms", kept, DType::F32, &[n]),
                normed_ND: plan.add("final_normed", kept, dtype, &[n, d]),
            },
            layer_output: plan.add("layer_output", Category::Scratch, residual_dtype, &[n * narrow]),
            workspace: plan.add("workspace", Category::Scratch, DType::F32, &[workspace_elements(shape, settings)]),
            rope: (
                plan.add("rope_cosines", Category::Scratch, DType::F32, &angles),
                plan.add("rope_sines", Category::Scratch, DType::F32, &angles),
            ),
            adapters: AdapterPlan::add_to(plan, shape, settings),
            gradients: training.then(|| {
                let residual = plan.add("residual_gradient", Category::Scratch, dtype, &[n, d]);
                (residual, plan.add("qkv_gradient", Category::Scratch, dtype, &[n, shape.heads().packed_width()]))
            }),
        }
    }

    /// The backbone over allocated buffers.
    pub fn bind(&self, arena: &Arena, weights: &Parameters<Weight>) -> Result<Backbone> {
        let tokens = self.settings.batch * self.settings.sequence_length;
        self.bind_rows(arena, weights, &self.bind_rope(arena)?, tokens, &[])
    }

    /// A backbone over the first `rows` rows of the buffers, for passes of fewer tokens; with a cache for each block,
    /// or none.
    pub(crate) fn bind_rows(
        &self,
        arena: &Arena,
        weights: &Parameters<Weight>,
        rope: &RopeTables,
        rows: usize,
        caches: &[KeyValueCache],
    ) -> Result<Backbone> {
        let mut bind = |&id: &BufferId| first_rows(&arena.buffer(id), rows);
        let adapters = self.adapters.zip(self.shape.lora.as_ref());
        let binder = adapters.map(|(plan, lora)| AdapterBinder::new(plan, lora, arena, rows)).transpose()?;
        let mut blocks = Vec::<Block>::with_capacity(self.blocks.len());
        for (layer, (values, weights)) in self.blocks.iter().zip(&weights.blocks).enumerate() {
            let previous_ND = blocks.last().map(|block| block.mlp.residual_ND().clone());
            let values = values.try_map(&mut bind)?;
            let adapters = |of: &[_]| binder.as_ref().map_or(Ok(Vec::new()), |binder| binder.bind(layer, of));
            blocks.push(Block::new(weights, previous_ND, values, &adapters, caches.get(layer).cloned())?);
        }
        let previous_ND = blocks.last().map(|block| block.mlp.residual_ND().clone());
        let values = self.final_norm.try_map(&mut bind)?;
        Ok(Backbone {
            embed_tokens: weights.embed_tokens.clone(),
            blocks,
            final_norm: Norm::new(weights.final_norm.clone(), previous_ND, values),
            settings: PassSettings {
                attention: AttentionShape {
                    heads: self.shape.heads(),
                    batch: self.settings.batch,
                    sequence_length: rows / self.settings.batch,
                },
                epsilon: self.shape.norm_epsilon as f32,
                rope: rope.clone(),
                recompute: self.settings.recompute,
            },
            dropout_key: self.adapters.map_or(Ok(None), |adapters| adapters.dropout_key(arena))?,
            scratch: self.bind_scratch(arena, rows)?,
        })
    }

    fn bind_scratch(&self, arena: &Arena, rows: usize) -> Result<Scratch> {
        let (n, d, a) = (rows, self.shape.hidden_size, self.shape.heads().query_width());
        let narrow = arena.buffer(self.layer_output);
        let bind = |(residual, qkv)| -> Result<_> {
            Ok(GradientScratch {
                dresidual_ND: first_rows(&arena.buffer(residual), n)?,
                dnormed_ND: narrow.view(0, &[n, d])?,
                dattended_NA: narrow.view(0, &[n, a])?,
                dqkv_NP: first_rows(&arena.buffer(qkv), n)?,
            })
        };
        Ok(Scratch {
            layer_output_ND: narrow.view(0, &[n, d])?,
            workspace: arena.buffer(self.workspace),
            gradients: self.gradients.map(bind).transpose()?,
        })
    }

    /// Fills the rotary embedding's buffers and returns them.
    pub(crate) fn bind_rope(&self, arena: &Arena) -> Result<RopeTables> {
        let (mut cos_TE2, mut sin_TE2) = (arena.buffer(self.rope.0), arena.buffer(self.rope.1));
        let (positions, device) = (cos_TE2.shape()[0], cos_TE2.device());
        let tables = rope::tables(positions, self.shape.head_size, &self.shape.rope_frequencies(), device)?;
        cos_TE2.copy_from(&tables.cos_TE2)?;
        sin_TE2.copy_from(&tables.sin_TE2)?;
        Ok(RopeTables { cos_TE2, sin_TE2 })
    }
}

/// A view of at most the first `rows` rows of a buffer.
fn first_rows(buffer: &Buffer, rows: usize) -> Result<Buffer> {
    let mut shape = buffer.shape().to_vec();
    shape[0] = shape[0].min(rows);
    Ok(buffer.view(0, &shape)?)
}

/// Elements of the largest workspace of any operation, the caller's included.
fn workspace_elements(shape: &ModelShape, settings: &ActivationSettings) -> usize {
    let &ActivationSettings { batch, sequence_length, training, device, .. } = settings;
    let (n, d) = (batch * sequence_length, shape.hidden_size);
    let backward = if training {
        add_rms_norm::workspace_elements(n, d, device).max(embedding::workspace_elements(n, device))
    } else {
        0
    };
    let layers = Attention::workspace_elements(shape, settings).max(Mlp::workspace_elements(shape, settings));
    layers.max(backward).max(settings.workspace_elements).max(1)
}

#[cfg(test)]
mod tests {
    use kernels::DeviceKind;

    use super::*;
    use crate::ActivationRecompute;
    use crate::shape::tests::one_billion;

    fn planned(recompute: ActivationRecompute, training: bool, batch: usize) -> Plan {
        let settings = ActivationSettings {
            batch,
            sequence_length: 2048,
            dtype: DType::BF16,
            residual_dtype: DType::BF16,
            recompute,
            training,
            positions: 2048,
            device: DeviceKind::Cpu,
            workspace_elements: 0,
        };
        let mut plan = Plan::new();
        BackbonePlan::new(&one_billion(), &settings, &mut plan);
        plan
    }

    fn saved(recompute: ActivationRecompute) -> f64 {
        planned(recompute, true, 1).bytes_of(Category::SavedActivations) as f64 / 1e9
    }

    #[test]
    fn saved_activations_at_1b_match_the_design() {
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
