//! Builds a trainer from a resolved run: everything is checked before anything is written.

mod changed_data;
mod changed_settings;
mod opened_data;
mod planned_run;

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

use dataset::{CancelToken, Cursor, Mixture, Tokenizer, hub::HubSettings};
use run_config::{EvaluationConfig, OWN_TOKENIZER, RESOLVED_CONFIG, ResolvedRun};

use self::{
    opened_data::OpenedData,
    planned_run::{PlannedRun, ResumePoint},
};
use super::{
    Observation, Position, Prompts, RunLedger, Stages, Trainer, bf16_units, matmul_algorithms, ranks,
    starting_point::{StartingPoint, fill, pretrained_weights},
};
use crate::{
    atomic_file,
    checkpoint::{self, BaseModel, Improvement, TrainerState},
    divergence_guard::DivergenceGuard,
    engine::{Engine, StepOf},
    environment::Environment,
    error::{Result, TrainerError},
    memory_plan::{self, MemoryPlan},
    metrics::MetricsWriter,
    profile::Profile,
    ranks::Ranks,
    report::DataReport,
    run_options::{ResumeFrom, RunOptions},
    schedule::LearningRate,
    speed_advice::speed_advice,
    stop::StopSignal,
    workers::TokenSpeeds,
};

impl Trainer {
    /// Starts a new run, at step 0.
    ///
    /// # Errors
    /// Nothing is allocated or written if the run does not fit in memory, its directory belongs to another trainer or
    /// holds checkpoints already, or its data cannot be found.
    pub fn new(run: ResolvedRun) -> Result<Self> {
        Self::start(run, &RunOptions::default(), &HubSettings::from_environment(), &StopSignal::new())
    }

    /// Resumes a run at a checkpoint, bit for bit as if it had never stopped: its micro-batch, accumulation and
    /// recompute mode are the checkpoint's too, unless `rebatch` takes the config's.
    ///
    /// # Errors
    /// Those of [`Trainer::new`]; [`TrainerError::Checkpoint`] if there is no intact checkpoint to resume from;
    /// [`TrainerError::ChangedOnResume`] and [`TrainerError::RebatchedOnResume`] if the config differs in a key that
    /// must not change on resume; [`TrainerError::OutOfMemoryOnResume`] if the checkpoint's micro-batch no longer fits.
    pub fn resume(run: ResolvedRun, from: &ResumeFrom, rebatch: bool) -> Result<Self> {
        let options = RunOptions { resume: Some(from.clone()), rebatch, ..RunOptions::default() };
        Self::start(run, &options, &HubSettings::from_environment(), &StopSignal::new())
    }

