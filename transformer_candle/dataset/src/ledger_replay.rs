//! Replay: makes the batch of a step again from the data.

use std::path::Path;

use serde::Serialize;

use crate::batch::IGNORED_TARGET;
use crate::cursor::WindowStart;
use crate::ledger::{LedgerHead, LedgerRecord, RowRange, StepRecord, WindowRecord, batch_hash, for_each_record};
use crate::sequence_packer::SequencePacker;
use crate::stream::DeliveredRows;
use crate::{Batch, CorruptedRows, Cursor, DataError, Mixture, StreamFingerprint, StreamStage, TokenStream, Tokenizer};

/// The batch of a step, made again.
#[derive(Debug)]
pub struct ReplayedBatch {
    /// The batch.
    pub batch: Batch,
    /// What each of its sequences was made of.
    pub sequences: Vec<SequenceRows>,
}

/// What a sequence was made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SequenceRows {
    /// The name of the data set or of the files.
    pub source: String,
    /// The rows whose documents have targets in the sequence.
    pub rows: Vec<SourceRow>,
}

/// A row of a source. Row groups and rows are counted from 0; a file without row groups has one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SourceRow {
    /// The file's name.
    pub file: String,
    /// The row group in the file.
    pub row_group: u64,
    /// The row in the row group.
    pub row: u64,
}

impl ReplayedBatch {
    /// Returns the text of sequence `k`, from its first input to its last target, with special tokens as they are
    /// spelled.
    ///
    /// # Errors
    /// [`DataError::Tokenizer`] if the tokenizer cannot decode it.
    pub fn text(&self, k: usize, tokenizer: &Tokenizer) -> Result<String, DataError> {
        let length = self.batch.sequence_length;
        let (inputs, targets) = (&self.batch.inputs[k * length..], &self.batch.targets[k * length..]);
        let last_target = targets[..length].iter().rposition(|&target| target != IGNORED_TARGET);
        let text_length = last_target.map_or(0, |last| last + 1);
        let mut ids = Vec::with_capacity(text_length + 1);
        for position in 0..text_length {
            ids.push(inputs[position]);
            // Where a conversation ends, its last token is no input.
            let target = u32::try_from(targets[position]).ok();
            let next_input = (position + 1 < text_length).then(|| inputs[position + 1]);
            ids.extend(target.filter(|_| target != next_input));
        }
        tokenizer.decode_with_special_tokens(&ids)
    }
}

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
) -> Result<ReplayedBatch, DataError> {
    let ledger_error = |message: String| DataError::Ledger { path: path.to_owned(), message };
    let FoundStep { stage, states, record } = find_step(path, head, step, &stages[0].mixture)?
        .ok_or_else(|| ledger_error(format!("it has no step {step}")))?;
    let StreamStage { mixture, settings } =
        stages.get(stage as usize).ok_or_else(|| ledger_error(format!("the config has no stage {stage}")))?;
    let fingerprint = StreamFingerprint::new(mixture, settings, &SequencePacker::new(settings, tokenizer)?);
    let mut cursor = Cursor::at_start(fingerprint, mixture.sources().len(), settings.open_shards);
    for (position, state) in cursor.components.iter_mut().zip(states) {
        position.delivered = state.delivered;
        position.corrupted = state.corrupted;
        if let Some((start, sequence)) = state.first_sequence {
            (position.start, position.sequence) = (start, sequence);
        }
    }
    let mut stream = TokenStream::open(mixture, settings, tokenizer, Some(cursor))?;
    let interrupted = || mixture.cancel().is_cancelled();
    let (batch, rows) = stream.next_sequences_with_rows(record.sequences() as usize, &interrupted)?;
    if batch_hash(&batch) == record.batch {
        let sequences = rows.into_iter().map(|DeliveredRows { component, rows }| {
            let source = &stream.mixture().sources()[component];
            let row = |RowRange { shard, row_group, first_row, .. }: RowRange| SourceRow {
                file: source.shards()[shard as usize].name.clone(),
                row_group,
                row: first_row,
            };
            SequenceRows { source: source.name().to_owned(), rows: rows.into_iter().map(row).collect() }
        });
        return Ok(ReplayedBatch { batch, sequences: sequences.collect() });
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
    states: Vec<ComponentBefore>,
    record: StepRecord,
}

fn find_step(path: &Path, head: &LedgerHead, step: u64, mixture: &Mixture) -> Result<Option<FoundStep>, DataError> {
    let components = mixture.sources().len();
    let (mut state, mut step_state) = (vec![ComponentBefore::default(); components], None);
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
                component.corrupted.push(record.found.rows);
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
                    step_state = Some(FoundStep { stage, states: state.clone(), record });
                } else {
                    for range in &record.sequence_ranges {
                        state[range.component as usize].delivered += range.sequences;
                    }
                }
            }
        }
        Ok(())
    })?;
    Ok(step_state)
}
