//! `validate-data`: proves from a run's ledger what it was trained on.

use std::fmt;
use std::path::{Path, PathBuf};

use clap::Args;
use dataset::hub::HubSettings;
use dataset::{Audit, AuditedComponent, AuditedEpoch, CancelToken, StreamStage, TokenStream, Until, audit, replay};
use run_config::{RESOLVED_CONFIG, ResolvedRun, RunConfig};
use serde::Serialize;

use super::model_source::{checkpoints_in, read_present};
use super::replayed_step::ReplayedStep;
use super::{NamedRun, Output};

use crate::checkpoint::{self, Checkpoint, TrainerState};
use crate::config_fingerprint;
use crate::engine::model_shape;
use crate::stop::StopSignal;
use crate::trainer::{DataPlan, LEDGER, cursor_of};
use crate::units::{counted, grouped};
use crate::{Result, TrainerError};

/// What `validate-data` takes.
#[derive(Debug, Clone, Args)]
pub struct ValidateDataOptions {
    /// A run: its name, its directory, a checkpoint of it, or its config. [default: the newest run]
    #[arg(value_name = "RUN")]
    pub run: Option<PathBuf>,
    /// Make the batch of this step again as well, and compare it with what the step was trained on. Repeatable.
    #[arg(long = "replay", value_name = "STEP")]
    pub replay: Vec<u64>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// The result of the audit, up to the newest intact checkpoint.
#[derive(Debug, Clone, Serialize)]
pub struct DataReport {
    /// The step of the checkpoint that holds the ledger's head.
    pub step: u64,
    /// Steps in the ledger.
    pub steps: u64,
    /// Targets that they were trained on.
    pub targets: u64,
    /// What these steps read of each component; one component where the data are no mixture.
    pub components: Vec<ComponentReport>,
    /// Steps whose batch was rebuilt and is identical.
    pub replayed: Vec<u64>,
    /// What these batches were made of.
    pub batches: Vec<ReplayedStep>,
    /// What is inconsistent; empty where every document was used exactly once.
    pub problems: Vec<String>,
}

/// What a run read of a component.
#[derive(Debug, Clone, Serialize)]
pub struct ComponentReport {
    /// Its name, sequences and epochs.
    #[serde(flatten)]
    pub audited: AuditedComponent,
    /// The fraction of the sequences that its weights give it.
    pub share: f64,
}

/// Audits a run, unless the signal is raised meanwhile.
///
/// # Errors
/// [`TrainerError::Request`] if this is not a run's directory, or a step to replay is not in its ledger;
/// [`TrainerError::Data`] if the ledger does not match the checkpoint's head, or the data cannot be read.
pub fn run(options: &ValidateDataOptions, hub: &HubSettings, stop: &StopSignal) -> Result<DataReport> {
    let cancel = stop.cancel_token();
    let directory = &NamedRun::find_or_newest(options.run.as_deref())?.run_directory()?;
    let config = directory.join(RESOLVED_CONFIG);
    if !config.exists() {
        let message =
            format!("{} is no run's folder: it lacks the {RESOLVED_CONFIG} that training writes", directory.display());
        return Err(TrainerError::Request(message));
    }
    let find = || Ok(checkpoint::newest_intact(&checkpoints_in(directory), &cancel)?.checkpoint.directory().to_owned());
    read_present(&cancel, find, |newest| report(directory, newest, options, hub, &cancel))
}

/// Audits the run in `directory` up to its checkpoint `newest`.
fn report(
    directory: &Path,
    newest: &Path,
    options: &ValidateDataOptions,
    hub: &HubSettings,
    cancel: &CancelToken,
) -> Result<DataReport> {
    let (config, tokenizer_json) = (directory.join(RESOLVED_CONFIG), checkpoint::tokenizer_in(newest));
    let mut run = RunConfig::load_with_checkpoint(&config, &[], &|_| Some(tokenizer_json.clone()))?;
    let state = Checkpoint::open(newest)?.state()?;
    config_fingerprint::restore_data_versions(&state.fingerprint, &mut run);
    let head = state.ledger.clone().ok_or_else(|| no_ledger(directory))?;
    let (mut data, cursor) =
        (DataPlan::new(&run, model_shape(&run.config)?.vocab_size, hub, cancel)?, cursor_of(&state)?);
    if !config_fingerprint::is_tokenizer_of(&state.fingerprint, data.tokenizer.content_hash()) {
        return Err(other_tokenizer(data.tokenizer.path(), newest));
    }
    data.mixture = data.mixture.arranged(&cursor);
    data.mixture.restore(&cursor, &data.settings);
    let (stages, tokenizer) = (data.stages(&run)?, &data.tokenizer);
    let path = directory.join(LEDGER);
    let is_exhausted = ended(&run, &state, &data, cancel)?;
    let Audit { steps, targets, components, stage_sequences, problems } = audit(&path, &head, &stages, is_exhausted)?;
    let mut batches = Vec::with_capacity(options.replay.len());
    let first = state.step + 1 - steps.min(state.step);
    for &step in &options.replay {
        if !(first..=state.step).contains(&step) {
            let (ledger, step) = (path.display(), grouped(step));
            let (first, last) = (grouped(first), grouped(state.step));
            let message = format!("step {step} cannot be replayed: {ledger} has steps {first} to {last}");
            return Err(TrainerError::Request(message));
        }
        batches.push(ReplayedStep::new(step, &replay(&path, &head, step, &stages, tokenizer)?, tokenizer)?);
    }
    let component = |(index, audited)| ComponentReport { audited, share: share(&stages, &stage_sequences, index) };
    let components = components.into_iter().enumerate().map(component).collect();
    let replayed = options.replay.clone();
    Ok(DataReport { step: state.step, steps, targets, components, replayed, batches, problems })
}

pub(super) fn main(options: &ValidateDataOptions, output: &mut dyn Output, stop: &StopSignal) -> Result<u8> {
    let report = run(options, &HubSettings::from_environment(), stop)?;
    if options.json {
        output.print_json(&report)?;
    } else {
        output.print(&report.to_string())?;
    }
    // The exit code of data that cannot be read: what the run was trained on is not what it should have been.
    Ok(if report.problems.is_empty() { 0 } else { 3 })
}

impl fmt::Display for DataReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} up to step {}, {}",
            counted(self.steps, "step"),
            grouped(self.step),
            counted(self.targets, "target token")
        )?;
        let all: u64 = self.components.iter().map(|component| component.audited.sequences).sum();
        for ComponentReport {
            audited: AuditedComponent { name, sequences, left_out, corrupted, changed, epochs },
            share,
        } in &self.components
        {
            if self.components.len() > 1 {
                let share_taken = *sequences as f64 / all.max(1) as f64;
                writeln!(
                    f,
                    "{name}: {} of {}, {:.2} % (its weight: {:.2} %)",
                    grouped(*sequences),
                    counted(all, "sequence"),
                    100.0 * share_taken,
                    100.0 * share
                )?;
            }
            if *left_out > 0 {
                let left_out = counted(*left_out, "sequence");
                writeln!(f, "{left_out} left out where a stage began at the next window")?;
            }
            for change in changed {
                writeln!(f, "changed while the run was stopped (--accept-changed-data): {change}")?;
            }
            for warning in corrupted {
                writeln!(f, "skipped: {warning}")?;
            }
            for AuditedEpoch { epoch, documents, finished, whole, .. } in epochs {
                let state = match (finished, whole) {
                    (true, true) if *left_out > 0 => "every document used exactly once, but for the sequences left out",
                    (true, true) => "every document used exactly once",
                    (true, false) => "no document used twice; it began before the ledger",
                    (false, _) => "not finished; no document used twice",
                };
                let state = if self.problems.is_empty() { state } else { "see the problems below" };
                // Counted as the progress line counts them; JSON and the ledger begin with 0.
                writeln!(f, "epoch {}: {}, {state}", grouped(epoch + 1), counted(*documents, "document"))?;
            }
        }
        self.batches.iter().try_for_each(|batch| batch.fmt(f))?;
        self.problems.iter().try_for_each(|problem| writeln!(f, "problem: {problem}"))
    }
}

