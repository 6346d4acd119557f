//! `validate-data`: proves from a run's ledger what it was trained on.

use std::fmt;
use std::path::{Path, PathBuf, absolute};

use clap::Args;
use dataset::ledger::{Audit, AuditedComponent, audit, replay};
use dataset::{Mixture, StreamSettings, TokenStream, Tokenizer};
use run_config::{ResolvedRun, RunConfig};
use serde::Serialize;

use crate::checkpoint::{self, TrainerState};
use crate::identity;
use crate::trainer::LEDGER;
use crate::{Result, TrainerError};

/// What `validate-data` takes.
#[derive(Debug, Clone, Args)]
pub struct ValidateDataOptions {
    /// The run's directory.
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// Make the batch of this step again as well, and compare it with what the step was trained on. Repeatable.
    #[arg(long = "replay", value_name = "STEP")]
    pub replay: Vec<u64>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// What was proven, up to the newest sound checkpoint.
#[derive(Debug, Clone, Serialize)]
pub struct DataReport {
    /// The step of the checkpoint that vouches for the ledger.
    pub step: u64,
    /// Steps in the ledger.
    pub steps: u64,
    /// Targets that they were trained on.
    pub targets: u64,
    /// What they took of each component; one where the data are no mixture.
    pub components: Vec<ComponentReport>,
    /// Steps whose batch was made again, equal.
    pub replayed: Vec<u64>,
    /// What does not fit; empty where every document was used exactly once.
    pub problems: Vec<String>,
}

/// What a run took of a component.
#[derive(Debug, Clone, Serialize)]
pub struct ComponentReport {
    /// The data set's name, or the patterns.
    pub name: String,
    /// The share of the sequences that its weight gives it, of 1.
    pub share: f64,
    /// Sequences that steps of the ledger took of it.
    pub sequences: u64,
    /// The epochs begun.
    pub epochs: Vec<EpochReport>,
}

/// An epoch of a component.
#[derive(Debug, Clone, Serialize)]
pub struct EpochReport {
    /// From 0.
    pub epoch: u64,
    /// Documents used.
    pub documents: u64,
    /// Whether every document of the training set had to be among them.
    pub finished: bool,
    /// Whether the ledger has the epoch from its beginning.
    pub whole: bool,
}

/// Audits a run.
///
/// # Errors
/// [`TrainerError::Request`] where this is no run, or a step to be made again is not in its ledger; [`TrainerError::Data`] where the
/// ledger is not what the checkpoint vouches for, or the data cannot be read.
pub fn run(options: &ValidateDataOptions) -> Result<DataReport> {
    let directory = &absolute(&options.run).unwrap_or_else(|_| options.run.clone());
    let config = directory.join("resolved_config.json");
    if !config.exists() {
        let message = format!(
            "{} is no run's folder: it lacks the resolved_config.json that training writes",
            directory.display()
        );
        return Err(TrainerError::Request(message));
    }
    let mut run = RunConfig::load(&config, &[])?;
    let state = newest_state(&run, directory)?;
    identity::recall_revisions(&state.identity, &mut run);
    let head = state.ledger.clone().ok_or_else(|| no_ledger(directory))?;
    let data = RunData::of(&run)?;
    let RunData { mixture, settings, tokenizer } = &data;
    let path = directory.join(LEDGER);
    let ended = ended(&run, &state, &data)?;
    let Audit { steps, targets, components, problems } = audit(&path, &head, mixture, settings, ended)?;
    let first = state.step + 1 - steps.min(state.step);
    for &step in &options.replay {
        if !(first..=state.step).contains(&step) {
            let (ledger, last) = (path.display(), state.step);
            let message = format!("step {step} cannot be made again: {ledger} has the steps {first} to {last}");
            return Err(TrainerError::Request(message));
        }
        replay(&path, &head, step, mixture, settings, tokenizer)?;
    }
    let component = |(index, audited): (usize, AuditedComponent)| ComponentReport::of(audited, mixture.share(index));
    let components = components.into_iter().enumerate().map(component).collect();
    let replayed = options.replay.clone();
    Ok(DataReport { step: state.step, steps, targets, components, replayed, problems })
}

impl ComponentReport {
    fn of(AuditedComponent { name, sequences, epochs }: AuditedComponent, share: f64) -> Self {
        let epochs = epochs.into_iter().map(|epoch| EpochReport {
            epoch: epoch.epoch,
            documents: epoch.documents,
            finished: epoch.finished,
            whole: epoch.whole,
        });
        Self { name, share, sequences, epochs: epochs.collect() }
    }
}

pub(super) fn main(options: &ValidateDataOptions) -> Result<u8> {
    let report = run(options)?;
    if options.json {
        super::print_json(&report)?;
    } else {
        super::print(&report.to_string())?;
    }
    // As for data that cannot be read: what the run was trained on is not what it should have been.
    Ok(if report.problems.is_empty() { 0 } else { 3 })
}

impl fmt::Display for DataReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} steps up to step {}, {} target tokens", self.steps, self.step, self.targets)?;
        let all: u64 = self.components.iter().map(|component| component.sequences).sum();
        for ComponentReport { name, share, sequences, epochs } in &self.components {
            if self.components.len() > 1 {
                let taken = *sequences as f64 / all.max(1) as f64;
                writeln!(
                    f,
                    "{name}: {sequences} of {all} sequences, {:.2} % (its weight: {:.2} %)",
                    100.0 * taken,
                    100.0 * share
                )?;
            }
            for EpochReport { epoch, documents, finished, whole } in epochs {
                let state = match (finished, whole) {
                    (true, true) => "every document used exactly once",
                    (true, false) => "no document used twice; it began before the ledger",
                    (false, _) => "not finished; no document used twice",
                };
                let state = if self.problems.is_empty() { state } else { "see the problems below" };
                writeln!(f, "epoch {epoch}: {documents} documents, {state}")?;
            }
        }
        for step in &self.replayed {
            writeln!(f, "step {step}: its batch was made again, equal")?;
        }
        self.problems.iter().try_for_each(|problem| writeln!(f, "problem: {problem}"))
    }
}

