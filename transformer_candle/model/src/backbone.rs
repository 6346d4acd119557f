//! The decoder without its head: embedding, blocks and last norm; forward beside backward. Training and generation both
//! run it.

use kernels::attention::AttentionShape;
use kernels::memory::{Arena, Category};
use kernels::rope::RopeTables;
use kernels::{Buffer, DType, WriteMode, add_rms_norm, embedding, rope, timing};

use crate::activations::{ActivationSettings, BlockBuffers};
use crate::attention::{Attention, KeyValueCache};
use crate::block::Block;
use crate::lora::{AdapterBuffers, DropoutKey};
use crate::mlp::Mlp;
use crate::norm::{Norm, NormActivations};
use crate::parameters::Parameters;
use crate::pass::{GradientScratch, Pass, PassSettings, Scratch};
use crate::weight::Weight;
use crate::{ActivationRecompute, ModelShape, Result};

/// Embedding, blocks and last norm.
#[derive(Debug)]
pub struct Backbone {
    /// Token embedding, [V, D].
    pub embed_tokens: Weight,
    /// The decoder blocks, at least one; what they share is the same memory in each.
    pub blocks: Vec<Block>,
    /// The norm whose output the head reads.
    pub final_norm: Norm,
    /// The settings that every pass has in common.
    pub settings: PassSettings,
    /// The key of adapters' dropout, to be written before a pass; None without dropout.
    pub dropout_key: Option<DropoutKey>,
    /// Buffers that every layer overwrites.
    pub scratch: Scratch,
}

impl Backbone {
    /// A backbone of these weights; with a cache for each block, or none.
    pub fn new(
        shape: &ModelShape,
        settings: &ActivationSettings,
        weights: &Parameters<Weight>,
        rope: RopeTables,
        caches: &[KeyValueCache],
        arena: &mut Arena,
    ) -> Result<Self> {
        let &ActivationSettings { batch, sequence_length, dtype, residual_dtype, training, .. } = settings;
        let (n, d) = (batch * sequence_length, shape.hidden_size);
        let adapter_buffers = AdapterBuffers::take(shape, settings, arena);
        let mut buffers = BlockBuffers::new(settings, arena);
        let mut blocks = Vec::<Block>::with_capacity(weights.blocks.len());
        for (layer, weights) in weights.blocks.iter().enumerate() {
            let previous_ND = blocks.last().map(|block| block.mlp.residual_ND().clone());
            let adapters =
                |of: &[_]| adapter_buffers.as_ref().map_or(Ok(Vec::new()), |buffers| buffers.adapters(layer, of));
            let cache = caches.get(layer).cloned();
            blocks.push(Block::new(shape, weights, previous_ND, &adapters, cache, &mut buffers)?);
            buffers.next_block();
        }
        let previous_ND = blocks.last().map(|block| block.mlp.residual_ND().clone());
        let category = if training { Category::SavedActivations } else { Category::Scratch };
        let values = NormActivations {
            residual_ND: arena.take("output", category, residual_dtype, &[n, d]),
            inv_rms_N: arena.take("final_inv_rms", category, DType::F32, &[n]),
            normed_ND: arena.take("final_normed", category, dtype, &[n, d]),
        };
        Ok(Self {
            embed_tokens: weights.embed_tokens.clone(),
            blocks,
            final_norm: Norm::new(weights.final_norm.clone(), previous_ND, values),
            settings: PassSettings {
                attention: AttentionShape { heads: shape.heads(), batch, sequence_length },
                epsilon: shape.norm_epsilon as f32,
                rope,
                recompute: settings.recompute,
            },
            dropout_key: adapter_buffers.map_or(Ok(None), |buffers| buffers.dropout_key())?,
            scratch: Scratch::new(shape, settings, arena)?,
        })
    }

