//! Muon's update of a group: the group's matrices in batches of one shape, and the buffers that a batch is
//! orthogonalised in.
//!
//! A matrix is a tensor as it is on disk: query, key, value, gate and up are orthogonalised each by itself, though they
//! are packed in memory.

use kernels::{
    Buffer, DType, DeviceKind, GraphCache,
    memory::{Arena, Category},
    muon::{self, Muon},
};
use model::{Parameter, ParameterKind, ParameterLayout, layout::HfTensor};

use super::{FlatState, groups::MOMENTUM};
use crate::engine::shard::Shard;

/// Matrices of one shape that are orthogonalised together.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MatrixBatch {
    /// Rows and columns.
    shape: [usize; 2],
    /// The offset of each matrix in the flat buffers.
    offsets: Vec<usize>,
}

impl MatrixBatch {
    /// Returns `[B, M, N]`: the number of matrices, their rows and their columns.
    fn sizes(&self) -> [usize; 3] {
        [self.offsets.len(), self.shape[0], self.shape[1]]
    }

    /// Returns the elements of the batch's update, and those of its Gram matrices.
    fn elements(&self) -> [usize; 2] {
        let [b, m, n] = self.sizes();
        [b * m * n, b * m.min(n).pow(2)]
    }
}

/// Elements of one matrix's update and Gram matrix.
fn footprint([m, n]: [usize; 2]) -> usize {
    m * n + m.min(n).pow(2)
}

/// How many matrices are orthogonalised together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Batching {
    /// One matrix at a time, as on a CPU: how it is rounded does not depend on the rank's other matrices.
    Single,
    /// As many of a shape as take no more memory than the largest matrix, whose GEMMs fill a GPU alone, or than
    /// [`BATCH_ELEMENTS`].
    Together,
}

/// Elements of updates and Gram matrices that are orthogonalised together even if the largest matrix has fewer: the
/// time of a small model's step is that of its launches. At most 64 MiB of BF16, every second iterate included.
const BATCH_ELEMENTS: usize = 1 << 24;

/// Returns the batches of the projections in a rank's shard, shape by shape.
fn batches(layout: &ParameterLayout, batching: Batching, shard: &Shard) -> Vec<MatrixBatch> {
    let projections = layout.by_offset().filter(|parameter| parameter.spec.kind == ParameterKind::Projection);
    let mut by_shape: Vec<MatrixBatch> = Vec::new();
    let is_own = |tensor: &HfTensor| shard.position_of(&(tensor.offset..tensor.offset + tensor.elements)).is_some();
    for tensor in projections.flat_map(Parameter::hf_tensors).filter(is_own) {
        let shape = [tensor.shape[0], tensor.shape[1]];
        match by_shape.iter_mut().find(|batch| batch.shape == shape) {
            Some(batch) => batch.offsets.push(tensor.offset),
            None => by_shape.push(MatrixBatch { shape, offsets: vec![tensor.offset] }),
        }
    }
    let room = by_shape.iter().map(|batch| footprint(batch.shape)).fold(BATCH_ELEMENTS, usize::max);
    let divide = |MatrixBatch { shape, offsets }: MatrixBatch| {
        let matrices = match batching {
            Batching::Single => 1,
            Batching::Together => room / footprint(shape),
        };
        let batch = |offsets: &[usize]| MatrixBatch { shape, offsets: offsets.to_vec() };
        offsets.chunks(matrices).map(batch).collect::<Vec<_>>()
    };
    by_shape.into_iter().flat_map(divide).collect()
}

/// FLOPs of one step of Muon for these parameters: 5 iterations of two GEMMs [S, S, L] and one [S, S, S] per matrix,
/// where S is the smaller and L the larger of its sizes.
pub(crate) fn flops(layout: &ParameterLayout) -> f64 {
    let of_batch = |batch: &MatrixBatch| {
        let (short, long) = (batch.shape[0].min(batch.shape[1]) as f64, batch.shape[0].max(batch.shape[1]) as f64);
        let iteration = 2.0 * short * short * (2.0 * long + short);
        batch.offsets.len() as f64 * muon::ITERATIONS as f64 * iteration
    };
    batches(layout, Batching::Single, &Shard::whole(0..layout.elements())).iter().map(of_batch).sum()
}

