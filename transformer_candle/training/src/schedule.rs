//! The learning rate and the batch size of every step, pure functions of the step's number.
//!
//! Steps count from 1. With a warm-up of W steps and T steps in all, the rate rises in a straight line to its peak at
//! step max(W, 1) and falls to `min_lr` at step T. These are PyTorch's `LinearLR(start_factor=1/W, total_iters=W-1)`
//! followed from step W on by `CosineAnnealingLR(T_max=T-W, eta_min=min_lr)` or `LinearLR(1, min_lr/peak, T-W)`. WSD
//! (warm-up, stable, decay; Hu et al. 2024, arXiv:2404.06395) holds the peak and falls in a straight line over the last
//! D steps.

use std::f64::consts::PI;

use run_config::{RunConfig, ScheduleStrategy};

/// The learning rate as a function of the step.
#[derive(Clone, Debug, PartialEq)]
pub struct LearningRate {
    strategy: ScheduleStrategy,
    peak: f64,
    min: f64,
    /// The first step at the peak rate.
    peak_step: u64,
    decay_start: u64,
    total_steps: u64,
}

impl LearningRate {
    /// Returns the schedule of a run. Without `total_steps` there is no end to decay towards, and the peak is held.
    pub fn new(config: &RunConfig) -> Self {
        let scheduler = &config.scheduler;
        let (strategy, total_steps) = match scheduler.total_steps {
            Some(total) => (scheduler.strategy, total),
            None => (ScheduleStrategy::Constant, u64::MAX),
        };
        let peak_step = scheduler.warmup_steps.max(1);
        let decay_start = match strategy {
            ScheduleStrategy::Wsd => total_steps.saturating_sub(scheduler.decay_steps_of(total_steps)).max(peak_step),
            _ => peak_step,
        };
        Self {
            strategy,
            peak: config.optimizer.learning_rate,
            min: scheduler.min_lr,
            peak_step,
            decay_start,
            total_steps,
        }
    }

    /// Returns the learning rate of optimizer step `step`, counted from 1. Past the last step it stays at the minimum.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.peak_step {
            return self.peak * step as f64 / self.peak_step as f64;
        }
        let way = self.total_steps.saturating_sub(self.decay_start).max(1) as f64;
        let progress = (step.saturating_sub(self.decay_start) as f64 / way).min(1.0);
        match self.strategy {
            ScheduleStrategy::Constant => self.peak,
            ScheduleStrategy::Cosine => self.min + (self.peak - self.min) * (1.0 + (PI * progress).cos()) / 2.0,
            ScheduleStrategy::Linear | ScheduleStrategy::Wsd => self.peak + (self.min - self.peak) * progress,
        }
    }
}

/// Returns the number of sequences of step `step`, counted from 1: it grows linearly in the batch-size warm-up.
pub fn sequences_at(config: &RunConfig, step: u64) -> usize {
    let (scheduler, all) = (&config.scheduler, config.data.sequences_per_step);
    let first = scheduler.batch_warmup_start.unwrap_or(all.div_ceil(8));
    if step > scheduler.batch_warmup_steps {
        return all;
    }
    let growth = (all - first) as u128 * u128::from(step - 1) / u128::from(scheduler.batch_warmup_steps);
    first + growth as usize
}

/// Returns the number of tokens in the first `steps` optimizer steps, if the data suffices.
pub fn tokens_of(config: &RunConfig, steps: u64) -> u64 {
    let warm_up = steps.min(config.scheduler.batch_warmup_steps);
    let growing: u64 = (1..=warm_up).map(|step| sequences_at(config, step) as u64).sum();
    (growing + (steps - warm_up) * config.data.sequences_per_step as u64) * config.data.sequence_length as u64
}

