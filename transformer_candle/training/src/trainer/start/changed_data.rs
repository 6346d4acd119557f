//! Local files that have changed since the checkpoint that a run is resumed from.

use dataset::{CancelToken, ChangedFile, Cursor, DataError, StreamFingerprint, check_consumed, recorded_files};
use run_config::ResolvedRun;

use crate::{
    checkpoint::TrainerState,
    error::{Result, TrainerError},
    trainer::{data::DataPlan, ledger::LEDGER},
};

/// Changed files that a message names.
const MAX_NAMED: usize = 5;

/// The local files that differ from those that the run's ledger records.
pub(super) struct ChangedData(Vec<ChangedFile>);

impl ChangedData {
    /// Compares the files with those of the run's ledger; None if none differs, or the ledger does not record them.
    pub(super) fn find(
        run: &ResolvedRun,
        state: &TrainerState,
        cursor: &Cursor,
        data: &DataPlan,
        cancel: &CancelToken,
    ) -> Result<Option<Self>> {
        let head =
            state.ledger.as_ref().filter(|_| cursor.fingerprint.data != StreamFingerprint::data_hash(&data.mixture));
        let Some(head) = head else { return Ok(None) };
        let recorded = match recorded_files(&run.run_directory.join(LEDGER), head, cancel) {
            // Without its ledger the run cannot tell what has changed.
            Err(DataError::Ledger { .. } | DataError::Io { .. }) => return Ok(None),
            recorded => recorded?,
        };
        let changed = data.mixture.changed_files(&recorded);
        Ok((!changed.is_empty()).then_some(Self(changed)))
    }

    /// Checks that what was consumed is the same, and moves the position to the changed data. Returns a note.
    ///
    /// # Errors
    /// [`TrainerError::Request`] says which files differ, if `is_accepted` is false, if files were added or are gone, or
    /// if what was consumed differs.
    pub(super) fn accept(
        &self,
        (run, data): (&ResolvedRun, &DataPlan),
        state: &TrainerState,
        cursor: &mut Cursor,
        is_accepted: bool,
    ) -> Result<String> {
        let (named, step) = (self.named(), state.step);
        let refuse = |reason: &str| {
            Err(TrainerError::Request(format!("the data has changed since step {step}: {named}{reason}")))
        };
        if self.0.iter().any(|file| file.shard.is_none()) {
            return refuse(
                ". A resumed run needs the same list of files: restore it, or start a new run from this one's weights \
                 (--init-from)",
            );
        }
        if !is_accepted {
            return refuse(
                ". Restore the files, or add --accept-changed-data to resume with them, which requires that what the run \
                 has consumed of them is the same",
            );
        }
        let Some(head) = &state.ledger else { return refuse(", and there is no ledger to tell what was consumed") };
        data.mixture.restore(cursor, &data.settings);
        let path = run.run_directory.join(LEDGER);
        match check_consumed(&path, head, &self.0, &data.stages(run)?, &data.tokenizer) {
            Ok(steps) => {
                cursor.fingerprint.data = StreamFingerprint::data_hash(&data.mixture);
                Ok(format!(
                    "changed data accepted: {named}; the batches of the {steps} steps that consumed rows of the changed \
                     files were made again and are identical"
                ))
            }
            Err(DataError::Ledger { message, .. }) => refuse(&format!(
                ". What the run has consumed of them differs too ({message}): restore them, or start a new run"
            )),
            Err(error) => Err(error.into()),
        }
    }

    fn named(&self) -> String {
        let mut named: Vec<String> = self.0.iter().take(MAX_NAMED).map(ToString::to_string).collect();
        if self.0.len() > named.len() {
            named.push(format!("and {} more", self.0.len() - named.len()));
        }
        named.join(", ")
    }
}
