//! The run's ledger (`ledger.jsonl`): what each step was trained on. Checkpoints store the hash of its head.

use std::{fs, io, path::Path};

use dataset::{
    CancelToken, Cursor, DataError, Mixture, TokenStream,
    ledger::{BeginRecord, CorruptedRecord, Ledger, LedgerHead, LedgerRecord, StageRecord, StepRecord, WindowRecord},
};

use super::{stages::Entered, step::CompletedStep};
use crate::{
    checkpoint::{self, TrainerState},
    error::{Result, TrainerError},
};

/// The ledger's name in a run directory.
pub const LEDGER: &str = "ledger.jsonl";

/// The ledger of a training run. It never stops the run: while it cannot be written its lines are buffered and
/// checkpoints store no head; when the buffer is full the ledger ends and training continues.
pub(super) struct RunLedger {
    /// `None` once it has lost a line.
    ledger: Option<Ledger>,
    notices: Vec<String>,
    /// The resume position, if the ledger contains it: the windows in use there are recorded already.
    cut: Option<Cursor>,
}

impl RunLedger {
    /// Continues at the checkpoint's head; without a matching one starts a new ledger at this step and adds a note.
    pub(super) fn open(
        run_directory: &Path,
        resumed: Option<&TrainerState>,
        mixture: &Mixture,
        cursor: &Cursor,
        notes: &mut Vec<String>,
        cancel: &CancelToken,
    ) -> Result<Self> {
        let path = run_directory.join(LEDGER);
        if path.is_symlink() {
            let path = path.display();
            return Err(TrainerError::Request(format!(
                "{path} is a symbolic link, and what it points to would be overwritten: remove the link"
            )));
        }
        let create = || Ledger::open(&path, &LedgerHead::empty(), cancel).map_err(of_disk);
        let Some(state) = resumed else {
            let mut ledger = Self::new(create()?, None);
            ledger.files(mixture);
            return Ok(ledger);
        };
        let refusal = match &state.ledger {
            None => "the checkpoint records none".to_owned(),
            Some(head) => match Ledger::open(&path, head, cancel) {
                Ok(ledger) => return Ok(Self::new(ledger, Some(cursor.clone()))),
                Err(DataError::Interrupted) => return Err(DataError::Interrupted.into()),
                // The disk may give it back: it is not restarted because of a moment.
                Err(DataError::Io { path, source }) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(of_disk(DataError::Io { path, source }));
                }
                Err(error) => error.to_string(),
            },
        };
        let step = state.step;
        let kept =
            keep_former(&path, step)?.map_or_else(String::new, |name| format!("; the former one is kept as {name}"));
        notes.push(format!(
            "the ledger restarts at step {step}; earlier steps can no longer be proven: {refusal}{kept}"
        ));
        let mut ledger = Self::new(create()?, None);
        ledger.write(|ledger| {
            ledger.append(&LedgerRecord::Begin(BeginRecord::new(step, state.stage, cursor)))?;
            let mut corrupted = mixture.corrupted_records(cursor).into_iter();
            corrupted.try_for_each(|record| ledger.append(&LedgerRecord::Corrupted(record)))
        });
        ledger.files(mixture);
        Ok(ledger)
    }

    /// Returns a ledger that writes nothing, for ranks other than the first.
    pub(super) fn off() -> Self {
        Self { ledger: None, notices: Vec::new(), cut: None }
    }

    fn new(ledger: Ledger, cut: Option<Cursor>) -> Self {
        Self { ledger: Some(ledger), notices: Vec::new(), cut }
    }

    /// Records a step, with the corrupted rows and the windows that its batch was read from. Where a later stage begins
    /// with it, records that before, and the windows in use until then that are not recorded yet.
    pub(super) fn step(&mut self, completed: &CompletedStep, stream: &TokenStream) {
        let CompletedStep { step, stage, batch, from, to, .. } = completed;
        if let Some(Entered { left_out, opened, .. }) = completed.later_stage() {
            self.windows(opened);
            let record = StageRecord { stage: *stage as u64, step: *step, left_out: left_out.clone() };
            self.write(|ledger| ledger.append(&LedgerRecord::Stage(record)));
        }
        self.corrupted(stream);
        self.windows(stream.opened_windows());
        self.write(|ledger| ledger.append(&LedgerRecord::Step(StepRecord::new(*step, from, to, batch))));
    }

    /// Records windows, without those that the ledger has from before the run was resumed.
    fn windows<'a>(&mut self, opened: impl IntoIterator<Item = &'a WindowRecord>) {
        let cut = self.cut.take();
        self.write(|ledger| {
            let mut unrecorded =
                opened.into_iter().filter(|window| !cut.as_ref().is_some_and(|cut| window.is_in_progress_at(cut)));
            unrecorded.try_for_each(|window| ledger.append(&LedgerRecord::Window(window.clone())))
        });
    }

    /// Records the local files that the steps from here on read.
    pub(super) fn files(&mut self, mixture: &Mixture) {
        self.write(|ledger| {
            mixture.files_records().into_iter().try_for_each(|record| ledger.append(&LedgerRecord::Files(record)))
        });
    }

    /// Records the corrupted rows that the last call to the stream has found.
    pub(super) fn corrupted(&mut self, stream: &TokenStream) {
        self.write(|ledger| {
            let mut findings = stream.found_corruption();
            findings.try_for_each(|(component, corruption)| {
                ledger.append(&LedgerRecord::Corrupted(CorruptedRecord::new(component, corruption)))
            })
        });
    }

    /// Returns the hash of everything written so far; `None` until it is on disk.
    pub(super) fn head(&mut self) -> Option<LedgerHead> {
        self.ledger.as_mut()?.sync()
    }

    /// Returns what the file lacks while it cannot be written.
    pub(super) fn unwritten(&self) -> Option<String> {
        self.ledger.as_ref().and_then(Ledger::unwritten)
    }

    /// Returns notes for the user since the last call, one sentence each.
    pub(super) fn take_notices(&mut self) -> Vec<String> {
        let file_notices = self.ledger.as_mut().map_or_else(Vec::new, Ledger::take_notices);
        self.notices.drain(..).chain(file_notices).collect()
    }

    fn write(&mut self, of: impl FnOnce(&mut Ledger) -> io::Result<()>) {
        if let Some(Err(error)) = self.ledger.as_mut().map(of) {
            self.notices.push(format!("{LEDGER} ends here, later steps cannot be proven: {error}"));
            self.ledger = None;
        }
    }
}

/// Converts the error of opening a ledger: where the disk is at fault, it is not the data that cannot be read.
fn of_disk(error: DataError) -> TrainerError {
    match error {
        DataError::Io { path, source } => TrainerError::io("open", path)(source),
        other => other.into(),
    }
}

/// Puts a ledger aside that a new one takes the place of; returns its new name, None if there was none.
fn keep_former(path: &Path, step: u64) -> Result<Option<String>> {
    if !path.metadata().is_ok_and(|former| former.is_file() && former.len() > 0) {
        return Ok(None);
    }
    let name = format!("ledger-before-{}.jsonl", checkpoint::step_name(step));
    fs::rename(path, path.with_file_name(&name)).map_err(TrainerError::io("rename", path))?;
    Ok(Some(name))
}
