//! `evaluate`: a trained model's loss on held-out text.

use std::env;
use std::path::{Path, PathBuf};

use clap::Args;
use dataset::hub::HubSettings;
use dataset::{
    CancelToken, ChatSettings, DataError, DataSource, FolderSplit, HeldOut, Mixture, StreamSettings, Tokenizer,
};
use kernels::DeviceKind;
use kernels::memory::{self, Arena};
use run_config::{DataConfig, Device, RESOLVED_CONFIG, ResolvedRun, RunConfig};

use super::count::at_least_one;
use super::{ModelSource, Output};
use crate::checkpoint::{self, Checkpoint, StoredModel, TrainerState};
use crate::config_fingerprint;
use crate::device::{self, DeviceSelection};
use crate::engine::StageEngine;
use crate::evaluation::Evaluator;
use crate::memory_plan::require_room;
use crate::pool::{self, in_pool};
use crate::ranks::Ranks;
use crate::report::{ComponentEvaluation, EvaluationReport};
use crate::stop::StopSignal;
use crate::trained_model::load_tokenizer;
use crate::trainer::cursor_of;
use crate::units::{counted, grouped_decimal};
use crate::{Result, TrainerError};

/// Maximum number of sequences per micro-batch; for a model whose run is not known, also its sequences per step.
const USUAL_BATCH: usize = 8;
/// The longest sequence for a model whose run is not known.
const LONGEST_SEQUENCE: usize = 2048;

