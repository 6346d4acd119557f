//! Detects divergence: non-finite gradients or a sustained rise in loss.

use std::collections::VecDeque;

use run_config::DivergenceGuardConfig;

/// Checks each step's loss for divergence. Its state is not saved: a resumed run starts with an empty history.
#[derive(Debug)]
pub struct DivergenceGuard {
    config: DivergenceGuardConfig,
    consecutive_skips: u64,
    /// The losses of the last `window_steps` steps.
    recent_losses: VecDeque<f64>,
    lowest_mean: Option<f64>,
}

impl DivergenceGuard {
    /// Returns a guard without history.
    pub fn new(config: &DivergenceGuardConfig) -> Self {
        Self { config: config.clone(), consecutive_skips: 0, recent_losses: VecDeque::new(), lowest_mean: None }
    }

    /// Adds a step's loss and whether its update was applied; returns the reason to stop, if there is one.
    pub fn observe(&mut self, loss: f32, applied: bool) -> Option<String> {
        if !applied || !loss.is_finite() {
            self.consecutive_skips += 1;
            return (self.consecutive_skips >= self.config.max_skipped_steps)
                .then(|| format!("the gradients of {} steps in a row were not finite", self.consecutive_skips));
        }
        self.consecutive_skips = 0;
        self.recent_losses.push_back(f64::from(loss));
        let window_steps = self.config.window_steps as usize;
        if self.recent_losses.len() > window_steps {
            self.recent_losses.pop_front();
        }
        if self.recent_losses.len() < window_steps {
            return None;
        }
        let mean = self.recent_losses.iter().sum::<f64>() / window_steps as f64;
        let lowest = self.lowest_mean.map_or(mean, |lowest| lowest.min(mean));
        self.lowest_mean = Some(lowest);
        let allowed = self.config.max_loss_increase?;
        (mean - lowest > allowed).then(|| {
            format!("the mean loss of the last {window_steps} steps is {mean:.3}, up from a minimum of {lowest:.3}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard() -> DivergenceGuard {
        DivergenceGuard::new(&DivergenceGuardConfig {
            max_skipped_steps: 3,
            max_loss_increase: Some(1.0),
            window_steps: 4,
        })
    }

    #[test]
    fn consecutive_skipped_steps_stop_a_run() {
        let mut guard = guard();
        for _ in 0..10 {
            assert_eq!(guard.observe(f32::NAN, false), None);
            assert_eq!(guard.observe(2.0, false), None);
            assert_eq!(guard.observe(2.0, true), None);
        }
        assert_eq!(guard.observe(2.0, false), None);
        assert_eq!(guard.observe(2.0, false), None);
        let reason = guard.observe(2.0, false).unwrap();
        assert_eq!(reason, "the gradients of 3 steps in a row were not finite");
    }

    #[test]
    fn a_sustained_rise_stops_a_run_and_a_spike_does_not() {
        let mut guard = guard();
        for loss in [9.0, 5.0, 3.0, 3.0, 3.0, 6.0, 3.0, 3.0, 3.0, 3.0, 3.0, 4.9] {
            assert_eq!(guard.observe(loss, true), None);
        }
        assert_eq!(guard.observe(4.9, true), None);
        let reason = guard.observe(4.9, true).unwrap();
        assert_eq!(reason, "the mean loss of the last 4 steps is 4.425, up from a minimum of 3.000");
    }

    #[test]
    fn without_max_loss_increase_finite_losses_pass() {
        let config = DivergenceGuardConfig { max_skipped_steps: 1, max_loss_increase: None, window_steps: 1 };
        let mut guard = DivergenceGuard::new(&config);
        assert!([1.0, 1e6, 1e30].into_iter().all(|loss| guard.observe(loss, true).is_none()));
    }
}
