//! The config of a training run: types, defaults, validation, overrides and JSON Schema.

// The doc comments are the manual, which writes the names of products as people do.
#![allow(clippy::doc_markdown)]

mod added_tokens;
mod byte_size;
mod check;
mod data;
mod device;
mod error;
mod fill;
mod format;
mod former_keys;
mod grouped;
mod guide;
mod hugging_face;
mod init_from;
mod load;
mod lora;
mod lora_init_from;
mod mixture;
mod model;
mod model_file;
mod optimizer;
mod overrides;
mod peft_config;
mod presets;
pub mod regular_file;
mod resolve;
mod resolved_run;
mod rules;
mod run_folder;
mod runtime;
mod scalar;
mod scheduler;
mod schema;
mod stages;
mod streaming_config;
pub mod system_error;
mod time_span;
mod tokenizer;
mod tokenizer_file;
mod tokenizer_folder;
mod yaml;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use added_tokens::AddedToken;
pub use byte_size::ByteSize;
pub use data::{
    BUILT_IN_TEMPLATES, BatchSize, Bos, CHATML, DataConfig, DataFormat, FIRST_READING_VERSION, NEWEST_READING_VERSION,
    NumWorkers, OnBadFile, OverlongConversations, Packing, QWEN3, is_built_in_template,
};
pub use device::Device;
pub use error::{ConfigError, Problem};
pub use format::Format;
pub use grouped::grouped;
pub use lora::{BasePrecision, LoraConfig, TargetModule, TargetModules};
pub use lora_init_from::{ADAPTER_CONFIG, AdapterDescription};
pub use mixture::MixtureComponent;
pub use model::{Architecture, ModelConfig, RopeScalingConfig, RopeType};
pub use model_file::model_file_problem;
pub use optimizer::{Algorithm, MuonConfig, MuonPolynomials, OptimizerConfig};
pub use presets::{Preset, presets};
pub use resolve::OWN_TOKENIZER;
pub use resolved_run::{CheckpointTokenizer, ResolvedRun};
pub use run_folder::{RESOLVED_CONFIG, checkpoint_directory};
pub use runtime::{
    ActivationRecompute, BestConfig, CheckpointConfig, DivergenceGuardConfig, EvaluationConfig, Fp8Recipe,
    LoggingConfig, OnSaveError, Precision, RuntimeConfig,
};
pub use scheduler::{ScheduleStrategy, SchedulerConfig};
pub use stages::{StageConfig, StageStart, StageWeight};
pub use streaming_config::{StreamingConfig, check_experiment_name};
pub use time_span::TimeSpan;
pub use tokenizer::{SpecialTokens, TokenizerConfig};
pub use tokenizer_file::vocab_size;
pub use tokenizer_folder::{
    Additions, CHAT_TEMPLATE, DEFAULT_TEMPLATE, NamedTemplate, TOKENIZER_CONFIG, TokenizerFileError, TokenizerFolder,
    TokenizerReading, wrong_token_ids,
};

/// Everything that describes a training run. `RunConfig::default()` is a small valid model for a
/// CPU.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// The shape of the network.
    pub model: ModelConfig,
    /// Low-rank adapters (LoRA) beside frozen weights.
    pub lora: LoraConfig,
    /// How text becomes token ids.
    pub tokenizer: TokenizerConfig,
    /// Which text is read and how it becomes batches.
    pub data: DataConfig,
    /// How gradients change the weights.
    pub optimizer: OptimizerConfig,
    /// How long training lasts and how the learning rate moves.
    pub scheduler: SchedulerConfig,
    /// Parts of the training that differ in sequence length, batch, learning rate or mixture weights, such as
    /// `[{steps: 8000, sequence_length: 512}, {steps: 2000, sequence_length: 2048, batch_size: 2}]`. `null`: one stage,
    /// as the sections say.
    pub stages: Option<Vec<StageConfig>>,
    /// The machine, and what is written while training.
    pub runtime: RuntimeConfig,
}
