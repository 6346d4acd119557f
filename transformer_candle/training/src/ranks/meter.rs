//! Measures the times of each rank in a step. The ranks exchange them with the sum of loss and gradient norm that every
//! step needs anyway: it takes no further message and changes no bit of those sums.
//!
//! At that sum a rank has computed its gradients and has not updated its weights. So its times are measured from the
//! sum of the step before to this one, within steps only: the update and the exchange of weights of the step before,
//! then the wait for data, the gradients and their exchange.

use std::time::{Duration, Instant};

use super::Ranks;
use crate::{error::Result, report::RankUsage};

/// The times of one rank in a step, and its use of its machine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankFigures {
    /// Time outside of waits for data and exchange.
    pub compute_seconds: f64,
    /// Time in exchange, the wait for other ranks included.
    pub exchange_seconds: f64,
    /// Time waiting for data.
    pub data_wait_seconds: f64,
    /// The process's memory and CPU use.
    pub usage: RankUsage,
}

impl RankFigures {
    const NUMBERS: usize = 6;

    fn to_numbers(self) -> [f64; Self::NUMBERS] {
        let RankUsage { rss_bytes, cpu_cores, swap_bytes } = self.usage;
        let seconds = [self.compute_seconds, self.exchange_seconds, self.data_wait_seconds];
        [seconds[0], seconds[1], seconds[2], rss_bytes as f64, cpu_cores, swap_bytes as f64]
    }

    fn from_numbers([compute, exchange, wait, rss, cpu_cores, swap]: [f64; Self::NUMBERS]) -> Self {
        let usage = RankUsage { rss_bytes: rss as u64, cpu_cores, swap_bytes: swap as u64 };
        Self { compute_seconds: compute, exchange_seconds: exchange, data_wait_seconds: wait, usage }
    }
}

/// Measures this rank's steps and holds the figures of all ranks. For one process it measures nothing.
#[derive(Debug, Default)]
pub struct RankMeter {
    ranks: Ranks,
    /// The moment up to which the current step is measured; None between steps.
    measured: Option<Moment>,
    compute: Duration,
    exchange: Duration,
    data_wait: Duration,
    usage: RankUsage,
    of_all: Vec<RankFigures>,
}

/// A point in time, and the time spent in exchange before it.
#[derive(Clone, Copy, Debug)]
struct Moment {
    at: Instant,
    exchanged: Duration,
}

impl RankMeter {
    /// Returns a meter for this process's rank.
    pub fn new(ranks: Ranks) -> Self {
        Self { ranks, ..Self::default() }
    }

    /// Returns the ranks of the run.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Begins a step, before its data.
    pub fn begin_step(&mut self) -> Result<()> {
        self.measured = self.now()?;
        Ok(())
    }

    /// Records the wait for the step's data, and the process's last sampled usage.
    pub fn loaded(&mut self, data_wait: Duration, usage: RankUsage) {
        (self.data_wait, self.usage) = (data_wait, usage);
    }

    /// Sums numbers over all ranks as [`super::Exchange::sum`] does, and exchanges the figures of each with them.
    ///
    /// # Errors
    /// Those of [`super::Exchange::sum`].
    pub fn sum(&mut self, numbers: &mut [f64]) -> Result<()> {
        let Some(exchange) = self.ranks.exchange() else { return Ok(()) };
        let rank_info = exchange.rank_info();
        self.measure()?;
        let own = RankFigures {
            compute_seconds: self.compute.saturating_sub(self.data_wait).as_secs_f64(),
            exchange_seconds: self.exchange.as_secs_f64(),
            data_wait_seconds: self.data_wait.as_secs_f64(),
            usage: self.usage,
        };
        (self.compute, self.exchange) = (Duration::ZERO, Duration::ZERO);
        // Zeros stand for the figures of the others: adding them changes no bit.
        let mut figures = vec![[0.0; RankFigures::NUMBERS]; rank_info.world_size];
        figures[rank_info.rank] = own.to_numbers();
        let mut all = [&*numbers, figures.as_flattened()].concat();
        self.ranks.sum(&mut all)?;
        let (sums, figures) = all.split_at(numbers.len());
        numbers.copy_from_slice(sums);
        self.of_all = figures.as_chunks().0.iter().copied().map(RankFigures::from_numbers).collect();
        Ok(())
    }

    /// Ends a step.
    pub fn end_step(&mut self) -> Result<()> {
        self.measure()?;
        self.measured = None;
        Ok(())
    }

    /// Returns the figures that the ranks exchanged with the last sum, in their order; empty for one process.
    pub fn of_all(&self) -> &[RankFigures] {
        &self.of_all
    }

    fn now(&self) -> Result<Option<Moment>> {
        Ok(self.ranks.exchange_time()?.map(|exchanged| Moment { at: Instant::now(), exchanged }))
    }

    /// Adds the time since the last measurement to compute and exchange.
    fn measure(&mut self) -> Result<()> {
        if let (Some(last), Some(now)) = (self.measured, self.now()?) {
            let exchanged = now.exchanged.saturating_sub(last.exchanged);
            self.exchange += exchanged;
            self.compute += now.at.duration_since(last.at).saturating_sub(exchanged);
            self.measured = Some(now);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
