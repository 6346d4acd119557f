//! Advice for a run of several ranks: one that is slower than the others, and too much time in their exchange.

use super::{ShareRule, percent};
use crate::report::RankTimes;

/// The part of a run's time that the other ranks may wait for the slowest.
const MAX_STRAGGLING: f64 = 0.1;
/// The part of a run's time that exchange may take.
const MAX_EXCHANGE: f64 = 0.2;
/// Seconds before either is found.
const MIN_SECONDS: f64 = 30.0;

/// Looks for what holds back the ranks of a run.
#[derive(Debug)]
pub(super) struct RankRules {
    hosts: Vec<String>,
    exchange: ShareRule,
    /// Per rank: the time that it computes longer than the median of the others.
    excess: Vec<ShareRule>,
    /// Exponentially decayed sum of the seconds that each rank has computed.
    computed: RankTimes,
}

impl RankRules {
    /// Returns the rules for ranks on `hosts`, one host per rank.
    pub(super) fn new(hosts: Vec<String>) -> Self {
        let rule = |limit| ShareRule::new(limit, MIN_SECONDS);
        Self {
            exchange: rule(MAX_EXCHANGE),
            excess: hosts.iter().map(|_| rule(MAX_STRAGGLING)).collect(),
            computed: RankTimes { compute_seconds: vec![0.0; hosts.len()], ..RankTimes::default() },
            hosts,
        }
    }

    /// Returns the findings that a step adds, one sentence each. Steps whose micro-batches cannot be shared evenly, as
    /// while the batch grows, are skipped: there a rank has more to do and is not slow.
    pub(super) fn step(&mut self, times: &RankTimes, step_seconds: f64) -> Vec<String> {
        if !times.is_even || times.compute_seconds.len() != self.hosts.len() {
            return Vec::new();
        }
        let exchange = self.exchange.observe(times.exchange_seconds, step_seconds).map(|share| {
            format!(
                "{} of the time the ranks exchange gradients and weights while nothing is computed: raise \
                 data.sequences_per_step, so that more is computed per exchange, train in fewer processes, or connect them \
                 by a faster network",
                percent(share)
            )
        });
        let weight = ShareRule::weight(step_seconds);
        for (sum, seconds) in self.computed.compute_seconds.iter_mut().zip(&times.compute_seconds) {
            *sum = weight * *sum + seconds;
        }
        let mut advice: Vec<String> = exchange.into_iter().collect();
        for rank in 0..self.hosts.len() {
            let excess = times.compute_seconds[rank] - times.median_of_others(rank);
            if let Some(share) = self.excess[rank].observe(excess, step_seconds) {
                advice.push(self.straggler(rank, share));
            }
        }
        advice
    }

    fn straggler(&self, rank: usize, share: f64) -> String {
        let ratio = self.computed.compute_seconds[rank] / self.computed.median_of_others(rank);
        let others = if self.hosts.len() == 2 { "the other" } else { "the median rank" };
        format!(
            "rank {rank} on {} takes {ratio:.1} times as long as {others} for its part of a step, and the others wait for it \
             {} of the time: look there for other programs, fewer or slower cores (runtime.threads), heat or swapping, or \
             train without that machine",
            self.hosts[rank],
            percent(share)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(compute_seconds: Vec<f64>, exchange_seconds: f64) -> RankTimes {
        RankTimes { compute_seconds, exchange_seconds, is_even: true }
    }

    /// Returns each finding in steps of one second: the number of its step, and the advice.
    fn advice_of(ranks: usize, steps: impl IntoIterator<Item = RankTimes>) -> Vec<(usize, String)> {
        let mut rules = RankRules::new((0..ranks).map(|rank| format!("node-{}", rank / 2)).collect());
        let advice = steps
            .into_iter()
            .enumerate()
            .flat_map(|(index, times)| rules.step(&times, 1.0).into_iter().map(move |text| (index + 1, text)));
        advice.collect()
    }

    #[test]
    fn a_straggler_is_named_once() {
        let advice = advice_of(4, (0..500).map(|_| times(vec![0.6, 0.62, 0.58, 0.84], 0.05)));
        assert_eq!(advice.len(), 1, "{advice:?}");
        assert_eq!(advice[0].0, 30);
        let expected = "rank 3 on node-1 takes 1.4 times as long as the median rank for its part of a step, and the others \
                        wait for it 24 % of the time: ";
        assert!(advice[0].1.starts_with(expected), "{}", advice[0].1);
    }

    #[test]
    fn of_two_ranks_the_slower_one_is_named() {
        let advice = advice_of(2, (0..100).map(|_| times(vec![0.9, 0.3], 0.05)));
        assert_eq!(advice.len(), 1);
        assert!(
            advice[0].1.starts_with("rank 0 on node-0 takes 3.0 times as long as the other for"),
            "{}",
            advice[0].1
        );
    }

    #[test]
    fn ranks_that_are_slow_in_turns_are_no_stragglers() {
        let in_turns = |step: usize| (0..4).map(|rank| if step % 4 == rank { 0.9 } else { 0.6 }).collect();
        assert_eq!(advice_of(4, (0..500).map(|step| times(in_turns(step), 0.05))), []);
        let of_two = |step: usize| if step.is_multiple_of(2) { vec![0.9, 0.5] } else { vec![0.5, 0.9] };
        assert_eq!(advice_of(2, (0..500).map(|step| times(of_two(step), 0.05))), []);
    }

    #[test]
    fn small_differences_and_uneven_shares_are_no_finding() {
        assert_eq!(advice_of(2, (0..500).map(|_| times(vec![0.6, 0.68], 0.05))), []);
        assert_eq!(
            advice_of(2, (0..500).map(|_| RankTimes { is_even: false, ..times(vec![0.0, 0.9], 0.05) })),
            [],
            "the batch grows"
        );
    }

    #[test]
    fn a_large_share_of_exchange_is_found() {
        let advice = advice_of(2, (0..500).map(|_| times(vec![0.6, 0.6], 0.35)));
        assert_eq!(advice.len(), 1, "{advice:?}");
        assert!(
            advice[0].1.starts_with("35 % of the time the ranks exchange gradients and weights"),
            "{}",
            advice[0].1
        );
        assert_eq!(advice_of(2, (0..500).map(|_| times(vec![0.6, 0.6], 0.15))), []);
    }
}
