//! ZeRO-1: each rank keeps the optimizer's state of its shard of the parameters, and updates that. A step sums the
//! gradients of each shard on its rank, beside the backward pass of its last micro-batch, and afterwards gives every rank
//! the updated weights.

use std::ops::Range;

use kernels::{
    Buffer, DType, accumulate,
    memory::{Arena, Category},
};
use model::{Decoder, ParameterLayout};

use super::{
    gradient_exchange::{ALIGNMENT, Chunk, ExchangeSchedule, Forwarded},
    settings::EngineSettings,
    shard::{Shard, shards},
};
use crate::{
    error::Result,
    ranks::{RankInfo, RankMeter, Ranks},
};

/// The shards of a run's ranks, and the exchange between the ranks.
#[derive(Debug)]
pub struct Sharding {
    meter: RankMeter,
    rank: usize,
    shards: Vec<Shard>,
    schedule: ExchangeSchedule,
    /// The staging buffer for received gradients: a row per other rank, in rank order; none with one rank.
    staging: Option<Buffer>,
}

impl Sharding {
    /// Takes the staging buffer of the gradient exchange; one rank needs none. The ranks are not connected yet.
    pub fn new(layout: &ParameterLayout, settings: EngineSettings, arena: &mut Arena) -> Self {
        let EngineSettings { device, rank_info: RankInfo { rank, world_size, .. }, .. } = settings;
        let (shards, meter) = (shards(layout, world_size), RankMeter::default());
        if world_size == 1 {
            return Self { meter, rank, shards, schedule: ExchangeSchedule::default(), staging: None };
        }
        let schedule = ExchangeSchedule::new(layout, &shards, device);
        let staging = [world_size - 1, schedule.width];
        let staging = arena.take("gradients.staging", Category::Scratch, DType::F32, &staging);
        Self { meter, rank, shards, schedule, staging: Some(staging) }
    }

    /// The parameters that this rank updates.
    pub(super) fn own_shard(&self) -> &Shard {
        &self.shards[self.rank]
    }

    /// Connects the ranks.
    pub fn connect(&mut self, ranks: Ranks) {
        self.meter = RankMeter::new(ranks);
    }

    /// The ranks, and the exchange between them.
    pub fn ranks(&self) -> &Ranks {
        self.meter.ranks()
    }

    /// The meter of this rank's steps.
    pub fn meter(&self) -> &RankMeter {
        &self.meter
    }

    /// The meter, to begin and end steps with.
    pub fn meter_mut(&mut self) -> &mut RankMeter {
        &mut self.meter
    }

    /// Begins the reduce-scatter of a step's gradients: each rank gets the sums of its shard, and its other gradients
    /// are of no use afterwards.
    pub(super) fn begin_reduction(&self) -> Reduction<'_> {
        Reduction { sharding: self, next_chunk: 0, in_flight: None }
    }

    /// Sends this rank's updated weights to all others and receives theirs (all-gather).
    pub(super) fn gather_weights(&self, decoder: &Decoder) -> Result<()> {
        let Some(exchange) = self.ranks().exchange() else { return Ok(()) };
        let own = exchange.rank_info().rank;
        let (mut outgoing, mut incoming) = (Vec::new(), Vec::new());
        for (rank, _) in self.shards.iter().enumerate().filter(|(rank, _)| *rank != own) {
            for (parcels, owner) in [(&mut outgoing, own), (&mut incoming, rank)] {
                for range in self.shards[owner].ranges() {
                    parcels.push((rank, decoder.weights().flat.view(range.start, &[range.len()])?));
                }
            }
        }
        exchange.swap(&outgoing, &incoming)
    }
}

/// The reduce-scatter of a step's gradients, in progress. The ranks begin the same chunks in the same order.
#[derive(Debug)]
pub(super) struct Reduction<'a> {
    sharding: &'a Sharding,
    /// How many chunks have begun.
    next_chunk: usize,
    in_flight: Option<&'a Chunk>,
}

