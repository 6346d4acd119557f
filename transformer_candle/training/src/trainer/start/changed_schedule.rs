//! What a resume with another schedule does to the learning rate, which may jump.

use run_config::{RESOLVED_CONFIG, ResolvedRun, RunConfig, regular_file};

use crate::schedule::LearningRate;
use crate::units::grouped;

/// A rate that is this much larger than the last step's is a jump.
const JUMP: f64 = 1.5;
/// A low rate after a schedule that ended at 0, as a part of the peak.
const LOW: f64 = 0.1;

/// Returns a note if the schedule of the run's last session, whose config is still in its directory, differs from the
/// one it is resumed with at `step`. None for a run with stages, each of which has a schedule of its own.
pub(super) fn note(run: &ResolvedRun, step: u64) -> Option<String> {
    let text = regular_file::read(&run.run_directory.join(RESOLVED_CONFIG)).ok()?;
    let former: RunConfig = serde_json::from_slice(&text).ok()?;
    let total = run.config.scheduler.total_steps?;
    if step == 0 || step >= total || run.config.stages.is_some() || former.stages.is_some() {
        return None;
    }
    let (former_rate, new_rate) = (LearningRate::new(&former), LearningRate::new(&run.config));
    if former_rate == new_rate {
        return None;
    }
    let (last, next) = (former_rate.at(step), new_rate.at(step + 1));
    let low = if last > 0.0 { last } else { LOW * run.config.optimizer.learning_rate };
    let advice = if next > JUMP * last && step >= former.scheduler.warmup_steps {
        format!(". Without the jump: scheduler.strategy=constant and optimizer.learning_rate={low:.1e}")
    } else {
        String::new()
    };
    let [last, next, end] =
        [last, next, new_rate.at(total)].map(|rate| if rate > 0.0 { format!("{rate:.1e}") } else { "0".to_owned() });
    Some(format!(
        "the schedule has changed: the learning rate was {last} at step {}, and is {next} at step {} and {end} at step {}, \
         the last{advice}",
        grouped(step),
        grouped(step + 1),
        grouped(total),
    ))
}
