//! The run's ledger (`ledger.jsonl`): what each step was trained on, vouched for by the checkpoints.

use std::{io, path::Path};

use dataset::{
    Batch, Cursor, WindowStart,
    ledger::{BeginRecord, Ledger, LedgerHead, LedgerRecord, StepRecord, WindowRecord, batch_hash},
};

use crate::{checkpoint::TrainerState, error::Result};

/// The ledger's name in a run directory.
pub const LEDGER: &str = "ledger.jsonl";

/// The ledger of a run in training. A proof is worth less than a run: once it cannot be written it ends, and the run goes on.
pub(super) struct RunLedger {
    /// None once it could not be written.
    ledger: Option<Ledger>,
    /// The window that the run was cut in, where the ledger has it already.
    known: Option<WindowStart>,
}

impl RunLedger {
    /// Goes on where the checkpoint vouches for it; else begins where the run stands, and says so.
    pub(super) fn open(
        run_directory: &Path,
        resumed: Option<&TrainerState>,
        cursor: &Cursor,
        notes: &mut Vec<String>,
    ) -> Result<Self> {
        let path = run_directory.join(LEDGER);
        let new = || Ledger::open(&path, &LedgerHead::empty());
        let Some(state) = resumed else {
            return Ok(Self { ledger: Some(new()?), known: None });
        };
        let refusal = match &state.ledger {
            None => "the checkpoint vouches for none".to_owned(),
            Some(head) => match Ledger::open(&path, head) {
                Ok(ledger) => {
                    let known = (cursor.sequence > 0).then(|| cursor.start.clone());
                    return Ok(Self { ledger: Some(ledger), known });
                }
                Err(error) => error.to_string(),
            },
        };
        let step = state.step;
        notes.push(format!("the ledger begins anew at step {step}, earlier steps can no longer be proven: {refusal}"));
        let mut ledger = Self { ledger: Some(new()?), known: None };
        let Cursor { start, sequence, .. } = cursor;
        let begin = BeginRecord { step, epoch: start.epoch, window: start.window, sequence: *sequence };
        ledger.write(|ledger| ledger.append(&LedgerRecord::Begin(begin)));
        Ok(ledger)
    }

    /// Writes down a step that took `batch` from `from` on, and the windows that it was the first to take from.
    pub(super) fn step(&mut self, step: u64, from: &Cursor, batch: &Batch, opened: &[WindowRecord]) {
        let known = self.known.take();
        self.write(|ledger| {
            for window in opened.iter().filter(|window| known.as_ref() != Some(&window.start)) {
                ledger.append(&LedgerRecord::Window(window.clone()))?;
            }
            let Cursor { start, sequence, .. } = from;
            ledger.append(&LedgerRecord::Step(StepRecord {
                step,
                epoch: start.epoch,
                window: start.window,
                sequence: *sequence,
                sequences: batch.sequences() as u64,
                targets: batch.target_count as u64,
                batch: batch_hash(batch),
            }))
        });
    }

    /// What vouches for everything written so far, once it is on the disk; none if that could not be.
    pub(super) fn head(&mut self) -> Option<LedgerHead> {
        self.write(Ledger::sync)
    }

    fn write<R>(&mut self, of: impl FnOnce(&mut Ledger) -> io::Result<R>) -> Option<R> {
        let written = of(self.ledger.as_mut()?);
        if let Err(error) = &written {
            tracing::warn!("{LEDGER} cannot be written, it ends here: {error}");
            self.ledger = None;
        }
        written.ok()
    }
}
