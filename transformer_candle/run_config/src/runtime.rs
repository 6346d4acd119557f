//! `runtime`: the machine, and what is written while training.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::byte_size::ByteSize;
use crate::device::Device;
use crate::time_span::TimeSpan;

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
    /// Precision of matmuls and activations. Master weights, optimizer state and accumulation are f32
    /// in all.
    pub precision: Precision,
    /// With `precision: fp8`, the numbers of an operand that share a scale.
    pub fp8_recipe: Fp8Recipe,
    /// CPU threads. Default: `RAYON_NUM_THREADS`, else all cores. Results do not depend on it.
    #[schemars(range(min = 1, max = 4096))]
    pub threads: Option<usize>,
    /// Memory of the device that training may use at most, such as `24GB` (10^9) or `30GiB` (2^30).
    /// Default: what is free.
    pub memory_limit: Option<ByteSize>,
    /// Whether a GPU uses the first GEMM algorithms and kernel variants instead of the fastest ones by
    /// timing: fresh runs on the same GPU and libraries are then bitwise equal, but slower. A resumed
    /// run uses those of its checkpoint in either case. CPU runs are always deterministic.
    pub deterministic: bool,
    /// Virtual shards of a step, a power of two that divides its number of micro-batches: every number of ranks that
    /// divides it, and one process, gives the same bits. Costs a gradient buffer (4 bytes per parameter) for each
    /// doubling of the virtual shards of a rank, and needs a fixed `data.batch_size`; on GPUs, `deterministic` as well or
    /// the algorithms of a checkpoint. `null`: numbers of ranks differ by rounding.
    #[schemars(range(min = 1, max = 65_536))]
    pub deterministic_reduction: Option<usize>,
    /// Optimizer steps between logged metrics.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub log_every_n_steps: u64,
    /// Time between samples of what the run takes of its machine (GPU, memory, cores), such as `10s`: lines of kind
    /// `utilization` in `metrics.jsonl`. `null`: none.
    pub utilization_every: Option<TimeSpan>,
    /// Which activations are recomputed in the backward pass to save memory.
    pub activation_recompute: ActivationRecompute,
    /// When a diverging run is stopped.
    pub divergence_guard: DivergenceGuardConfig,
    /// Checkpoints.
    pub checkpoint: CheckpointConfig,
    /// Evaluation on held-out text during training.
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
            fp8_recipe: Fp8Recipe::default(),
            threads: None,
            memory_limit: None,
            deterministic: false,
            deterministic_reduction: None,
            log_every_n_steps: 10,
            utilization_every: Some(TimeSpan(10)),
            activation_recompute: ActivationRecompute::Selective,
            divergence_guard: DivergenceGuardConfig::default(),
            checkpoint: CheckpointConfig::default(),
            evaluation: EvaluationConfig::default(),
            logging: LoggingConfig::default(),
        }
    }
}

/// Precision of matmuls and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything in 32 bits.
    Fp32,
    /// Operands and activations in bfloat16, sums in f32.
    Bf16,
    /// As `bf16`, but the operands of the matmuls in the blocks are rounded to 8 bits (e4m3), with a scale for each
    /// group of numbers. Head, embedding, attention, norms and adapters stay as they are, and so do checkpoints. On GPUs of the
    /// Ada generation and newer. A CPU only rounds as a GPU would, which takes time and memory.
    Fp8,
}

/// The numbers of an fp8 operand that share a scale, a power of two.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Fp8Recipe {
    /// The finest that the device has: `mxfp8` on Blackwell and on a CPU, `blockwise` on Hopper, `tensorwise` on Ada.
    #[default]
    Auto,
    /// All of a tensor.
    Tensorwise,
    /// Squares of 128 x 128.
    Blockwise,
    /// Squares of 32 x 32.
    Mxfp8,
}

/// Which activations are recomputed in the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ActivationRecompute {
    /// None: fastest, most memory.
    None,
    /// Norm outputs and SwiGLU activations: a third less memory, almost as fast.
    Selective,
    /// Whole blocks: least memory, a third more FLOPs.
    Block,
}