    /// Starts a run as [`Trainer::new`] or [`Trainer::resume`] does, as the options say, unless the signal is raised
    /// meanwhile. `hub.retries` shows the requests that it waits for.
    pub fn start(run: ResolvedRun, options: &RunOptions, hub: &HubSettings, stop: &StopSignal) -> Result<Self> {
        let (cancel, rank_info) = (stop.cancel_token(), options.ranks.rank_info());
        let mut planned = PlannedRun::new(run, options, &cancel)?;
        let opened_data = OpenedData::new(&mut planned, hub, options.accept_changed_data, &cancel)?;
        let LoadedEngine { mut engine, base, advice } =
            LoadedEngine::new(&mut planned, opened_data.speeds, &options.ranks, stop)?;
        let OpenedData { data, stage_run, tokenizer_files, fingerprint, has_changed_files, .. } = opened_data;
        let stage = planned.stage();
        stop.time_limit().expect_save(planned.plan.checkpoint_bytes);
        let PlannedRun { mut run, device, shape, plan, resumed, profiled_steps, folder, lock, mut notes, .. } = planned;
        let state = resumed.as_ref().map(|resumed| &resumed.state);
        let prompts = prompts(&run, &data.tokenizer, &mut engine)?;
        let cursor = data.stream.cursor();
        ranks::require_same_start(&options.ranks, state.map_or(0, |state| state.step), &fingerprint)?;
        let environment = Environment::capture(engine.pool().current_num_threads()).on(engine.device());
        let introduced = ranks::introduce(&options.ranks, &environment.host, plan.bytes)?;
        let environment = Environment { hosts: introduced.hosts.clone(), ..environment };
        notes.extend(state.map_or_else(Vec::new, |state| changed_settings::notes(&run, state.step)));
        if let Some(resumed) = resumed.as_ref().filter(|_| rank_info.is_first()) {
            notes.extend(restore_tokenizer(&mut run, resumed.directory())?);
        }
        let saved = saved(&run, resumed.as_ref());
        let is_latest = saved.as_deref().is_some_and(checkpoint::is_latest);
        if let Some(saved) = saved.as_deref().filter(|_| rank_info.is_first() && !is_latest) {
            // Before the records are cut to its step: who resumes the run after this moment continues there.
            checkpoint::mark_latest(saved)?;
        }
        let mixture = data.stream.mixture();
        let (mut ledger, metrics) = if rank_info.is_first() {
            open_records(&run, &environment, state, mixture, &cursor, &mut notes, &cancel)?
        } else {
            (RunLedger::off(), MetricsWriter::off())
        };
        if has_changed_files {
            ledger.files(data.stream.mixture());
        }
        let mut trainer = Self {
            saved,
            position: position(state, cursor, &run.config.runtime.evaluation),
            ledger,
            metrics,
            profile: Profile::new(profiled_steps.filter(|_| rank_info.is_first()), &run.run_directory, &engine),
            data_report: DataReport::default(),
            observation: Observation::start(&run.config, &device, data.workers, rank_info.rank, introduced.hosts),
            stages: Stages::new(&run.config, stage, resumed.is_none()),
            schedule: LearningRate::new(&stage_run.config),
            guard: DivergenceGuard::new(&run.config.runtime.divergence_guard),
            run,
            stage_run,
            plan,
            largest_plan_bytes: introduced.largest_plan_bytes,
            shape,
            engine,
            data,
            prompts,
            tokenizer_files,
            base,
            fingerprint,
            notes,
            notices: Vec::new(),
            issued_warnings: HashSet::new(),
            folder,
            lock,
            own_stop: stop.clone(),
        };
        if resumed.is_none() {
            trainer.observation.advise(0, advice, &mut trainer.metrics);
        }
        // The last save may have been interrupted before this. A rewind removes nothing before it saves.
        if let Some(latest) = trainer.saved.clone().filter(|_| rank_info.is_first() && is_latest) {
            trainer.mark_best_and_prune(&latest)?;
        }
        Ok(trainer)
    }
}

/// An engine with the weights and the optimizer's state before the next step.
struct LoadedEngine {
    engine: Engine,
    /// The record of the model that adapters train beside.
    base: Option<BaseModel>,
    /// Advice on settings that would make a new run faster.
    advice: Vec<String>,
}

impl LoadedEngine {
    /// Checks the weights to start from, then allocates, fills and warms up the engine, unless the signal is raised
    /// meanwhile.
    fn new(planned: &mut PlannedRun, speeds: TokenSpeeds, ranks: &Ranks, stop: &StopSignal) -> Result<Self> {
        let (stage, cancel) = (planned.stage(), stop.cancel_token());
        let PlannedRun { run, requested_batch, device, shape, plan, resumed, notes, .. } = planned;
        let pretrained = pretrained_weights(run, shape, resumed.is_some(), notes, &cancel)?;
        let checkpoint = resumed.as_ref().map(|resumed| &resumed.checkpoint);
        let start = StartingPoint::new(checkpoint, pretrained.as_ref(), run.config.runtime.seed);
        let base = start.base_record()?;
        // The advice depends on what would fit, so it is computed before memory is allocated.
        let plan_of = |run: &ResolvedRun| MemoryPlan::of_rank(run, device, ranks.rank_info());
        let advice = speed_advice(run, *requested_batch, plan, plan_of, Some(speeds))?;
        let (configs, settings) = (run.config.stage_configs(), plan.stage_settings(device.kind()));
        let steps = configs.iter().zip(settings).map(|(config, settings)| StepOf { config, shape, settings });
        let mut engine = memory_plan::allocate_stages(&run.config, &steps.collect::<Vec<_>>(), device)?;
        engine.sharding.connect(ranks.clone());
        engine.enter_stage(stage);
        stop.check()?;
        fill(&mut engine, shape, &start, &cancel)?;
        stop.check()?;
        if let Some(ResumePoint { state, .. }) = resumed {
            notes.extend(matmul_algorithms::restore(device, state.matmul_algorithms.as_ref())?);
            let units = bf16_units::of(device, run.config.runtime.precision);
            notes.extend(bf16_units::change_note(state.bf16_units.as_deref(), units.as_deref()));
        }
        ranks::warm_up(ranks, &mut engine)?;
        Ok(Self { engine, base, advice })
    }
}

