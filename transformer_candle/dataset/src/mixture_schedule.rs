//! The mixture schedule: which component gives the next sequence, as a pure function of the mixture weights and of the
//! number of sequences that each component has delivered.
//!
//! Let component `i` have weight `w_i` (the weights sum to 1) and have delivered `n_i` of the first `k` sequences. Its
//! next sequence is released at position `floor(n_i / w_i)` and due before position `ceil((n_i + 1) / w_i)`. Of the
//! components whose next sequence is released at position `k`, the one with the earliest deadline is next; of equal
//! deadlines, the first in the list. This is earliest-deadline-first over the windows of proportionate fairness
//! (Baruah, Cohen, Plaxton, Varvel, "Proportionate progress: a notion of fairness in resource allocation", Algorithmica
//! 1996): such a schedule meets every deadline, so that `|n_i - k * w_i| < 1` at every position. Weights are integers,
//! so that nothing drifts.

/// Sum of the integer weights, up to rounding: more than a run has sequences, and a power of ten because people write
/// weights as decimals.
const TOTAL_WEIGHT: f64 = 1e12;

/// The integer mixture weights of the components, and the schedule that follows from them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MixtureSchedule(Vec<u64>);

impl MixtureSchedule {
    /// Normalises weights that are positive and have a finite sum.
    pub(crate) fn from_weights(weights: &[f64]) -> Self {
        let sum: f64 = weights.iter().sum();
        Self(weights.iter().map(|weight| ((weight / sum * TOTAL_WEIGHT).round() as u64).max(1)).collect())
    }

    /// The integer weights, which determine the schedule.
    pub(crate) fn weights(&self) -> &[u64] {
        &self.0
    }

    /// The normalised weight of a component, between 0 and 1.
    pub(crate) fn fraction(&self, component: usize) -> f64 {
        self.0[component] as f64 / self.total() as f64
    }

    /// Returns the component that gives the next sequence, given how many each has `delivered`.
    pub(crate) fn next_component(&self, delivered: &[u64]) -> usize {
        let (total, position) = (self.total(), delivered.iter().map(|&count| u128::from(count)).sum::<u128>());
        let deadlines = self.0.iter().zip(delivered).enumerate().filter_map(|(component, (&weight, &delivered))| {
            let (weight, delivered) = (u128::from(weight), u128::from(delivered));
            let is_released = delivered * total < (position + 1) * weight;
            is_released.then(|| (((delivered + 1) * total).div_ceil(weight), component))
        });
        // At least one is released: not every component can be ahead of its weight.
        deadlines.min().map_or(0, |(_, component)| component)
    }

    /// Whether the schedule can reach these counts: each component is less than one sequence away from its weight.
    pub(crate) fn is_reachable(&self, delivered: &[u64]) -> bool {
        let (total, position) = (self.total(), delivered.iter().map(|&count| u128::from(count)).sum::<u128>());
        let is_near = |(&weight, &delivered): (&u64, &u64)| {
            (u128::from(delivered) * total).abs_diff(position.saturating_mul(u128::from(weight))) < total
        };
        delivered.len() == self.0.len() && self.0.iter().zip(delivered).all(is_near)
    }

    fn total(&self) -> u128 {
        self.0.iter().map(|&weight| u128::from(weight)).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn components(weights: &[f64], length: usize) -> Vec<usize> {
        let schedule = MixtureSchedule::from_weights(weights);
        let mut delivered = vec![0; weights.len()];
        let components = (0..length).map(|_| {
            let next = schedule.next_component(&delivered);
            delivered[next] += 1;
            next
        });
        components.collect()
    }

    #[test]
    fn simple_weights_give_the_obvious_schedule() {
        assert_eq!(components(&[3.0], 4), [0, 0, 0, 0]);
        assert_eq!(components(&[1.0, 1.0], 6), [0, 1, 0, 1, 0, 1]);
        assert_eq!(components(&[0.7, 0.3], 10), [0, 0, 1, 0, 0, 1, 0, 0, 0, 1]);
        assert_eq!(components(&[7.0, 3.0], 1000), components(&[0.7, 0.3], 1000));
    }

    proptest! {
        #[test]
        fn components_stay_within_one_sequence_of_their_weight(
            weights in prop::collection::vec(prop_oneof![1e-6..1.0_f64, 1.0..1e6, Just(1.0)], 1..12),
            length in 1_usize..3000,
        ) {
            let schedule = MixtureSchedule::from_weights(&weights);
            let mut delivered = vec![0; weights.len()];
            for _ in 0..length {
                let next = schedule.next_component(&delivered);
                delivered[next] += 1;
                prop_assert!(schedule.is_reachable(&delivered), "{delivered:?}");
            }
        }

        #[test]
        fn schedule_repeats_exactly_after_each_period(
            weights in prop::collection::vec(0.001..1.0_f64, 2..6),
            periods in 1_u64..1000,
        ) {
            // After as many sequences as the weights sum to, each component has delivered exactly its weight.
            let schedule = MixtureSchedule::from_weights(&weights);
            let (mut near, mut far) =
                (vec![0; weights.len()], schedule.0.iter().map(|weight| weight * periods).collect::<Vec<_>>());
            for _ in 0..1000 {
                let next = schedule.next_component(&near);
                prop_assert_eq!(schedule.next_component(&far), next);
                near[next] += 1;
                far[next] += 1;
            }
        }

        #[test]
        fn next_component_never_fails(weights in prop::collection::vec(1e-300..1e300_f64, 1..6), delivered: [u32; 6]) {
            let delivered: Vec<u64> = delivered.iter().map(|&count| count.into()).take(weights.len()).collect();
            prop_assert!(MixtureSchedule::from_weights(&weights).next_component(&delivered) < weights.len());
        }
    }
}
