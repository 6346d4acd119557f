//! Tests of the search on a GPU that is a few lines of arithmetic.

use std::convert::Infallible;

use proptest::prelude::*;

use super::*;

/// A GPU whose clock falls to that of its power limit after some milliseconds of the same work.
#[derive(Clone, Default)]
struct FakeGpu {
    /// Milliseconds per run, of each candidate, at the boost clock; None is never accepted.
    cold: Vec<Option<f32>>,
    /// The same once the clock has settled.
    settled: Vec<f32>,
    /// A candidate, and how many calls for it are accepted.
    refuses: Vec<(usize, usize)>,
    /// What every run takes the host, in milliseconds.
    host: f32,
    /// The calls so far: the candidate, and the runs of it.
    calls: Vec<(usize, usize)>,
    /// The time spent so far, in milliseconds.
    spent: f32,
}

const SETTLES_AFTER_MILLISECONDS: f32 = 10.0;

impl FakeGpu {
    /// One at whose power limit each candidate is as fast as at its boost clock.
    fn steady(milliseconds: &[f32]) -> Self {
        let cold = milliseconds.iter().copied().map(Some).collect();
        Self { cold, settled: milliseconds.to_vec(), ..Self::default() }
    }

    fn time(&mut self, candidate: usize, runs: usize) -> Option<Elapsed> {
        let earlier = self.calls.iter().filter(|(called, _)| *called == candidate).count();
        let is_same = self.calls.last().is_some_and(|(called, runs)| {
            *called == candidate && *runs as f32 * self.settled[candidate] > SETTLES_AFTER_MILLISECONDS
        });
        self.calls.push((candidate, runs));
        if self.refuses.iter().any(|&(refused, accepted)| refused == candidate && earlier >= accepted) {
            return None;
        }
        let cold = self.cold[candidate]?;
        let gpu = runs as f32 * if is_same { self.settled[candidate] } else { cold };
        let host = (1 + runs) as f32 * self.host.max(gpu / runs as f32);
        self.spent += host;
        Some(Elapsed { gpu, host })
    }

    fn fastest(&mut self) -> Option<usize> {
        let Ok(fastest) =
            fastest_candidate(self.cold.len(), |candidate, runs| Ok::<_, Infallible>(self.time(candidate, runs)));
        fastest
    }

    /// The candidates that were timed in turns, in the order of the turns.
    fn turns(&self) -> Vec<usize> {
        let halves = self.calls.windows(2).enumerate().filter(|(_, pair)| pair[0] == pair[1] && pair[0].1 > 1);
        halves.map(|(_, pair)| pair[0].0).collect()
    }
}

#[test]
fn clocks_decide_when_they_have_settled() {
    let cold = vec![Some(1.00), Some(1.05), Some(1.10)];
    let mut gpu = FakeGpu { cold, settled: vec![1.30, 1.25, 1.20], ..FakeGpu::default() };
    assert_eq!(gpu.fastest(), Some(2));
    assert_eq!(gpu.turns(), [0, 1, 2, 0, 1, 2, 0, 1, 2]);
}

#[test]
fn no_difference_is_too_small_in_turns() {
    assert_eq!(FakeGpu::steady(&[1.001, 1.0, 1.002]).fastest(), Some(1));
}

#[test]
fn of_exact_equals_the_first_is_kept() {
    assert_eq!(FakeGpu::steady(&[2.0, 1.0, 1.0, 1.0, 1.0, 1.0]).fastest(), Some(1));
    assert_eq!(FakeGpu::steady(&[0.0, 0.0]).fastest(), Some(0));
}

#[test]
fn only_the_fastest_few_are_timed_in_turns() {
    let mut gpu = FakeGpu::steady(&[1.19, 1.10, 1.21, 1.0, 5.0, 1.15, 1.18, 1.12]);
    assert_eq!(gpu.fastest(), Some(3));
    assert_eq!(gpu.turns(), [1, 3, 5, 7].repeat(ROUNDS));
    // One candidate needs no turns.
    let mut gpu = FakeGpu::steady(&[1.0, 1.5]);
    assert_eq!(gpu.fastest(), Some(0));
    assert_eq!(gpu.calls, [(0, 1), (1, 1)]);
}

#[test]
fn short_work_is_timed_several_times() {
    let mut gpu = FakeGpu::steady(&[0.01, 0.1, 1.0]);
    assert_eq!(gpu.fastest(), Some(0));
    assert_eq!(gpu.calls, [(0, 1), (0, 10), (1, 1), (2, 1)]);
}

