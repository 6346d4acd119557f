//! Sums a step in an order that does not depend on the number of ranks (`runtime.deterministic_reduction`).
//!
//! The micro-batches of a step are V virtual shards, V a power of two. Each is summed in the order of its
//! micro-batches, and the V sums are the leaves of a binary tree: (s0 + s1) + (s2 + s3) for V = 4. One of R ranks
//! computes V / R neighbouring ones, which are a subtree of their own, and the exchange sums the ranks' subtrees as the
//! rest of the tree. The gradient norm is summed over tensors, which no shard of the optimizer's state cuts.

use std::ops::Range;

use kernels::{
    Buffer, DType, accumulate, grad_norm,
    memory::{Arena, Category},
};
use model::{Decoder, Parameter};

use super::{optimizer::SumOverRanks, shard::Shard};
use crate::{error::Result, ranks::RankInfo};

/// Sums the gradients, losses and squares of a step as a fixed tree.
#[derive(Debug)]
pub struct TreeReduction {
    virtual_shards: usize,
    /// Buffer i holds the summed gradients of 2^i virtual shards.
    partial_sums: Vec<Buffer>,
    /// The index of each tensor that this rank updates, among all that train, and its gradient.
    tensors: Vec<(usize, Buffer)>,
    /// The loss of each virtual shard, then the squared gradient norm of each tensor; zero for those of other ranks.
    terms: Vec<f64>,
}

impl TreeReduction {
    /// Takes the buffers of a rank that computes its share of this many virtual shards; `shard` are the parameters that
    /// it updates.
    pub fn new(
        decoder: &Decoder,
        shard: &Shard,
        virtual_shards: usize,
        rank_info: RankInfo,
        arena: &mut Arena,
    ) -> Result<Self> {
        let levels = (virtual_shards / rank_info.world_size).max(1).ilog2();
        let elements = [decoder.layout().trainable_elements()];
        let mut take =
            |level| arena.take(format!("gradients.partial.{level}"), Category::Gradients, DType::F32, &elements);
        let partial_sums = (0..levels).map(&mut take).collect();
        let (layout, trained) = (decoder.layout(), decoder.layout().trainable_elements());
        let tensors = layout.by_offset().flat_map(Parameter::hf_tensors).filter(|tensor| tensor.offset < trained);
        let mut own = Vec::new();
        let mut count = 0;
        for tensor in tensors {
            if shard.position_of(&(tensor.offset..tensor.offset + tensor.elements)).is_some() {
                own.push((count, decoder.gradients().view(tensor.offset, &[tensor.elements])?));
            }
            count += 1;
        }
        Ok(Self { virtual_shards, partial_sums, tensors: own, terms: vec![0.0; virtual_shards + count] })
    }

    /// Virtual shards of a step.
    pub fn virtual_shards(&self) -> usize {
        self.virtual_shards
    }

    /// Adds the loss and the gradients that the decoder has accumulated over virtual shard `shard`, one of this rank's
    /// `own`, which are added in ascending order. After the last one the decoder's gradients are the sum of all.
    pub(super) fn add(&mut self, decoder: &mut Decoder, shard: usize, own: &Range<usize>) -> Result<()> {
        self.terms[shard] = f64::from(decoder.loss().read::<f32>()?[0]);
        let position = shard - own.start;
        // As a binary counter: a sum waits until the neighbour of its size is there.
        let complete = position.trailing_ones() as usize;
        for sum in &self.partial_sums[..complete] {
            accumulate::forward(decoder.gradients_mut(), sum)?;
        }
        match self.partial_sums.get_mut(complete) {
            Some(waiting) if position + 1 < own.len() => Ok(waiting.copy_from(decoder.gradients())?),
            _ => Ok(()),
        }
    }

    /// Writes the norm of all gradients and the loss of all virtual shards, each the same bits on every rank.
    pub(super) fn norm_and_loss(
        &mut self,
        sum_over_ranks: Option<SumOverRanks<'_>>,
        norm: &mut Buffer,
        loss: &mut Buffer,
        workspace: &mut Buffer,
    ) -> Result<()> {
        let Self { virtual_shards, tensors, terms, .. } = self;
        for (tensor, gradients) in tensors {
            grad_norm::forward(gradients, norm, workspace)?;
            terms[*virtual_shards + *tensor] = f64::from(norm.read::<f32>()?[0]).powi(2);
        }
        let mut all = terms.clone();
        if let Some(sum_over_ranks) = sum_over_ranks {
            // Only one rank has a number: adding the zeros of the others changes no bit of it.
            sum_over_ranks(&mut all)?;
        }
        let (losses, squares) = all.split_at(*virtual_shards);
        norm.write(&[squares.iter().sum::<f64>().sqrt() as f32])?;
        Ok(loss.write(&[tree_sum(losses) as f32])?)
    }
}

