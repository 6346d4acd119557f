//! Splits the batch of an optimizer step into micro-batches and uploads them to the device.
//!
//! Legend: N tokens of a micro-batch.

// Names such as inputs_N carry their shape.
#![allow(non_snake_case)]

use std::{collections::VecDeque, ops::Range};

use dataset::{Batch, IGNORED_TARGET};
use kernels::{
    Buffer, DType, DeviceKind, Upload,
    memory::{Arena, Category},
    timing,
};
use model::Decoder;
use run_config::Packing;

use crate::error::{Result, TrainerError};

/// Double buffering: while the device works on a micro-batch, the next one is copied into the other slot.
const SLOTS: usize = 2;

/// The device's micro-batch, and the slots through which it is uploaded.
pub struct MicroBatch {
    /// Token ids, U32.
    inputs_N: Buffer,
    /// The token after each, I32, [`IGNORED_TARGET`] where there is none.
    targets_N: Buffer,
    /// The position of the first token of each token's document, I32, if documents are masked.
    documents_N: Option<Buffer>,
    sequences: usize,
    vocab_size: usize,
    slots: [Slot; SLOTS],
    /// Slots with copies in flight, oldest first.
    in_flight: VecDeque<usize>,
    next: usize,
}

/// One of the two upload slots.
struct Slot {
    inputs: Upload<u32>,
    targets: Upload<i32>,
    documents: Option<Upload<i32>>,
}

/// The buffers of a micro-batch, or of its staging, each `[N]`.
struct Columns {
    inputs: Buffer,
    targets: Buffer,
    documents: Option<Buffer>,
}

impl Columns {
    fn take(name: &str, tokens: usize, packing: Packing, arena: &mut Arena) -> Self {
        let mut take = |column, dtype| arena.take(format!("{column}{name}"), Category::Batch, dtype, &[tokens]);
        Self {
            inputs: take("inputs", DType::U32),
            targets: take("targets", DType::I32),
            documents: (packing == Packing::Documents).then(|| take("documents", DType::I32)),
        }
    }
}

impl Slot {
    fn new(to: &Columns, staging: Option<Columns>) -> Result<Self> {
        let (inputs, targets, documents) = staging
            .map_or((None, None, None), |staging| (Some(staging.inputs), Some(staging.targets), staging.documents));
        Ok(Self {
            inputs: Upload::new(to.inputs.clone(), inputs)?,
            targets: Upload::new(to.targets.clone(), targets)?,
            documents: to.documents.clone().map(|to| Upload::new(to, documents)).transpose()?,
        })
    }
}

impl MicroBatch {
    /// Takes the buffers of a micro-batch of B sequences of T tokens.
    pub fn new(
        [sequences, sequence_length]: [usize; 2],
        packing: Packing,
        vocab_size: usize,
        device: DeviceKind,
        arena: &mut Arena,
    ) -> Result<Self> {
        let mut take = |name: &str| Columns::take(name, sequences * sequence_length, packing, arena);
        let batch = take("");
        // A CPU needs no staging.
        let mut slot = |number: usize| {
            let staging = (device == DeviceKind::Cuda).then(|| take(&format!(".staging.{number}")));
            Slot::new(&batch, staging)
        };
        let slots = [slot(0)?, slot(1)?];
        Ok(Self {
            slots,
            inputs_N: batch.inputs,
            targets_N: batch.targets,
            documents_N: batch.documents,
            sequences,
            vocab_size,
            in_flight: VecDeque::with_capacity(SLOTS),
            next: 0,
        })
    }

    /// Sequences per micro-batch.
    pub fn sequences(&self) -> usize {
        self.sequences
    }

    /// Returns the range of sequences of each micro-batch of these shards, where the step is divided into `count`
    /// shards; the batch's last micro-batch may be shorter.
    pub fn cut(
        &self,
        batch: &Batch,
        shards: &Range<usize>,
        count: usize,
    ) -> impl ExactSizeIterator<Item = Range<usize>> + use<> {
        let (all, step) = (batch.sequences(), self.sequences);
        let micro_batches = all.div_ceil(step);
        let start_of = |shard: usize| micro_batches * shard / count;
        (start_of(shards.start)..start_of(shards.end)).map(move |index| index * step..all.min((index + 1) * step))
    }

