//! From a resolved run to a trainer that can take its next step: everything is checked before anything is written.

use std::{fs, path::PathBuf};

use dataset::{CancelToken, Cursor, Tokenizer, hub::HubSettings};
use model::{ModelShape, initialization};
use run_config::{BatchSize, ResolvedRun};

use super::{Engine, Position, RunLedger, Trainer, data::DataPlan, data::cursor_of, products};
use crate::{
    checkpoint::{self, TokenizerFiles, TrainerState},
    device,
    divergence_guard::DivergenceGuard,
    environment::Environment,
    error::{Result, TrainerError},
    identity,
    lock::RunLock,
    memory_plan::{MemoryPlan, shape_of},
    metrics::MetricsWriter,
    schedule::LearningRate,
    stop::StopSignal,
};

/// The config as it is trained, in the run directory.
pub const RESOLVED_CONFIG: &str = "resolved_config.json";

/// Where a run goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResumeFrom {
    /// At the newest sound checkpoint of the run's folder of checkpoints; at the beginning if none was ever written.
    Latest,
    /// At this checkpoint directory.
    Directory(PathBuf),
}

/// A checkpoint that was chosen to go on from.
struct Chosen {
    directory: PathBuf,
    state: TrainerState,
}

impl Trainer {
    /// A trainer at step 0 of a new run.
    ///
    /// # Errors
    /// Nothing is allocated or written if the run does not fit in memory, its directory belongs to another trainer or
    /// holds checkpoints already, or its data cannot be found.
    pub fn new(run: ResolvedRun) -> Result<Self> {
        Self::start(run, None, &HubSettings::from_environment(), &StopSignal::new())
    }

    /// A trainer that goes on at a checkpoint, bit for bit as if it had never stopped.
    ///
    /// # Errors
    /// As [`Trainer::new`]; [`TrainerError::Checkpoint`] if there is nothing sound to go on from;
    /// [`TrainerError::ChangedOnResume`] if a key of the config differs that training cannot go on with.
    pub fn resume(run: ResolvedRun, from: &ResumeFrom) -> Result<Self> {
        Self::start(run, Some(from), &HubSettings::from_environment(), &StopSignal::new())
    }

    /// [`Trainer::new`], or [`Trainer::resume`] where `from` says at what, unless the signal is raised meanwhile. What it
    /// waits for can be seen in `hub.waits`.
    pub fn start(
        mut run: ResolvedRun,
        from: Option<&ResumeFrom>,
        hub: &HubSettings,
        stop: &StopSignal,
    ) -> Result<Self> {
        let cancel = stop.cancel_token();
        let device::Chosen { device, notes: of_device } = device::choose(&mut run)?;
        let shape = shape_of(&run.config)?;
        let plan = MemoryPlan::here(&run, &device)?;
        plan.check()?;
        fix_batch(&mut run, &plan);
        let lock = RunLock::acquire(&run.run_directory)?;
        let mut notes = [run.notes.clone(), of_device].concat();
        let chosen = choose(&run, from, &mut notes, &cancel)?;
        let resumed = chosen.as_ref().map(|chosen| &chosen.state);
        if let Some(state) = resumed {
            identity::recall_revisions(&state.identity, &mut run);
        }
        let data = DataPlan::of(&run, shape.vocab_size, hub, &cancel)?;
        let tokenizer_files = tokenizer_files(&run, &data.tokenizer)?;
        let sources = data.mixture.describe();
        identity::pin_revisions(&mut run, &sources);
        let identity = identity::of(&run, data.tokenizer.content_hash(), &sources);
        if let Some(Chosen { directory, state }) = &chosen {
            let changes = identity::changes(&state.identity, &identity);
            if !changes.is_empty() {
                return Err(TrainerError::ChangedOnResume { checkpoint: directory.clone(), changes });
            }
        }
        let data = data.open(&mut run, resumed.map(cursor_of).transpose()?, &mut notes)?;

        let mut engine = Engine::new(&run.config, &shape, plan.setting(device.kind()), &device)?;
        stop.check()?;
        fill(&mut engine, &shape, run.config.runtime.seed, chosen.as_ref(), &cancel)?;
        stop.check()?;
        if let Some(state) = resumed {
            notes.extend(products::recall(&device, state.products.as_ref())?);
        }
        engine.warm_up()?;
        write_records(&run, &engine)?;
        let logging = &run.config.runtime.logging;
        let tensorboard = logging.tensorboard_directory.as_deref().filter(|_| logging.tensorboard);
        let cursor = data.stream.cursor();
        let ledger = RunLedger::open(&run.run_directory, resumed, &cursor, &mut notes, &cancel)?;
        let rewind_to = resumed.map(|state| state.step);
        let trainer = Self {
            saved: saved(&run, chosen.as_ref()),
            position: position(chosen.as_ref(), cursor),
            ledger,
            metrics: MetricsWriter::open(&run.run_directory, tensorboard, rewind_to)?,
            schedule: LearningRate::of(&run.config),
            guard: DivergenceGuard::new(&run.config.runtime.divergence_guard),
            run,
            plan,
            shape,
            engine,
            data,
            tokenizer_files,
            identity,
            notes,
            _lock: lock,
        };
        if let Some(latest) = checkpoint::latest(trainer.checkpoint_directory())
            && trainer.saved.as_ref() == Some(&latest)
        {
            trainer.settle(&latest)?;
        }
        Ok(trainer)
    }
}

