//! Overfitting: the model fits its training text ever better, and other text ever worse.

/// Evaluations in a row in which the held-out loss must rise.
const EVALUATIONS_IN_A_ROW: usize = 3;

/// A rule for a held-out loss that rises from evaluation to evaluation while the training loss falls.
#[derive(Debug, Default)]
pub(super) struct OverfittingRule {
    /// Sum and number of the training losses since the last evaluation.
    losses: (f64, u64),
    /// Held-out loss, and mean training loss before it, at each evaluation since the held-out loss last fell.
    evaluations: Vec<(f64, f64)>,
    is_told: bool,
}

impl OverfittingRule {
    /// Forgets the losses so far, which are not comparable with later ones.
    pub(super) fn restart(&mut self) {
        *self = Self { is_told: self.is_told, ..Self::default() };
    }

    pub(super) fn step(&mut self, loss: f64) {
        self.losses = (self.losses.0 + loss, self.losses.1 + 1);
    }

    /// Adds an evaluation; returns the finding as a sentence when the losses are first found to move apart.
    pub(super) fn evaluate(&mut self, held_out: f64) -> Option<String> {
        let (sum, count) = std::mem::take(&mut self.losses);
        if count == 0 {
            return None;
        }
        let training = sum / count as f64;
        if self.evaluations.last().is_some_and(|last| !(held_out > last.0 && training < last.1)) {
            self.evaluations.clear();
        }
        self.evaluations.push((held_out, training));
        let first = self.evaluations[0];
        let is_found = !self.is_told && self.evaluations.len() > EVALUATIONS_IN_A_ROW;
        self.is_told |= is_found;
        is_found.then(|| {
            format!(
                "the held-out loss has risen in {EVALUATIONS_IN_A_ROW} evaluations in a row, from {:.4} to {held_out:.4}, \
                 while the training loss fell from {:.4} to {training:.4}: the model memorizes its text. Give it more text, \
                 or fewer steps or parameters; checkpoints/best has the lowest held-out loss, and \
                 runtime.evaluation.patience ends a run there",
                first.0, first.1
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_out_loss_that_rises_while_training_loss_falls_is_found() {
        let warnings_of = |losses: &[(f64, f64)]| {
            let mut rule = OverfittingRule::default();
            let evaluate = |&(training, held_out): &(f64, f64)| {
                rule.step(training);
                rule.evaluate(held_out)
            };
            losses.iter().filter_map(evaluate).collect::<Vec<_>>()
        };
        let diverging = [(3.0, 3.1), (2.5, 2.9), (2.0, 3.0), (1.5, 3.2), (1.0, 3.5), (0.5, 3.9), (0.4, 4.0)];
        let advice = warnings_of(&diverging);
        assert_eq!(advice.len(), 1);
        assert!(
            advice[0].contains("from 2.9000 to 3.5000") && advice[0].contains("from 2.5000 to 1.0000"),
            "{advice:?}"
        );
        assert_eq!(warnings_of(&diverging[..4]), [""; 0], "two evaluations");
        assert_eq!(
            warnings_of(&[(3.0, 3.0), (2.9, 3.1), (2.8, 3.2), (2.7, 3.1), (2.6, 3.2)]),
            [""; 0],
            "it fell in between"
        );
        assert_eq!(warnings_of(&[(3.0, 3.0), (3.1, 3.1), (3.2, 3.2), (3.3, 3.3)]), [""; 0], "both rise");
    }
}
