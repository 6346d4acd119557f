//! Which component of a mixture gives the next sequence: a pure function of the weights and of how many each gave so
//! far.
//!
//! Let component `i` have the share `w_i` and have given `n_i` of the first `k` sequences. Its `n_i`-th sequence may
//! come from position `floor(n_i / w_i)` on and must have come before position `ceil((n_i + 1) / w_i)`; of the
//! components that may come, the one that must come first is next, and of equals the first in the list. These windows
//! are those of proportionate fairness (Baruah, Cohen, Plaxton, Varvel, "Proportionate progress: a notion of fairness
//! in resource allocation", Algorithmica 1996): a schedule that keeps to them exists, serving the earliest deadline
//! finds it, and keeping to them means that `n_i` is never a whole sequence away from `k * w_i`. Shares are whole
//! numbers, so that nothing drifts.

/// The parts of the whole in which shares are counted: more than any run has sequences, and decimal as the weights that
/// people write.
const WHOLE: f64 = 1e12;

/// The components' shares of the sequences, as whole numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shares(Vec<u64>);

impl Shares {
    /// From weights that are positive and finite, as their sum is.
    pub(crate) fn of(weights: &[f64]) -> Self {
        let sum: f64 = weights.iter().sum();
        Self(weights.iter().map(|weight| ((weight / sum * WHOLE).round() as u64).max(1)).collect())
    }

    /// The numbers themselves, which name the schedule.
    pub(crate) fn numbers(&self) -> &[u64] {
        &self.0
    }

    /// The share of a component, between 0 and 1.
    pub(crate) fn of_component(&self, component: usize) -> f64 {
        self.0[component] as f64 / self.whole() as f64
    }

    /// The component that gives the next sequence when `given` lie behind of each.
    pub(crate) fn next(&self, given: &[u64]) -> usize {
        let (whole, position) = (self.whole(), given.iter().map(|&given| u128::from(given)).sum::<u128>());
        let timed = self.0.iter().zip(given).enumerate().filter_map(|(component, (&share, &given))| {
            let (share, given) = (u128::from(share), u128::from(given));
            let may_come = given * whole < (position + 1) * share;
            may_come.then(|| (((given + 1) * whole).div_ceil(share), component))
        });
        // Not all can have given more than their share.
        timed.min().map_or(0, |(_, component)| component)
    }

    /// Whether the schedule may come to these numbers: none is a whole sequence away from its share.
    pub(crate) fn lead_to(&self, given: &[u64]) -> bool {
        let (whole, position) = (self.whole(), given.iter().map(|&given| u128::from(given)).sum::<u128>());
        let near = |(&share, &given): (&u64, &u64)| {
            (u128::from(given) * whole).abs_diff(position.saturating_mul(u128::from(share))) < whole
        };
        given.len() == self.0.len() && self.0.iter().zip(given).all(near)
    }

    fn whole(&self) -> u128 {
        self.0.iter().map(|&share| u128::from(share)).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn schedule(weights: &[f64], length: usize) -> Vec<usize> {
        let shares = Shares::of(weights);
        let mut given = vec![0; weights.len()];
        let turns = (0..length).map(|_| {
            let next = shares.next(&given);
            given[next] += 1;
            next
        });
        turns.collect()
    }

    #[test]
    fn weights_a_person_can_follow_give_schedules_a_person_can_follow() {
        assert_eq!(schedule(&[3.0], 4), [0, 0, 0, 0]);
        assert_eq!(schedule(&[1.0, 1.0], 6), [0, 1, 0, 1, 0, 1]);
        assert_eq!(schedule(&[0.7, 0.3], 10), [0, 0, 1, 0, 0, 1, 0, 0, 0, 1]);
        assert_eq!(schedule(&[7.0, 3.0], 1000), schedule(&[0.7, 0.3], 1000));
    }

    proptest! {
        #[test]
        fn no_component_is_ever_a_whole_sequence_away_from_its_share(
            weights in prop::collection::vec(prop_oneof![1e-6..1.0_f64, 1.0..1e6, Just(1.0)], 1..12),
            length in 1_usize..3000,
        ) {
            let shares = Shares::of(&weights);
            let mut given = vec![0; weights.len()];
            for _ in 0..length {
                let next = shares.next(&given);
                given[next] += 1;
                prop_assert!(shares.lead_to(&given), "{given:?}");
            }
        }

        #[test]
        fn however_far_out_it_is_as_exact_as_at_the_beginning(
            weights in prop::collection::vec(0.001..1.0_f64, 2..6),
            rounds in 1_u64..1000,
        ) {
            // After as many sequences as the whole has parts each component has given exactly its share.
            let shares = Shares::of(&weights);
            let (mut near, mut far) = (vec![0; weights.len()], shares.0.iter().map(|share| share * rounds).collect::<Vec<_>>());
            for _ in 0..1000 {
                let next = shares.next(&near);
                prop_assert_eq!(shares.next(&far), next);
                near[next] += 1;
                far[next] += 1;
            }
        }

        #[test]
        fn no_numbers_make_it_fail(weights in prop::collection::vec(1e-300..1e300_f64, 1..6), given: [u32; 6]) {
            let given: Vec<u64> = given.iter().map(|&given| given.into()).take(weights.len()).collect();
            prop_assert!(Shares::of(&weights).next(&given) < weights.len());
        }
    }
}
