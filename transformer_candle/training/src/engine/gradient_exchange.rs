//! The schedule by which the ranks exchange the gradients of a step: each as soon as the backward pass has computed it.

use std::{collections::VecDeque, ops::Range};

use kernels::DeviceKind;
use model::ParameterLayout;

use super::shard::{Shard, TrainedTensor, shards, trained_tensors};

/// Ranges in a row of the staging buffer begin at multiples of this many f32 elements (64 bytes), for GPU kernels.
pub(super) const ALIGNMENT: usize = 16;
/// Fewest elements that a rank sums in an exchange before all gradients are complete: 4 MiB, so that the fixed cost of
/// a message is small beside them.
const LEAST_ELEMENTS: usize = 1 << 20;

/// The schedule by which the gradients of a step are summed over the ranks, the same on every rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ExchangeSchedule {
    /// The chunks, in the order of their exchange. After each part of the last micro-batch the next chunk's exchange
    /// begins, if enough gradients are complete, and overlaps with the computation of the next part; after the last
    /// part the remaining ones follow one another.
    pub(super) chunks: Vec<Chunk>,
    /// Ranges that a rank sums for another one, which updates them and receives the sums afterwards.
    pub(super) forwarded: Vec<Forwarded>,
    /// Elements of a row of the staging buffer, into which a rank receives what it sums from one other rank.
    pub(super) width: usize,
}

/// Gradients that are exchanged together, up to a row of the staging buffer for every rank, so that all links are in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// The part of the last micro-batch after which they are complete.
    pub(super) part: usize,
    /// The ranges of the flat gradients that each rank sums, by rank.
    pub(super) of_ranks: Vec<Vec<Range<usize>>>,
}

/// A summed part of a gradient that goes from one rank to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Forwarded {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) range: Range<usize>,
}

impl ExchangeSchedule {
    /// Plans the exchange. Each rank sums its shard, except for a large tensor that only the last part completes, the
    /// embedding: the links to its rank would be busy with it when no backward pass is left, and all others idle. On
    /// more than two GPUs every rank sums a slice of it. Of two, one would send as much as before, and on a CPU there
    /// is one link.
    pub(super) fn new(layout: &ParameterLayout, shards: &[Shard], device: DeviceKind) -> Self {
        let largest = shards.iter().map(Shard::len).max().unwrap_or(0);
        let width = largest.div_ceil(layout.backward_parts()).max(LEAST_ELEMENTS).min(largest);
        Self::with_width(layout, shards, device, width.next_multiple_of(ALIGNMENT), LEAST_ELEMENTS)
    }

    /// Plans rows of `width` elements; before the last part a chunk has at least `least` elements of one rank.
    fn with_width(layout: &ParameterLayout, shards: &[Shard], device: DeviceKind, width: usize, least: usize) -> Self {
        let (last, ranks) = (layout.backward_parts() - 1, shards.len());
        let mut schedule = Self { width, ..Self::default() };
        let mut queues = vec![Queue::default(); ranks];
        for TrainedTensor { range, completed_by } in trained_tensors(layout) {
            let owner = shards.iter().position(|shard| shard.position_of(&range).is_some());
            let owner = owner.expect("every tensor is in a shard");
            if device == DeviceKind::Cpu || ranks <= 2 || completed_by < last || range.len() <= width {
                queues[owner].push(completed_by, range);
                continue;
            }
            for (rank, slice) in slices(&range, ranks).enumerate() {
                queues[rank].push(completed_by, slice.clone());
                if rank != owner && !slice.is_empty() {
                    schedule.forwarded.push(Forwarded { from: rank, to: owner, range: slice });
                }
            }
        }
        queues.iter_mut().for_each(Queue::sort);
        let mut part = 0;
        while queues.iter().any(|queue| !queue.0.is_empty()) {
            if part == last || queues.iter().any(|queue| queue.complete(part) >= least) {
                let of_ranks = queues.iter_mut().map(|queue| queue.take(part, width)).collect();
                schedule.chunks.push(Chunk { part, of_ranks });
            }
            part = last.min(part + 1);
        }
        schedule
    }
}

/// Splits a range into slices of equal size, rounded up to the alignment; the last ones may be shorter or empty.
fn slices(range: &Range<usize>, count: usize) -> impl Iterator<Item = Range<usize>> {
    let elements = range.len().div_ceil(count).next_multiple_of(ALIGNMENT);
    let Range { start, end } = *range;
    (0..count).map(move |index| end.min(start + index * elements)..end.min(start + (index + 1) * elements))
}

/// The ranges that a rank has yet to sum, each with the part that completes it, in the order of these parts.
#[derive(Clone, Default)]
struct Queue(VecDeque<(usize, Range<usize>)>);

impl Queue {
    fn push(&mut self, completed_by: usize, range: Range<usize>) {
        if !range.is_empty() {
            self.0.push_back((completed_by, range));
        }
    }

    fn sort(&mut self) {
        self.0.make_contiguous().sort_by_key(|(completed_by, range)| (*completed_by, range.start));
    }

    /// Returns how many elements are complete after a part.
    fn complete(&self, part: usize) -> usize {
        self.0.iter().take_while(|(completed_by, _)| *completed_by <= part).map(|(_, range)| range.len()).sum()
    }

    /// Takes up to `width` elements of what is complete after a part.
    fn take(&mut self, part: usize, width: usize) -> Vec<Range<usize>> {
        let (mut ranges, mut room) = (Vec::new(), width);
        while let Some((completed_by, range)) = self.0.front_mut() {
            if *completed_by > part || room == 0 {
                break;
            }
            let end = range.end.min(range.start + room);
            ranges.push(range.start..end);
            room = room.saturating_sub((end - range.start).next_multiple_of(ALIGNMENT));
            range.start = end;
            if end == range.end {
                self.0.pop_front();
            }
        }
        ranges
    }
}

