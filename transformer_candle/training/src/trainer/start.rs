//! Builds a trainer from a resolved run: everything is checked before anything is written.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use dataset::{CancelToken, ChatSettings, ConversationEncoder, Cursor, Tokenizer, hub::HubSettings};
use kernels::Device;
use model::ModelShape;
use run_config::{EvaluationConfig, RESOLVED_CONFIG, ResolvedRun, RunConfig};

use super::{
    Observation, Position, Prompts, RunLedger, Stages, Trainer,
    data::DataPlan,
    data::cursor_of,
    execution, matmul_algorithms, ranks,
    starting_point::{StartingPoint, fill, pretrained_weights},
};
use crate::{
    atomic_file,
    checkpoint::{self, Checkpoint, Improvement, TokenizerFiles, TrainerState},
    config_fingerprint::{self, ConfigFingerprint},
    device,
    divergence_guard::DivergenceGuard,
    engine::{Engine, StepOf, model_shape},
    environment::Environment,
    error::{Result, TrainerError},
    lock::RunLock,
    memory_plan::{self, MemoryPlan},
    metrics::MetricsWriter,
    pool,
    profile::Profile,
    ranks::{RankInfo, Ranks},
    run_folder::RunFolder,
    run_options::{ResumeFrom, RunOptions},
    schedule::LearningRate,
    speed_advice::speed_advice,
    stop::StopSignal,
    workers::TokenSpeeds,
};

/// The checkpoint that a run is resumed from.
struct ResumePoint {
    checkpoint: Checkpoint,
    state: TrainerState,
}

impl ResumePoint {
    fn directory(&self) -> &Path {
        self.checkpoint.directory()
    }

    /// Refuses a run that differs from the checkpoint's in what must not change.
    fn require_same(&self, fingerprint: &ConfigFingerprint) -> Result<()> {
        match config_fingerprint::changes(&self.state.fingerprint, fingerprint) {
            changes if changes.is_empty() => Ok(()),
            changes => Err(TrainerError::ChangedOnResume { checkpoint: self.directory().to_owned(), changes }),
        }
    }
}

impl Trainer {
    /// A trainer at step 0 of a new run.
    ///
    /// # Errors
    /// Nothing is allocated or written if the run does not fit in memory, its directory belongs to another trainer or
    /// holds checkpoints already, or its data cannot be found.
    pub fn new(run: ResolvedRun) -> Result<Self> {
        Self::start(run, &RunOptions::default(), &HubSettings::from_environment(), &StopSignal::new())
    }

    /// A trainer that resumes at a checkpoint, bit for bit as if it had never stopped: also its micro-batch,
    /// accumulation and recompute mode are the checkpoint's, unless `rebatch` takes the config's.
    ///
    /// # Errors
    /// As [`Trainer::new`]; [`TrainerError::Checkpoint`] if there is no intact checkpoint to resume from;
    /// [`TrainerError::ChangedOnResume`] and [`TrainerError::RebatchedOnResume`] if a key of the config differs that training
    /// cannot be resumed with; [`TrainerError::OutOfMemoryOnResume`] if the checkpoint's micro-batch does not fit any
    /// more.
    pub fn resume(run: ResolvedRun, from: &ResumeFrom, rebatch: bool) -> Result<Self> {
        let options = RunOptions { resume: Some(from.clone()), rebatch, ..RunOptions::default() };
        Self::start(run, &options, &HubSettings::from_environment(), &StopSignal::new())
    }

