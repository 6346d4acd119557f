//! Which rule updates which parameters, and the state that the rules keep.
//!
//! A new algorithm is a variant of [`Algorithm`] that divides the parameters into groups, a variant of [`UpdateRule`]
//! that lists its state, and an arm of the optimizer's update. Plan, checkpoints and `gpu-check` read the list.

use std::ops::Range;

use kernels::{DType, adamw, memory::Category, muon};
use model::{ParameterKind, ParameterLayout, Precision};
use run_config::{MuonPolynomials, OptimizerConfig};

use super::state::{MASTER_LOW_BITS, StateLayout};
use crate::engine::shard::Shard;

/// `AdamW`'s running mean of the gradients.
pub(super) const FIRST_MOMENT: &str = "first_moment";
/// `AdamW`'s running mean of the squared gradients.
pub(super) const SECOND_MOMENT: &str = "second_moment";
/// Muon's running mean of the gradients.
pub(super) const MOMENTUM: &str = "momentum";

/// How gradients change the weights, each algorithm with its own settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Algorithm {
    /// `AdamW` for every parameter.
    AdamW {
        /// The same for every parameter.
        settings: adamw::AdamW,
        /// Of the parameters that decay.
        weight_decay: f32,
    },
    /// Muon for the projections of the decoder blocks, `AdamW` for the rest.
    Muon {
        /// Of the projections.
        settings: muon::Muon,
        /// Of embedding, head and norms.
        adamw: adamw::AdamW,
        /// Of the parameters that decay.
        weight_decay: f32,
    },
}

impl Algorithm {
    /// The algorithm that the keys of a config describe.
    pub fn from_config(config: &OptimizerConfig) -> Self {
        let &OptimizerConfig { algorithm, beta1, beta2, epsilon, weight_decay, ref muon, .. } = config;
        let (adamw, weight_decay) = (adamw::AdamW { beta1, beta2, epsilon }, weight_decay as f32);
        match algorithm {
            run_config::Algorithm::AdamW => Self::AdamW { settings: adamw, weight_decay },
            run_config::Algorithm::Muon => {
                let polynomials = match muon.polynomials {
                    MuonPolynomials::Quintic => muon::Polynomials::Quintic,
                    MuonPolynomials::PolarExpress => muon::Polynomials::PolarExpress,
                };
                Self::Muon { settings: muon::Muon { momentum: muon.momentum, polynomials }, adamw, weight_decay }
            }
        }
    }

    /// The groups of the parameters that train, which cover the flat buffers from their first element to the last of these.
    /// None is empty.
    pub fn groups(&self, layout: &ParameterLayout) -> Vec<ParameterGroup> {
        let (decayed, all, ratio) = (layout.decayed_elements(), layout.trainable_elements(), layout.width_ratio());
        let group = |range, rule, learning_rate_scale, weight_decay| {
            let weight_decay = (f64::from(weight_decay) / learning_rate_scale) as f32;
            ParameterGroup { range, rule, learning_rate_scale, weight_decay }
        };
        let groups = match *self {
            Self::AdamW { settings, weight_decay } => {
                let rule = UpdateRule::AdamW(settings);
                vec![group(0..decayed, rule, ratio, weight_decay), group(decayed..all, rule, 1.0, 0.0)]
            }
            Self::Muon { settings, adamw, weight_decay } => {
                let (muon, adamw) = (UpdateRule::Muon(settings), UpdateRule::AdamW(adamw));
                vec![
                    // The spectral norm of an update of Muon grows with the root of the width, of one of AdamW with
                    // the width.
                    group(layout.range(ParameterKind::Projection), muon, ratio.sqrt(), weight_decay),
                    group(layout.range(ParameterKind::Head), adamw, ratio, weight_decay),
                    group(decayed..all, adamw, 1.0, 0.0),
                ]
            }
        };
        groups.into_iter().filter(|group| !group.range.is_empty()).collect()
    }

    /// The settings of the groups that `AdamW` updates.
    pub(super) fn adamw(&self) -> &adamw::AdamW {
        match self {
            Self::AdamW { settings, .. } | Self::Muon { adamw: settings, .. } => settings,
        }
    }
}

/// Parameters that one rule updates with one weight decay.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterGroup {
    /// Their elements of the flat buffers.
    pub range: Range<usize>,
    /// How a gradient changes them.
    pub rule: UpdateRule,
    /// Multiplies the learning rate of every step (`model.base_hidden_size`).
    pub learning_rate_scale: f64,
    /// Decoupled, multiplied by the scaled learning rate: that much more as the rate is scaled down.
    pub weight_decay: f32,
}

/// How the gradient of a group changes its weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UpdateRule {
    /// See [`kernels::adamw`].
    AdamW(adamw::AdamW),
    /// See [`kernels::muon`].
    Muon(muon::Muon),
}

impl UpdateRule {
    /// The names of the f32 tensors that it keeps, each with an element per parameter.
    fn state(self) -> &'static [&'static str] {
        match self {
            Self::AdamW(_) => &[FIRST_MOMENT, SECOND_MOMENT],
            Self::Muon(_) => &[MOMENTUM],
        }
    }
}

