//! Checks that a number of ranks can share a run.

use model::hugging_face;

use crate::{
    engine::{EngineSettings, StepOf},
    error::{Result, TrainerError},
};

/// Refuses a number of ranks that cannot share the sequences of a step equally.
///
/// # Errors
/// [`TrainerError::Request`] if it does not divide them.
pub fn check_sequences(sequences: usize, ranks: usize) -> Result<()> {
    if sequences.is_multiple_of(ranks) {
        return Ok(());
    }
    let noun = if sequences == 1 { "sequence" } else { "sequences" };
    Err(TrainerError::Request(format!(
        "a step of {sequences} {noun} cannot be shared equally by {ranks} ranks: take a number of ranks that divides \
         {sequences}, or change data.sequences_per_step"
    )))
}

/// Refuses a number of ranks that cannot share the micro-batches of a step, or the model's tensors.
pub(super) fn check_ranks(step: &StepOf<'_>) -> Result<()> {
    let EngineSettings { micro_batch, rank_info, .. } = step.settings;
    check_reduction(step)?;
    let (ranks, sequences) = (rank_info.world_size, step.config.data.sequences_per_step);
    check_sequences(sequences, ranks)?;
    let micro_batches = sequences / micro_batch;
    if !micro_batches.is_multiple_of(ranks) {
        return Err(TrainerError::Request(format!(
            "a step of {sequences} sequences is {micro_batches} micro-batches of {micro_batch}, which {ranks} ranks cannot \
             share equally: take a number of ranks that divides {micro_batches}, or change data.batch_size or \
             data.sequences_per_step"
        )));
    }
    let tensors = hugging_face::trainable_tensors(step.shape).len();
    if tensors < ranks {
        return Err(TrainerError::Request(format!(
            "{ranks} ranks cannot share the {tensors} tensors of this model, of which each rank updates at least one: take \
             fewer ranks"
        )));
    }
    Ok(())
}

/// Refuses virtual shards that the ranks cannot share.
fn check_reduction(step: &StepOf<'_>) -> Result<()> {
    let Some(shards) = step.config.runtime.deterministic_reduction else { return Ok(()) };
    let ranks = step.settings.rank_info.world_size;
    if !shards.is_multiple_of(ranks) {
        return Err(TrainerError::Request(format!(
            "{ranks} ranks cannot share the {shards} virtual shards of runtime.deterministic_reduction equally: take a \
             number of ranks that divides {shards}, or change the key"
        )));
    }
    Ok(())
}
