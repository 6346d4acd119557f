//! ZeRO-1: each rank keeps the optimizer's state of its shard of the parameters, and updates that. A step sums the
//! gradients of each shard on its rank, and afterwards gives every rank the updated weights.

use std::ops::Range;

use kernels::{
    Buffer, DType,
    memory::{Arena, BufferId, Category, Plan},
};
use model::{Decoder, Parameter, ParameterLayout, hugging_face::HfTensor};

use crate::{
    error::Result,
    ranks::{Place, RankMeter, Ranks},
};

/// Elements of a bucket of gradients from each other rank: 4 MiB, large beside what a message costs by itself.
const BUCKET: usize = 1 << 20;

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
    pub fn add_to(plan: &mut Plan, layout: &ParameterLayout, place: Place) -> Self {
        let shards = shards(layout, place.world_size);
        // The same on all ranks, which send what the others expect.
        let width = shards.iter().map(ExactSizeIterator::len).max().unwrap_or(0).min(BUCKET);
        let staging = (place.world_size > 1)
            .then(|| plan.add("gradients.staging", Category::Scratch, DType::F32, &[place.world_size - 1, width]));
        Self { shards, rank: place.rank, staging }
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

    /// Sums the gradients of this rank's shard over all ranks.
    pub(super) fn reduce_gradients(&self, decoder: &Decoder) -> Result<()> {
        match (self.ranks().exchange(), &self.staging) {
            (Some(exchange), Some(staging)) => exchange.reduce_gradients(decoder.gradients(), staging, &self.shards),
            _ => Ok(()),
        }
    }

    /// Gives every rank the weights that each has updated.
    pub(super) fn gather_weights(&self, decoder: &Decoder) -> Result<()> {
        self.ranks().exchange().map_or(Ok(()), |exchange| exchange.gather_weights(decoder.weights(), &self.shards))
    }
}

#[cfg(test)]
mod tests {
    use model::ModelShape;
    use run_config::ModelConfig;

    use super::*;

    fn layout() -> ParameterLayout {
        ParameterLayout::new(&ModelShape::new(&ModelConfig { num_layers: 3, ..ModelConfig::default() }, 1000))
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
