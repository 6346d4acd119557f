//! Fills in what stages take from the rest of the config, and their lengths in steps.

use super::StageConfig;
use crate::check::Findings;
use crate::data::BatchSize;
use crate::error::Problem;
use crate::fill::near_divisor;
use crate::{DataConfig, RunConfig};

/// Fills in the keys of every stage. `tokens_per_step` is `data.tokens_per_step` where that was given.
pub(crate) fn fill(config: &mut RunConfig, tokens_per_step: Option<usize>, findings: &mut Findings) {
    let RunConfig { stages, data, .. } = config;
    for (index, stage) in stages.iter_mut().flatten().enumerate() {
        let path = format!("stages[{index}]");
        let is_refused = |key: &str| findings.rejected.contains(key);
        // A key that the stage would take from there was refused itself.
        let is_open = ["data.sequence_length", "data.sequences_per_step", "data.batch_size"].map(is_refused);
        if is_refused(&path) || is_open.contains(&true) {
            findings.rejected.insert(path);
            continue;
        }
        let filler = Filler { data, tokens_per_step, path: &path };
        if let Err(problem) = filler.fill(stage) {
            findings.problems.push(problem);
            findings.rejected.insert(path);
        }
    }
}

/// Fills in one stage.
struct Filler<'a> {
    data: &'a DataConfig,
    tokens_per_step: Option<usize>,
    path: &'a str,
}

impl Filler<'_> {
    fn problem(&self, key: &str, message: impl Into<String>) -> Problem {
        Problem::new(format!("{}.{key}", self.path), message)
    }

    fn fill(&self, stage: &mut StageConfig) -> Result<(), Problem> {
        let length = *stage.sequence_length.get_or_insert(self.data.sequence_length);
        let sequences = self.sequences(stage, length)?;
        stage.sequences_per_step = Some(sequences);
        stage.tokens_per_step = None;
        stage.batch_size = Some(self.batch_size(stage, sequences)?);
        stage.steps = Some(self.steps(stage, length as u64 * sequences as u64)?);
        stage.tokens = None;
        Ok(())
    }

    /// Returns the sequences of an optimizer step.
    fn sequences(&self, stage: &StageConfig, length: usize) -> Result<usize, Problem> {
        let inherited = self.tokens_per_step.filter(|_| stage.sequences_per_step.is_none());
        let Some(tokens) = stage.tokens_per_step.or(inherited) else {
            return Ok(stage.sequences_per_step.unwrap_or(self.data.sequences_per_step));
        };
        if !tokens.is_multiple_of(length) {
            let (key, from) = match stage.tokens_per_step {
                Some(_) => ("tokens_per_step", String::new()),
                None => ("sequence_length", format!("is {length}, but data.tokens_per_step ")),
            };
            let message = format!("{from}is {tokens}, not a multiple of the stage's sequence_length {length}");
            return Err(self.problem(key, message).suggest("give the stage a tokens_per_step that is"));
        }
        match (tokens / length, stage.sequences_per_step) {
            (sequences, Some(other)) if sequences != other => {
                let message = format!(
                    "is {tokens}, which makes {sequences} sequences of {length}, but sequences_per_step is {other}"
                );
                Err(self.problem("tokens_per_step", message).suggest("remove one of the two"))
            }
            (sequences, _) => Ok(sequences),
        }
    }

    fn batch_size(&self, stage: &StageConfig, sequences: usize) -> Result<BatchSize, Problem> {
        let batch_size = stage.batch_size.unwrap_or(self.data.batch_size);
        match batch_size {
            BatchSize::Fixed(batch) if !sequences.is_multiple_of(batch) => {
                let from = if stage.batch_size.is_some() { "is" } else { "is missing, and data.batch_size is" };
                let message =
                    format!("{from} {batch}, which does not divide the stage's {sequences} sequences per step");
                Err(self
                    .problem("batch_size", message)
                    .suggest(format!("{} would, and so does `auto`", near_divisor(sequences, batch))))
            }
            batch_size => Ok(batch_size),
        }
    }

    fn steps(&self, stage: &StageConfig, tokens_per_step: u64) -> Result<u64, Problem> {
        match (stage.steps, stage.tokens) {
            (Some(steps), None) => Ok(steps),
            (None, Some(tokens)) => Ok(tokens.div_ceil(tokens_per_step)),
            (Some(_), Some(_)) => {
                Err(self.problem("tokens", "is given, and so is steps").suggest("remove one of the two"))
            }
            (None, None) => {
                Err(self.problem("steps", "is missing: how long the stage lasts").suggest("give it, or tokens"))
            }
        }
    }
}
