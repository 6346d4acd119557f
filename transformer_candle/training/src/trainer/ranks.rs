//! Agreement between the ranks of a run: at its start that they train the same run, and before each step whether to
//! compute it.

use std::collections::BTreeMap;

use dataset::{Batch, DataError};
use kernels::Device;
use run_config::{BatchSize, ResolvedRun, RunConfig};
use serde_json::{Value, json};

use super::{bf16_units, matmul_algorithms};
use crate::{
    config_fingerprint::ConfigFingerprint,
    engine::Engine,
    environment::VERSION,
    error::{Result, TrainerError},
    ranks::{RankFigures, Ranks, Vote},
    report::RankTimes,
    run_options::RunOptions,
    stop::StopSignal,
};

/// What all ranks do with the batch of the next step.
pub(super) enum AgreedBatch {
    /// Train on it.
    Compute(Batch),
    /// Keep it, if it has been read: the signal is raised on all ranks.
    Abandon(Option<Batch>),
}

/// Decides whether all ranks compute the next step. Signals reach them at different times, and a rank that leaves the
/// others waiting takes the whole run down; so none stops or saves unless all do. `own_stop` is the signal of this
/// process, `stop` the one that is raised on all ranks. `corrupted` are the corrupted rows that this rank's stream
/// skips: the ranks train on the same batches only if they are the same.
pub(super) fn agree_on_batch(
    ranks: &Ranks,
    batch: Result<Batch>,
    corrupted: &str,
    own_stop: &StopSignal,
    stop: &StopSignal,
) -> Result<AgreedBatch> {
    let Some(exchange) = ranks.exchange() else {
        return match batch {
            Err(TrainerError::Data(DataError::Interrupted)) => Ok(AgreedBatch::Abandon(None)),
            batch => Ok(AgreedBatch::Compute(batch?)),
        };
    };
    let own = match &batch {
        Ok(_) | Err(TrainerError::Data(DataError::Interrupted)) => {
            let compute = if own_stop.is_save_requested() { Vote::Save } else { Vote::Compute };
            own_stop.requested().map_or(compute, Vote::Stop)
        }
        Err(TrainerError::Data(_)) => Vote::Fail,
        Err(_) => return batch.map(AgreedBatch::Compute),
    };
    match ranks.agree(own, corrupted)? {
        Vote::Differ => Err(different_corruption(&exchange.gather(corrupted)?)),
        Vote::Compute => Ok(AgreedBatch::Compute(batch?)),
        Vote::Save => {
            stop.request_save(own_stop.take_save_request());
            Ok(AgreedBatch::Compute(batch?))
        }
        Vote::Stop(reason) => {
            stop.request(reason);
            Ok(AgreedBatch::Abandon(batch.ok()))
        }
        Vote::Fail => {
            let own = batch.err().filter(|error| !matches!(error, TrainerError::Data(DataError::Interrupted)));
            let all = exchange.gather(&own.map_or_else(String::new, |error| error.to_string()))?;
            let (rank, message) = all.into_iter().enumerate().find(|(_, text)| !text.is_empty()).unwrap_or_default();
            Err(TrainerError::DataOnRank { rank, message })
        }
    }
}

fn different_corruption(all: &[String]) -> TrainerError {
    let rank = all.iter().position(|corrupted| *corrupted != all[0]).unwrap_or_default();
    let rows_text = |corrupted: &String| if corrupted.is_empty() { "none".to_owned() } else { corrupted.clone() };
    let (first, other) = (rows_text(&all[0]), rows_text(&all[rank]));
    let message = format!(
        "the ranks cannot read the same files: corrupted for rank 0 are {first}, for rank {rank} {other}. Give all of them \
         the same files, and resume the run"
    );
    TrainerError::DataOnRank { rank, message }
}

/// Refuses ranks that were started with different versions, configs or options.
pub(super) fn require_same_request(ranks: &Ranks, run: &ResolvedRun, options: &RunOptions) -> Result<()> {
    if ranks.exchange().is_none() {
        return Ok(());
    }
    let mut facts = BTreeMap::from([
        ("the version".to_owned(), json!(VERSION)),
        ("--max-steps".to_owned(), json!(options.max_steps)),
        ("--accept-changed-data".to_owned(), json!(options.accept_changed_data)),
        ("--rebatch".to_owned(), json!(options.rebatch)),
        ("--resume".to_owned(), json!(options.resume.is_some())),
    ]);
    let config = serde_json::to_value(&run.config).expect("a config is plain values");
    flatten(String::new(), config, &mut facts);
    // These may differ between machines.
    facts.remove("runtime.threads");
    facts.remove("runtime.device");
    facts.remove("data.num_workers");
    ranks.require_equal(&facts)
}

/// Refuses ranks that found different data or checkpoints, before any of them writes anything.
pub(super) fn require_same_start(ranks: &Ranks, step: u64, fingerprint: &ConfigFingerprint) -> Result<()> {
    if ranks.exchange().is_none() {
        return Ok(());
    }
    let mut facts = fingerprint.clone();
    facts.insert("the step to start at".to_owned(), json!(step));
    ranks.require_equal(&facts)
}

/// The facts about each rank that the ranks exchange at the start.
#[derive(Debug, Default)]
pub(super) struct Introductions {
    /// The host name of each rank; empty for one process.
    pub(super) hosts: Vec<String>,
    /// Planned bytes of the rank that needs the most.
    pub(super) largest_plan_bytes: u64,
}

