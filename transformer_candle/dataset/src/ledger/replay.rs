//! A step's batch, made again from the data.

use std::path::Path;

use super::{LedgerHead, LedgerRecord, StepRecord, WindowRecord, batch_hash, for_each_record};
use crate::{Batch, Cursor, DataError, DataSource, StreamIdentity, StreamSettings, TokenStream, Tokenizer};

/// Makes the batch of `step` again and compares it with the checksum in the ledger. Reads at most the windows that the step
/// took from.
///
/// # Errors
/// [`DataError::Ledger`] where the ledger has no such step, or its checksum is another batch's.
pub fn replay(
    path: &Path,
    head: &LedgerHead,
    step: u64,
    source: &DataSource,
    settings: &StreamSettings,
    tokenizer: &Tokenizer,
) -> Result<Batch, DataError> {
    let wrong = |message: String| DataError::Ledger { path: path.to_owned(), message };
    let (window, record) = find(path, head, step)?.ok_or_else(|| wrong(format!("it has no step {step}")))?;
    let identity = StreamIdentity::of(source, settings, tokenizer);
    let cursor = Cursor { identity, start: window.start, sequence: record.sequence };
    let mut stream = TokenStream::open(source, settings, tokenizer, Some(cursor))?;
    let batch = stream.next_sequences(record.sequences as usize)?;
    if batch_hash(&batch) == record.batch {
        return Ok(batch);
    }
    Err(wrong(format!("step {step} was trained on another batch than the data give today")))
}

/// The step's line and that of the window it starts in.
fn find(path: &Path, head: &LedgerHead, step: u64) -> Result<Option<(WindowRecord, StepRecord)>, DataError> {
    // A step starts in the window of the step before, or in a newer one.
    let (mut recent, mut found) = (Vec::<WindowRecord>::new(), None);
    for_each_record(path, head, |record| {
        match record {
            LedgerRecord::Begin(_) => {}
            LedgerRecord::Window(window) => recent.push(window),
            LedgerRecord::Step(record) => {
                recent.retain(|window| (window.start.epoch, window.start.window) >= (record.epoch, record.window));
                if record.step == step {
                    found = recent.first().cloned().map(|window| (window, record));
                }
            }
        }
        Ok(())
    })?;
    Ok(found)
}