    /// [`Trainer::new`] or [`Trainer::resume`], as the options say, unless the signal is raised meanwhile. What it waits for can
    /// be seen in `hub.retries`.
    pub fn start(mut run: ResolvedRun, options: &RunOptions, hub: &HubSettings, stop: &StopSignal) -> Result<Self> {
        let (from, rebatch) = (options.resume.as_ref(), options.rebatch);
        let cancel = stop.cancel_token();
        let rank_info = options.ranks.rank_info();
        pool::check(run.config.runtime.threads, dataset::max_workers(&run.config.data))?;
        let device::DeviceSelection { device, notes: device_notes } = device::select_for_training(&mut run, rank_info)?;
        ranks::connect(&options.ranks, &device, &run.config)?;
        let shape = model_shape(&run.config)?;
        if from.is_none() {
            options.profiled_steps(&run.config, 0)?;
            // A new run that does not fit leaves no trace, not even a lock.
            MemoryPlan::of_rank(&run, &device, rank_info)?.check()?;
        }
        let (lock, folder) = occupy(&run, options)?;
        if !rank_info.is_first() {
            run.config.runtime.evaluation.prompts.clear();
        }
        let mut notes = [run.notes.clone(), device_notes].concat();
        let resumed = find_resume_point(&run, from, &mut notes, &cancel)?;
        let asked = run.config.data.batch_size;
        let plan = plan(&mut run, (&device, &options.ranks), resumed.as_ref(), rebatch, &mut notes)?;
        let state = resumed.as_ref().map(|resumed| &resumed.state);
        let profiled_steps = options.profiled_steps(&run.config, state.map_or(0, |state| state.step))?;
        if let Some(state) = state {
            config_fingerprint::restore_revisions(&state.fingerprint, &mut run);
        }
        let stage = state.map_or(0, |state| state.stage as usize);
        let mut data = DataPlan::new(&run.at_stage(stage), shape.vocab_size, hub, &cancel)?;
        let (encoder, threads) = (data.tokenizer.measure_speed()?, pool::threads(&run.config)?);
        let speeds = TokenSpeeds::new(encoder, plan.flops_per_token, &device, threads);
        data.settings.workers = speeds.workers(&run.config, data.settings.workers);
        run.config.data.bos = data.tokenizer.document_tokens().starts_with_bos.into();
        let tokenizer_files = tokenizer_files(&run, &data.tokenizer)?;
        let sources = data.mixture.describe();
        config_fingerprint::pin_revisions(&mut run, &sources);
        let fingerprint = config_fingerprint::compute(&run, data.tokenizer.content_hash(), &sources);
        if let Some(resumed) = &resumed {
            resumed.require_same(&fingerprint)?;
        }
        let mut stage_run = run.at_stage(stage);
        let data = data.open(&mut stage_run, state.map(cursor_of).transpose()?, &mut notes)?;
        run.config.runtime.evaluation.every_n_steps = stage_run.config.runtime.evaluation.every_n_steps;

        let pretrained = pretrained_weights(&run, &shape, resumed.is_some(), &mut notes, &cancel)?;
        let checkpoint = resumed.as_ref().map(|resumed| &resumed.checkpoint);
        let start = StartingPoint::new(checkpoint, pretrained.as_ref(), run.config.runtime.seed);
        let base = start.base_record()?;
        // What would fit is asked before memory is taken.
        let advice =
            speed_advice(&run, asked, &plan, |run| MemoryPlan::of_rank(run, &device, rank_info), Some(speeds))?;
        let mut engine = allocate(&run.config, &shape, &plan, &device)?;
        engine.sharding.connect(options.ranks.clone());
        engine.enter_stage(stage);
        stop.check()?;
        fill(&mut engine, &shape, &start, &cancel)?;
        stop.check()?;
        if let Some(state) = state {
            notes.extend(matmul_algorithms::restore(&device, state.matmul_algorithms.as_ref())?);
        }
        ranks::warm_up(&options.ranks, &mut engine)?;
        let prompts = prompts(&run, &data.tokenizer, &mut engine)?;
        let cursor = data.stream.cursor();
        ranks::require_same_start(&options.ranks, state.map_or(0, |state| state.step), &fingerprint)?;
        let environment = Environment::capture(engine.pool().current_num_threads()).on(engine.device());
        let introduced = ranks::introduce(&options.ranks, &environment.host, plan.bytes)?;
        let environment = Environment { hosts: introduced.hosts.clone(), ..environment };
        let (ledger, metrics) = open_records((&run, &environment, rank_info), state, &cursor, &mut notes, &cancel)?;
        let mut trainer = Self {
            saved: saved(&run, resumed.as_ref()),
            position: position(state, cursor, &run.config.runtime.evaluation),
            ledger,
            metrics,
            profile: Profile::new(profiled_steps.filter(|_| rank_info.is_first()), &run.run_directory, &engine),
            observation: Observation::start(&run.config, &device, data.workers, (rank_info.rank, introduced.hosts)),
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
            _lock: lock,
            own_stop: stop.clone(),
        };
        if resumed.is_none() {
            trainer.observation.advise(0, advice, &mut trainer.metrics);
        }
        trainer.complete_last_save()?;
        Ok(trainer)
    }