/// The matrices of a group with views of their state.
#[derive(Debug)]
pub(super) struct MuonGroup {
    settings: Muon,
    batches: Vec<BoundBatch>,
    workspace: Buffer,
    /// The update of all matrices: hundreds of launches, some shorter than the call that launches them.
    graphs: GraphCache<()>,
}

/// The buffers that matrices are orthogonalised in: those of the largest batch, or a batch's views of them.
#[derive(Debug)]
struct Orthogonalization {
    /// `[B, M, N]`, as `other`.
    update: Buffer,
    other: Buffer,
    /// `[B, S, S]` with S = min(M, N), as `polynomial`.
    gram: Buffer,
    polynomial: Buffer,
}

/// A batch with the views that it is orthogonalised in.
#[derive(Debug)]
struct BoundBatch {
    matrices: Vec<BoundMatrix>,
    buffers: Orthogonalization,
}

/// Views of a matrix's part of every buffer, each `[M, N]`.
#[derive(Debug)]
struct BoundMatrix {
    weight: Buffer,
    low_bits: Option<Buffer>,
    gradient: Buffer,
    momentum: Buffer,
    update: Buffer,
}

impl MuonGroup {
    /// Takes the buffers in which the matrices of a shard are orthogonalised.
    pub(super) fn new(
        flat: &FlatState<'_>,
        settings: Muon,
        device: DeviceKind,
        batching: Batching,
        shard: &Shard,
        arena: &mut Arena,
    ) -> kernels::Result<Self> {
        let batches = batches(flat.decoder.layout(), batching, shard);
        let largest = |index: usize| batches.iter().map(|batch| batch.elements()[index]).max().unwrap_or(0);
        let workspace = batches.iter().map(|batch| muon::workspace_elements(batch.sizes(), device)).max().unwrap_or(0);
        let (dtype, matrices, squares) = (flat.decoder.weights().flat.dtype(), largest(0), largest(1));
        let mut take = |name: &str, dtype, elements| arena.take(name, Category::Scratch, dtype, &[elements]);
        let scratch = Orthogonalization {
            update: take("muon.update", dtype, matrices),
            other: take("muon.other", dtype, matrices),
            gram: take("muon.gram", dtype, squares),
            polynomial: take("muon.polynomial", dtype, squares),
        };
        let workspace = take("muon.workspace", DType::F32, workspace);
        let batches = batches.iter().map(|batch| BoundBatch::new(batch, &scratch, flat));
        Ok(Self {
            settings,
            batches: batches.collect::<kernels::Result<_>>()?,
            workspace,
            graphs: GraphCache::default(),
        })
    }

    /// Updates every matrix once, with the same `weight_decay` in every call.
    pub(super) fn update(&mut self, scalars: &Buffer, weight_decay: f32) -> kernels::Result<()> {
        let Self { settings, batches, workspace, graphs } = self;
        graphs.run(scalars.device(), (), || {
            batches.iter_mut().try_for_each(|batch| batch.update(scalars, settings, weight_decay, workspace))
        })
    }

    /// Captures no graph from now on.
    pub(super) fn run_eagerly(&mut self) {
        self.graphs = GraphCache::eager();
    }

    /// Orthogonalises copies of the weights, so that a GPU chooses its algorithms on numbers like those of a step.
    pub(super) fn warm_up(&mut self) -> kernels::Result<()> {
        let Self { settings, batches, workspace, .. } = self;
        batches.iter_mut().try_for_each(|batch| {
            batch.matrices.iter_mut().try_for_each(|matrix| matrix.update.copy_from(&matrix.weight))?;
            batch.orthogonalize(settings, workspace)
        })
    }
}

impl BoundBatch {
    fn new(batch: &MatrixBatch, scratch: &Orthogonalization, flat: &FlatState<'_>) -> kernels::Result<Self> {
        let ([b, m, n], short) = (batch.sizes(), batch.shape[0].min(batch.shape[1]));
        let update = scratch.update.view(0, &[b, m, n])?;
        let matrix = |(index, &offset): (usize, &usize)| {
            Ok(BoundMatrix {
                weight: flat.decoder.weights().flat.view(offset, &[m, n])?,
                low_bits: flat.low_bits(offset, &[m, n])?,
                gradient: flat.decoder.gradients().view(offset, &[m, n])?,
                momentum: flat.view(MOMENTUM, offset, &[m, n])?,
                update: update.view(index * m * n, &[m, n])?,
            })
        };
        let matrices = batch.offsets.iter().enumerate().map(matrix).collect::<kernels::Result<_>>()?;
        let other = scratch.other.view(0, &[b, m, n])?;
        let [gram, polynomial] =
            [&scratch.gram, &scratch.polynomial].map(|squares| squares.view(0, &[b, short, short]));
        Ok(Self { matrices, buffers: Orthogonalization { update, other, gram: gram?, polynomial: polynomial? } })
    }