#[cfg(test)]
// The peak must be met exactly.
#[allow(clippy::float_cmp)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STRATEGIES: [ScheduleStrategy; 4] =
        [ScheduleStrategy::Cosine, ScheduleStrategy::Linear, ScheduleStrategy::Constant, ScheduleStrategy::Wsd];

    fn schedule(strategy: ScheduleStrategy, warmup: u64, total: u64, peak: f64, min: f64) -> LearningRate {
        let mut config = RunConfig::default();
        config.optimizer.learning_rate = peak;
        config.scheduler.strategy = strategy;
        config.scheduler.warmup_steps = warmup;
        config.scheduler.total_steps = Some(total);
        config.scheduler.min_lr = min;
        LearningRate::new(&config)
    }

    /// `tests/oracles/schedule.py` of this crate prints this table with PyTorch's own schedulers.
    #[test]
    fn rates_equal_pytorchs_schedulers() {
        for line in include_str!("../tests/oracles/schedule.txt").lines().filter(|line| !line.starts_with('#')) {
            let mut fields = line.split_whitespace();
            let strategy = match fields.next().unwrap() {
                "cosine" => ScheduleStrategy::Cosine,
                _ => ScheduleStrategy::Linear,
            };
            let mut number = || fields.next().unwrap().parse::<f64>().unwrap();
            let (warmup, total, step, expected) = (number() as u64, number() as u64, number() as u64, number());
            let ours = schedule(strategy, warmup, total, 3e-4, 3e-5).at(step);
            assert!((ours - expected).abs() <= 1e-12 * expected, "{line}: {ours}");
        }
    }

    #[test]
    fn the_rate_peaks_after_warm_up_and_ends_at_min_lr() {
        let rate = schedule(ScheduleStrategy::Cosine, 10, 100, 1e-3, 1e-4);
        assert_eq!((rate.at(1), rate.at(5), rate.at(10)), (1e-4, 5e-4, 1e-3));
        assert!((rate.at(55) - 5.5e-4).abs() < 1e-18 && (rate.at(100) - 1e-4).abs() < 1e-18);
        assert_eq!(rate.at(1_000_000), rate.at(100));
    }

    #[test]
    fn wsd_holds_the_peak_until_the_decay() {
        let rate = schedule(ScheduleStrategy::Wsd, 10, 100, 1.0, 0.0);
        assert_eq!((rate.at(10), rate.at(50), rate.at(80)), (1.0, 1.0, 1.0));
        assert_eq!((rate.at(90), rate.at(100)), (0.5, 0.0));
    }

    #[test]
    fn without_total_steps_the_peak_is_held() {
        let mut config = RunConfig::default();
        config.scheduler.total_steps = None;
        config.scheduler.total_epochs = Some(2);
        let rate = LearningRate::new(&config);
        assert_eq!(rate.at(1_000_000_000), config.optimizer.learning_rate);
    }

    #[test]
    fn the_batch_grows_linearly_to_its_full_size() {
        let mut config = RunConfig::default();
        config.data.sequences_per_step = 16;
        assert_eq!((sequences_at(&config, 1), tokens_of(&config, 10)), (16, 160 * config.data.sequence_length as u64));
        config.scheduler.batch_warmup_steps = 7;
        let sizes: Vec<_> = (1..=9).map(|step| sequences_at(&config, step)).collect();
        assert_eq!(sizes, [2, 4, 6, 8, 10, 12, 14, 16, 16]);
        assert_eq!(tokens_of(&config, 9), 88 * config.data.sequence_length as u64);
        config.scheduler.batch_warmup_start = Some(16);
        assert_eq!(sequences_at(&config, 1), 16);
    }

    proptest! {
        #[test]
        fn the_rate_stays_in_bounds_and_turns_once(
            strategy in 0usize..4, warmup in 0u64..50, decay_steps in 1u64..200, min in 0.0f64..1.0,
        ) {
            let rate = schedule(STRATEGIES[strategy], warmup, warmup + decay_steps, 1.0, min);
            let peak_step = warmup.max(1);
            prop_assert_eq!(rate.at(peak_step), 1.0);
            for step in 1..warmup + decay_steps + 5 {
                let (now, next) = (rate.at(step), rate.at(step + 1));
                if step < peak_step {
                    prop_assert!(now > 0.0 && now < next);
                } else {
                    prop_assert!(next <= now && next >= min - 1e-15);
                }
            }
        }
    }
}