    /// Marks and prunes the checkpoints of a run whose last save was stopped before that.
    fn complete_last_save(&mut self) -> Result<()> {
        let latest = checkpoint::latest(self.checkpoint_directory());
        match latest.filter(|latest| self.saved.as_ref() == Some(latest)) {
            Some(latest) if self.ranks().rank_info().is_first() => self.mark_best_and_prune(&latest),
            _ => Ok(()),
        }
    }
}

/// Plans the run with its checkpoint's execution or the config's, and writes the micro-batch into the config.
fn plan(
    run: &mut ResolvedRun,
    (device, ranks): (&Device, &Ranks),
    resumed: Option<&ResumePoint>,
    rebatch: bool,
    notes: &mut Vec<String>,
) -> Result<MemoryPlan> {
    let rank_info = ranks.rank_info();
    if let Some(resumed) = resumed.filter(|_| !rebatch) {
        notes.extend(execution::keep(run, resumed.directory(), resumed.state.execution.as_ref())?);
    }
    let plan = MemoryPlan::of_rank(run, device, rank_info)?;
    match (&plan.shortage, resumed) {
        (Some(shortage), Some(resumed))
            if !rebatch
                && !shortage.fits.is_empty()
                && resumed.state.execution.as_ref() == Some(&execution::from_plan(&plan)) =>
        {
            let (checkpoint, shortage) = (resumed.directory().to_owned(), Box::new(shortage.clone()));
            return Err(TrainerError::OutOfMemoryOnResume { checkpoint, shortage });
        }
        _ => plan.check()?,
    }
    if rebatch {
        notes.extend(execution::changed(&plan, resumed.and_then(|resumed| resumed.state.execution.as_ref())));
    }
    execution::write(&plan, run);
    if !ranks::agree_on_micro_batch(ranks, run)? {
        return Ok(plan);
    }
    let plan = MemoryPlan::of_rank(run, device, rank_info)?;
    execution::write(&plan, run);
    Ok(plan)
}

/// The engine of all stages, at the first one.
fn allocate(config: &RunConfig, shape: &ModelShape, plan: &MemoryPlan, device: &Device) -> Result<Engine> {
    let (configs, settings) = (config.stage_configs(), plan.stage_settings(device.kind()));
    let steps = configs.iter().zip(settings).map(|(config, settings)| StepOf { config, shape, settings });
    memory_plan::allocate_stages(config, &steps.collect::<Vec<_>>(), device)
}

