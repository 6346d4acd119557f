//! The batch of an optimizer step, cut into pieces that fit in memory.
//!
//! Legend: N tokens of a micro-batch.

// Names such as inputs_N carry their shape.
#![allow(non_snake_case)]

use std::ops::Range;

use dataset::{Batch, IGNORED_TARGET};
use kernels::{Buffer, memory::Arena};

use crate::{error::Result, memory_plan::RunBuffers};

/// The device's inputs and targets, and what they are filled from.
#[derive(Debug)]
pub(crate) struct MicroBatch {
    /// Token ids, U32.
    pub(crate) inputs_N: Buffer,
    /// The token after each, I32, [`IGNORED_TARGET`] where there is none.
    pub(crate) targets_N: Buffer,
    sequences: usize,
    staged_inputs: Vec<u32>,
    staged_targets: Vec<i32>,
}

impl MicroBatch {
    pub(crate) fn bind(buffers: &RunBuffers, arena: &Arena, sequences: usize) -> Self {
        let (inputs_N, targets_N) = (arena.buffer(buffers.inputs), arena.buffer(buffers.targets));
        let tokens = inputs_N.elements();
        Self { inputs_N, targets_N, sequences, staged_inputs: vec![0; tokens], staged_targets: vec![0; tokens] }
    }

    /// Sequences at a time.
    pub(crate) fn sequences(&self) -> usize {
        self.sequences
    }

    /// The sequences of each micro-batch; the last may have fewer.
    pub(crate) fn cut(&self, batch: &Batch) -> impl Iterator<Item = Range<usize>> + use<> {
        let (all, step) = (batch.sequences(), self.sequences);
        (0..all).step_by(step).map(move |start| start..all.min(start + step))
    }

    /// Moves some sequences to the device. What they leave free has no targets.
    pub(crate) fn upload(&mut self, batch: &Batch, sequences: Range<usize>) -> Result<()> {
        let tokens = sequences.start * batch.sequence_length..sequences.end * batch.sequence_length;
        let (inputs, free_inputs) = self.staged_inputs.split_at_mut(tokens.len());
        let (targets, free_targets) = self.staged_targets.split_at_mut(tokens.len());
        inputs.copy_from_slice(&batch.inputs[tokens.clone()]);
        targets.copy_from_slice(&batch.targets[tokens]);
        free_inputs.fill(0);
        free_targets.fill(IGNORED_TARGET);
        self.inputs_N.write(&self.staged_inputs)?;
        self.targets_N.write(&self.staged_targets)?;
        Ok(())
    }
}
