//! Divides the parameters between the ranks: each updates its shard, and keeps the optimizer's state of it.

use std::{cmp::Reverse, ops::Range};

use model::{Parameter, ParameterLayout};

/// The ranges of the flat buffers that one rank updates: whole tensors, ascending, with other ranks' between them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shard(Vec<Range<usize>>);

impl Shard {
    /// A shard of one range.
    pub fn whole(range: Range<usize>) -> Self {
        let mut shard = Self::default();
        shard.push(range);
        shard
    }

    /// Its ranges; none is empty.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.0
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.0.iter().map(ExactSizeIterator::len).sum()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the part of the shard that lies in a range.
    #[must_use]
    pub fn overlap(&self, range: &Range<usize>) -> Self {
        let mut overlap = Self::default();
        for own in &self.0 {
            let start = own.start.max(range.start);
            overlap.push(start..own.end.min(range.end).max(start));
        }
        overlap
    }

    /// Returns the offset of `elements` in a buffer of the shard's ranges side by side; none unless one range has all.
    pub fn position_of(&self, elements: &Range<usize>) -> Option<usize> {
        let mut position = 0;
        for own in &self.0 {
            if own.start <= elements.start && elements.end <= own.end {
                return Some(position + elements.start - own.start);
            }
            position += own.len();
        }
        None
    }

    /// Appends a range; one that begins where the last one ends is merged with it.
    fn push(&mut self, range: Range<usize>) {
        match self.0.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.0.push(range),
        }
    }
}

/// A tensor that trains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TrainedTensor {
    /// Its elements of the flat buffers, with the padding up to the next tensor.
    pub(super) range: Range<usize>,
    /// See [`ParameterLayout::completed_by`].
    pub(super) completed_by: usize,
}

/// Returns the tensors that train, in the order of the flat buffers; together they cover all trainable elements.
pub(super) fn trained_tensors(layout: &ParameterLayout) -> Vec<TrainedTensor> {
    let elements = layout.trainable_elements();
    let starts = |parameter: &Parameter| {
        let completed_by = layout.completed_by(parameter);
        parameter.hf_tensors().map(move |tensor| (tensor.offset, completed_by)).collect::<Vec<_>>()
    };
    let starts = layout.by_offset().flat_map(starts).filter(|(start, _)| *start < elements).collect::<Vec<_>>();
    let ends = starts.iter().skip(1).map(|(start, _)| *start).chain([elements]);
    starts
        .iter()
        .zip(ends)
        .map(|(&(start, completed_by), end)| TrainedTensor { range: start..end, completed_by })
        .collect()
}

/// Divides what trains between the ranks, in whole tensors: Muon needs whole matrices, and any number of ranks can read
/// what another number has saved.
///
/// From the largest tensor to the smallest each goes to the rank that has the least so far. So each rank has about the
/// same of every decoder block, and no link between ranks waits while the gradients of a block are exchanged. Ranks
/// beyond the number of tensors get nothing.
pub fn shards(layout: &ParameterLayout, world_size: usize) -> Vec<Shard> {
    let mut tensors = trained_tensors(layout);
    tensors.sort_by_key(|tensor| (Reverse(tensor.range.len()), tensor.range.start));
    let mut shares = vec![(0, Vec::new()); world_size];
    for TrainedTensor { range, .. } in tensors {
        if let Some((elements, ranges)) = shares.iter_mut().min_by_key(|(elements, _)| *elements) {
            *elements += range.len();
            ranges.push(range);
        }
    }
    let shard = |(_, mut ranges): (usize, Vec<Range<usize>>)| {
        ranges.sort_by_key(|range| range.start);
        ranges.into_iter().fold(Shard::default(), |mut shard, range| {
            shard.push(range);
            shard
        })
    };
    shares.into_iter().map(shard).collect()
}

/// The rank with the largest shard, which needs the most memory.
pub(crate) fn largest_shard(layout: &ParameterLayout, world_size: usize) -> usize {
    let shards = shards(layout, world_size);
    (0..world_size).max_by_key(|rank| (shards[*rank].len(), world_size - rank)).unwrap_or_default()
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
        let tensors = trained_tensors(&layout);
        assert!(tensors.windows(2).all(|pair| pair[0].range.end == pair[1].range.start));
        for world_size in 1..=tensors.len() {
            let shards = shards(&layout, world_size);
            assert_eq!(shards.iter().map(Shard::len).sum::<usize>(), layout.elements());
            for TrainedTensor { range, .. } in &tensors {
                let owners = shards.iter().filter(|shard| shard.position_of(range).is_some());
                assert_eq!(owners.count(), 1, "{range:?} with {world_size} ranks");
            }
            assert!(shards.iter().all(|shard| !shard.is_empty()), "{world_size} ranks");
        }
        assert_eq!(shards(&layout, 1), [Shard::whole(0..layout.elements())]);
    }

    #[test]
    fn shards_are_of_about_one_size() {
        let config = ModelConfig { num_layers: 20, tie_embeddings: false, ..ModelConfig::default() };
        let layout = ParameterLayout::new(&ModelShape::new(&config, 1000));
        for world_size in [2, 4, 8] {
            let shards = shards(&layout, world_size);
            let (least, most) = (shards.iter().map(Shard::len).min(), shards.iter().map(Shard::len).max());
            let even = layout.elements() / world_size;
            assert!(most.unwrap() - least.unwrap() < even / 20, "{world_size} ranks: {least:?} to {most:?}");
        }
    }

    #[test]
    fn ranks_beyond_the_tensors_get_nothing() {
        let layout = layout();
        let shards = shards(&layout, 1000);
        assert_eq!(shards.iter().map(Shard::len).sum::<usize>(), layout.elements());
        assert!(shards[999].is_empty());
    }

    #[test]
    fn positions_are_those_of_the_ranges_side_by_side() {
        let shard = Shard(vec![10..20, 30..34]);
        assert_eq!((shard.len(), shard.position_of(&(12..20)), shard.position_of(&(31..33))), (14, Some(2), Some(11)));
        for lacking in [8..12, 18..31, 20..21, 34..35] {
            assert_eq!(shard.position_of(&lacking), None, "{lacking:?}");
        }
        assert_eq!(shard.overlap(&(15..32)), Shard(vec![15..20, 30..32]));
        assert!(shard.overlap(&(20..30)).is_empty());
    }
}