/// Encodes the prompts, and warms up their generation on a GPU.
fn prompts(run: &ResolvedRun, tokenizer: &Tokenizer, engine: &mut Engine) -> Result<Prompts> {
    let prompts = Prompts::new(&run.config, tokenizer, engine.generator.as_ref())?;
    let (pool, is_on_gpu) = (engine.pool(), engine.device().as_cuda().is_some());
    if let Some(generator) = engine.generator.as_mut().filter(|_| is_on_gpu) {
        pool.install(|| prompts.warm_up(generator))?;
    }
    Ok(prompts)
}

fn position(state: Option<&TrainerState>, cursor: Cursor, evaluation: &EvaluationConfig) -> Position {
    let improvement_of = |state: &TrainerState| {
        let since_best = || Some(Improvement::since_best(state.best?, state.step, evaluation.every_n_steps?));
        evaluation.patience.and_then(|_| state.improvement.or_else(since_best))
    };
    Position {
        step: state.map_or(0, |state| state.step),
        stage: state.map_or(0, |state| state.stage as usize),
        tokens: state.map_or(0, |state| state.tokens),
        cursor,
        data_ended: false,
        evaluation_loss: state.and_then(|state| state.evaluation_loss),
        best: state.and_then(|state| state.best),
        improvement: state.and_then(improvement_of),
    }
}

/// Returns the checkpoint that the run is resumed from, if it is in the run's own folder of checkpoints.
fn saved(run: &ResolvedRun, resumed: Option<&ResumePoint>) -> Option<PathBuf> {
    let directory = resumed?.directory().canonicalize().ok()?;
    let path = run.config.runtime.checkpoint.directory.as_deref()?.join(directory.file_name()?);
    (path.canonicalize().ok()? == directory).then_some(path)
}

/// Puts the tokenizer back into the run directory where the run takes it from its checkpoints, which are pruned;
/// returns a note if it did.
fn restore_tokenizer(run: &mut ResolvedRun, checkpoint: &Path) -> Result<Option<String>> {
    let own = run.run_directory.join(OWN_TOKENIZER);
    let in_use = run.config.tokenizer.tokenizer_json.as_deref().and_then(Path::parent);
    if own.exists() || in_use.and_then(Path::parent) != checkpoint.parent() {
        return Ok(None);
    }
    let folder = own.parent().unwrap_or(&run.run_directory);
    checkpoint::restore_tokenizer(checkpoint, folder)?;
    let note = format!("the checkpoint's tokenizer is restored to {}", folder.display());
    run.config.tokenizer.tokenizer_json = Some(own);
    Ok(Some(note))
}

/// Opens the ledger and the metrics, rewound to the checkpoint, and writes the resolved config and the environment.
fn open_records(
    run: &ResolvedRun,
    environment: &Environment,
    state: Option<&TrainerState>,
    mixture: &Mixture,
    cursor: &Cursor,
    notes: &mut Vec<String>,
    cancel: &CancelToken,
) -> Result<(RunLedger, MetricsWriter)> {
    let ledger = RunLedger::open(&run.run_directory, state, mixture, cursor, notes, cancel)?;
    let logging = &run.config.runtime.logging;
    let tensorboard = logging.tensorboard_directory.as_deref().filter(|_| logging.tensorboard);
    let rewind_to = state.map(|state| state.step);
    let metrics = MetricsWriter::open(&run.run_directory, tensorboard, rewind_to)?;
    write_records(run, environment)?;
    Ok((ledger, metrics))
}

/// Writes the resolved config and the environment into the run directory.
fn write_records(run: &ResolvedRun, environment: &Environment) -> Result<()> {
    let path = run.run_directory.join(RESOLVED_CONFIG);
    let mut text = serde_json::to_string_pretty(&run.portable_config()).expect("a config is plain values");
    text.push('\n');
    atomic_file::replace(&path, text.as_bytes()).map_err(TrainerError::io("write", &path))?;
    environment.save(&run.run_directory)
}
