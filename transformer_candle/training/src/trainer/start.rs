//! Builds a trainer from a resolved run: everything is checked before anything is written.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use dataset::{CancelToken, ChatSettings, ConversationEncoder, Cursor, Tokenizer, hub::HubSettings};
use kernels::Device;
use model::hugging_face::PretrainedWeights;
use model::{ModelShape, initialization};
use run_config::{BatchSize, EvaluationConfig, RESOLVED_CONFIG, ResolvedRun};

use super::{
    Observation, Position, Prompts, RunLedger, Trainer, data::DataPlan, data::cursor_of, execution, matmul_algorithms,
};
use crate::{
    atomic_file,
    checkpoint::{self, BaseModel, Checkpoint, Improvement, TokenizerFiles, TrainerState},
    config_fingerprint, device,
    divergence_guard::DivergenceGuard,
    engine::{Engine, model_shape},
    environment::Environment,
    error::{Result, TrainerError},
    lock::RunLock,
    memory_plan::{self, MemoryPlan},
    metrics::MetricsWriter,
    pool,
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
        pool::check(run.config.runtime.threads, dataset::max_workers(&run.config.data))?;
        let device::DeviceSelection { device, notes: device_notes } = device::select_for_training(&mut run)?;
        let shape = model_shape(&run.config)?;
        if from.is_none() {
            // A new run that does not fit leaves no trace, not even a lock.
            MemoryPlan::here(&run, &device)?.check()?;
        }
        let lock = match &options.lock {
            Some(held) if held.belongs_to(&run.run_directory) => Arc::clone(held),
            _ => Arc::new(RunLock::acquire(&run.run_directory)?),
        };
        let folder = RunFolder::open(&run.run_directory)?;
        let mut notes = [run.notes.clone(), device_notes].concat();
        let resumed = find_resume_point(&run, from, &mut notes, &cancel)?;
        let asked = run.config.data.batch_size;
        let plan = plan(&mut run, &device, resumed.as_ref(), rebatch, &mut notes)?;
        let state = resumed.as_ref().map(|resumed| &resumed.state);
        if let Some(state) = state {
            config_fingerprint::restore_revisions(&state.fingerprint, &mut run);
        }
        let mut data = DataPlan::new(&run, shape.vocab_size, hub, &cancel)?;
        let (encoder, threads) = (data.tokenizer.measure_speed()?, pool::threads(&run.config)?);
        let speeds = TokenSpeeds::new(encoder, plan.flops_per_token, &device, threads);
        data.settings.workers = speeds.workers(&run.config, data.settings.workers);
        run.config.data.bos = data.tokenizer.document_tokens().starts_with_bos.into();
        let tokenizer_files = tokenizer_files(&run, &data.tokenizer)?;
        let sources = data.mixture.describe();
        config_fingerprint::pin_revisions(&mut run, &sources);
        let fingerprint = config_fingerprint::compute(&run, data.tokenizer.content_hash(), &sources);
        if let Some(resumed) = &resumed {
            let changes = config_fingerprint::changes(&resumed.state.fingerprint, &fingerprint);
            if !changes.is_empty() {
                return Err(TrainerError::ChangedOnResume { checkpoint: resumed.directory().to_owned(), changes });
            }
        }
        let data = data.open(&mut run, state.map(cursor_of).transpose()?, &mut notes)?;

        let pretrained = pretrained_weights(&run, &shape, resumed.is_some(), &mut notes, &cancel)?;
        let base = base_model(&run, resumed.as_ref(), &cancel)?;
        // What would fit is asked before memory is taken.
        let advice = speed_advice(&run, asked, &plan, &device, speeds)?;
        let mut engine = memory_plan::allocate(&run.config, &shape, plan.engine_settings(device.kind()), &device)?;
        stop.check()?;
        let seed = run.config.runtime.seed;
        let start = match (&resumed, &pretrained) {
            (Some(resumed), _) => StartingPoint::Checkpoint(&resumed.checkpoint),
            (None, Some(weights)) => StartingPoint::Pretrained { weights, seed },
            (None, None) => StartingPoint::Random { seed },
        };
        fill(&mut engine, &shape, &start, &cancel)?;
        stop.check()?;
        if let Some(state) = state {
            notes.extend(matmul_algorithms::restore(&device, state.matmul_algorithms.as_ref())?);
        }
        engine.warm_up()?;
        let prompts = prompts(&run, &data.tokenizer, &mut engine)?;
        let cursor = data.stream.cursor();
        let ledger = RunLedger::open(&run.run_directory, state, &cursor, &mut notes, &cancel)?;
        write_records(&run, &engine)?;
        let logging = &run.config.runtime.logging;
        let tensorboard = logging.tensorboard_directory.as_deref().filter(|_| logging.tensorboard);
        let rewind_to = state.map(|state| state.step);
        let mut trainer = Self {
            saved: saved(&run, resumed.as_ref()),
            position: position(state, cursor, &run.config.runtime.evaluation),
            ledger,
            metrics: MetricsWriter::open(&run.run_directory, tensorboard, rewind_to)?,
            observation: Observation::start(&run.config, &device, data.workers),
            schedule: LearningRate::new(&run.config),
            guard: DivergenceGuard::new(&run.config.runtime.divergence_guard),
            run,
            plan,
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
        };
        if resumed.is_none() {
            trainer.observation.advise(0, advice, &mut trainer.metrics);
        }
        if let Some(latest) = checkpoint::latest(trainer.checkpoint_directory())
            && trainer.saved.as_ref() == Some(&latest)
        {
            trainer.mark_best_and_prune(&latest)?;
        }
        Ok(trainer)
    }
}

