//! Parameter groups: which rule updates which parameters, and the state that the rules keep.
//!
//! A new algorithm is an arm of [`parameter_groups`] that divides the parameters into groups, a variant of [`UpdateRule`]
//! that lists its state, and an arm of the optimizer's update. Plan, checkpoints and `gpu-check` read the list.

use std::ops::Range;

use kernels::{DType, adamw, memory::Category, muon};
use model::{ParameterKind, ParameterLayout, Precision, dtype_of};
use run_config::{Algorithm, MuonPolynomials, OptimizerConfig};

use super::state::{MASTER_LOW_BITS, StateLayout};
use crate::engine::shard::Shard;

/// `AdamW`'s running mean of the gradients.
pub(super) const FIRST_MOMENT: &str = "first_moment";
/// `AdamW`'s running mean of the squared gradients.
pub(super) const SECOND_MOMENT: &str = "second_moment";
/// Muon's running mean of the gradients.
pub(super) const MOMENTUM: &str = "momentum";

/// Returns the groups of the parameters that train, none of them empty. Together they cover the trainable elements of
/// the flat buffers.
pub fn parameter_groups(config: &OptimizerConfig, layout: &ParameterLayout) -> Vec<ParameterGroup> {
    let (decayed, all, ratio) = (layout.decayed_elements(), layout.trainable_elements(), layout.width_ratio());
    let embedding = layout.range(ParameterKind::Embedding);
    let group = |range: Range<usize>, rule, learning_rate_scale, weight_decay: f64| {
        let weight_decay = (weight_decay / learning_rate_scale) as f32;
        ParameterGroup { range: range.start.min(all)..range.end.min(all), rule, learning_rate_scale, weight_decay }
    };
    let adamw = UpdateRule::AdamW(adamw_settings(config));
    let matrices = match config.algorithm {
        Algorithm::AdamW => vec![group(0..decayed, adamw, ratio, config.weight_decay)],
        // The spectral norm of an update of Muon grows with the root of the width, of one of AdamW with the width.
        Algorithm::Muon => vec![
            group(layout.range(ParameterKind::Projection), muon_rule(config), ratio.sqrt(), config.weight_decay),
            group(layout.range(ParameterKind::Head), adamw, ratio, config.weight_decay),
        ],
    };
    let others = match config.embedding_learning_rate_scale {
        1.0 => vec![group(decayed..all, adamw, 1.0, 0.0)],
        scale => vec![group(embedding.clone(), adamw, scale, 0.0), group(embedding.end..all, adamw, 1.0, 0.0)],
    };
    matrices.into_iter().chain(others).filter(|group| !group.range.is_empty()).collect()
}

/// `AdamW`'s settings in a config.
pub(super) fn adamw_settings(config: &OptimizerConfig) -> adamw::AdamW {
    let &OptimizerConfig { beta1, beta2, epsilon, .. } = config;
    adamw::AdamW { beta1, beta2, epsilon }
}

/// Muon with a config's settings.
fn muon_rule(config: &OptimizerConfig) -> UpdateRule {
    let polynomials = match config.muon.polynomials {
        MuonPolynomials::Quintic => muon::Polynomials::Quintic,
        MuonPolynomials::PolarExpress => muon::Polynomials::PolarExpress,
    };
    UpdateRule::Muon(muon::Muon { momentum: config.muon.momentum, polynomials })
}

/// Parameters that one rule updates with one weight decay.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterGroup {
    /// Their elements of the flat buffers.
    pub range: Range<usize>,
    /// The rule that updates them.
    pub rule: UpdateRule,
    /// Multiplies the learning rate of every step (`model.base_hidden_size`).
    pub learning_rate_scale: f64,
    /// Decoupled weight decay: the config's over `learning_rate_scale`, so that the scale does not change the decay.
    pub weight_decay: f32,
}

/// The rule by which a group's gradients change its weights.
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

/// Returns the groups that have parameters in a rank's shard, each with its part of the shard.
pub(super) fn in_shard(groups: &[ParameterGroup], shard: &Shard) -> Vec<(ParameterGroup, Shard)> {
    let part = |group: &ParameterGroup| (group.clone(), shard.overlap(&group.range));
    groups.iter().map(part).filter(|(_, part)| !part.is_empty()).collect()
}

/// Returns the layout of a rank's state tensors for these groups, in the order in which they are saved. State that
/// several groups keep is one tensor, from the first one's first element to the last one's last.
pub(super) fn state_layouts(
    groups: &[ParameterGroup],
    elements: usize,
    precision: Precision,
    shard: &Shard,
) -> Vec<StateLayout> {
    let mut layouts: Vec<StateLayout> = Vec::new();
    for ParameterGroup { range, rule, .. } in groups {
        for &name in rule.state() {
            if let Some(layout) = layouts.iter_mut().find(|layout| layout.name == name) {
                layout.of_all_ranks =
                    layout.of_all_ranks.start.min(range.start)..layout.of_all_ranks.end.max(range.end);
            } else {
                let (category, dtype) = (Category::OptimizerMoments, DType::F32);
                layouts.push(StateLayout::new(name, category, dtype, range.clone()));
            }
        }
    }
    if dtype_of(precision) == DType::BF16 {
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
            let config = OptimizerConfig { algorithm, embedding_learning_rate_scale: 10.0, ..Default::default() };
            let groups = parameter_groups(&config, &layout);
            let ends = groups.iter().map(|group| group.range.end);
            assert!(groups.iter().map(|group| group.range.start).eq([0].into_iter().chain(ends).take(groups.len())));
            assert_eq!(groups[groups.len() - 1].range.end, layout.elements());
            let scaled = groups.iter().filter(|group| group.learning_rate_scale > 1.0).map(|group| &group.range);
            assert!(scaled.eq([&layout.range(ParameterKind::Embedding)]));
            groups
        };
        let muon = state_layouts(&groups_of(Algorithm::Muon), all.end, Precision::Bf16, &Shard::whole(all.clone()));
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
        let groups = groups_of(Algorithm::AdamW);
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