/// Exchanges host names and planned bytes with the other ranks.
pub(super) fn introduce(ranks: &Ranks, host: &str, plan_bytes: u64) -> Result<Introductions> {
    let Some(exchange) = ranks.exchange() else {
        return Ok(Introductions { largest_plan_bytes: plan_bytes, ..Introductions::default() });
    };
    let all = exchange.gather(&json!((host, plan_bytes)).to_string())?;
    let parsed = all.iter().map(|text| serde_json::from_str::<(String, u64)>(text).unwrap_or_default());
    let (hosts, bytes): (Vec<String>, Vec<u64>) = parsed.unzip();
    Ok(Introductions { hosts, largest_plan_bytes: bytes.into_iter().max().unwrap_or(plan_bytes) })
}

/// Returns the longest wait for data of any rank, in seconds; None for one process.
pub(super) fn longest_data_wait(figures: &[RankFigures]) -> Option<f64> {
    figures.iter().map(|rank| rank.data_wait_seconds).reduce(f64::max)
}

/// Returns the times of a step of several ranks; None for one process.
pub(super) fn times(figures: &[RankFigures], is_even: bool) -> Option<RankTimes> {
    if figures.len() < 2 {
        return None;
    }
    // The slowest rank waits for nobody, so all of its time in exchange is transfer.
    let exchange_seconds = figures.iter().map(|rank| rank.exchange_seconds).reduce(f64::min)?;
    let compute_seconds = figures.iter().map(|rank| rank.compute_seconds).collect();
    Some(RankTimes { compute_seconds, exchange_seconds, is_even })
}

/// Connects the memory of the ranks' devices, which must be all CPUs or all GPUs; with
/// `runtime.deterministic_reduction`, which gives equal bits on any number of ranks, the GPUs, or the units of
/// processors that multiply bf16, must be equal.
pub(super) fn connect(ranks: &Ranks, device: &Device, config: &RunConfig) -> Result<()> {
    let Some(exchange) = ranks.exchange() else { return Ok(()) };
    let mut facts = BTreeMap::from([("the kind of device".to_owned(), json!(format!("{:?}", device.kind())))]);
    let is_deterministic = config.runtime.deterministic_reduction.is_some();
    if let Some(gpu) = device.as_cuda().filter(|_| is_deterministic) {
        facts.insert("the GPU (runtime.deterministic_reduction)".to_owned(), json!(gpu.fingerprint()));
    }
    if let Some(units) = bf16_units::of(device, config.runtime.precision).filter(|_| is_deterministic) {
        facts.insert("the units that multiply bf16 (runtime.deterministic_reduction)".to_owned(), json!(units));
    }
    ranks.require_equal(&facts)?;
    exchange.connect(device)
}

/// Warms up the engines of all ranks with the GEMM algorithms that the first one chooses; for shapes that it does not
/// have, those of the lowest rank that has. Warms up the exchange between GPUs as well.
pub(super) fn warm_up(ranks: &Ranks, engine: &mut Engine) -> Result<()> {
    let device = engine.device().clone();
    if !ranks.rank_info().is_first() {
        matmul_algorithms::share(ranks, &device)?;
    }
    engine.warm_up()?;
    if ranks.rank_info().is_first() {
        matmul_algorithms::share(ranks, &device)?;
    }
    matmul_algorithms::share(ranks, &device)?;
    engine.warm_up_exchange()
}

/// Writes the smallest micro-batch of any rank into the config: `auto` depends on the memory that each has left. Returns
/// whether it changed.
pub(super) fn agree_on_micro_batch(ranks: &Ranks, run: &mut ResolvedRun) -> Result<bool> {
    let Some(exchange) = ranks.exchange() else { return Ok(false) };
    let own: Vec<usize> = micro_batches(run).into_iter().map(|size| *size).collect();
    let all = exchange.gather(&json!(own).to_string())?;
    let all: Vec<Vec<usize>> = all.iter().map(|text| serde_json::from_str(text).unwrap_or_default()).collect();
    for (stage, size) in micro_batches(run).into_iter().enumerate() {
        *size = all.iter().filter_map(|sizes| sizes.get(stage).copied()).min().unwrap_or(*size);
    }
    Ok(micro_batches(run).into_iter().map(|size| *size).ne(own))
}

/// Returns the micro-batch size of the run, or of each of its stages, to be changed in place.
fn micro_batches<'a>(run: &'a mut ResolvedRun) -> Vec<&'a mut usize> {
    let RunConfig { stages, data, .. } = &mut run.config;
    let sizes: Vec<&'a mut BatchSize> = match stages {
        Some(stages) => stages.iter_mut().filter_map(|stage| stage.batch_size.as_mut()).collect(),
        None => vec![&mut data.batch_size],
    };
    let fixed = |size: &'a mut BatchSize| match size {
        BatchSize::Fixed(size) => Some(size),
        BatchSize::Auto => None,
    };
    sizes.into_iter().filter_map(fixed).collect()
}

/// Adds the values of a nested object to `into`, by their keys as dotted paths.
fn flatten(path: String, value: Value, into: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(entries) => {
            for (key, value) in entries {
                let path = if path.is_empty() { key } else { format!("{path}.{key}") };
                flatten(path, value, into);
            }
        }
        value => {
            into.insert(path, value);
        }
    }
}