/// Returns a component's mixture weight; over several stages the mean, weighted by the sequences of each.
fn share(stages: &[StreamStage], sequences: &[u64], component: usize) -> f64 {
    let [stage] = stages else {
        let all: u64 = sequences.iter().sum();
        let of_stages = stages.iter().zip(sequences);
        let of_stages = of_stages.map(|(stage, &sequences)| sequences as f64 * stage.mixture.weight(component));
        return of_stages.sum::<f64>() / all.max(1) as f64;
    };
    stage.mixture.weight(component)
}

/// Whether the data was exhausted at the checkpoint: the epochs of the run are complete.
fn ended(run: &ResolvedRun, state: &TrainerState, data: &DataPlan, cancel: &CancelToken) -> Result<bool> {
    if run.config.scheduler.total_epochs.is_none() {
        return Ok(false);
    }
    let DataPlan { mixture, settings, tokenizer } = data;
    let mut stream = TokenStream::open(mixture, settings, tokenizer, Some(cursor_of(state)?))?;
    Ok(stream.next_sequences_until(Until::Count(1), &|| cancel.is_cancelled())?.is_empty())
}

fn other_tokenizer(tokenizer_json: &Path, checkpoint: &Path) -> TrainerError {
    TrainerError::Request(format!(
        "{} is not the tokenizer that the run was trained with: put back the tokenizer.json of {}",
        tokenizer_json.display(),
        checkpoint.display()
    ))
}

fn no_ledger(directory: &Path) -> TrainerError {
    TrainerError::Request(format!(
        "the newest checkpoint of {} was written without a ledger: there is nothing to prove its data with",
        directory.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_groups_the_digits_of_its_counts() {
        let epoch = AuditedEpoch { documents: 1_234_567, finished: true, whole: true, ..AuditedEpoch::default() };
        let component = |name: &str, left_out| ComponentReport {
            audited: AuditedComponent {
                name: name.to_owned(),
                sequences: 5000,
                left_out,
                corrupted: Vec::new(),
                changed: Vec::new(),
                epochs: vec![epoch.clone()],
            },
            share: 0.5,
        };
        let report = DataReport {
            step: 20_000,
            steps: 1250,
            targets: 5_120_000,
            components: vec![component("books", 1), component("web", 1297)],
            replayed: Vec::new(),
            batches: Vec::new(),
            problems: Vec::new(),
        };
        insta::assert_snapshot!(report.to_string(), @r"
        1,250 steps up to step 20,000, 5,120,000 target tokens
        books: 5,000 of 10,000 sequences, 50.00 % (its weight: 50.00 %)
        1 sequence left out where a stage began at the next window
        epoch 1: 1,234,567 documents, every document used exactly once, but for the sequences left out
        web: 5,000 of 10,000 sequences, 50.00 % (its weight: 50.00 %)
        1,297 sequences left out where a stage began at the next window
        epoch 1: 1,234,567 documents, every document used exactly once, but for the sequences left out
        ");
    }
}