/// Returns the fraction of a step's gradient exchange that remains when the backward pass has ended, even if that takes
/// long: on `world_size` GPUs, by the elements that the busiest rank receives.
pub(crate) fn share_after_backward(layout: &ParameterLayout, world_size: usize) -> f64 {
    let schedule = ExchangeSchedule::new(layout, &shards(layout, world_size), DeviceKind::Cuda);
    let last = layout.backward_parts() - 1;
    let of_rank = |ranges: &Vec<Range<usize>>| ranges.iter().map(ExactSizeIterator::len).sum::<usize>();
    let busiest = |chunk: &Chunk| chunk.of_ranks.iter().map(of_rank).max().unwrap_or(0);
    let forwarded = schedule.forwarded.iter().map(|forwarded| forwarded.range.len()).max().unwrap_or(0);
    let elements_after =
        schedule.chunks.iter().filter(|chunk| chunk.part == last).map(busiest).sum::<usize>() + forwarded;
    let elements_during = schedule.chunks.iter().filter(|chunk| chunk.part < last).map(busiest).sum::<usize>();
    elements_after as f64 / (elements_after + elements_during).max(1) as f64
}

#[cfg(test)]
mod tests {
    use model::ModelShape;
    use run_config::ModelConfig;

    use super::*;

    fn layout(tie_embeddings: bool) -> ParameterLayout {
        let config = ModelConfig { num_layers: 5, tie_embeddings, ..ModelConfig::default() };
        ParameterLayout::new(&ModelShape::new(&config, 1000))
    }

    fn is_within(range: &Range<usize>, other: &Range<usize>) -> bool {
        other.start <= range.start && range.end <= other.end
    }

    #[test]
    fn every_gradient_is_summed_once_and_complete() {
        let devices = [DeviceKind::Cpu, DeviceKind::Cuda];
        for (tied, ranks, width) in
            [(true, 2, 64), (false, 2, 10_000), (false, 3, 10_000), (true, 8, 64), (true, 8, 1 << 30)]
        {
            for device in devices {
                let layout = layout(tied);
                let (shards, tensors) = (shards(&layout, ranks), trained_tensors(&layout));
                let schedule = ExchangeSchedule::with_width(&layout, &shards, device, width, 1);
                assert!(schedule.chunks.windows(2).all(|pair| pair[0].part <= pair[1].part));
                let mut summed_by = vec![None; layout.elements()];
                for Chunk { part, of_ranks } in &schedule.chunks {
                    for (rank, ranges) in of_ranks.iter().enumerate() {
                        let aligned = |range: &Range<usize>| range.len().next_multiple_of(ALIGNMENT);
                        assert!(ranges.iter().map(aligned).sum::<usize>() <= width);
                        for range in ranges {
                            let tensor = tensors.iter().find(|tensor| is_within(range, &tensor.range)).unwrap();
                            assert!(tensor.completed_by <= *part);
                            assert!(summed_by[range.clone()].iter().all(Option::is_none));
                            summed_by[range.clone()].fill(Some(rank));
                        }
                    }
                }
                for Forwarded { from, to, range } in &schedule.forwarded {
                    assert!(summed_by[range.clone()].iter().all(|rank| *rank == Some(*from)));
                    summed_by[range.clone()].fill(Some(*to));
                }
                assert_eq!(schedule.forwarded.is_empty(), device == DeviceKind::Cpu || ranks == 2 || width == 1 << 30);
                for (rank, shard) in shards.iter().enumerate() {
                    for range in shard.ranges() {
                        assert!(summed_by[range.clone()].iter().all(|by| *by == Some(rank)), "it has what it updates");
                    }
                }
            }
        }
    }

    #[test]
    fn a_small_model_is_exchanged_at_once() {
        let layout = layout(false);
        let schedule = ExchangeSchedule::new(&layout, &shards(&layout, 4), DeviceKind::Cpu);
        assert!(layout.elements() < 4 * LEAST_ELEMENTS);
        assert_eq!(schedule.chunks.len(), 1);
    }

    #[test]
    fn only_what_the_last_part_completes_is_left_at_the_end() {
        let config = ModelConfig { num_layers: 20, tie_embeddings: false, ..ModelConfig::default() };
        let layout = ParameterLayout::new(&ModelShape::new(&config, 1000));
        for ranks in [2, 4] {
            let shards = shards(&layout, ranks);
            let width = layout.elements().div_ceil(ranks * layout.backward_parts()).next_multiple_of(ALIGNMENT);
            let schedule = ExchangeSchedule::with_width(&layout, &shards, DeviceKind::Cuda, width, 1);
            let last = layout.backward_parts() - 1;
            let early_chunks: Vec<&Chunk> = schedule.chunks.iter().filter(|chunk| chunk.part < last).collect();
            let of_chunk = |chunk: &&Chunk| chunk.of_ranks.iter().flatten().map(ExactSizeIterator::len).sum::<usize>();
            let completed_last = trained_tensors(&layout).into_iter().filter(|tensor| tensor.completed_by == last);
            let completed_last = completed_last.map(|tensor| tensor.range.len()).sum::<usize>();
            let remaining = layout.elements() - completed_last - early_chunks.iter().map(of_chunk).sum::<usize>();
            assert!(remaining < layout.elements() / 10, "{remaining} of {} with {ranks} ranks", layout.elements());
            assert!(early_chunks.windows(2).all(|pair| pair[0].part < pair[1].part), "one begins after each part");
        }
    }
}
