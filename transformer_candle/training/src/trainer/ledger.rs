//! The run's ledger (`ledger.jsonl`): what each step was trained on, vouched for by the checkpoints.

use std::{io, path::Path};

use dataset::{
    Batch, CancelToken, Cursor, DataError,
    ledger::{BeginRecord, Ledger, LedgerHead, LedgerRecord, StepRecord, WindowRecord},
};

use crate::{checkpoint::TrainerState, error::Result};

/// The ledger's name in a run directory.
pub const LEDGER: &str = "ledger.jsonl";

/// The ledger of a run in training. A proof is worth less than a run: once it cannot be written it ends, and the run goes on.
pub(super) struct RunLedger {
    /// None once it could not be written.
    ledger: Option<Ledger>,
    /// Where the run was cut, if the ledger led there: it has the windows begun there already.
    cut: Option<Cursor>,
}

impl RunLedger {
    /// Goes on where the checkpoint vouches for it; else begins where the run stands, and says so.
    pub(super) fn open(
        run_directory: &Path,
        resumed: Option<&TrainerState>,
        cursor: &Cursor,
        notes: &mut Vec<String>,
        cancel: &CancelToken,
    ) -> Result<Self> {
        let path = run_directory.join(LEDGER);
        let new = || Ledger::open(&path, &LedgerHead::empty(), cancel);
        let Some(state) = resumed else {
            return Ok(Self { ledger: Some(new()?), cut: None });
        };
        let refusal = match &state.ledger {
            None => "the checkpoint vouches for none".to_owned(),
            Some(head) => match Ledger::open(&path, head, cancel) {
                Ok(ledger) => return Ok(Self { ledger: Some(ledger), cut: Some(cursor.clone()) }),
                Err(DataError::Interrupted) => return Err(DataError::Interrupted.into()),
                Err(error) => error.to_string(),
            },
        };
        let step = state.step;
        notes.push(format!("the ledger begins anew at step {step}, earlier steps can no longer be proven: {refusal}"));
        let mut ledger = Self { ledger: Some(new()?), cut: None };
        ledger.write(|ledger| ledger.append(&LedgerRecord::Begin(BeginRecord::of(step, cursor))));
        Ok(ledger)
    }

    /// Writes down a step that took `batch` from one position to another, and the windows that it was the first to take from.
    pub(super) fn step<'a>(
        &mut self,
        step: u64,
        (from, to): (&Cursor, &Cursor),
        batch: &Batch,
        opened: impl Iterator<Item = &'a WindowRecord>,
    ) {
        let cut = self.cut.take();
        self.write(|ledger| {
            for window in opened.filter(|window| !cut.as_ref().is_some_and(|cut| window.is_cut_by(cut))) {
                ledger.append(&LedgerRecord::Window(window.clone()))?;
            }
            ledger.append(&LedgerRecord::Step(StepRecord::of(step, from, to, batch)))
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
