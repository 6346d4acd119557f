//! A run's data: its tokenizer, its token stream, and its held-out text.

use dataset::hub::HubSettings;
use dataset::{
    Batch, CancelToken, Cursor, DataError, HeldOut, Mixture, NextStage, StreamSettings, StreamStage, TokenStream,
    Tokenizer,
};
use run_config::ResolvedRun;

use super::stages::Entered;
use crate::checkpoint::TrainerState;
use crate::error::{Result, TrainerError};

/// A run's tokenizer, its data sources, listed but not opened, and the settings of its stream.
pub(crate) struct DataPlan {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) mixture: Mixture,
    pub(crate) settings: StreamSettings,
}

/// The open data of a trainer.
pub(super) struct Data {
    pub(super) tokenizer: Tokenizer,
    pub(super) stream: TokenStream,
    /// Number of threads that tokenise.
    pub(super) workers: usize,
    /// The batch of a step that was abandoned.
    pub(super) pending_batch: Option<Batch>,
    held_out: Vec<HeldOut>,
}

impl DataPlan {
    /// Loads the tokenizer and lists the files, unless cancelled.
    pub(crate) fn new(run: &ResolvedRun, vocab_size: usize, hub: &HubSettings, cancel: &CancelToken) -> Result<Self> {
        let tokenizer = Tokenizer::from_run(run)?;
        if tokenizer.vocab_size() > vocab_size {
            return Err(TrainerError::Request(format!(
                "model.vocab_size is {vocab_size}, and {} has {} tokens: leave model.vocab_size out to take the tokenizer's",
                tokenizer.path().display(),
                tokenizer.vocab_size()
            )));
        }
        Ok(Self { tokenizer, mixture: Mixture::from_run(run, hub, cancel)?, settings: StreamSettings::from_run(run) })
    }

    /// Returns the mixture and the stream settings of each stage; one for a run without stages.
    pub(crate) fn stages(&self, run: &ResolvedRun) -> Result<Vec<StreamStage>> {
        let stages = 0..run.config.stages.as_ref().map_or(1, Vec::len);
        stages.map(|stage| stream_stage(&run.at_stage(stage), &self.mixture, self.settings.workers)).collect()
    }

    /// Opens the stream, at a checkpoint's position if there is one, and the held-out text if the run will evaluate, so
    /// that errors appear at once and not hours later. A data set too small for a held-out part is trained on without
    /// evaluation.
    pub(super) fn open(self, run: &mut ResolvedRun, cursor: Option<Cursor>, notes: &mut Vec<String>) -> Result<Data> {
        let Self { tokenizer, mixture, settings } = self;
        notes.extend(mixture.notes());
        let stream = TokenStream::open(mixture, &settings, &tokenizer, cursor)?;
        let mut data = Data { tokenizer, stream, workers: settings.workers, pending_batch: None, held_out: Vec::new() };
        if run.config.runtime.evaluation.every_n_steps.is_some() {
            match data.held_out(run) {
                Err(TrainerError::Data(problem @ DataError::NothingHeldOut { .. })) => {
                    notes.push(format!("nothing is evaluated: {problem}"));
                    run.config.runtime.evaluation.every_n_steps = None;
                }
                opened => notes.extend(opened?.iter_mut().flat_map(HeldOut::take_notices)),
            }
        }
        Ok(data)
    }
}

/// Returns the stream's position that a checkpoint's state holds.
pub(crate) fn cursor_of(state: &TrainerState) -> Result<Cursor> {
    serde_json::from_value(state.cursor.clone()).map_err(|error| {
        TrainerError::Request(format!(
            "the checkpoint of step {} has a data position that this program cannot read ({error}): it was written by \
             another version",
            state.step
        ))
    })
}

/// Returns the mixture and the stream settings of one stage; `run` has that stage's settings.
fn stream_stage(run: &ResolvedRun, mixture: &Mixture, workers: usize) -> Result<StreamStage> {
    let components = &run.config.data.mixture;
    let mixture = match components.as_slice() {
        [] => mixture.clone(),
        components => mixture.with_weights(components.iter().map(|component| component.weight))?,
    };
    Ok(StreamStage { mixture, settings: StreamSettings { workers, ..StreamSettings::from_run(run) } })
}

impl Data {
    /// Switches to the stream of the next stage. The held-out text is opened again on next use, with the stage's
    /// sequences.
    pub(super) fn enter_stage(&mut self, run: &ResolvedRun, interrupted: &dyn Fn() -> bool) -> Result<Entered> {
        let stage = stream_stage(run, self.stream.mixture(), self.workers)?;
        let NextStage { stream, left_out, opened } = self.stream.next_stage(&stage, interrupted)?;
        self.stream = stream;
        self.held_out.clear();
        Ok(Entered { start: Some(self.stream.cursor()), left_out, opened })
    }

    /// Returns the held-out text, which is opened on first use.
    pub(super) fn held_out(&mut self, run: &ResolvedRun) -> Result<&mut [HeldOut]> {
        if self.held_out.is_empty() {
            self.held_out = HeldOut::from_run(run, self.stream.mixture(), &self.tokenizer)?;
        }
        Ok(&mut self.held_out)
    }
}
