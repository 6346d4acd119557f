//! `runtime`: the machine, and what is written while training.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::byte_size::ByteSize;
use crate::device::Device;

/// The machine, and what is written while training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RuntimeConfig {
    /// Where to train: `auto` (the first CUDA device if there is one, else the CPU), `cpu`, `cuda`
    /// or `cuda:N`.
    pub device: Device,
    /// Seed of the initial weights and of the data order. The same config and seed give the same
    /// losses.
    #[schemars(range(min = 0, max = 9_223_372_036_854_775_807_i64))]
    pub seed: u64,
    /// Arithmetic of matrix products and activations. Master weights, moments and sums are f32 in
    /// both.
    pub precision: Precision,
    /// CPU threads. Left out: `RAYON_NUM_THREADS`, else all cores. Results do not depend on it.
    #[schemars(range(min = 1, max = 4096))]
    pub threads: Option<usize>,
    /// Most memory that training may take on its device, such as `24GB` (10^9) or `30GiB`
    /// (2^20). Left out: what is free.
    pub memory_limit: Option<ByteSize>,
    /// Whether a GPU computes in the way that is declared or offered first instead of the fastest of
    /// those it timed: fresh runs on the same GPU and libraries then have the same bits, at some
    /// loss of speed. A resumed run keeps what its checkpoint says either way. A CPU run is
    /// deterministic without.
    pub deterministic: bool,
    /// Optimizer steps between two lines of metrics.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub log_every_n_steps: u64,
    /// Which activations are computed again in the backward pass to save memory.
    pub activation_recompute: ActivationRecompute,
    /// When a training that goes wrong is stopped.
    pub divergence_guard: DivergenceGuardConfig,
    /// What is saved to resume from and to use.
    pub checkpoint: CheckpointConfig,
    /// How the model is judged on held-out text while it trains.
    pub evaluation: EvaluationConfig,
    /// Where metrics go besides `metrics.jsonl`.
    pub logging: LoggingConfig,
}

impl Default for RuntimeConfig {
    fn default() -> Self {
        Self {
            device: Device::Auto,
            seed: 42,
            precision: Precision::Fp32,
            threads: None,
            memory_limit: None,
            deterministic: false,
            log_every_n_steps: 10,
            activation_recompute: ActivationRecompute::Selective,
            divergence_guard: DivergenceGuardConfig::default(),
            checkpoint: CheckpointConfig::default(),
            evaluation: EvaluationConfig::default(),
            logging: LoggingConfig::default(),
        }
    }
}

/// Arithmetic of matrix products and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything in 32 bits.
    Fp32,
    /// Operands and activations in bfloat16, sums in f32.
    Bf16,
}

/// Which activations are computed again in the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ActivationRecompute {
    /// Everything is kept: fastest, most memory.
    None,
    /// Norm outputs and SwiGLU products: a third less memory, nearly free.
    Selective,
    /// Whole blocks: least memory, a third more arithmetic.
    Block,
}

/// When a training that goes wrong is stopped (exit code 6).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DivergenceGuardConfig {
    /// A step whose gradient is not finite changes nothing and is counted; after this many in a row
    /// training stops.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_skipped_steps: u64,
    /// Training stops when the mean loss of the last `window_steps` steps is this many nats above
    /// the lowest such mean. `null`: never.
    #[schemars(range(max = 1000), extend("exclusiveMinimum" = 0))]
    pub max_loss_increase: Option<f64>,
    /// Optimizer steps whose mean loss `max_loss_increase` looks at.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub window_steps: u64,
}

impl Default for DivergenceGuardConfig {
    fn default() -> Self {
        Self { max_skipped_steps: 10, max_loss_increase: Some(2.0), window_steps: 100 }
    }
}

/// What is saved to resume from and to use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Folder of the checkpoints. Left out: `checkpoints` beside the config.
    pub directory: Option<PathBuf>,
    /// Optimizer steps between two checkpoints. The last step and a stop by Ctrl-C save one as
    /// well.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub every_n_steps: u64,
    /// Checkpoints kept; older ones are removed after a newer one is safely on disk. 12 bytes a
    /// parameter each.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_keep: usize,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { directory: None, every_n_steps: 1000, max_keep: 3 }
    }
}

/// How the model is judged on held-out text while it trains.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EvaluationConfig {
    /// Optimizer steps between two evaluations. `null`: never.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub every_n_steps: Option<u64>,
    /// Most batches of `data.sequences_per_step` sequences in one evaluation. The same text every
    /// time.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_batches: usize,
    /// The checkpoints with the lowest evaluation loss.
    pub best: BestConfig,
}

impl Default for EvaluationConfig {
    fn default() -> Self {
        Self { every_n_steps: Some(500), max_batches: 16, best: BestConfig::default() }
    }
}

/// The checkpoints with the lowest evaluation loss.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BestConfig {
    /// Folder they are kept in. Left out: they stay in `runtime.checkpoint.directory`.
    pub directory: Option<PathBuf>,
    /// How many are kept besides those of `runtime.checkpoint.max_keep`.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_keep: usize,
}

impl Default for BestConfig {
    fn default() -> Self {
        Self { directory: None, max_keep: 1 }
    }
}

/// Where metrics go besides `metrics.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LoggingConfig {
    /// Whether TensorBoard event files are written.
    pub tensorboard: bool,
    /// Folder of the TensorBoard event files. Left out: `tensorboard` beside the config.
    pub tensorboard_directory: Option<PathBuf>,
}

impl Default for LoggingConfig {
    fn default() -> Self {
        Self { tensorboard: true, tensorboard_directory: None }
    }
}
