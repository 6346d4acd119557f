//! Sampling of the next token from its logits: greedy, or by temperature, top-k and top-p.

use std::cmp::Ordering;

use crate::{Error, Result};
use kernels::counter_hash::mix;

/// Settings of sampling. Filters apply in the order of `transformers`: temperature, top-k, top-p.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct SamplingSettings {
    /// Divides the logits: 0 always takes the most likely token, 1 follows the model.
    #[cfg_attr(feature = "clap", arg(long, value_name = "T", default_value_t = 0.8))]
    pub temperature: f64,
    /// Choose among the K most likely tokens; 0 for all.
    #[cfg_attr(feature = "clap", arg(long, value_name = "K", default_value_t = 0))]
    pub top_k: usize,
    /// Choose among the fewest most likely tokens that together have this probability; 1 for all.
    #[cfg_attr(feature = "clap", arg(long, value_name = "P", default_value_t = 1.0))]
    pub top_p: f64,
    /// The same seed writes the same text.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 0))]
    pub seed: u64,
}

impl SamplingSettings {
    /// Settings that always choose the most likely token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 }
    }

    /// Refuses settings outside their range.
    pub fn check(&self) -> Result<()> {
        let refuse = |key, value, expected| Err(Error::Sampling { key, value, expected });
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return refuse("temperature", self.temperature, "0 (greedy) or a positive number");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return refuse("top_p", self.top_p, "above 0 and at most 1");
        }
        Ok(())
    }
}

impl Default for SamplingSettings {
    /// Settings that follow the model's own distribution.
    fn default() -> Self {
        Self { temperature: 1.0, ..Self::greedy() }
    }
}

/// Returns the token chosen from logits; a pure function of (logits, settings, index), where `index` counts the draws.
///
/// Of equal logits the lower id counts as more likely; a logit that is not a number is never chosen while there is
/// another.
pub fn sample(logits: &[f32], settings: &SamplingSettings, index: u64) -> u32 {
    let mut tokens: Vec<Token> = (0..).zip(logits.iter().map(|&logit| rank_key(logit))).collect();
    let Some((best, largest)) = tokens.iter().copied().reduce(|best, next| if next.1 > best.1 { next } else { best })
    else {
        return 0;
    };
    if settings.temperature == 0.0 || largest.is_infinite() {
        return best;
    }
    keep_likeliest(&mut tokens, settings.top_k);
    for (_, weight) in &mut tokens {
        *weight = ((*weight - largest) / settings.temperature).exp();
    }
    keep_nucleus(&mut tokens, settings.top_p);
    draw(&tokens, unit(settings.seed, index))
}

/// An id, and its logit or weight.
type Token = (u32, f64);

fn likelier((a_id, a): &Token, (b_id, b): &Token) -> Ordering {
    b.total_cmp(a).then(a_id.cmp(b_id))
}

/// Drops all but the `count` most likely; 0 keeps all.
fn keep_likeliest(tokens: &mut Vec<Token>, count: usize) {
    if 0 < count && count < tokens.len() {
        tokens.select_nth_unstable_by(count - 1, likelier);
        tokens.truncate(count);
        tokens.sort_unstable_by_key(|&(id, _)| id);
    }
}

fn rank_key(logit: f32) -> f64 {
    if logit.is_nan() { f64::NEG_INFINITY } else { f64::from(logit) }
}

/// Keeps the most likely tokens that reach `top_p` of the whole weight.
fn keep_nucleus(tokens: &mut Vec<Token>, top_p: f64) {
    if top_p >= 1.0 {
        return;
    }
    let all: f64 = tokens.iter().map(|(_, weight)| weight).sum();
    // Half of what may be left out, in equal parts: the tokens below one are not needed, and most of a large
    // vocabulary's are there. Only the others need to be put in order.
    let least = 0.5 * (1.0 - top_p) * all / tokens.len() as f64;
    tokens.retain(|&(_, weight)| weight >= least);
    tokens.sort_unstable_by(likelier);
    let mut sum = 0.0;
    let nucleus = tokens.iter().take_while(|(_, weight)| {
        let is_in_nucleus = sum < top_p * all;
        sum += weight;
        is_in_nucleus
    });
    let count = nucleus.count();
    tokens.truncate(count.max(1));
}

