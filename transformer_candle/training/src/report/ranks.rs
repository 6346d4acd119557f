//! The times and the resource use of a run's ranks.

use super::scalar::{Scalar, Series};
use crate::statistics::median;

/// The times of a step of several ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankTimes {
    /// Seconds that each rank has computed, without waiting for data and for other ranks.
    pub compute_seconds: Vec<f64>,
    /// Seconds in exchange of the rank that spent the least: those of the others include waiting for it.
    pub exchange_seconds: f64,
    /// Whether every rank has computed the same number of micro-batches.
    pub is_even: bool,
}

/// Memory and CPU use of a rank's process when it was last sampled; zeros before.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankUsage {
    /// Resident memory in bytes.
    pub rss_bytes: u64,
    /// Mean number of busy cores.
    pub cpu_cores: f64,
    /// Swapped-out memory in bytes.
    pub swap_bytes: u64,
}

impl RankTimes {
    /// Returns the rank that has computed for the longest time, and its seconds.
    pub fn slowest(&self) -> (usize, f64) {
        let seconds = self.compute_seconds.iter().copied().enumerate();
        seconds.max_by(|(_, one), (_, other)| one.total_cmp(other)).unwrap_or_default()
    }

    /// Returns the median of the compute seconds of all ranks but this one.
    pub fn median_of_others(&self, rank: usize) -> f64 {
        let mut others = self.compute_seconds.clone();
        others.remove(rank);
        median(others)
    }

    pub(super) fn scalars(&self) -> [Scalar; 4] {
        let (rank, seconds) = self.slowest();
        [
            Scalar::curve("exchange_seconds", "exchange_seconds", self.exchange_seconds),
            Scalar::plain("slowest_rank", rank as u64),
            Scalar::curve("slowest_rank_seconds", "ranks/slowest_compute_seconds", seconds),
            Scalar::curve("median_rank_seconds", "ranks/median_compute_seconds", self.median_of_others(rank)),
        ]
    }

    pub(super) fn series(&self) -> Series {
        Series { key: "rank_compute_seconds", values: self.compute_seconds.clone() }
    }

    /// Formats `exchange 8 %`, and `rank 3 takes 1.4x` where a rank takes much longer than the median of the others.
    pub fn summary(&self, step_seconds: f64) -> String {
        let (rank, seconds) = self.slowest();
        let ratio = seconds / self.median_of_others(rank);
        let slow = if ratio >= SHOWN_RATIO { format!(", rank {rank} takes {ratio:.1}x") } else { String::new() };
        format!("exchange {:.0} %{slow}", 100.0 * self.exchange_seconds / step_seconds)
    }
}

/// A rank that takes this many times as long as the median of the others is shown.
const SHOWN_RATIO: f64 = 1.2;

#[cfg(test)]
mod tests {
    use super::*;

    fn times(compute_seconds: &[f64]) -> RankTimes {
        RankTimes { compute_seconds: compute_seconds.to_vec(), exchange_seconds: 0.08, is_even: true }
    }

    #[test]
    fn the_slowest_rank_is_compared_with_the_others() {
        let four = times(&[0.5, 0.6, 0.7, 0.9]);
        assert_eq!(four.slowest(), (3, 0.9));
        assert!((four.median_of_others(3) - 0.6).abs() < 1e-12);
        assert!((four.median_of_others(0) - 0.7).abs() < 1e-12);
        assert_eq!(times(&[0.9, 0.6]).median_of_others(0).to_bits(), 0.6_f64.to_bits());
        assert!((times(&[0.1, 0.2, 0.9]).median_of_others(2) - 0.15).abs() < 1e-12);
    }

    #[test]
    fn the_summary_names_a_rank_that_takes_much_longer() {
        assert_eq!(times(&[0.6, 0.6, 0.9, 0.6]).summary(1.0), "exchange 8 %, rank 2 takes 1.5x");
        assert_eq!(times(&[0.6, 0.66]).summary(1.0), "exchange 8 %");
    }
}
