//! How a step is computed (micro-batch, accumulation, recompute mode), carried from a checkpoint to the run that
//! resumes it: with another split the sums of gradients round differently, and the weights would differ from an
//! uninterrupted run's.

use std::path::Path;

use run_config::{BatchSize, ResolvedRun};
use serde_json::json;

use crate::{
    checkpoint::Execution,
    config_fingerprint::Change,
    error::{Result, TrainerError, shortage::recompute},
    memory_plan::MemoryPlan,
};

/// How the steps of a plan are computed.
pub(super) fn from_plan(plan: &MemoryPlan) -> Execution {
    Execution {
        micro_batch: plan.micro_batch as usize,
        gradient_accumulation_steps: plan.gradient_accumulation_steps as usize,
        activation_recompute: plan.activation_recompute,
    }
}

/// Makes a resumed run compute its steps as the checkpoint's run did, and returns a note for the user if it cannot.
///
/// `batch_size: auto` becomes the checkpoint's micro-batch, whatever memory is free. A run whose
/// `data.sequences_per_step` was changed takes other steps anyway, and only what the config leaves open is kept.
///
/// # Errors
/// [`TrainerError::RebatchedOnResume`] if the config names another micro-batch or recompute mode.
pub(super) fn keep(run: &mut ResolvedRun, checkpoint: &Path, saved: Option<&Execution>) -> Result<Option<String>> {
    let data = &mut run.config.data;
    let Some(saved) = saved else {
        return Ok((data.batch_size == BatchSize::Auto).then(|| {
            "the checkpoint does not say with which micro-batch it was trained: data.batch_size is `auto`, so the weights may round \
             differently from those of an uninterrupted run"
                .to_owned()
        }));
    };
    let note = if data.sequences_per_step == saved.sequences_per_step() {
        let changes = changes(run, saved);
        if !changes.is_empty() {
            return Err(TrainerError::RebatchedOnResume { checkpoint: checkpoint.to_owned(), changes });
        }
        None
    } else {
        let (was, is) = (saved.sequences_per_step(), data.sequences_per_step);
        Some(format!("data.sequences_per_step was {was} up to the checkpoint and is {is} from here on"))
    };
    let data = &mut run.config.data;
    if data.batch_size == BatchSize::Auto && data.sequences_per_step.is_multiple_of(saved.micro_batch) {
        data.batch_size = BatchSize::Fixed(saved.micro_batch);
    }
    Ok(note)
}

/// The note of a run whose batching was changed on request.
pub(super) fn changed(plan: &MemoryPlan, saved: Option<&Execution>) -> Option<String> {
    let (was, is) = (saved?, from_plan(plan));
    (*was != is).then(|| {
        format!(
            "--rebatch: steps are computed as {}, not as {}: from here on the weights agree with those of an uninterrupted run up \
             to rounding",
            described(&is),
            described(was)
        )
    })
}

fn described(execution: &Execution) -> String {
    let Execution { micro_batch, gradient_accumulation_steps, activation_recompute } = execution;
    let recompute = recompute(*activation_recompute);
    format!("{micro_batch} x {gradient_accumulation_steps} sequences with activation_recompute {recompute}")
}

/// The config keys that differ from the checkpoint's.
fn changes(run: &ResolvedRun, saved: &Execution) -> Vec<Change> {
    let change = |key: &str, was, is| (was != is).then(|| Change { key: key.to_owned(), was, is });
    let micro_batch = match run.config.data.batch_size {
        BatchSize::Auto => saved.micro_batch,
        BatchSize::Fixed(sequences) => sequences,
    };
    let recompute = run.config.runtime.activation_recompute;
    [
        change("data.batch_size", json!(saved.micro_batch), json!(micro_batch)),
        change("runtime.activation_recompute", json!(saved.activation_recompute), json!(recompute)),
    ]
    .into_iter()
    .flatten()
    .collect()
}