/// What `evaluate` takes.
#[derive(Debug, Clone, Args)]
pub struct EvaluateOptions {
    /// The model to evaluate.
    #[command(flatten)]
    pub model: ModelSource,
    /// Text to evaluate on: files, folders or globs of .parquet, .jsonl(.gz/.zst), .txt. Repeatable. [default: what
    /// the run held out]
    #[arg(long, value_name = "PATTERN")]
    pub input: Vec<String>,
    /// The column or field of `--input` that holds the text.
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub text_column: String,
    /// Sequences to evaluate at most. [default: as many as the run evaluates on]
    #[arg(long, value_name = "N", value_parser = at_least_one::<usize>)]
    pub max_sequences: Option<usize>,
    /// Where to compute: auto, cpu, cuda or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value_t = Device::Auto)]
    pub device: Device,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Evaluates the model, unless the signal is raised meanwhile.
pub fn run(options: &EvaluateOptions, hub: &HubSettings, stop: &StopSignal) -> Result<EvaluationReport> {
    pool::start()?;
    options.model.read(&stop.cancel_token(), |checkpoint| evaluate(checkpoint, options, hub, stop))
}

/// The config that a model is evaluated with, and the text that it is evaluated on.
struct HeldOutText {
    config: RunConfig,
    text: Vec<HeldOut>,
}

fn evaluate(
    checkpoint: &Checkpoint,
    options: &EvaluateOptions,
    hub: &HubSettings,
    stop: &StopSignal,
) -> Result<EvaluationReport> {
    let cancel = stop.cancel_token();
    let StoredModel { shape, precision, stop_tokens } = checkpoint.model()?;
    let tokenizer = load_tokenizer(checkpoint, &stop_tokens)?;
    let state = checkpoint.state().ok();
    let max_positions = shape.max_position_embeddings;
    let directory = checkpoint.directory();
    let held_out = held_out_text(directory, state.as_ref(), tokenizer, max_positions, options, hub, &cancel)?;
    let HeldOutText { mut config, mut text } = held_out;
    config.runtime.precision = precision;
    let most = options.max_sequences.unwrap_or_else(|| match options.input.as_slice() {
        [] => config.runtime.evaluation.max_batches * config.data.sequences_per_step,
        _ => usize::MAX,
    });
    let sequences = micro_batch_size(&mut text, config.data.sequences_per_step.min(USUAL_BATCH).min(most), stop)?;
    let new =
        |device: DeviceKind, arena: &mut Arena| StageEngine::for_evaluation(&config, &shape, sequences, device, arena);
    let needed_bytes = |device: &kernels::Device| {
        let arena_bytes = memory::count(|arena| new(device.kind(), arena));
        arena_bytes.expect("buffers without memory are never refused").1.bytes()
    };
    let DeviceSelection { device, notes } = device::select_for_inference(options.device, &shape, needed_bytes)?;
    warn_of(&notes);
    require_room(needed_bytes(&device), &device, || format!("evaluating the model in {}", directory.display()))?;
    let StageEngine { mut decoder, mut micro_batch } = memory::allocate(&device, |arena| new(device.kind(), arena))?;
    checkpoint.weights(&shape, decoder.weights_mut(), &cancel)?;
    let step = state.map_or(0, |state| state.step);
    let (decoder, micro_batch) = (&mut decoder, &mut micro_batch);
    let mut evaluator = Evaluator { decoder, micro_batch, ranks: &Ranks::ONE, stop };
    let report = in_pool(|| evaluator.evaluate(&mut text, most, step))?;
    for text in &mut text {
        warn_of(&text.take_notices());
    }
    match (report, stop.requested()) {
        (Some(report), _) if report.loss.is_nan() => Err(model::Error::NotFinite.into()),
        (Some(report), _) => Ok(report),
        (None, Some(signal)) => Err(TrainerError::Interrupted(signal)),
        (None, None) => {
            let problem = "there is not one token to evaluate on: give more text with --input";
            Err(TrainerError::Request(problem.to_owned()))
        }
    }
}

/// Opens the text of `--input`, or else what the run of the checkpoint in `directory` held out.
fn held_out_text(
    directory: &Path,
    state: Option<&TrainerState>,
    mut tokenizer: Tokenizer,
    max_position_embeddings: usize,
    options: &EvaluateOptions,
    hub: &HubSettings,
    cancel: &CancelToken,
) -> Result<HeldOutText> {
    let run = run_of(directory, state).transpose()?;
    if run.as_ref().is_some_and(|run| run.config.parses_documents()) {
        tokenizer = tokenizer.parsing_special_tokens()?;
    }
    match (run, options.input.as_slice()) {
        (Some(run), []) => {
            let mut data = Mixture::from_run(&run, hub, cancel)?;
            warn_of(&data.notes());
            if let Some(state) = state {
                let cursor = cursor_of(state)?;
                data = data.arranged(&cursor);
                data.restore(&cursor, &StreamSettings::from_run(&run));
            }
            let text = HeldOut::from_run(&run, &data, &tokenizer)?;
            Ok(HeldOutText { config: run.config, text })
        }
        (None, []) => Err(no_text(directory)),
        (run, patterns) => {
            let config = run.map_or_else(|| usual(max_position_embeddings), |run| run.config);
            let text = vec![local(patterns, &options.text_column, &config.data, &tokenizer, cancel)?];
            Ok(HeldOutText { config, text })
        }
    }
}

pub(super) fn main(options: &EvaluateOptions, output: &mut dyn Output, stop: &StopSignal) -> Result<u8> {
    let report = run(options, &HubSettings::from_environment(), stop)?;
    if options.json {
        output.print_json(&report)?;
        return Ok(0);
    }
    let EvaluationReport { loss, perplexity, bits_per_byte, tokens, components, .. } = report;
    let bits = bits_per_byte.map_or_else(String::new, |bits| format!("  {bits:.3} bits per byte"));
    let perplexity = grouped_decimal(perplexity, 2);
    output.print(&format!("loss {loss:.4}  perplexity {perplexity}{bits}  ({})\n", counted(tokens, "token")))?;
    for ComponentEvaluation { name, share, loss, tokens, .. } in components {
        output.print(&format!("  {:.1}% {name}: loss {loss:.4}  ({})\n", 100.0 * share, counted(tokens, "token")))?;
    }
    Ok(0)
}

/// Returns the number of sequences that are computed at a time: as many as the longest text has, at most `limit`. A
/// micro-batch that is not full takes as long as one that is.
fn micro_batch_size(texts: &mut [HeldOut], limit: usize, stop: &StopSignal) -> Result<usize> {
    let interrupted = || stop.requested().is_some();
    let mut sequences = 1;
    for text in texts {
        match (in_pool(|| text.sequences_up_to(limit, &interrupted)), stop.requested()) {
            (Err(DataError::Interrupted), Some(signal)) => return Err(TrainerError::Interrupted(signal)),
            (count, _) => sequences = sequences.max(count?),
        }
    }
    Ok(sequences)
}

/// Loads the run that a checkpoint belongs to, with the revisions of data sets that it was trained on: that of the
/// first folder above it that holds a resolved config. None where no folder does.
fn run_of(directory: &Path, state: Option<&TrainerState>) -> Option<Result<ResolvedRun>> {
    // `.` has no folder above it by its name.
    let directory = directory.canonicalize().ok()?;
    let config = directory.ancestors().take(3).map(|folder| folder.join(RESOLVED_CONFIG)).find(|path| path.exists())?;
    let tokenizer = |_: &Path| Some(checkpoint::tokenizer_in(&directory));
    let mut run = RunConfig::load_with_checkpoint(&config, &[], &tokenizer).map_err(TrainerError::from);
    if let (Ok(run), Some(state)) = (&mut run, state) {
        config_fingerprint::restore_data_versions(&state.fingerprint, run);
        // As the run evaluated it.
        *run = run.at_stage(state.stage as usize);
    }
    Some(run)
}

fn no_text(directory: &Path) -> TrainerError {
    TrainerError::Request(format!(
        "{} is in no run's folder, so that there is no held-out text to take: name some with --input",
        directory.display()
    ))
}

fn usual(max_position_embeddings: usize) -> RunConfig {
    let mut config = RunConfig::default();
    config.data.sequence_length = max_position_embeddings.min(LONGEST_SEQUENCE);
    config.data.sequences_per_step = USUAL_BATCH;
    config
}

fn local(
    patterns: &[String],
    text_column: &str,
    data: &DataConfig,
    tokenizer: &Tokenizer,
    cancel: &CancelToken,
) -> Result<HeldOut> {
    let here = env::current_dir().unwrap_or_else(|_| PathBuf::from("."));
    let (split, version) = (FolderSplit::Validation, data.reading_version());
    let source = DataSource::local_split(patterns, &here, &split, text_column, version, cancel)?;
    let source = source.with_format(data.format).with_bad_files_skipped(data.skips_bad_files());
    warn_of(source.notes());
    let settings = StreamSettings {
        sequence_length: data.sequence_length,
        packing: data.packing,
        chat: ChatSettings::from_config(data),
        ..StreamSettings::default()
    };
    Ok(HeldOut::whole(&source, &settings, tokenizer)?)
}

fn warn_of(notes: &[String]) {
    for note in notes {
        tracing::warn!("{note}");
    }
}
