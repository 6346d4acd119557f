//! The beginning of a stage.

use std::fmt;

use super::scalar::{Record, Scalar};
use crate::units::grouped;

/// The report that a stage of the run begins.
#[derive(Clone, Debug, PartialEq)]
pub struct StageReport {
    /// Its first optimizer step.
    pub step: u64,
    /// Its index in the config's `stages`, from 0.
    pub stage: usize,
    /// Number of stages of the run.
    pub stages: usize,
    /// Tokens of a sequence.
    pub sequence_length: usize,
    /// Sequences of an optimizer step.
    pub sequences_per_step: usize,
    /// Sequences that are left out because the stage before had begun their shuffle windows and not finished them.
    pub left_out: u64,
}

impl StageReport {
    /// Returns the record that metrics sinks receive.
    pub fn record(&self) -> Record {
        let scalars = vec![
            Scalar::plain("stage", self.stage as u64),
            Scalar::plain("sequence_length", self.sequence_length as u64),
            Scalar::plain("sequences_per_step", self.sequences_per_step as u64),
            Scalar::plain("left_out_sequences", self.left_out),
        ];
        Record { scalars, ..Record::new("stage", self.step) }
    }
}

/// `step 401: stage 2 of 3 begins, 8 sequences of 1,024 tokens per step; 37 sequences of the window before are left out`
impl fmt::Display for StageReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "step {}: stage {} of {} begins, {} sequences of {} tokens per step",
            grouped(self.step),
            self.stage + 1,
            self.stages,
            grouped(self.sequences_per_step as u64),
            grouped(self.sequence_length as u64)
        )?;
        match self.left_out {
            0 => Ok(()),
            1 => f.write_str("; 1 sequence of the shuffle window before is left out"),
            left_out => write!(f, "; {} sequences of the shuffle window before are left out", grouped(left_out)),
        }
    }
}
