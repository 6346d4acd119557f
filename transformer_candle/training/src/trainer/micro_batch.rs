//! The batch of an optimizer step, cut into pieces that fit in memory, and their way to the device.
//!
//! Legend: N tokens of a micro-batch.

// Names such as inputs_N carry their shape.
#![allow(non_snake_case)]

use std::{collections::VecDeque, ops::Range};

use dataset::{Batch, IGNORED_TARGET};
use kernels::{
    Buffer, DType, DeviceKind, Upload,
    memory::{Arena, BufferId, Category, Plan},
};

use crate::{completion::refused, error::Result};

/// Ways to the device that alternate: while the device works on a micro-batch, the next one travels.
const LANES: usize = 2;

/// The buffers of a [`MicroBatch`] in a memory plan.
#[derive(Clone, Debug)]
pub(crate) struct MicroBatchPlan {
    inputs: BufferId,
    targets: BufferId,
    /// Where ids and targets land on a card before it is their turn, one pair a lane. A CPU needs none.
    landings: Vec<(BufferId, BufferId)>,
    vocab_size: usize,
}

impl MicroBatchPlan {
    pub(crate) fn add_to(plan: &mut Plan, tokens: usize, vocab_size: usize, device: DeviceKind) -> Self {
        let mut pair = |name: &str| {
            let inputs = plan.add(format!("inputs{name}"), Category::Batch, DType::U32, &[tokens]);
            (inputs, plan.add(format!("targets{name}"), Category::Batch, DType::I32, &[tokens]))
        };
        let (inputs, targets) = pair("");
        let lanes = if device == DeviceKind::Cuda { LANES } else { 0 };
        let landings = (0..lanes).map(|lane| pair(&format!(".landing.{lane}"))).collect();
        Self { inputs, targets, landings, vocab_size }
    }
}

/// The device's inputs and targets, and the ways that they come.
pub(crate) struct MicroBatch {
    /// Token ids, U32.
    pub(crate) inputs_N: Buffer,
    /// The token after each, I32, [`IGNORED_TARGET`] where there is none.
    pub(crate) targets_N: Buffer,
    sequences: usize,
    vocab_size: usize,
    lanes: [Lane; LANES],
    /// Lanes on their way, the oldest first.
    travelling: VecDeque<usize>,
    next: usize,
}

/// One way to the device.
struct Lane {
    inputs: Upload<u32>,
    targets: Upload<i32>,
}

impl MicroBatch {
    pub(crate) fn bind(plan: &MicroBatchPlan, arena: &Arena, sequences: usize) -> Result<Self> {
        let (inputs_N, targets_N) = (arena.buffer(plan.inputs), arena.buffer(plan.targets));
        let lane = |lane: usize| -> Result<Lane> {
            let landing = plan.landings.get(lane).map(|&(inputs, targets)| (arena.buffer(inputs), arena.buffer(targets)));
            let (inputs, targets) = landing.unzip();
            Ok(Lane {
                inputs: Upload::new(inputs_N.clone(), inputs)?,
                targets: Upload::new(targets_N.clone(), targets)?,
            })
        };
        Ok(Self {
            lanes: [lane(0)?, lane(1)?],
            inputs_N,
            targets_N,
            sequences,
            vocab_size: plan.vocab_size,
            travelling: VecDeque::with_capacity(LANES),
            next: 0,
        })
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

    /// Sets some sequences on their way to the device; at most one micro-batch may be ahead of the one that is worked on. What the
    /// sequences leave free of it has no targets.
    ///
    /// Tokens are checked here, once: a card could not refuse them later.
    pub(crate) fn send(&mut self, batch: &Batch, sequences: Range<usize>) -> Result<()> {
        let tokens = sequences.start * batch.sequence_length..sequences.end * batch.sequence_length;
        let (inputs, targets) = (&batch.inputs[tokens.clone()], &batch.targets[tokens]);
        self.check(inputs, targets)?;
        let lane = &mut self.lanes[self.next];
        let staged = lane.inputs.stage()?;
        staged[..inputs.len()].copy_from_slice(inputs);
        staged[inputs.len()..].fill(0);
        let staged = lane.targets.stage()?;
        staged[..targets.len()].copy_from_slice(targets);
        staged[targets.len()..].fill(IGNORED_TARGET);
        lane.inputs.send()?;
        lane.targets.send()?;
        self.travelling.push_back(self.next);
        self.next = (self.next + 1) % LANES;
        Ok(())
    }

    /// Makes the micro-batch that was sent first the one that the device works on next.
    pub(crate) fn receive(&mut self) -> Result<()> {
        let lane = self.travelling.pop_front().expect("what is received was sent before");
        self.lanes[lane].inputs.receive()?;
        Ok(self.lanes[lane].targets.receive()?)
    }

    /// [`MicroBatch::send`] and [`MicroBatch::receive`] in one.
    pub(crate) fn upload(&mut self, batch: &Batch, sequences: Range<usize>) -> Result<()> {
        self.send(batch, sequences)?;
        self.receive()
    }

    fn check(&self, inputs: &[u32], targets: &[i32]) -> Result<()> {
        let vocab_size = self.vocab_size;
        let targets = targets.iter().filter(|target| **target != IGNORED_TARGET).map(|target| target.cast_unsigned());
        match inputs.iter().copied().chain(targets).find(|token| *token as usize >= vocab_size) {
            Some(token) => Err(refused(model::Error::UnknownToken { token, vocab_size })),
            None => Ok(()),
        }
    }
}
