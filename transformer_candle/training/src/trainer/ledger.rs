//! The run's ledger (`ledger.jsonl`): what each step was trained on, vouched for by the checkpoints.

use std::path::Path;

use dataset::{
    Batch, Cursor, WindowStart,
    ledger::{BeginRecord, Ledger, LedgerHead, LedgerRecord, StepRecord, batch_hash},
};

use crate::{checkpoint::TrainerState, error::Result};

/// The ledger's name in a run directory.
pub const LEDGER: &str = "ledger.jsonl";

/// A ledger open for writing.
pub(super) struct RunLedger {
    ledger: Ledger,
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
        let Some(state) = resumed else {
            return Ok(Self { ledger: Ledger::open(&path, &LedgerHead::empty())?, known: None });
        };
        let refusal = match &state.ledger {
            None => "the checkpoint vouches for none".to_owned(),
            Some(head) => match Ledger::open(&path, head) {
                Ok(ledger) => {
                    let known = (cursor.sequence > 0).then(|| cursor.start.clone());
                    return Ok(Self { ledger, known });
                }
                Err(error) => error.to_string(),
            },
        };
        notes.push(format!(
            "the ledger begins anew at step {}, earlier steps can no longer be proven: {refusal}",
            state.step
        ));
        let mut ledger = Ledger::open(&path, &LedgerHead::empty())?;
        let Cursor { start, sequence, .. } = cursor;
        let begin = BeginRecord { step: state.step, epoch: start.epoch, window: start.window, sequence: *sequence };
        ledger.append(&LedgerRecord::Begin(begin))?;
        Ok(Self { ledger, known: None })
    }

    /// Writes down a step that took `batch` from `from` on.
    pub(super) fn step(
        &mut self,
        step: u64,
        from: &Cursor,
        batch: &Batch,
        opened: &[dataset::ledger::WindowRecord],
    ) -> Result<()> {
        let known = self.known.take();
        for window in opened.iter().filter(|window| known.as_ref() != Some(&window.start)) {
            self.ledger.append(&LedgerRecord::Window(window.clone()))?;
        }
        let Cursor { start, sequence, .. } = from;
        self.ledger.append(&LedgerRecord::Step(StepRecord {
            step,
            epoch: start.epoch,
            window: start.window,
            sequence: *sequence,
            sequences: batch.sequences() as u64,
            targets: batch.target_count as u64,
            batch: batch_hash(batch),
        }))?;
        Ok(())
    }

    /// What vouches for everything written so far, once it is on the disk.
    pub(super) fn head(&mut self) -> Result<LedgerHead> {
        Ok(self.ledger.sync()?)
    }
}