/// What a run reads.
struct RunData {
    mixture: Mixture,
    settings: StreamSettings,
    tokenizer: Tokenizer,
}

impl RunData {
    fn of(run: &ResolvedRun) -> Result<Self> {
        let path = run.config.tokenizer.tokenizer_json.as_deref().unwrap_or(Path::new("tokenizer.json"));
        let tokenizer = Tokenizer::load(path, &run.special_tokens)?;
        Ok(Self { mixture: Mixture::from_run(run)?, settings: StreamSettings::from_run(run), tokenizer })
    }
}

/// The state of the newest sound checkpoint.
fn newest_state(run: &ResolvedRun, directory: &Path) -> Result<TrainerState> {
    let checkpoints = run.config.runtime.checkpoint.directory.as_deref().unwrap_or(directory);
    let newest = checkpoint::newest_sound(checkpoints)?.path;
    Ok(checkpoint::load_state(&newest)?)
}

/// Whether the data had ended at the checkpoint: the run takes so many epochs, and nothing of them is left.
fn ended(run: &ResolvedRun, state: &TrainerState, data: &RunData) -> Result<bool> {
    if run.config.scheduler.total_epochs.is_none() {
        return Ok(false);
    }
    let cursor = serde_json::from_value(state.cursor.clone()).map_err(|error| {
        TrainerError::Request(format!("the checkpoint of step {} has no readable data position: {error}", state.step))
    })?;
    let RunData { mixture, settings, tokenizer } = data;
    Ok(TokenStream::open(mixture, settings, tokenizer, Some(cursor))?.next_sequences(1)?.is_empty())
}

fn no_ledger(directory: &Path) -> TrainerError {
    TrainerError::Request(format!(
        "the newest checkpoint of {} was written without a ledger: there is nothing to prove its data with",
        directory.display()
    ))
}