/// Where the weights before the next step come from.
enum StartingPoint<'a> {
    Random { seed: u64 },
    Pretrained { weights: &'a Pretrained, seed: u64 },
    Checkpoint(&'a Checkpoint),
}

/// The checked weights that a new run starts from.
struct Pretrained {
    model: PretrainedWeights,
    /// Those of `lora.init_from`.
    adapters: Option<PretrainedWeights>,
}

/// Fills weights and optimizer state.
fn fill(engine: &mut Engine, shape: &ModelShape, start: &StartingPoint, cancel: &CancelToken) -> Result<()> {
    let pool = engine.pool();
    let Engine { decoder, optimizer, .. } = engine;
    pool.install(|| match start {
        StartingPoint::Random { seed } => {
            Ok(initialization::fill(shape, *seed, decoder.weights_mut(), optimizer.low_bits_mut())?)
        }
        StartingPoint::Pretrained { weights: Pretrained { model, adapters }, seed } => {
            let cancelled = || cancel.is_cancelled();
            model.read(decoder.weights_mut(), optimizer.low_bits_mut(), &cancelled)?;
            if let Some(adapters) = adapters {
                return Ok(adapters.read(decoder.weights_mut(), optimizer.low_bits_mut(), &cancelled)?);
            }
            let low_bits = optimizer.low_bits_mut().map(|low_bits| &*low_bits);
            Ok(initialization::fill_adapters(shape, *seed, decoder.weights_mut(), low_bits)?)
        }
        StartingPoint::Checkpoint(checkpoint) => {
            checkpoint.weights(shape, decoder.weights_mut(), cancel)?;
            Ok(checkpoint.optimizer(shape, optimizer.state_mut(), cancel)?)
        }
    })
}

/// The checked weights of `model.init_from` and `lora.init_from` for a new run; none for a resumed one.
fn pretrained_weights(
    run: &ResolvedRun,
    shape: &ModelShape,
    is_resumed: bool,
    notes: &mut Vec<String>,
    cancel: &CancelToken,
) -> Result<Option<Pretrained>> {
    let Some(directory) = run.config.model.init_from.as_deref().filter(|_| !is_resumed) else {
        return Ok(None);
    };
    let model = Checkpoint::open(directory)?.pretrained_weights(shape, cancel)?;
    notes.push(format!("training starts from the weights in {}", directory.display()));
    let adapters = match run.config.lora.init_from.as_deref().filter(|_| shape.lora.is_some()) {
        Some(directory) => {
            notes.push(format!("adapters start from those in {}", directory.display()));
            Some(Checkpoint::open(directory)?.pretrained_adapters(shape, cancel)?)
        }
        None => None,
    };
    Ok(Some(Pretrained { model, adapters }))
}

/// The model that the adapters of a run belong to; none where every weight trains.
fn base_model(run: &ResolvedRun, resumed: Option<&ResumePoint>, cancel: &CancelToken) -> Result<Option<BaseModel>> {
    let directory = run.config.model.init_from.as_deref().filter(|_| run.config.lora.rank.is_some());
    Ok(match (directory, resumed) {
        (None, _) => None,
        (Some(_), Some(resumed)) => resumed.checkpoint.base_record()?,
        (Some(directory), None) => Some(BaseModel::measure(directory, cancel)?),
    })
}

/// Plans the run with its checkpoint's execution or the config's, and writes the micro-batch into the config.
fn plan(
    run: &mut ResolvedRun,
    device: &Device,
    resumed: Option<&ResumePoint>,
    rebatch: bool,
    notes: &mut Vec<String>,
) -> Result<MemoryPlan> {
    if let Some(resumed) = resumed.filter(|_| !rebatch) {
        notes.extend(execution::keep(run, resumed.directory(), resumed.state.execution.as_ref())?);
    }
    let plan = MemoryPlan::here(run, device)?;
    match (&plan.shortage, resumed) {
        (Some(shortage), Some(resumed))
            if !rebatch
                && !shortage.fits.is_empty()
                && resumed.state.execution == Some(execution::from_plan(&plan)) =>
        {
            let (checkpoint, shortage) = (resumed.directory().to_owned(), Box::new(shortage.clone()));
            return Err(TrainerError::OutOfMemoryOnResume { checkpoint, shortage });
        }
        _ => plan.check()?,
    }
    if rebatch {
        notes.extend(execution::changed(&plan, resumed.and_then(|resumed| resumed.state.execution.as_ref())));
    }
    run.config.data.batch_size = BatchSize::Fixed(plan.micro_batch as usize);
    run.config.data.gradient_accumulation_steps = Some(plan.gradient_accumulation_steps as usize);
    Ok(plan)
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

/// Writes the resolved config and the environment into the run directory.
fn write_records(run: &ResolvedRun, engine: &Engine) -> Result<()> {
    let path = run.run_directory.join(RESOLVED_CONFIG);
    let mut text = serde_json::to_string_pretty(&run.portable_config()).expect("a config is plain values");
    text.push('\n');
    atomic_file::replace(&path, text.as_bytes()).map_err(TrainerError::io("write", &path))?;
    Environment::capture(engine.pool().current_num_threads()).on(engine.device()).save(&run.run_directory)
}
