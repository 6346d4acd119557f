//! What a resume tells of settings that have changed since the run's last session and may: the schedule, whose learning
//! rate may jump, and other settings of the optimizer.

use run_config::{RESOLVED_CONFIG, ResolvedRun, RunConfig, regular_file};
use serde_json::{Value, json};

use crate::config_fingerprint::{ConfigFingerprint, changes};
use crate::schedule::LearningRate;
use crate::units::grouped;

/// A rate that is this much larger than the last step's is a jump.
const JUMP: f64 = 1.5;
/// A low rate after a schedule that ended at 0, as a part of the peak.
const LOW: f64 = 0.1;

/// Returns what differs from the run's last session, whose config is still in its directory, in a run that is resumed at
/// `step`.
pub(super) fn notes(run: &ResolvedRun, step: u64) -> Vec<String> {
    let text = regular_file::read(&run.run_directory.join(RESOLVED_CONFIG));
    let Some(former) = text.ok().and_then(|text| serde_json::from_slice::<RunConfig>(&text).ok()) else {
        return Vec::new();
    };
    let mut notes = Vec::from_iter(schedule(run, &former, step));
    let changes = changes(&settings(&former), &settings(&run.config));
    if step > 0 && !changes.is_empty() {
        let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
        notes.push(format!("settings have changed: {}", changes.join(", ")));
    }
    notes
}

/// Returns the settings by key that may change and that weights depend on, without what the schedule's note tells.
fn settings(config: &RunConfig) -> ConfigFingerprint {
    let mut settings = ConfigFingerprint::from([("lora.dropout".to_owned(), json!(config.lora.dropout))]);
    add(&mut settings, "optimizer", json!(config.optimizer));
    if config.stages.is_none() {
        settings.remove("optimizer.learning_rate");
    }
    settings
}

/// Adds a setting, or those in a table of settings.
fn add(settings: &mut ConfigFingerprint, key: &str, value: Value) {
    let Value::Object(table) = value else {
        settings.insert(key.to_owned(), value);
        return;
    };
    for (name, value) in table {
        add(settings, &format!("{key}.{name}"), value);
    }
}

/// Returns a note if the schedule differs. None for a run with stages, each of which has a schedule of its own.
fn schedule(run: &ResolvedRun, former: &RunConfig, step: u64) -> Option<String> {
    let total = run.config.scheduler.total_steps?;
    if step == 0 || step >= total || run.config.stages.is_some() || former.stages.is_some() {
        return None;
    }
    let (former_rate, new_rate) = (LearningRate::new(former), LearningRate::new(&run.config));
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