    fn update(
        &mut self,
        scalars: &Buffer,
        settings: &Muon,
        weight_decay: f32,
        workspace: &mut Buffer,
    ) -> kernels::Result<()> {
        for matrix in &mut self.matrices {
            let BoundMatrix { momentum, gradient, update, .. } = matrix;
            muon::accumulate_momentum(momentum, gradient, update, scalars, settings)?;
        }
        self.orthogonalize(settings, workspace)?;
        for matrix in &mut self.matrices {
            let BoundMatrix { weight, low_bits, update, .. } = matrix;
            muon::step(weight, low_bits.as_mut(), update, scalars, weight_decay)?;
        }
        Ok(())
    }

    fn orthogonalize(&mut self, settings: &Muon, workspace: &mut Buffer) -> kernels::Result<()> {
        let Orthogonalization { update, other, gram, polynomial } = &mut self.buffers;
        let scratch = muon::Scratch { other_BMN: other, gram_BSS: gram, polynomial_BSS: polynomial, workspace };
        muon::orthogonalize(update, scratch, settings.polynomials)
    }
}

#[cfg(test)]
mod tests {
    use model::ModelShape;
    use run_config::ModelConfig;

    use super::*;

    fn layout(hidden_size: usize) -> ParameterLayout {
        let config = ModelConfig {
            hidden_size,
            intermediate_size: 3 * hidden_size,
            num_layers: 3,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            ..ModelConfig::default()
        };
        ParameterLayout::new(&ModelShape::new(&config, 100))
    }

    fn sizes(layout: &ParameterLayout, batching: Batching) -> Vec<[usize; 3]> {
        batches(layout, batching, &Shard::whole(0..layout.elements())).iter().map(MatrixBatch::sizes).collect()
    }

    #[test]
    fn every_projection_is_in_one_batch_of_its_shape() {
        let layout = layout(64);
        for batching in [Batching::Single, Batching::Together] {
            let batches = batches(&layout, batching, &Shard::whole(0..layout.elements()));
            let mut elements: Vec<(usize, usize)> = Vec::new();
            for MatrixBatch { shape: [m, n], offsets } in &batches {
                elements.extend(offsets.iter().map(|&offset| (offset, m * n)));
            }
            elements.sort_unstable();
            assert_eq!(elements.len(), 3 * 7, "q, k, v, o, gate, up, down of each block");
            assert!(elements.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
            assert_eq!(
                elements.iter().map(|(_, count)| count).sum::<usize>(),
                3 * (64 * (64 + 64 + 64) + 3 * 64 * 192)
            );
        }
    }

    #[test]
    fn matrices_are_batched_on_request_as_far_as_memory_allows() {
        assert!(sizes(&layout(64), Batching::Single).iter().all(|&[matrices, ..]| matrices == 1));
        let all = [[6, 64, 64], [6, 32, 64], [6, 192, 64], [3, 64, 192]];
        assert_eq!(sizes(&layout(64), Batching::Together), all);
        // The largest matrix has more than `BATCH_ELEMENTS`.
        let attention = [vec![[2, 4096, 4096]; 3], vec![[5, 2048, 4096], [1, 2048, 4096]]];
        let expected = [attention.concat(), vec![[1, 12_288, 4096]; 6], vec![[1, 4096, 12_288]; 3]].concat();
        assert_eq!(sizes(&layout(4096), Batching::Together), expected);
    }

    #[test]
    fn flops_are_counted_by_hand() {
        let one = |short: f64, long: f64| 5.0 * (4.0 * short * short * long + 2.0 * short.powi(3));
        let block = 2.0 * one(64.0, 64.0) + 2.0 * one(32.0, 64.0) + 3.0 * one(64.0, 192.0);
        assert!((flops(&layout(64)) - 3.0 * block).abs() < 1.0);
    }
}