    /// Rounds the weights of the blocks to fp8, where GEMMs are in fp8.
    pub fn round_weights(&mut self) -> Result<()> {
        let Self { blocks, scratch: Scratch { workspace, .. }, .. } = self;
        blocks.iter_mut().enumerate().try_for_each(|(layer, block)| {
            timing::scope_of("layer", layer, || {
                block.attention.round_weights(workspace)?;
                block.mlp.round_weights(workspace)
            })
        })
    }

    /// Runs the tokens `ids_N` through the blocks and leaves the head's input in [`Backbone::hidden_ND`]. `documents_N`
    /// and `past` are those of [`Pass`].
    pub fn forward(&mut self, ids_N: &Buffer, documents_N: Option<&Buffer>, past: usize) -> Result<()> {
        let Self { embed_tokens, blocks, final_norm, settings, scratch, .. } = self;
        let write_mode = WriteMode::Accumulate;
        let mut pass = Pass { settings, documents_N, past, write_mode, scratch };
        embedding::forward(&embed_tokens.values, ids_N, blocks[0].attention.residual_mut())?;
        for (layer, block) in blocks.iter_mut().enumerate() {
            timing::scope_of("layer", layer, || block.forward(&mut pass))?;
        }
        final_norm.forward(&pass)
    }

    /// Begins the backward pass of the last [`Backbone::forward`] with the gradient of [`Backbone::hidden_ND`], which
    /// is in `dnormed_ND`. [`Backbone::backward_block`] of each block, from the last to the first, and
    /// [`Backbone::backward_embedding`] follow.
    pub fn backward_final_norm(&mut self) -> Result<()> {
        let (gradients, workspace) = self.scratch.backward()?;
        gradients.dresidual_ND.zero()?;
        self.final_norm.backward(gradients, workspace)
    }

    /// Computes the gradients of the parameters of a block.
    pub fn backward_block(&mut self, layer: usize, documents_N: Option<&Buffer>, write_mode: WriteMode) -> Result<()> {
        let Self { blocks, settings, scratch, .. } = self;
        // The last block's values are still there from the forward pass.
        let is_recomputed = settings.recompute == ActivationRecompute::Block && layer + 1 < blocks.len();
        let (block, mut pass) = (&mut blocks[layer], Pass { settings, documents_N, past: 0, write_mode, scratch });
        timing::scope_of("layer", layer, || {
            if is_recomputed {
                block.recompute(&mut pass)?;
            }
            block.backward(&mut pass)
        })
    }

    /// Ends the backward pass with the gradient of the embedding, where that trains.
    pub fn backward_embedding(&mut self, ids_N: &Buffer) -> Result<()> {
        let (gradients, workspace) = self.scratch.backward()?;
        match &mut self.embed_tokens.gradient {
            Some(dtable_VD) => Ok(embedding::backward(ids_N, &gradients.dresidual_ND, dtable_VD, workspace)?),
            None => Ok(()),
        }
    }

    /// The normed output of the last block, [N, D].
    pub fn hidden_ND(&self) -> &Buffer {
        &self.final_norm.values.normed_ND
    }
}

impl Scratch {
    fn new(shape: &ModelShape, settings: &ActivationSettings, arena: &mut Arena) -> Result<Self> {
        let &ActivationSettings { batch, sequence_length, dtype, residual_dtype, training, .. } = settings;
        let (n, d, heads) = (batch * sequence_length, shape.hidden_size, shape.heads());
        let a = heads.query_width();
        // The widest of the values that a linear map exchanges with the residual stream.
        let narrow = if training { d.max(a) } else { d };
        let mut take = |name, dtype, shape: &[usize]| arena.take(name, Category::Scratch, dtype, shape);
        let layer_output = take("layer_output", residual_dtype, &[n * narrow]);
        let workspace = take("workspace", DType::F32, &[workspace_elements(shape, settings)]);
        let gradients = training.then(|| -> Result<_> {
            Ok(GradientScratch {
                dresidual_ND: take("residual_gradient", dtype, &[n, d]),
                dnormed_ND: layer_output.view(0, &[n, d])?,
                dattended_NA: layer_output.view(0, &[n, a])?,
                dqkv_NP: take("qkv_gradient", dtype, &[n, heads.packed_width()]),
            })
        });
        Ok(Self { layer_output_ND: layer_output.view(0, &[n, d])?, workspace, gradients: gradients.transpose()? })
    }
}