fn find_resume_point(
    run: &ResolvedRun,
    from: Option<&ResumeFrom>,
    notes: &mut Vec<String>,
    cancel: &CancelToken,
) -> Result<Option<ResumePoint>> {
    let directory = run.config.runtime.checkpoint.directory.as_deref().unwrap_or(&run.run_directory);
    let existing = checkpoint::list(directory)?;
    let checkpoint = match (from, existing.last()) {
        (None, None) => return Ok(None),
        (None, Some(newest)) => {
            return Err(TrainerError::Request(format!(
                "{} already holds checkpoints, the newest of step {}: resume it with --resume, or give the new run another \
                 directory",
                directory.display(),
                newest.step
            )));
        }
        (Some(ResumeFrom::Latest), None) => {
            notes.push(format!("there is no checkpoint in {} yet: starting at step 0", directory.display()));
            return Ok(None);
        }
        (Some(ResumeFrom::Latest), Some(_)) => {
            let found = checkpoint::newest_intact(directory, cancel)?;
            notes.extend(found.corrupted.iter().map(|corrupted| {
                format!("checkpoint {} is corrupted and was skipped: {}", corrupted.name, corrupted.reason)
            }));
            found.checkpoint
        }
        (Some(ResumeFrom::Directory(path)), _) => Checkpoint::open(path)?.verified(cancel)?,
    };
    let base_model = run.config.model.init_from.as_deref().filter(|_| checkpoint.has_adapters());
    let checkpoint = checkpoint.beside(base_model);
    let state = checkpoint.state()?;
    notes.push(format!("resuming at step {} from {}", state.step, checkpoint.directory().display()));
    Ok(Some(ResumePoint { checkpoint, state }))
}

/// The encoded prompts, tried out on a GPU.
fn prompts(run: &ResolvedRun, tokenizer: &Tokenizer, engine: &mut Engine) -> Result<Prompts> {
    let prompts = Prompts::new(&run.config, tokenizer, engine.generator.as_ref())?;
    let (pool, is_on_gpu) = (engine.pool(), engine.device().as_cuda().is_some());
    if let Some(generator) = engine.generator.as_mut().filter(|_| is_on_gpu) {
        pool.install(|| prompts.warm_up(generator))?;
    }
    Ok(prompts)
}

fn position(state: Option<&TrainerState>, cursor: Cursor, evaluation: &EvaluationConfig) -> Position {
    let counted = |state: &TrainerState| {
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
        improvement: state.and_then(counted),
    }
}

/// Refuses a checkpoint of another run.
fn saved(run: &ResolvedRun, resumed: Option<&ResumePoint>) -> Option<PathBuf> {
    let directory = resumed?.directory().canonicalize().ok()?;
    let path = run.config.runtime.checkpoint.directory.as_deref()?.join(directory.file_name()?);
    (path.canonicalize().ok()? == directory).then_some(path)
}

fn tokenizer_files(run: &ResolvedRun, tokenizer: &Tokenizer) -> Result<TokenizerFiles> {
    let longest = run.config.model.max_position_embeddings;
    let files = TokenizerFiles::read(tokenizer.path(), tokenizer.document_tokens(), longest)?;
    let data = &run.config.data;
    match ChatSettings::from_config(data) {
        None => Ok(files),
        Some(chat) => Ok(files.with_chat(&ConversationEncoder::new(tokenizer, &chat, data.sequence_length)?)),
    }
}

/// Takes the run directory for this run's ranks: the first one locks it.
fn occupy(run: &ResolvedRun, options: &RunOptions) -> Result<(Option<Arc<RunLock>>, RunFolder)> {
    let is_first = options.ranks.rank_info().is_first();
    let lock = match &options.lock {
        _ if !is_first => None,
        Some(held) if held.belongs_to(&run.run_directory) => Some(Arc::clone(held)),
        _ => Some(Arc::new(RunLock::acquire(&run.run_directory)?)),
    };
    // Where another trainer holds the lock, only the first rank knows: the others wait for it here.
    ranks::require_same_request(&options.ranks, run, options)?;
    let open = if is_first { RunFolder::open } else { RunFolder::of_another_rank };
    Ok((lock, open(&run.run_directory)?))
}

/// Opens what the first rank writes while training, the ledger and the metrics, rewound to the checkpoint; and writes
/// what it trains.
fn open_records(
    (run, environment, rank_info): (&ResolvedRun, &Environment, RankInfo),
    state: Option<&TrainerState>,
    cursor: &Cursor,
    notes: &mut Vec<String>,
    cancel: &CancelToken,
) -> Result<(RunLedger, MetricsWriter)> {
    if !rank_info.is_first() {
        return Ok((RunLedger::off(), MetricsWriter::off()));
    }
    let ledger = RunLedger::open(&run.run_directory, state, cursor, notes, cancel)?;
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