impl Reduction<'_> {
    /// Ends the exchange that has overlapped with a part of the last micro-batch, and begins the next one, of gradients
    /// that are complete by then. To be called after each part.
    pub(super) fn after_part(&mut self, decoder: &Decoder, part: usize) -> Result<()> {
        self.end_chunk(decoder)?;
        self.begin_chunk(decoder, part)
    }

    /// Exchanges and sums the remaining chunks, once all gradients are complete.
    pub(super) fn finish(mut self, decoder: &Decoder) -> Result<()> {
        while self.in_flight.is_some() || self.next_chunk < self.sharding.schedule.chunks.len() {
            self.after_part(decoder, usize::MAX)?;
        }
        self.forward(decoder)
    }

    /// Exchanges the ranges that one rank has summed for another ([`Forwarded`]).
    fn forward(&self, decoder: &Decoder) -> Result<()> {
        let Sharding { schedule: ExchangeSchedule { forwarded, .. }, .. } = self.sharding;
        let Some(exchange) = self.sharding.ranks().exchange().filter(|_| !forwarded.is_empty()) else { return Ok(()) };
        let (own, mut outgoing, mut incoming) = (exchange.rank_info().rank, Vec::new(), Vec::new());
        for Forwarded { from, to, range } in forwarded {
            let gradients = || decoder.gradients().view(range.start, &[range.len()]);
            if *from == own {
                outgoing.push((*to, gradients()?));
            } else if *to == own {
                incoming.push((*from, gradients()?));
            }
        }
        exchange.swap(&outgoing, &incoming)
    }

    fn begin_chunk(&mut self, decoder: &Decoder, part: usize) -> Result<()> {
        let Sharding { schedule: ExchangeSchedule { chunks, .. }, staging, .. } = self.sharding;
        let (Some(exchange), Some(staging)) = (self.sharding.ranks().exchange(), staging) else { return Ok(()) };
        let Some(chunk) = chunks.get(self.next_chunk).filter(|chunk| chunk.part <= part) else { return Ok(()) };
        let (own, mut outgoing, mut incoming) = (exchange.rank_info().rank, Vec::new(), Vec::new());
        for (rank, ranges) in chunk.of_ranks.iter().enumerate().filter(|(rank, _)| *rank != own) {
            for range in ranges {
                outgoing.push((rank, decoder.gradients().view(range.start, &[range.len()])?));
            }
            for (range, position) in positions(&chunk.of_ranks[own]) {
                incoming.push((rank, row_part(staging, rank, own, position, range.len())?));
            }
        }
        exchange.begin_swap(&outgoing, &incoming)?;
        (self.next_chunk, self.in_flight) = (self.next_chunk + 1, Some(chunk));
        Ok(())
    }

    /// Ends the exchange in flight and sums this rank's gradients over all ranks, as a binary tree of neighbours.
    fn end_chunk(&mut self, decoder: &Decoder) -> Result<()> {
        let (Some(exchange), Some(staging)) = (self.sharding.ranks().exchange(), &self.sharding.staging) else {
            return Ok(());
        };
        let Some(chunk) = self.in_flight.take() else { return Ok(()) };
        exchange.end_swap()?;
        let RankInfo { rank: own, world_size, .. } = exchange.rank_info();
        for (range, position) in positions(&chunk.of_ranks[own]) {
            let mut sum = decoder.gradients().view(range.start, &[range.len()])?;
            let part = |rank| match rank {
                _ if rank == own => Ok(sum.clone()),
                _ => row_part(staging, rank, own, position, range.len()),
            };
            let first = sum_tree((0..world_size).map(part).collect::<Result<_>>()?)?;
            if first.address() != sum.address() {
                sum.copy_from(&first)?;
            }
        }
        Ok(())
    }
}

/// Ranges of a chunk with their positions in a row of the staging buffer.
fn positions(ranges: &[Range<usize>]) -> impl Iterator<Item = (&Range<usize>, usize)> {
    ranges.iter().scan(0, |next, range| {
        let position = *next;
        *next += range.len().next_multiple_of(ALIGNMENT);
        Some((range, position))
    })
}

/// Returns a view of the staging buffer of rank `own`: `elements` from `position` on in the row of another rank.
fn row_part(staging: &Buffer, rank: usize, own: usize, position: usize, elements: usize) -> Result<Buffer> {
    let row = if rank < own { rank } else { rank - 1 };
    Ok(staging.view(row * staging.shape()[1] + position, &[elements])?)
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

    use super::*;

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
}
