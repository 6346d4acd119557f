//! Replay: makes the batch of a step again from the data.

use std::path::Path;

use crate::cursor::WindowStart;
use crate::ledger::{LedgerHead, LedgerRecord, StepRecord, WindowRecord, batch_hash, for_each_record};
use crate::sequence_packer::SequencePacker;
use crate::{Batch, CorruptedRows, Cursor, DataError, Mixture, StreamFingerprint, StreamStage, TokenStream, Tokenizer};

/// Makes the batch of `step` again and compares it with the checksum in the ledger. Reads only the windows that the
/// step took sequences of. `stages` are those of the run, at least one.
///
/// # Errors
/// [`DataError::Ledger`] where the ledger has no such step, or its checksum is another batch's.
pub fn replay(
    path: &Path,
    head: &LedgerHead,
    step: u64,
    stages: &[StreamStage],
    tokenizer: &Tokenizer,
) -> Result<Batch, DataError> {
    let ledger_error = |message: String| DataError::Ledger { path: path.to_owned(), message };
    let FoundStep { stage, before, record } = find_step(path, head, step, &stages[0].mixture)?
        .ok_or_else(|| ledger_error(format!("it has no step {step}")))?;
    let StreamStage { mixture, settings } =
        stages.get(stage as usize).ok_or_else(|| ledger_error(format!("the config has no stage {stage}")))?;
    let fingerprint = StreamFingerprint::new(mixture, settings, &SequencePacker::new(settings, tokenizer)?);
    let mut cursor = Cursor::at_start(fingerprint, mixture.sources().len(), settings.open_shards);
    for (position, before) in cursor.components.iter_mut().zip(before) {
        position.delivered = before.delivered;
        position.corrupted = before.corrupted;
        if let Some((start, sequence)) = before.first_sequence {
            (position.start, position.sequence) = (start, sequence);
        }
    }
    let mut stream = TokenStream::open(mixture, settings, tokenizer, Some(cursor))?;
    let interrupted = || mixture.cancel().is_cancelled();
    let batch = stream.next_sequences_unless(record.sequences() as usize, &interrupted)?;
    if batch_hash(&batch) == record.batch {
        return Ok(batch);
    }
    Err(ledger_error(format!("the batch of step {step}, made again from the data, differs from the one trained on")))
}

/// The state of a component before a step.
#[derive(Clone, Default)]
struct ComponentBefore {
    delivered: u64,
    /// The start of the window that the step takes sequences of, and the first of these; `None` if it takes none.
    first_sequence: Option<(WindowStart, u64)>,
    /// Corrupted rows recorded so far.
    corrupted: Vec<CorruptedRows>,
    /// Windows that a step may still take sequences of: that of the step before, and later ones.
    windows: Vec<WindowRecord>,
}

/// A step found in the ledger.
struct FoundStep {
    /// Index of the step's stage.
    stage: u64,
    /// State of each component before the step.
    before: Vec<ComponentBefore>,
    record: StepRecord,
}

fn find_step(path: &Path, head: &LedgerHead, step: u64, mixture: &Mixture) -> Result<Option<FoundStep>, DataError> {
    let components = mixture.sources().len();
    let (mut state, mut found) = (vec![ComponentBefore::default(); components], None);
    let mut stage = 0;
    let message = format!("it names more components than the {components} of the run");
    let unknown_component = || DataError::Ledger { path: path.to_owned(), message: message.clone() };
    for_each_record(path, head, mixture.cancel(), |record| {
        match record {
            LedgerRecord::Stage(record) => {
                stage = record.stage;
                for component in &mut state {
                    component.delivered = 0;
                }
            }
            LedgerRecord::Begin(begin) => {
                stage = begin.stage;
                for (component, begin) in state.iter_mut().zip(&begin.components) {
                    component.delivered = begin.delivered;
                }
            }
            LedgerRecord::Files(_) => {}
            LedgerRecord::Corrupted(record) => {
                let component = state.get_mut(record.component as usize).ok_or_else(unknown_component)?;
                component.corrupted.push(record.rows);
            }
            LedgerRecord::Window(window) => {
                state.get_mut(window.component as usize).ok_or_else(unknown_component)?.windows.push(window);
            }
            LedgerRecord::Step(record) => {
                for range in &record.sequence_ranges {
                    let component = state.get_mut(range.component as usize).ok_or_else(unknown_component)?;
                    component
                        .windows
                        .retain(|window| (window.start.epoch, window.start.window) >= (range.epoch, range.window));
                    if record.step == step {
                        let window = component.windows.first();
                        component.first_sequence = window.map(|window| (window.start.clone(), range.first_sequence));
                    }
                }
                if record.step == step {
                    found = Some(FoundStep { stage, before: state.clone(), record });
                } else {
                    for range in &record.sequence_ranges {
                        state[range.component as usize].delivered += range.sequences;
                    }
                }
            }
        }
        Ok(())
    })?;
    Ok(found)
}