/// The weights, and what the optimizer keeps beside them, as they are before the first step or at a checkpoint.
fn fill(
    engine: &mut Engine,
    shape: &ModelShape,
    seed: u64,
    chosen: Option<&Chosen>,
    cancel: &CancelToken,
) -> Result<()> {
    let pool = engine.pool();
    let Engine { decoder, optimizer, .. } = engine;
    let (weights, (remainder, first_moment, second_moment)) = (decoder.weights_mut(), optimizer.state_mut());
    pool.install(|| match chosen {
        None => Ok(initialization::fill(shape, seed, weights, remainder)?),
        Some(Chosen { directory, .. }) => {
            Ok(checkpoint::restore(directory, shape, weights, remainder, first_moment, second_moment, cancel)?)
        }
    })
}

/// Writes the micro-batch that the plan found into the config.
fn fix_batch(run: &mut ResolvedRun, plan: &MemoryPlan) {
    run.config.data.batch_size = BatchSize::Fixed(plan.micro_batch as usize);
    run.config.data.gradient_accumulation_steps = Some(plan.gradient_accumulation_steps as usize);
}

fn choose(
    run: &ResolvedRun,
    from: Option<&ResumeFrom>,
    notes: &mut Vec<String>,
    cancel: &CancelToken,
) -> Result<Option<Chosen>> {
    let directory = run.config.runtime.checkpoint.directory.as_deref().unwrap_or(&run.run_directory);
    let existing = checkpoint::list(directory)?;
    let chosen = match (from, existing.last()) {
        (None, None) => return Ok(None),
        (None, Some(newest)) => {
            return Err(TrainerError::Request(format!(
                "{} already holds checkpoints, the newest of step {}: go on from it with --resume, or give the new run a \
                 directory of its own",
                directory.display(),
                newest.step
            )));
        }
        (Some(ResumeFrom::Latest), None) => {
            notes.push(format!("there is no checkpoint in {} yet: starting at step 0", directory.display()));
            return Ok(None);
        }
        (Some(ResumeFrom::Latest), Some(_)) => {
            let found = checkpoint::newest_sound(directory, cancel)?;
            notes.extend(found.damaged.iter().map(|damaged| {
                format!("checkpoint {} is damaged and was passed over: {}", damaged.name, damaged.reason)
            }));
            found.path
        }
        (Some(ResumeFrom::Directory(path)), _) => path.clone(),
    };
    let state = checkpoint::load_state(&chosen)?;
    notes.push(format!("resuming at step {} from {}", state.step, chosen.display()));
    Ok(Some(Chosen { directory: chosen, state }))
}

fn position(chosen: Option<&Chosen>, cursor: Cursor) -> Position {
    let state = chosen.map(|chosen| &chosen.state);
    Position {
        step: state.map_or(0, |state| state.step),
        tokens: state.map_or(0, |state| state.tokens),
        cursor,
        data_ended: false,
        evaluation_loss: state.and_then(|state| state.evaluation_loss),
        best: state.and_then(|state| state.best),
    }
}

/// A checkpoint of another folder is no checkpoint of this run.
fn saved(run: &ResolvedRun, chosen: Option<&Chosen>) -> Option<PathBuf> {
    let directory = &chosen?.directory;
    (directory.parent() == run.config.runtime.checkpoint.directory.as_deref()).then(|| directory.clone())
}

fn tokenizer_files(run: &ResolvedRun, tokenizer: &Tokenizer) -> Result<TokenizerFiles> {
    let longest = run.config.model.max_position_embeddings;
    Ok(TokenizerFiles::read(tokenizer.path(), tokenizer.end_of_text_name(), tokenizer.end_of_text(), longest)?)
}

/// What was run, with what, for whoever comes later.
fn write_records(run: &ResolvedRun, engine: &Engine) -> Result<()> {
    let path = run.run_directory.join(RESOLVED_CONFIG);
    let mut text = serde_json::to_string_pretty(&run.config).expect("a config is plain values");
    text.push('\n');
    fs::write(&path, text).map_err(TrainerError::io("write", &path))?;
    Environment::capture(engine.pool().current_num_threads()).on(engine.device()).save(&run.run_directory)
}