#[test]
fn candidates_that_are_refused_are_passed_over() {
    assert_eq!(FakeGpu::default().fastest(), None);
    let mut gpu = FakeGpu { cold: vec![None, None], settled: vec![1.0; 2], ..FakeGpu::default() };
    assert_eq!(gpu.fastest(), None);
    let mut gpu = FakeGpu { cold: vec![None, Some(2.0), None], settled: vec![2.0; 3], ..FakeGpu::default() };
    assert_eq!(gpu.fastest(), Some(1));
}

#[test]
fn a_candidate_that_fails_in_the_second_round_is_dropped() {
    // Accepted briefly and in the first round: once, and two halves of a turn.
    let mut gpu = FakeGpu { refuses: vec![(1, 3)], ..FakeGpu::steady(&[1.1, 1.0, 1.05]) };
    assert_eq!(gpu.fastest(), Some(2));
    assert_eq!(gpu.calls.iter().filter(|(candidate, _)| *candidate == 1).count(), 1 + 2 + 2);
}

#[test]
fn if_all_fail_in_turns_the_next_is_taken() {
    let refuses = vec![(0, 1), (1, 1)];
    let mut gpu = FakeGpu { refuses: refuses.clone(), ..FakeGpu::steady(&[1.0, 1.1, 1.4, 1.3]) };
    assert_eq!(gpu.fastest(), Some(3));
    assert_eq!(FakeGpu { refuses, ..FakeGpu::steady(&[1.0, 1.1]) }.fastest(), None);
}

#[test]
fn errors_end_the_search() {
    let failed = fastest_candidate(3, |candidate, _| match candidate {
        0 => Ok(Some(Elapsed { gpu: 1.0, host: 1.0 })),
        _ => Err("the GPU is lost"),
    });
    assert_eq!(failed, Err("the GPU is lost"));
}

#[test]
fn where_launches_are_slow_brief_timings_decide() {
    let mut gpu = FakeGpu { host: 100.0, ..FakeGpu::steady(&[1.01, 1.0, 1.03]) };
    assert_eq!(gpu.fastest(), Some(0), "the first that cannot be told from the fastest");
    assert_eq!(gpu.calls, [(0, 1), (1, 1), (2, 1)]);
}

#[test]
fn no_candidate_is_timed_when_the_time_is_spent() {
    let mut gpu = FakeGpu::steady(&[120.0, 110.0, 115.0, 100.0]);
    assert_eq!(gpu.fastest(), Some(1));
    assert_eq!(gpu.calls, [(0, 1), (1, 1), (2, 1)]);
}

#[test]
fn brief_timings_within_two_percent_are_equal() {
    assert_eq!(best(&[Some(3.0), Some(1.0), Some(2.0)]), Some(1));
    assert_eq!(best(&[Some(1.01), Some(1.0), Some(1.0)]), Some(0));
    assert_eq!(best(&[Some(1.03), Some(1.01), Some(1.0)]), Some(1));
    assert_eq!(best(&[None, Some(2.0), None]), Some(1));
    assert_eq!(best(&[Some(0.0), Some(0.0)]), Some(0));
    assert_eq!(best(&[None, None]), None);
    assert_eq!(best(&[]), None);
}

#[test]
fn one_slow_sample_moves_no_median() {
    assert_eq!(median(&mut [9.0, 1.0, 2.0]), Some(2.0));
    assert_eq!(median(&mut [4.0, 3.0, 2.0, 1.0]), Some(2.0));
    assert_eq!(median(&mut [5.0]), Some(5.0));
    assert_eq!(median(&mut []), None);
}

proptest! {
    #[test]
    fn the_time_of_a_search_is_bounded(
        fastest in 0.001_f32..50.0,
        slower in prop::collection::vec(1.0_f32..2.0, 1..64),
    ) {
        let milliseconds: Vec<f32> = slower.iter().map(|factor| factor * fastest).collect();
        let mut gpu = FakeGpu::steady(&milliseconds);
        gpu.fastest().unwrap();
        let last_candidate = 2.0 * 2.0 * fastest + 2.0 * SAMPLE_MILLISECONDS;
        let bound = BRIEF_MILLISECONDS + last_candidate + 1.01 * ROUNDS_MILLISECONDS;
        prop_assert!(gpu.spent <= bound, "{} of {bound} ms", gpu.spent);
    }

    #[test]
    fn the_same_timings_give_the_same_choice(milliseconds in prop::collection::vec(1.0_f32..1.2, 1..64)) {
        let chosen = FakeGpu::steady(&milliseconds).fastest();
        prop_assert_eq!(chosen, FakeGpu::steady(&milliseconds).fastest());
        let lowest = milliseconds.iter().copied().fold(f32::INFINITY, f32::min);
        prop_assert_eq!(chosen, milliseconds.iter().position(|&time| time == lowest));
    }
}