    /// Starts copying these sequences to the device; at most one micro-batch may be ahead of the current one. If they
    /// do not fill the micro-batch, the rest has no targets.
    ///
    /// Token ids are checked here, since a GPU kernel cannot report them.
    pub(super) fn send(&mut self, batch: &Batch, sequences: Range<usize>) -> Result<()> {
        let tokens = sequences.start * batch.sequence_length..sequences.end * batch.sequence_length;
        let (inputs, targets) = (&batch.inputs[tokens.clone()], &batch.targets[tokens.clone()]);
        self.check(inputs, targets)?;
        let slot = &mut self.slots[self.next];
        let staged = slot.inputs.stage()?;
        staged[..inputs.len()].copy_from_slice(inputs);
        staged[inputs.len()..].fill(0);
        let staged = slot.targets.stage()?;
        staged[..targets.len()].copy_from_slice(targets);
        staged[targets.len()..].fill(IGNORED_TARGET);
        if let Some(documents) = &mut slot.documents {
            let staged = documents.stage()?;
            staged.fill(0);
            if let Some(starts) = &batch.document_starts {
                staged[..inputs.len()].copy_from_slice(&starts[tokens]);
            }
            documents.send()?;
        }
        slot.inputs.send()?;
        slot.targets.send()?;
        self.in_flight.push_back(self.next);
        self.next = (self.next + 1) % SLOTS;
        Ok(())
    }

    /// Makes the oldest sent micro-batch the current one.
    pub(super) fn receive(&mut self) -> Result<()> {
        let slot = self.in_flight.pop_front().expect("what is received was sent before");
        let Slot { inputs, targets, documents } = &mut self.slots[slot];
        inputs.receive()?;
        targets.receive()?;
        Ok(documents.iter_mut().try_for_each(Upload::receive)?)
    }

    /// [`MicroBatch::send`] and [`MicroBatch::receive`] in one.
    pub fn upload(&mut self, batch: &Batch, sequences: Range<usize>) -> Result<()> {
        self.send(batch, sequences)?;
        self.receive()
    }

    /// Adds `scale` times the summed loss of its targets to the decoder's loss, and its gradients to the decoder's.
    pub fn train(&self, decoder: &mut Decoder, scale: f32) -> Result<()> {
        timing::scope("micro_batch", || {
            Ok(decoder.forward_backward(&self.inputs_N, self.documents_N.as_ref(), &self.targets_N, scale)?)
        })
    }

    /// Does [`MicroBatch::train`] in parts and calls `after_part` after each: [`Decoder::forward_backward_in_parts`].
    pub fn train_in_parts(
        &self,
        decoder: &mut Decoder,
        scale: f32,
        after_part: impl FnMut(&Decoder, usize) -> Result<()>,
    ) -> Result<()> {
        let Self { inputs_N, documents_N, targets_N, .. } = self;
        timing::scope("micro_batch", || {
            decoder.forward_backward_in_parts(inputs_N, documents_N.as_ref(), targets_N, scale, after_part)
        })
    }

