//! What the ranks of a run agree on: at its start that they are about to do the same, and before each step whether to
//! compute it.

use std::collections::BTreeMap;

use dataset::{Batch, DataError};
use kernels::Device;
use run_config::ResolvedRun;
use serde_json::{Value, json};

use crate::{
    config_fingerprint::ConfigFingerprint,
    environment::VERSION,
    error::{Result, TrainerError},
    ranks::{RankFigures, Ranks, Vote},
    report::RankTimes,
    run_options::RunOptions,
    stop::StopSignal,
};

/// What the ranks do with the batch of the next step.
pub(super) enum AgreedBatch {
    /// Train on it.
    Compute(Batch),
    /// Keep it, where it is there: the signal is raised on all ranks.
    Abandon(Option<Batch>),
}

/// Decides whether all ranks compute the next step. Signals reach them at different times, and a rank that leaves the
/// others waiting takes the whole run down; so none stops unless all do. `own_stop` is what this process was asked,
/// `stop` what all are.
pub(super) fn agree_on_batch(
    ranks: &Ranks,
    batch: Result<Batch>,
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
            own_stop.requested().map_or(Vote::Compute, Vote::Stop)
        }
        Err(TrainerError::Data(_)) => Vote::Fail,
        Err(_) => return batch.map(AgreedBatch::Compute),
    };
    match ranks.agree(own)? {
        Vote::Compute => Ok(AgreedBatch::Compute(batch?)),
        Vote::Stop(signal) => {
            stop.request(signal);
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

/// Refuses ranks that were started with different versions, configs or options.
pub(super) fn require_same_request(ranks: &Ranks, run: &ResolvedRun, options: &RunOptions) -> Result<()> {
    if ranks.exchange().is_none() {
        return Ok(());
    }
    let mut facts = BTreeMap::from([
        ("the version".to_owned(), json!(VERSION)),
        ("--max-steps".to_owned(), json!(options.max_steps)),
        ("--rebatch".to_owned(), json!(options.rebatch)),
        ("--resume".to_owned(), json!(options.resume.is_some())),
    ]);
    let config = serde_json::to_value(&run.config).expect("a config is plain values");
    flatten(String::new(), config, &mut facts);
    // Machines may differ in these.
    facts.remove("runtime.threads");
    facts.remove("data.num_workers");
    ranks.require_equal(&facts)
}

/// Refuses ranks that found different data or checkpoints. No rank has written anything before.
pub(super) fn require_same_start(ranks: &Ranks, step: u64, fingerprint: &ConfigFingerprint) -> Result<()> {
    if ranks.exchange().is_none() {
        return Ok(());
    }
    let mut facts = fingerprint.clone();
    facts.insert("the step to start at".to_owned(), json!(step));
    ranks.require_equal(&facts)
}

/// What the ranks tell each other of themselves at the start.
#[derive(Debug, Default)]
pub(super) struct Introductions {
    /// The machine of each rank; none of one process.
    pub(super) hosts: Vec<String>,
    /// Planned bytes of the rank with the most.
    pub(super) largest_plan_bytes: u64,
}

/// Tells the other ranks this machine's name and planned bytes.
pub(super) fn introduce(ranks: &Ranks, host: &str, plan_bytes: u64) -> Result<Introductions> {
    let Some(exchange) = ranks.exchange() else {
        return Ok(Introductions { largest_plan_bytes: plan_bytes, ..Introductions::default() });
    };
    let all = exchange.gather(&json!((host, plan_bytes)).to_string())?;
    let parsed = all.iter().map(|text| serde_json::from_str::<(String, u64)>(text).unwrap_or_default());
    let (hosts, bytes): (Vec<String>, Vec<u64>) = parsed.unzip();
    Ok(Introductions { hosts, largest_plan_bytes: bytes.into_iter().max().unwrap_or(plan_bytes) })
}

/// The longest wait for data of a rank; none of one process.
pub(super) fn longest_data_wait(figures: &[RankFigures]) -> Option<f64> {
    figures.iter().map(|rank| rank.data_wait_seconds).reduce(f64::max)
}

/// The parts of a step of several ranks; none of one process.
pub(super) fn times(figures: &[RankFigures], is_even: bool) -> Option<RankTimes> {
    if figures.len() < 2 {
        return None;
    }
    // The rank that the others wait for waits for nobody, so what it spends in exchange is exchange.
    let exchange_seconds = figures.iter().map(|rank| rank.exchange_seconds).reduce(f64::min)?;
    let compute_seconds = figures.iter().map(|rank| rank.compute_seconds).collect();
    Some(RankTimes { compute_seconds, exchange_seconds, is_even })
}

/// Ranks exchange what lies in the machine's memory.
pub(super) fn require_cpu(ranks: &Ranks, device: &Device) -> Result<()> {
    if ranks.exchange().is_some() && device.as_cuda().is_some() {
        return Err(TrainerError::Request(
            "several ranks train on CPUs only so far: add --device cpu (runtime.device: cpu), or train on one GPU without \
             torchrun"
                .to_owned(),
        ));
    }
    Ok(())
}

/// Keys of a nested object as dotted paths.
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