/// Returns the token at the fraction `at` of the weights laid end to end.
fn draw(tokens: &[Token], at: f64) -> u32 {
    let mut rest = at * tokens.iter().map(|(_, weight)| weight).sum::<f64>();
    for &(id, weight) in tokens {
        rest -= weight;
        if rest < 0.0 {
            return id;
        }
    }
    // Rounding may leave a remainder beyond the last token that has any weight.
    tokens.iter().rfind(|(_, weight)| *weight > 0.0).map_or(0, |&(id, _)| id)
}

/// Returns a number in [0, 1) from a counter.
fn unit(seed: u64, index: u64) -> f64 {
    (mix(mix(seed) ^ index) >> 11) as f64 * 2f64.powi(-53)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shares(logits: &[f32], settings: &SamplingSettings, draws: u64) -> Vec<f64> {
        let mut counts = vec![0.0; logits.len()];
        (0..draws).for_each(|index| {
            counts[sample(logits, settings, index) as usize] += 1.0 / draws as f64;
        });
        counts
    }

    #[test]
    fn draws_follow_the_softmax_of_the_logits_over_the_temperature() {
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let settings = SamplingSettings { temperature: 0.5, seed: 3, ..SamplingSettings::default() };
        let total: f64 = logits.iter().map(|&logit| (f64::from(logit) / 0.5).exp()).sum();
        for (share, &logit) in shares(&logits, &settings, 40_000).iter().zip(&logits) {
            assert!((share - (f64::from(logit) / 0.5).exp() / total).abs() < 0.01);
        }
    }

    #[test]
    fn top_p_keeps_the_fewest_tokens_that_reach_it() {
        // Probabilities 0.5, 0.25, 0.125, 0.125.
        let logits = [4f32.ln(), 2f32.ln(), 0.0, 0.0];
        let retained_count = |top_p| {
            let settings = SamplingSettings { top_p, ..SamplingSettings::default() };
            shares(&logits, &settings, 2000).iter().filter(|share| **share > 0.0).count()
        };
        assert_eq!([0.4, 0.6, 0.8, 0.9, 1.0].map(retained_count), [1, 2, 3, 4, 4]);
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        let refused = |settings: SamplingSettings| settings.check().unwrap_err().to_string();
        let default = SamplingSettings::default();
        for temperature in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(refused(SamplingSettings { temperature, ..default }).contains("temperature"));
        }
        for top_p in [0.0, 1.5, f64::NAN] {
            assert!(refused(SamplingSettings { top_p, ..default }).contains("top_p"));
        }
        assert!(default.check().is_ok() && SamplingSettings::greedy().check().is_ok());
    }

    #[test]
    fn logits_that_are_no_numbers_are_never_chosen() {
        let logits = [f32::NAN, 1.0, f32::NEG_INFINITY, f32::NAN];
        for settings in [SamplingSettings::greedy(), SamplingSettings::default()] {
            assert!((0..200).all(|index| sample(&logits, &settings, index) == 1));
        }
        assert_eq!(sample(&[f32::NAN; 3], &SamplingSettings::default(), 0), 0);
    }

    proptest! {
        #[test]
        fn greedy_takes_the_first_of_the_largest(logits in prop::collection::vec(-3i8..3, 1..40)) {
            let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
            let largest = logits.iter().copied().fold(f32::MIN, f32::max);
            let expected = logits.iter().position(|&logit| logit == largest).unwrap() as u32;
            prop_assert_eq!(sample(&logits, &SamplingSettings::greedy(), 9), expected);
            let one = SamplingSettings { top_k: 1, ..SamplingSettings::default() };
            prop_assert_eq!(sample(&logits, &one, 9), expected);
        }

        #[test]
        fn a_draw_is_repeatable_and_one_of_the_top_k(
            logits in prop::collection::vec(-5f32..5.0, 1..40), top_k in 1usize..10, seed: u64, index: u64,
        ) {
            let settings = SamplingSettings { top_k, seed, ..SamplingSettings::default() };
            let token = sample(&logits, &settings, index);
            prop_assert_eq!(token, sample(&logits, &settings, index));
            let better = logits.iter().filter(|&&logit| logit > logits[token as usize]).count();
            prop_assert!(better < top_k);
        }
    }
}