/// Takes the rotary embedding's tables for this many positions and fills them.
pub fn rope_tables(shape: &ModelShape, positions: usize, arena: &mut Arena) -> Result<RopeTables> {
    let angles = [positions, shape.head_size / 2];
    let mut take = |name| arena.take(name, Category::Scratch, DType::F32, &angles);
    let (mut cos_TE2, mut sin_TE2) = (take("rope_cosines"), take("rope_sines"));
    if !cos_TE2.is_meta() {
        let tables = rope::tables(positions, shape.head_size, &shape.rope_frequencies(), cos_TE2.device())?;
        cos_TE2.copy_from(&tables.cos_TE2)?;
        sin_TE2.copy_from(&tables.sin_TE2)?;
    }
    Ok(RopeTables { cos_TE2, sin_TE2 })
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
    use kernels::memory::{Plan, count};

    use super::*;
    use crate::layout::ParameterLayout;
    use crate::shape::tests::one_billion;

    fn plan_of(recompute: ActivationRecompute, training: bool, batch: usize) -> Plan {
        let settings = ActivationSettings {
            batch,
            sequence_length: 2048,
            dtype: DType::BF16,
            residual_dtype: DType::BF16,
            fp8: None,
            recompute,
            training,
            device: DeviceKind::Cpu,
            workspace_elements: 0,
        };
        let (shape, layout) = (one_billion(), ParameterLayout::new(&one_billion()));
        let flat = Arena::counting().take("", Category::Weights, DType::BF16, &[layout.elements()]);
        let weights = layout.weights(&flat.clone().into(), training.then_some(&flat)).unwrap();
        let new = |arena: &mut Arena| {
            let rope = rope_tables(&shape, settings.sequence_length, arena)?;
            Backbone::new(&shape, &settings, &weights, rope, &[], arena)
        };
        count(new).unwrap().1
    }

    fn saved(recompute: ActivationRecompute) -> f64 {
        plan_of(recompute, true, 1).bytes_of(Category::SavedActivations) as f64 / 1e9
    }

    #[test]
    fn saved_activations_at_1b_match_the_design() {
        assert!((saved(ActivationRecompute::None) - 3.10).abs() < 0.03, "{}", saved(ActivationRecompute::None));
        assert!((saved(ActivationRecompute::Selective) - 2.10).abs() < 0.03);
        assert!((0.1..0.3).contains(&saved(ActivationRecompute::Block)));
        let all_of_block = plan_of(ActivationRecompute::Block, true, 1).bytes() as f64 / 1e9;
        assert!((0.2..0.6).contains(&all_of_block), "{all_of_block}");
    }

    #[test]
    fn scratch_does_not_grow_with_the_layers() {
        for recompute in [ActivationRecompute::None, ActivationRecompute::Selective] {
            let plan = plan_of(recompute, true, 1);
            assert!(plan.bytes_of(Category::Scratch) < 300_000_000, "{}", plan.bytes_of(Category::Scratch));
        }
        let evaluation = plan_of(ActivationRecompute::None, false, 1);
        assert_eq!(evaluation.bytes_of(Category::SavedActivations), 0);
        assert!(evaluation.bytes() < plan_of(ActivationRecompute::Block, true, 1).bytes());
    }

    #[test]
    fn saved_bytes_grow_in_proportion_to_the_tokens() {
        let of = |batch| plan_of(ActivationRecompute::Selective, true, batch).bytes_of(Category::SavedActivations);
        assert_eq!(of(4), 4 * of(1));
    }
}