/// When a diverging run is stopped (exit code 6).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DivergenceGuardConfig {
    /// Consecutive steps with a non-finite gradient, which change nothing, after which training stops.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_skipped_steps: u64,
    /// Training stops when the mean loss of the last `window_steps` steps is this many nats above
    /// the lowest such mean. `null`: never.
    #[schemars(range(max = 1000), extend("exclusiveMinimum" = 0))]
    pub max_loss_increase: Option<f64>,
    /// Optimizer steps of the mean loss of `max_loss_increase`.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub window_steps: u64,
}

impl Default for DivergenceGuardConfig {
    fn default() -> Self {
        Self { max_skipped_steps: 10, max_loss_increase: Some(2.0), window_steps: 100 }
    }
}

/// Checkpoints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Folder of the checkpoints. Default: `checkpoints` beside the config.
    pub directory: Option<PathBuf>,
    /// Optimizer steps between checkpoints. The last step and Ctrl-C also save one.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub every_n_steps: u64,
    /// Checkpoints kept; older ones are removed after a newer one is on disk. 12 bytes per parameter
    /// each.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_keep: usize,
    /// What happens when a checkpoint cannot be written because the disk is full or failing.
    pub on_error: OnSaveError,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { directory: None, every_n_steps: 1000, max_keep: 3, on_error: OnSaveError::default() }
    }
}

/// What happens when a checkpoint cannot be written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnSaveError {
    /// The run ends with exit code 1.
    #[default]
    Stop,
    /// Training goes on, with a warning and a record in `metrics.jsonl`, and saves again when the next checkpoint is due.
    /// The run ends with exit code 1 if its last checkpoint cannot be written.
    Continue,
}

/// Evaluation on held-out text during training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EvaluationConfig {
    /// Optimizer steps between evaluations. `null`: never.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub every_n_steps: Option<u64>,
    /// Batches of `data.sequences_per_step` sequences in an evaluation at most. Every evaluation uses
    /// the same text.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_batches: usize,
    /// Prompts that the model continues after each evaluation, such as `["Once upon a time", "The"]`: what it writes
    /// is shown with the evaluation, in `metrics.jsonl` and in TensorBoard.
    pub prompts: Vec<String>,
    /// Tokens that each prompt is continued by at most.
    #[schemars(range(min = 1, max = 65_536))]
    pub prompt_tokens: usize,
    /// Sampling temperature of these texts; 0 takes the most likely token each time. Tokens are drawn with
    /// `runtime.seed`, so that the same weights always write the same text.
    #[schemars(range(min = 0, max = 100))]
    pub prompt_temperature: f64,
    /// Evaluations in a row without an improvement after which training ends, saved. `null`: never.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub patience: Option<u64>,
    /// Nats per token by which the loss must fall below the best one before to count as an improvement for `patience`.
    #[schemars(range(min = 0, max = 1000))]
    pub min_delta: f64,
    /// The checkpoints with the lowest evaluation loss.
    pub best: BestConfig,
}

impl Default for EvaluationConfig {
    fn default() -> Self {
        Self {
            every_n_steps: Some(500),
            max_batches: 16,
            prompts: Vec::new(),
            prompt_tokens: 64,
            prompt_temperature: 0.8,
            patience: None,
            min_delta: 0.0,
            best: BestConfig::default(),
        }
    }
}

/// The checkpoints with the lowest evaluation loss.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BestConfig {
    /// Folder of these checkpoints. Default: `runtime.checkpoint.directory`.
    pub directory: Option<PathBuf>,
    /// Number kept in addition to `runtime.checkpoint.max_keep`.
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
    /// Folder of the TensorBoard event files. Default: `tensorboard` beside the config.
    pub tensorboard_directory: Option<PathBuf>,
}

impl Default for LoggingConfig {
    fn default() -> Self {
        Self { tensorboard: true, tensorboard_directory: None }
    }
}