    /// The loss of each target in nats, F32 `[N]`, zero where there is none.
    pub fn evaluate<'a>(&self, decoder: &'a mut Decoder) -> Result<&'a Buffer> {
        Ok(decoder.evaluate(&self.inputs_N, self.documents_N.as_ref(), &self.targets_N)?)
    }

    fn check(&self, inputs: &[u32], targets: &[i32]) -> Result<()> {
        let vocab_size = self.vocab_size;
        let targets = targets.iter().filter(|target| **target != IGNORED_TARGET).map(|target| target.cast_unsigned());
        match inputs.iter().copied().chain(targets).find(|token| *token as usize >= vocab_size) {
            Some(token) => Err(TrainerError::from_request(model::Error::UnknownToken { token, vocab_size })),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use kernels::{Device, memory::allocate};

    use super::*;

    const T: usize = 3;

    /// Micro-batches of two sequences of three tokens, of a vocabulary of 100.
    fn micro_batch(packing: Packing) -> MicroBatch {
        allocate(&Device::Cpu, |arena| MicroBatch::new([2, T], packing, 100, DeviceKind::Cpu, arena)).unwrap()
    }

    fn batch(sequences: u32) -> Batch {
        let tokens = sequences * T as u32;
        Batch {
            inputs: (0..tokens).collect(),
            targets: (1..=tokens).map(u32::cast_signed).collect(),
            document_starts: None,
            sequence_length: T,
            target_count: tokens as usize,
            target_bytes: None,
        }
    }

    #[test]
    fn the_next_micro_batch_uploads_during_compute() {
        let (mut micro_batch, batch) = (micro_batch(Packing::Concat), batch(3));
        let pieces: Vec<_> = micro_batch.cut(&batch, &(0..1), 1).collect();
        assert_eq!(pieces, [0..2, 2..3]);
        for _ in 0..2 {
            micro_batch.send(&batch, pieces[0].clone()).unwrap();
            micro_batch.receive().unwrap();
            micro_batch.send(&batch, pieces[1].clone()).unwrap();
            assert_eq!(micro_batch.inputs_N.read::<u32>().unwrap(), [0, 1, 2, 3, 4, 5]);
            assert_eq!(micro_batch.targets_N.read::<i32>().unwrap(), [1, 2, 3, 4, 5, 6]);
            micro_batch.receive().unwrap();
            assert_eq!(micro_batch.inputs_N.read::<u32>().unwrap(), [6, 7, 8, 0, 0, 0]);
            assert_eq!(micro_batch.targets_N.read::<i32>().unwrap()[..3], [7, 8, 9]);
            assert_eq!(micro_batch.targets_N.read::<i32>().unwrap()[3..], [IGNORED_TARGET; 3]);
        }
    }

    #[test]
    fn ranks_share_the_micro_batches_of_a_step() {
        let micro_batch = micro_batch(Packing::Concat);
        for (sequences, world_size) in [(8, 1), (8, 2), (7, 2), (8, 4), (3, 4), (1, 3), (0, 2)] {
            let batch = batch(sequences);
            let of_rank = |rank| micro_batch.cut(&batch, &(rank..rank + 1), world_size);
            let shared: Vec<_> = (0..world_size).flat_map(of_rank).collect();
            let alone: Vec<_> = micro_batch.cut(&batch, &(0..world_size), world_size).collect();
            assert_eq!(shared, alone, "{sequences} sequences on {world_size} ranks");
        }
    }

    #[test]
    fn document_starts_upload_only_with_document_packing() {
        assert!(micro_batch(Packing::Concat).documents_N.is_none());
        let mut micro_batch = micro_batch(Packing::Documents);
        let batch = Batch { document_starts: Some(vec![0, 0, 2, 0, 1, 2, 0, 1, 1]), ..batch(3) };
        for (sequences, starts) in [(0..2, [0, 0, 2, 0, 1, 2]), (2..3, [0, 1, 1, 0, 0, 0])] {
            micro_batch.upload(&batch, sequences).unwrap();
            assert_eq!(micro_batch.documents_N.as_ref().unwrap().read::<i32>().unwrap(), starts);
        }
    }

    #[test]
    fn an_unknown_token_is_not_uploaded() {
        let mut micro_batch = micro_batch(Packing::Concat);
        for (token, target) in [(100, 1), (1, 100), (1, -1), (u32::MAX, 1)] {
            let batch = Batch { inputs: vec![token; T], targets: vec![target; T], ..batch(1) };
            let error = micro_batch.upload(&batch, 0..1).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{error}");
            assert!(error.to_string().contains("vocabulary of 100"), "{error}");
        }
        micro_batch.upload(&batch(2), 0..2).unwrap();
    }
}
