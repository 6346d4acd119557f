//! Early stopping: how long ago the held-out loss last improved.

use run_config::EvaluationConfig;

use crate::checkpoint::{BestEvaluation, Improvement};
use crate::units::grouped;

impl Improvement {
    /// Updates the count with another evaluation. A loss that is not finite is no improvement, and none to compare
    /// others with.
    pub(crate) fn after(previous: Option<Self>, step: u64, loss: f64, min_delta: f64) -> Option<Self> {
        let Some(previous) = previous else {
            return loss.is_finite().then_some(Self { step, loss, evaluations_since: 0 });
        };
        if loss < previous.loss && previous.loss - loss >= min_delta {
            return Some(Self { step, loss, evaluations_since: 0 });
        }
        Some(Self { evaluations_since: previous.evaluations_since + 1, ..previous })
    }

    /// Returns the count of a run whose checkpoint has none: the evaluations since its best one.
    pub(crate) fn since_best(best: BestEvaluation, step: u64, every_n_steps: u64) -> Self {
        let BestEvaluation { step: best_step, loss } = best;
        let evaluations_since = (step / every_n_steps).saturating_sub(best_step / every_n_steps);
        Self { step: best_step, loss, evaluations_since }
    }

    /// Returns why training ends, if patience has run out.
    pub(crate) fn reason_to_end(&self, config: &EvaluationConfig) -> Option<String> {
        let patience = config.patience.filter(|patience| self.evaluations_since >= *patience)?;
        let by = if config.min_delta > 0.0 { format!(" by at least {}", config.min_delta) } else { String::new() };
        let plural = if patience == 1 { "" } else { "s" };
        Some(format!(
            "evaluation has not improved{by} for {patience} evaluation{plural} (best {:.4} at step {})",
            self.loss,
            grouped(self.step)
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(losses: &[f64], min_delta: f64) -> Improvement {
        let evaluate = |previous, (index, loss): (usize, &f64)| {
            Improvement::after(previous, 10 * (index as u64 + 1), *loss, min_delta)
        };
        losses.iter().enumerate().fold(None, evaluate).unwrap()
    }

    #[test]
    fn an_improvement_starts_the_count_again() {
        assert_eq!(after(&[3.0, 3.1, 2.9, 2.9, 3.0], 0.0), Improvement { step: 30, loss: 2.9, evaluations_since: 2 });
        assert_eq!(after(&[f64::NAN, 3.0, f64::NAN], 0.0), Improvement { step: 20, loss: 3.0, evaluations_since: 1 });
    }

    #[test]
    fn small_improvements_count_together_only() {
        let slow = [3.0, 2.96, 2.92, 2.88];
        assert_eq!(after(&slow, 0.1), Improvement { step: 40, loss: 2.88, evaluations_since: 0 });
        assert_eq!(after(&slow[..3], 0.1).evaluations_since, 2);
    }

    #[test]
    fn training_ends_when_patience_runs_out() {
        let config = EvaluationConfig { patience: Some(2), ..EvaluationConfig::default() };
        assert_eq!(after(&[3.0, 3.1], 0.0).reason_to_end(&config), None);
        let reason = after(&[3.0, 3.1, 3.2], 0.0).reason_to_end(&config).unwrap();
        assert_eq!(reason, "evaluation has not improved for 2 evaluations (best 3.0000 at step 10)");
        let config = EvaluationConfig { patience: Some(1), min_delta: 0.01, ..config };
        let reason = after(&[3.0, 3.1], 0.01).reason_to_end(&config).unwrap();
        assert!(reason.starts_with("evaluation has not improved by at least 0.01 for 1 evaluation (best"), "{reason}");
        assert_eq!(after(&[3.0, 3.1, 3.2], 0.0).reason_to_end(&EvaluationConfig::default()), None);
    }

    #[test]
    fn a_checkpoint_without_a_count_counts_from_its_best_evaluation() {
        let best = BestEvaluation { step: 400, loss: 3.21 };
        assert_eq!(Improvement::since_best(best, 900, 100).evaluations_since, 5);
    }
}
