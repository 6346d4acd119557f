//! Local files that have changed since the checkpoint that a run is resumed from.

use dataset::{CancelToken, Cursor, DataError, FileChanges, StreamFingerprint, check_consumed, recorded_files};
use run_config::{FIRST_READING_VERSION, ResolvedRun};

use crate::{
    checkpoint::TrainerState,
    error::{Result, TrainerError},
    trainer::{data::DataPlan, ledger::LEDGER},
    units::{counted, grouped},
};

/// Changed files that a message names.
const MAX_NAMED: usize = 5;
/// The way out where changed files cannot be accepted.
const WAY_OUT: &str = "restore the files, or start a new run from this one's weights (--init-from)";

/// The local files that differ from those that the run's ledger records.
pub(super) struct ChangedData(FileChanges);

impl ChangedData {
    /// Compares the files, as listed, with those of the run; None if none differs, or it is not known which do.
    ///
    /// # Errors
    /// [`TrainerError::Request`] if changes are to be accepted, but it is not known what has changed.
    pub(super) fn find(
        run: &ResolvedRun,
        state: &TrainerState,
        cursor: &Cursor,
        data: &DataPlan,
        is_accepted: bool,
        cancel: &CancelToken,
    ) -> Result<Option<Self>> {
        let is_same = cursor.fingerprint.data == StreamFingerprint::data_hash(&data.mixture.arranged(cursor));
        if is_same || run.streaming.is_some() {
            return Ok(None);
        }
        let unknown = |reason: &str| {
            let step = grouped(state.step);
            let message = format!(
                "the data has changed since step {step}, and --accept-changed-data cannot tell which files have: {reason}; \
                 {WAY_OUT}"
            );
            if is_accepted { Err(TrainerError::Request(message)) } else { Ok(None) }
        };
        if run.config.data.reading_version() == FIRST_READING_VERSION {
            return unknown(
                "a run with data.reading_version 1 records no list of its files, neither in its ledger nor in its \
                 checkpoints",
            );
        }
        let Some(head) = &state.ledger else { return unknown("the checkpoint records no ledger") };
        let records = match recorded_files(&run.run_directory.join(LEDGER), head, cancel) {
            Err(error @ (DataError::Ledger { .. } | DataError::Io { .. })) => return unknown(&error.to_string()),
            records => records?,
        };
        let changes = data.mixture.changed_files(&records, cursor)?;
        Ok((!changes.files.is_empty()).then_some(Self(changes)))
    }

    /// Checks that what was consumed is the same, and moves the position to the changed data. Returns a note.
    ///
    /// # Errors
    /// [`TrainerError::Request`] says which files differ, if `is_accepted` is false, if the run cannot continue with them, or
    /// if what was consumed differs.
    pub(super) fn accept(
        self,
        run: &ResolvedRun,
        data: &mut DataPlan,
        state: &TrainerState,
        cursor: &mut Cursor,
        is_accepted: bool,
    ) -> Result<String> {
        let (file_list, step) = (self.named(), grouped(state.step));
        let refuse = |reason: &str| {
            Err(TrainerError::Request(format!("the data has changed since step {step}: {file_list}. {reason}")))
        };
        if !is_accepted {
            return refuse(
                "Restore the files, or add --accept-changed-data to resume with them, which requires that what the run has \
                 consumed of them is the same",
            );
        }
        let Some(head) = &state.ledger else { return refuse("There is no ledger to tell what was consumed") };
        let path = run.run_directory.join(LEDGER);
        if let Some(reason) = self.0.refusal(&path, head, &data.settings)? {
            return refuse(&format!("The run cannot be resumed so: {reason}; {WAY_OUT}"));
        }
        let order = self.order();
        let FileChanges { files, mixture, cursor: moved } = self.0;
        mixture.restore(&moved, &data.settings);
        data.mixture = mixture;
        *cursor = moved;
        match check_consumed(&path, head, &files, &data.stages(run)?, &data.tokenizer) {
            Ok(steps) => Ok(format!(
                "changed data accepted: {file_list}; the batches of {} that consumed rows of the changed files were \
                 made again and are identical{order}",
                counted(steps as u64, "step")
            )),
            Err(DataError::Interrupted) => Err(DataError::Interrupted.into()),
            Err(error) => {
                let message = match error {
                    DataError::Ledger { message, .. } => message,
                    error => error.to_string(),
                };
                refuse(&format!("What the run has consumed of them differs too ({message}): {WAY_OUT}"))
            }
        }
    }

    /// Says when what was added is read, and what follows where files are gone.
    fn order(&self) -> String {
        let files = &self.0.files;
        let (mut added, mut gone) = ("", "");
        if files.iter().any(|file| file.was.is_none() || file.is_appended) {
            added = "; what was added is read from the next epoch on";
        }
        if files.iter().any(|file| file.is.is_none()) {
            gone = "; what is gone is not read any more, and steps that used it cannot be replayed";
        }
        format!("{added}{gone}")
    }

    fn named(&self) -> String {
        let files = &self.0.files;
        let mut names: Vec<String> = files.iter().take(MAX_NAMED).map(ToString::to_string).collect();
        if files.len() > names.len() {
            names.push(format!("and {} more", files.len() - names.len()));
        }
        names.join(", ")
    }
}
