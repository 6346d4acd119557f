//! A step's batch, made again from the data.

use std::path::Path;

use super::{LedgerHead, LedgerRecord, StepRecord, WindowRecord, batch_hash, for_each_record};
use crate::cursor::WindowStart;
use crate::{Batch, Cursor, DataError, Mixture, StreamIdentity, StreamSettings, TokenStream, Tokenizer};

/// Makes the batch of `step` again and compares it with the checksum in the ledger. Uses no window that the step did
/// not take from.
///
/// # Errors
/// [`DataError::Ledger`] where the ledger has no such step, or its checksum is another batch's.
pub fn replay(
    path: &Path,
    head: &LedgerHead,
    step: u64,
    data: impl Into<Mixture>,
    settings: &StreamSettings,
    tokenizer: &Tokenizer,
) -> Result<Batch, DataError> {
    let mixture: Mixture = data.into();
    let wrong = |message: String| DataError::Ledger { path: path.to_owned(), message };
    let (before, record) = find(path, head, step, &mixture)?.ok_or_else(|| wrong(format!("it has no step {step}")))?;
    let identity = StreamIdentity::of(&mixture, settings, tokenizer);
    let mut cursor = Cursor::at_start(identity, mixture.sources().len(), settings.lanes);
    for (position, before) in cursor.components.iter_mut().zip(before) {
        position.given = before.given;
        if let Some((start, sequence)) = before.first {
            (position.start, position.sequence) = (start, sequence);
        }
    }
    let mut stream = TokenStream::open(&mixture, settings, tokenizer, Some(cursor))?;
    let interrupted = || mixture.cancel().is_cancelled();
    let batch = stream.next_sequences_unless(record.sequences() as usize, &interrupted)?;
    if batch_hash(&batch) == record.batch {
        return Ok(batch);
    }
    Err(wrong(format!("step {step} was trained on another batch than the data give today")))
}

/// Where a component stands before a step.
#[derive(Clone, Default)]
struct Before {
    given: u64,
    /// The start of the window that the step takes from, and the place of its first sequence there; none if the step
    /// takes nothing.
    first: Option<(WindowStart, u64)>,
    /// Windows that were not left behind: a step starts in the window of the step before, or in a newer one.
    recent: Vec<WindowRecord>,
}

/// The step's line, and where each component stood before it.
fn find(
    path: &Path,
    head: &LedgerHead,
    step: u64,
    mixture: &Mixture,
) -> Result<Option<(Vec<Before>, StepRecord)>, DataError> {
    let components = mixture.sources().len();
    let (mut at, mut found) = (vec![Before::default(); components], None);
    let message = format!("it names more than the run's {components} components");
    let unknown = || DataError::Ledger { path: path.to_owned(), message: message.clone() };
    for_each_record(path, head, mixture.cancel(), |record| {
        match record {
            LedgerRecord::Begin(begin) => {
                for (at, begun) in at.iter_mut().zip(&begin.components) {
                    at.given = begun.given;
                }
            }
            LedgerRecord::Window(window) => {
                at.get_mut(window.component as usize).ok_or_else(unknown)?.recent.push(window);
            }
            LedgerRecord::Step(record) => {
                for taken in &record.taken {
                    let at = at.get_mut(taken.component as usize).ok_or_else(unknown)?;
                    at.recent.retain(|recent| (recent.start.epoch, recent.start.window) >= (taken.epoch, taken.window));
                    if record.step == step {
                        at.first = at.recent.first().map(|window| (window.start.clone(), taken.sequence));
                    }
                }
                if record.step == step {
                    found = Some((at.clone(), record));
                } else {
                    for taken in &record.taken {
                        at[taken.component as usize].given += taken.sequences;
                    }
                }
            }
        }
        Ok(())
    })?;
    Ok(found)
}