/// The groups that have parameters in a rank's shard, with what they have there.
pub(super) fn in_shard(groups: &[ParameterGroup], shard: &Shard) -> Vec<(ParameterGroup, Shard)> {
    let part = |group: &ParameterGroup| (group.clone(), shard.overlap(&group.range));
    groups.iter().map(part).filter(|(_, part)| !part.is_empty()).collect()
}

/// Every tensor of state that these groups need, in the order in which they are saved, as far as it lies in a rank's
/// shard. One that several groups keep is one tensor, from the first one's first element to the last one's last.
pub(super) fn state_layouts(
    groups: &[ParameterGroup],
    elements: usize,
    precision: Precision,
    shard: &Shard,
) -> Vec<StateLayout> {
    let mut layouts: Vec<StateLayout> = Vec::new();
    for ParameterGroup { range, rule, .. } in groups {
        for &name in rule.state() {
            if let Some(known) = layouts.iter_mut().find(|layout| layout.name == name) {
                known.of_all_ranks = known.of_all_ranks.start.min(range.start)..known.of_all_ranks.end.max(range.end);
            } else {
                let (category, dtype) = (Category::OptimizerMoments, DType::F32);
                layouts.push(StateLayout::new(name, category, dtype, range.clone()));
            }
        }
    }
    if precision == Precision::Bf16 {
        let (category, dtype) = (Category::MasterLowBits, DType::I16);
        layouts.push(StateLayout::new(MASTER_LOW_BITS, category, dtype, 0..elements));
    }
    for layout in &mut layouts {
        layout.shard = shard.overlap(&layout.of_all_ranks);
    }
    layouts
}

#[cfg(test)]
mod tests {
    use model::ModelShape;
    use run_config::ModelConfig;

    use super::*;

    #[test]
    fn groups_cover_every_parameter_once() {
        let layout = ParameterLayout::new(&ModelShape::new(&ModelConfig::default(), 100));
        let all = 0..layout.elements();
        let groups_of = |algorithm| {
            let groups = Algorithm::from_config(&OptimizerConfig { algorithm, ..Default::default() }).groups(&layout);
            let ends = groups.iter().map(|group| group.range.end);
            assert!(
                groups.iter().map(|group| group.range.start).eq([0].into_iter().chain(ends.clone()).take(groups.len()))
            );
            assert_eq!(groups[groups.len() - 1].range.end, layout.elements());
            groups
        };
        let muon = state_layouts(
            &groups_of(run_config::Algorithm::Muon),
            all.end,
            Precision::Bf16,
            &Shard::whole(all.clone()),
        );
        let projections = layout.range(ParameterKind::Projection);
        let rest = projections.end..layout.elements();
        assert_eq!(
            muon.into_iter().map(|layout| (layout.name, layout.of_all_ranks)).collect::<Vec<_>>(),
            [
                (MOMENTUM, projections),
                (FIRST_MOMENT, rest.clone()),
                (SECOND_MOMENT, rest),
                (MASTER_LOW_BITS, 0..layout.elements())
            ]
        );
        let groups = groups_of(run_config::Algorithm::AdamW);
        for (precision, names) in [
            (Precision::Fp32, &["first_moment", "second_moment"][..]),
            (Precision::Bf16, &["first_moment", "second_moment", "master_remainder"]),
        ] {
            let state = state_layouts(&groups, all.end, precision, &Shard::whole(all.clone()));
            assert_eq!(state.iter().map(|layout| layout.name).collect::<Vec<_>>(), names);
            assert!(state.iter().all(|state| state.shard == Shard::whole(0..layout.elements())));
        }
    }

    #[test]
    fn state_spans_exactly_the_groups_that_use_it() {
        let rule = UpdateRule::AdamW(adamw::AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 });
        let group = |range| ParameterGroup { range, rule, learning_rate_scale: 1.0, weight_decay: 0.0 };
        let groups = [group(10..30), group(30..40)];
        let state = state_layouts(&groups, 50, Precision::Fp32, &Shard::whole(0..50));
        assert!(state.iter().all(|layout| layout.shard == Shard::whole(10..40)));
        assert_eq!(state[0].offset_of(&(12..20)), Some(2));
        assert_eq!([state[0].offset_of(&(8..20)), state[0].offset_of(&(38..42))], [None, None]);
        for (shard, ranges) in [(0..35, &[10..30, 30..35][..]), (20..35, &[20..30, 30..35]), (40..50, &[])] {
            let shard = Shard::whole(shard);
            let state = state_layouts(&groups, 50, Precision::Fp32, &shard);
            let own = shard.overlap(&(10..40));
            assert!(state.iter().all(|layout| layout.shard == own && layout.of_all_ranks == (10..40)));
            let parts = in_shard(&groups, &shard).into_iter().map(|(_, part)| part);
            assert!(parts.eq(ranges.iter().cloned().map(Shard::whole)));
        }
    }
}
