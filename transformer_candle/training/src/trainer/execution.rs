//! How a step is computed (micro-batch, accumulation, recompute mode, virtual shards), kept from a checkpoint by the
//! run that resumes it: with another split the sums of gradients round differently, and the weights would differ from
//! an uninterrupted run's.

use std::path::Path;

use run_config::{BatchSize, ResolvedRun};
use serde_json::{Value, json};

use crate::{
    checkpoint::{Execution, StageExecution},
    config_fingerprint::Change,
    error::{Result, TrainerError, shortage::recompute},
    memory_plan::{MemoryPlan, StagePlan},
};

/// Returns how a plan computes its steps.
pub(super) fn from_plan(plan: &MemoryPlan) -> Execution {
    Execution {
        micro_batch: plan.micro_batch as usize,
        gradient_accumulation_steps: plan.gradient_accumulation_steps as usize,
        activation_recompute: plan.activation_recompute,
        deterministic_reduction: plan.deterministic_reduction.map(|shards| shards as usize),
        stages: plan.stages.iter().map(of_stage).collect(),
    }
}

fn of_stage(stage: &StagePlan) -> StageExecution {
    StageExecution {
        micro_batch: stage.micro_batch as usize,
        gradient_accumulation_steps: stage.gradient_accumulation_steps as usize,
    }
}

/// Writes the micro-batches of a plan into the config.
pub(super) fn write(plan: &MemoryPlan, run: &mut ResolvedRun) {
    if let Some(stages) = &mut run.config.stages {
        for (stage, planned) in stages.iter_mut().zip(&plan.stages) {
            stage.batch_size = Some(BatchSize::Fixed(planned.micro_batch as usize));
        }
        return;
    }
    run.config.data.batch_size = BatchSize::Fixed(plan.micro_batch as usize);
    run.config.data.gradient_accumulation_steps = Some(plan.gradient_accumulation_steps as usize);
}

/// Makes a resumed run compute its steps as the checkpoint's run did, and returns a note for the user if it cannot.
///
/// `batch_size: auto` becomes the checkpoint's micro-batch, whatever memory is free. A run whose
/// `data.sequences_per_step` was changed takes other steps anyway, and only what the config leaves open is kept.
///
/// # Errors
/// [`TrainerError::RebatchedOnResume`] if the config names another micro-batch, recompute mode or number of virtual
/// shards.
pub(super) fn keep(run: &mut ResolvedRun, checkpoint: &Path, saved: Option<&Execution>) -> Result<Option<String>> {
    let data = &mut run.config.data;
    let Some(saved) = saved else {
        return Ok((data.batch_size == BatchSize::Auto).then(|| {
            "the checkpoint does not say with which micro-batch it was trained: data.batch_size is `auto`, so the weights may round \
             differently from those of an uninterrupted run"
                .to_owned()
        }));
    };
    let stages = run.config.stages.as_ref().map_or(0, Vec::len);
    if stages != saved.stages.len() {
        // A different run: the comparison of fingerprints gives the better message.
        return Ok(None);
    }
    if stages > 0 {
        return keep_stages(run, checkpoint, saved).map(|()| None);
    }
    let data = &mut run.config.data;
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

/// Does what [`keep`] does for a run in stages: `batch_size: auto` of each becomes the checkpoint's micro-batch.
fn keep_stages(run: &mut ResolvedRun, checkpoint: &Path, saved: &Execution) -> Result<()> {
    let mut changes = runtime_changes(run, saved);
    let stages = run.config.stages.iter_mut().flatten();
    for (index, (stage, saved)) in stages.zip(&saved.stages).enumerate() {
        if stage.sequences_per_step != Some(saved.micro_batch * saved.gradient_accumulation_steps) {
            continue;
        }
        match stage.batch_size {
            Some(BatchSize::Fixed(micro_batch)) => {
                let key = format!("stages[{index}].batch_size");
                changes.extend(change(&key, json!(saved.micro_batch), json!(micro_batch)));
            }
            _ => stage.batch_size = Some(BatchSize::Fixed(saved.micro_batch)),
        }
    }
    if changes.is_empty() {
        return Ok(());
    }
    Err(TrainerError::RebatchedOnResume { checkpoint: checkpoint.to_owned(), changes })
}

/// Returns the note for a run that `--rebatch` computes differently from its checkpoint; None where it is the same.
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
    let Execution { micro_batch, gradient_accumulation_steps, activation_recompute, deterministic_reduction, stages } =
        execution;
    let recompute = recompute(*activation_recompute);
    let one = |micro_batch: usize, steps: usize| format!("{micro_batch} x {steps}");
    let stages: Vec<_> = stages.iter().map(|stage| one(stage.micro_batch, stage.gradient_accumulation_steps)).collect();
    let split =
        if stages.is_empty() { one(*micro_batch, *gradient_accumulation_steps) } else { stages.join(", then ") };
    let tree = deterministic_reduction.map_or_else(String::new, |shards| format!(" in {shards} virtual shards"));
    format!("{split} sequences{tree} with activation_recompute {recompute}")
}

/// Returns the config keys that differ from the checkpoint's.
fn changes(run: &ResolvedRun, saved: &Execution) -> Vec<Change> {
    let micro_batch = match run.config.data.batch_size {
        BatchSize::Auto => saved.micro_batch,
        BatchSize::Fixed(sequences) => sequences,
    };
    let micro_batch = change("data.batch_size", json!(saved.micro_batch), json!(micro_batch));
    micro_batch.into_iter().chain(runtime_changes(run, saved)).collect()
}

/// Returns the keys of `runtime` that differ from the checkpoint's.
fn runtime_changes(run: &ResolvedRun, saved: &Execution) -> Vec<Change> {
    let is = &run.config.runtime;
    let recompute =
        change("runtime.activation_recompute", json!(saved.activation_recompute), json!(is.activation_recompute));
    let (was, is) = (saved.deterministic_reduction, is.deterministic_reduction);
    let reduction = change("runtime.deterministic_reduction", json!(was), json!(is));
    recompute.into_iter().chain(reduction).collect()
}

fn change(key: &str, was: Value, is: Value) -> Option<Change> {
    (was != is).then(|| Change { key: key.to_owned(), was, is })
}
