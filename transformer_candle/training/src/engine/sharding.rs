//! ZeRO-1: each rank keeps the optimizer's state of its shard of the parameters, and updates that. A step sums the
//! gradients of each shard on its rank, and afterwards gives every rank the updated weights.

use std::ops::Range;

use kernels::{
    Buffer, DType, accumulate,
    memory::{Arena, BufferId, Category, Plan},
};
use model::{Decoder, Parameter, ParameterLayout, hugging_face::HfTensor};

use crate::{
    error::Result,
    ranks::{Exchange, Parcel, RankInfo, RankMeter, Ranks},
};

/// Elements of a bucket of gradients from each other rank: 4 MiB, large beside what a message costs by itself.
const BUCKET: usize = 1 << 20;
/// Rows of the staging buffer begin at multiples of this, as a GPU's kernels ask for: 64 bytes.
const ROW_MULTIPLE: usize = 16;

/// Divides the flat buffers of what trains between the ranks, in ranges of whole tensors of about equal size: Muon
/// needs whole matrices, and any number of ranks can read what another number has saved. Ranks beyond the number of
/// tensors get nothing.
pub fn shards(layout: &ParameterLayout, world_size: usize) -> Vec<Range<usize>> {
    let elements = layout.trainable_elements();
    let tensors = layout.by_offset().flat_map(Parameter::hf_tensors);
    let starts: Vec<usize> =
        tensors.map(|HfTensor { offset, .. }| offset).filter(|&offset| offset < elements).collect();
    let mut bounds = vec![0];
    for rank in 1..world_size {
        let ideal = elements / world_size * rank;
        // Every rank after this one needs a tensor as well.
        let last = starts.len().saturating_sub(world_size - rank);
        let first = starts.partition_point(|start| *start <= bounds[rank - 1]);
        let candidates = starts.get(first..=last.max(first)).unwrap_or_default();
        let nearest = candidates.iter().min_by_key(|start| start.abs_diff(ideal));
        bounds.push(nearest.copied().unwrap_or(elements));
    }
    bounds.push(elements);
    bounds.windows(2).map(|bounds| bounds[0]..bounds[1]).collect()
}

/// The rank with the largest shard, which needs the most memory.
pub(crate) fn largest_shard(layout: &ParameterLayout, world_size: usize) -> usize {
    let shards = shards(layout, world_size);
    (0..world_size).max_by_key(|rank| (shards[*rank].len(), world_size - rank)).unwrap_or_default()
}

/// The shards of a run's ranks and the buffer of their exchange in a memory plan.
#[derive(Clone, Debug)]
pub struct ShardingPlan {
    shards: Vec<Range<usize>>,
    rank: usize,
    staging: Option<BufferId>,
}

impl ShardingPlan {
    /// Adds what the ranks exchange gradients through; one rank needs nothing.
    pub fn add_to(plan: &mut Plan, layout: &ParameterLayout, rank_info: RankInfo) -> Self {
        let shards = shards(layout, rank_info.world_size);
        // The same on all ranks, which send what the others expect.
        let width = shards.iter().map(ExactSizeIterator::len).max().unwrap_or(0).min(BUCKET);
        let width = width.next_multiple_of(ROW_MULTIPLE);
        let staging = (rank_info.world_size > 1)
            .then(|| plan.add("gradients.staging", Category::Scratch, DType::F32, &[rank_info.world_size - 1, width]));
        Self { shards, rank: rank_info.rank, staging }
    }

    /// The parameters that this rank updates.
    pub(super) fn own_shard(&self) -> Range<usize> {
        self.shards[self.rank].clone()
    }
}

/// The shards of a run's ranks, and what connects these.
#[derive(Debug)]
pub struct Sharding {
    meter: RankMeter,
    shards: Vec<Range<usize>>,
    staging: Option<Buffer>,
}

impl Sharding {
    /// Takes its buffer from the arena. The ranks are not connected yet.
    pub fn bind(plan: &ShardingPlan, arena: &Arena) -> Self {
        let staging = plan.staging.map(|id| arena.buffer(id));
        Self { meter: RankMeter::default(), shards: plan.shards.clone(), staging }
    }

    /// Connects the ranks.
    pub fn connect(&mut self, ranks: Ranks) {
        self.meter = RankMeter::new(ranks);
    }

    /// What connects the ranks.
    pub fn ranks(&self) -> &Ranks {
        self.meter.ranks()
    }

    /// What measures the steps of the ranks.
    pub fn meter(&self) -> &RankMeter {
        &self.meter
    }

    /// The same, to begin and end steps.
    pub fn meter_mut(&mut self) -> &mut RankMeter {
        &mut self.meter
    }

    /// Sums the gradients of this rank's shard over all ranks, as a binary tree of neighbouring ranks; the rest of the
    /// gradients is of no use afterwards. The sum is made in buckets, for which the staging buffer has a row per other
    /// rank.
    pub(super) fn reduce_gradients(&self, decoder: &Decoder) -> Result<()> {
        let (Some(exchange), Some(staging)) = (self.ranks().exchange(), &self.staging) else { return Ok(()) };
        let width = staging.shape()[1];
        let longest = self.shards.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        for offset in (0..longest).step_by(width) {
            let bucket = |shard: &Range<usize>| {
                let end = |elements: usize| (shard.start + elements).min(shard.end);
                let elements = end(offset + width) - end(offset);
                decoder.gradients().view(end(offset), &[elements])
            };
            let parts = self.shards.iter().map(bucket).collect::<kernels::Result<Vec<_>>>()?;
            sum_bucket(exchange, parts, staging)?;
        }
        Ok(())
    }