/// Sums 2^n numbers as a binary tree of neighbours.
fn tree_sum(numbers: &[f64]) -> f64 {
    match numbers {
        [] => 0.0,
        [one] => *one,
        _ => {
            let (left, right) = numbers.split_at(numbers.len() / 2);
            tree_sum(left) + tree_sum(right)
        }
    }
}

#[cfg(test)]
mod tests {
    use kernels::{Device, DeviceKind, memory::allocate};
    use model::{DecoderSettings, ModelShape};
    use run_config::{ActivationRecompute, ModelConfig, Precision};

    use super::*;

    /// The decoder of one rank and its tree reduction.
    fn rank(virtual_shards: usize, world_size: usize) -> (Decoder, TreeReduction) {
        let shape = ModelShape::new(&ModelConfig { num_layers: 1, ..ModelConfig::default() }, 32);
        let settings = DecoderSettings {
            batch: 1,
            sequence_length: 4,
            precision: Precision::Fp32,
            fp8: None,
            recompute: ActivationRecompute::None,
            training: true,
            device: DeviceKind::Cpu,
            z_loss: 0.0,
        };
        let rank_info = RankInfo { rank: 0, world_size, local_rank: 0, local_world_size: world_size };
        let new = |arena: &mut Arena| {
            let decoder = Decoder::new(&shape, &settings, arena)?;
            let all = Shard::whole(0..decoder.layout().trainable_elements());
            let reduction = TreeReduction::new(&decoder, &all, virtual_shards, rank_info, arena)?;
            Result::Ok((decoder, reduction))
        };
        allocate(&Device::Cpu, new).unwrap()
    }

    fn leaf(shard: usize) -> f32 {
        1.0 / (shard as f32 + 3.0)
    }

    /// Returns the rank's summed gradients after virtual shards with gradients of [`leaf`] each, and the reduction.
    fn sum_of(own: &Range<usize>, virtual_shards: usize, world_size: usize) -> (f32, TreeReduction) {
        let (mut decoder, mut reduction) = rank(virtual_shards, world_size);
        let elements = decoder.gradients().elements();
        for shard in own.clone() {
            decoder.gradients_mut().write(&vec![leaf(shard); elements]).unwrap();
            decoder.loss().view(0, &[1]).unwrap().write(&[leaf(shard)]).unwrap();
            reduction.add(&mut decoder, shard, own).unwrap();
        }
        let sums = decoder.gradients().read::<f32>().unwrap();
        assert!(sums.iter().all(|sum| sum.to_bits() == sums[0].to_bits()));
        (sums[0], reduction)
    }

    #[test]
    fn ranks_sum_subtrees_of_one_tree() {
        let whole = ((leaf(0) + leaf(1)) + (leaf(2) + leaf(3))) + ((leaf(4) + leaf(5)) + (leaf(6) + leaf(7)));
        let in_order = (1..8).fold(leaf(0), |sum, shard| sum + leaf(shard));
        assert_ne!(whole.to_bits(), in_order.to_bits(), "the order shows");
        assert_eq!(sum_of(&(0..8), 8, 1).0.to_bits(), whole.to_bits());
        let halves = sum_of(&(0..4), 8, 2).0 + sum_of(&(4..8), 8, 2).0;
        assert_eq!(halves.to_bits(), whole.to_bits());
        let quarters = [0..2, 2..4, 4..6, 6..8].map(|own| sum_of(&own, 8, 4).0);
        assert_eq!(((quarters[0] + quarters[1]) + (quarters[2] + quarters[3])).to_bits(), whole.to_bits());
        assert_eq!(sum_of(&(5..6), 8, 8).0.to_bits(), leaf(5).to_bits());
    }

    #[test]
    fn a_rank_holds_one_buffer_per_level_of_its_subtree() {
        for (virtual_shards, world_size, buffers) in [(1, 1, 0), (4, 1, 2), (4, 2, 1), (4, 4, 0), (8, 1, 3), (8, 2, 2)]
        {
            assert_eq!(rank(virtual_shards, world_size).1.partial_sums.len(), buffers);
        }
    }

    #[test]
    fn the_loss_is_summed_as_a_tree_too() {
        let numbers = [1.0, 1e100, -1e100, 1.0];
        assert_eq!(tree_sum(&numbers).to_bits(), 0_f64.to_bits(), "in order it would be 1");
        let terms = sum_of(&(0..4), 4, 1).1.terms;
        assert_eq!(terms[..4], [0, 1, 2, 3].map(|shard| f64::from(leaf(shard))));
    }
}
