//! What `bench` has measured on this machine, kept in `bench/` of the cache folder for `plan`: a file per device and
//! config, as far as the config decides the speed.

use std::{
    fs,
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

use chrono::{DateTime, Utc};
use run_config::RunConfig;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{atomic_file, engine::StepOf};

/// A measured step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct MeasuredStep {
    /// Seconds of an optimizer step, the median.
    pub(super) step_seconds: f64,
    /// The time of the measurement, in seconds since 1970.
    pub(super) unix_time: u64,
    /// The key, whose hash is the file's name, for people.
    #[serde(default)]
    pub(super) key: Value,
}

impl MeasuredStep {
    /// The day of the measurement (UTC), such as `2026-12-10`.
    pub(super) fn date(&self) -> String {
        let date = i64::try_from(self.unix_time).ok().and_then(|time| DateTime::<Utc>::from_timestamp(time, 0));
        date.map_or_else(|| "an unknown day".to_owned(), |date| date.format("%Y-%m-%d").to_string())
    }
}

/// Returns the key of a measurement: everything that decides the time of a step.
fn key(step: StepOf<'_>, device: &str) -> Value {
    let StepOf { config, shape, settings } = step;
    let RunConfig { data, optimizer, runtime, .. } = config;
    json!({
        "program": env!("CARGO_PKG_VERSION"),
        "device": device,
        "architecture": shape.architecture,
        "sizes": [shape.vocab_size, shape.hidden_size, shape.intermediate_size, shape.num_layers],
        "heads": [shape.num_attention_heads, shape.num_key_value_heads, shape.head_size],
        "tie_embeddings": shape.tie_embeddings,
        "sequence_length": data.sequence_length,
        "sequences_per_step": data.sequences_per_step,
        "packing": data.packing,
        "micro_batch": settings.micro_batch,
        "activation_recompute": settings.activation_recompute,
        "precision": runtime.precision,
        "algorithm": optimizer.algorithm,
    })
}

fn path(key: &Value) -> PathBuf {
    let hash = Sha256::digest(key.to_string());
    let name = hash.iter().take(8).fold(0_u64, |name, byte| name << 8 | u64::from(*byte));
    dataset::cache_root().join("bench").join(format!("{name:016x}.json"))
}

/// Writes a measurement to the cache. A cache that cannot be written is no reason to fail.
pub(super) fn keep(step: StepOf<'_>, device: &str, step_seconds: f64) {
    let unix_time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let key = key(step, device);
    let path = path(&key);
    let measured = MeasuredStep { step_seconds, unix_time, key };
    let text = serde_json::to_vec_pretty(&measured).unwrap_or_default();
    let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
    if let Err(error) = folder.and_then(|()| atomic_file::replace(&path, &text)) {
        tracing::debug!("{} was not written: {error}", path.display());
    }
}

/// Reads the measurement of a config on a device from the cache; none where there is none.
pub(super) fn find(step: StepOf<'_>, device: &str) -> Option<MeasuredStep> {
    let text = fs::read_to_string(path(&key(step, device))).ok()?;
    let measured: MeasuredStep = serde_json::from_str(&text).ok()?;
    (measured.step_seconds.is_finite() && measured.step_seconds > 0.0).then_some(measured)
}