    /// Gives every rank the weights that each has updated.
    pub(super) fn gather_weights(&self, decoder: &Decoder) -> Result<()> {
        let Some(exchange) = self.ranks().exchange() else { return Ok(()) };
        let weights = |shard: &Range<usize>| decoder.weights().view(shard.start, &[shard.len()]);
        let parts = self.shards.iter().map(weights).collect::<kernels::Result<Vec<_>>>()?;
        let own = exchange.rank_info().rank;
        let sent = parts.iter().enumerate().map(|(rank, _)| (rank, parts[own].clone()));
        swap(exchange, sent.collect(), parts.iter().cloned().enumerate().collect())
    }
}

/// Sends each rank its bucket of this rank's gradients, `parts`, and adds up what all ranks have for this one's.
fn sum_bucket(exchange: &dyn Exchange, mut parts: Vec<Buffer>, staging: &Buffer) -> Result<()> {
    let RankInfo { rank, world_size, .. } = exchange.rank_info();
    let mut own = parts[rank].clone();
    let (width, elements) = (staging.shape()[1], own.elements());
    let sent = parts.iter().cloned().enumerate().collect();
    for (row, other) in (0..world_size).filter(|other| *other != rank).enumerate() {
        parts[other] = staging.view(row * width, &[elements])?;
    }
    swap(exchange, sent, parts.iter().cloned().enumerate().collect())?;
    let first = sum_tree(parts)?;
    if first.address() != own.address() {
        own.copy_from(&first)?;
    }
    Ok(())
}

/// Exchanges what goes to and comes from other ranks, and is not empty.
fn swap(exchange: &dyn Exchange, mut sent: Vec<Parcel>, mut received: Vec<Parcel>) -> Result<()> {
    let own = exchange.rank_info().rank;
    for parcels in [&mut sent, &mut received] {
        parcels.retain(|(rank, part)| *rank != own && part.elements() > 0);
    }
    exchange.swap(&sent, &received)
}

/// Adds up buffers as a binary tree of neighbours, which overwrites them; returns the first one, which has the sum.
fn sum_tree(mut parts: Vec<Buffer>) -> Result<Buffer> {
    while parts.len() > 1 {
        for pair in parts.chunks_exact_mut(2) {
            let (left, right) = pair.split_at_mut(1);
            accumulate::forward(&mut left[0], &right[0])?;
        }
        parts = parts.into_iter().step_by(2).collect();
    }
    Ok(parts.swap_remove(0))
}

#[cfg(test)]
mod tests {
    use kernels::Device;
    use model::ModelShape;
    use run_config::ModelConfig;

    use super::*;

    fn layout() -> ParameterLayout {
        ParameterLayout::new(&ModelShape::new(&ModelConfig { num_layers: 3, ..ModelConfig::default() }, 1000))
    }

    #[test]
    fn ranks_are_summed_as_a_tree_of_neighbours() {
        let leaf = |rank: usize| 1.0 / (rank as f32 + 3.0);
        let sum = |ranks: usize| {
            let part = |rank| {
                let mut part = Buffer::zeros(&[3], DType::F32, &Device::Cpu).unwrap();
                part.write(&[leaf(rank); 3]).unwrap();
                part
            };
            sum_tree((0..ranks).map(part).collect()).unwrap().read::<f32>().unwrap()
        };
        let four = (leaf(0) + leaf(1)) + (leaf(2) + leaf(3));
        assert_eq!(sum(1), [leaf(0); 3]);
        assert_eq!(sum(3), [(leaf(0) + leaf(1)) + leaf(2); 3]);
        assert_eq!(sum(4), [four; 3]);
        assert_eq!(sum(5), [four + leaf(4); 3]);
        assert_eq!(sum(7), [four + ((leaf(4) + leaf(5)) + leaf(6)); 3]);
    }

    #[test]
    fn shards_hold_every_tensor_whole_and_once() {
        let layout = layout();
        let tensors: Vec<HfTensor> = layout.parameters().iter().flat_map(Parameter::hf_tensors).collect();
        let largest = tensors.iter().map(|tensor| tensor.elements).max().unwrap();
        for world_size in 1..=tensors.len() {
            let shards = shards(&layout, world_size);
            assert_eq!(shards.len(), world_size);
            assert_eq!((shards[0].start, shards[world_size - 1].end), (0, layout.elements()));
            assert!(shards.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(shards.iter().all(|shard| shard.len() <= layout.elements().div_ceil(world_size) + 2 * largest));
            for HfTensor { offset, elements, name, .. } in &tensors {
                let owners = shards.iter().filter(|shard| shard.start <= *offset && offset + elements <= shard.end);
                assert_eq!(owners.count(), 1, "{name} with {world_size} ranks");
            }
            assert!(shards.iter().all(|shard| !shard.is_empty()), "{world_size} ranks");
        }
    }

    #[test]
    fn ranks_beyond_the_tensors_get_nothing() {
        let layout = layout();
        let shards = shards(&layout, 1000);
        assert_eq!(shards.iter().map(ExactSizeIterator::len).sum::<usize>(), layout.elements());
        assert!(shards[999].is_empty());
    }
}
