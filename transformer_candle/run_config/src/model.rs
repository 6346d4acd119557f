//! `model`: the shape of the network.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The shape of the network: a Llama-style decoder (pre-norm RMSNorm, rotary positions,
/// grouped-query attention, SwiGLU), with the biases or norms of its `architecture`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// Folder of a pretrained model in Hugging Face's format whose weights training starts from. The other
    /// keys of `model` and the tokenizer are then the model's unless given; those that shape its weights
    /// must not differ. Default: weights drawn at random.
    pub init_from: Option<PathBuf>,
    /// Which layers the blocks have, and what checkpoints are saved as, by `transformers`' name.
    pub architecture: Architecture,
    /// Vocabulary size. Default: the tokenizer's. May be larger than the tokenizer's, not smaller. It
    /// is padded to a multiple of 64 in memory, not in checkpoints.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub vocab_size: Option<usize>,
    /// Width of the residual stream. A multiple of `num_attention_heads` unless `head_dim` is given.
    #[schemars(range(min = 2, max = 65_536))]
    pub hidden_size: usize,
    /// Width of the SwiGLU MLP. 8/3 of `hidden_size` has the parameters of a plain MLP of width
    /// 4 `hidden_size`; larger values are common.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub intermediate_size: usize,
    /// Number of decoder blocks.
    #[schemars(range(min = 1, max = 1024))]
    pub num_layers: usize,
    /// Number of query heads.
    #[schemars(range(min = 1, max = 1024))]
    pub num_attention_heads: usize,
    /// Number of key/value heads, a divisor of `num_attention_heads`. Fewer make the KV cache and the
    /// QKV matrix smaller (grouped-query attention). Default: `num_attention_heads`.
    #[schemars(range(min = 1, max = 1024))]
    pub num_key_value_heads: usize,
    /// Size of an attention head. It must be even; every GPU kernel supports 64 and 128. Default:
    /// `hidden_size / num_attention_heads`.
    #[schemars(range(min = 2, max = 65_536))]
    pub head_dim: Option<usize>,
    /// Longest sequence that the model supports; stored in checkpoints. Default:
    /// `data.sequence_length`.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub max_position_embeddings: usize,
    /// Base of the rotary angles. 10000 is Llama 2's; longer contexts use more (Llama 3: 500000).
    #[schemars(range(max = 1e12), extend("exclusiveMinimum" = 1))]
    pub rope_theta: f64,
    /// Scaling of the rotary angles of models whose context was extended.
    pub rope_scaling: RopeScalingConfig,
    /// Added to the mean square inside RMSNorm so that it never divides by zero.
    #[schemars(range(max = 0.1), extend("exclusiveMinimum" = 0))]
    pub norm_epsilon: f64,
    /// Whether the output head is the embedding table itself. Saves `vocab_size * hidden_size`
    /// parameters, a large part of a small model.
    pub tie_embeddings: bool,
    /// Standard deviation of the initial weights (0.02 in GPT-2); divided by `sqrt(2 * num_layers)`
    /// for projections that write to the residual stream.
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub init_std: f64,
    /// Hidden size at which `optimizer.learning_rate` and `init_std` were tuned, to use them at another
    /// one (the widths of μP, Yang et al., 2022, without multipliers in the forward pass). With r =
    /// `base_hidden_size / hidden_size`: initial projections are scaled by sqrt(r) and the head by r;
    /// `AdamW`'s learning rate by r for projections and head, Muon's by sqrt(r); embedding and norms
    /// stay. Needs `tie_embeddings: false`. Default: no scaling.
    #[schemars(range(min = 2, max = 65_536))]
    pub base_hidden_size: Option<usize>,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            init_from: None,
            architecture: Architecture::Llama,
            vocab_size: None,
            hidden_size: 192,
            intermediate_size: 512,
            num_layers: 4,
            num_attention_heads: 6,
            num_key_value_heads: 2,
            head_dim: None,
            max_position_embeddings: 256,
            rope_theta: 10_000.0,
            rope_scaling: RopeScalingConfig::default(),
            norm_epsilon: 1e-5,
            tie_embeddings: true,
            init_std: 0.02,
            base_hidden_size: None,
        }
    }
}

impl ModelConfig {
    /// Size of an attention head.
    pub fn head_size(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads)
    }
}

/// Architectures of decoders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Architecture {
    /// `LlamaForCausalLM`.
    Llama,
    /// `MistralForCausalLM` without a sliding window: the layers of Llama.
    Mistral,
    /// `Qwen2ForCausalLM`: Llama with a bias in the query, key and value projections.
    Qwen2,
    /// `Qwen3ForCausalLM`: Llama with a norm of each query and key head before the rotary embedding
    /// (QK-norm), which bounds attention's scores.
    Qwen3,
}

impl Architecture {
    /// Every architecture.
    pub const ALL: [Self; 4] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3];

    /// The architecture's `model_type` in a `config.json`.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// The architecture's class in `transformers`.
    pub fn class_name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    /// Whether the query, key and value projections have a bias.
    pub fn has_qkv_bias(self) -> bool {
        self == Self::Qwen2
    }

    /// Whether query and key heads are normed before the rotary embedding.
    pub fn has_qk_norm(self) -> bool {
        self == Self::Qwen3
    }
}

/// Scaling of the rotary angles.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RopeScalingConfig {
    /// How frequencies are scaled.
    pub rope_type: RopeType,
    /// Low frequencies are divided by it.
    #[schemars(range(min = 1, max = 1e6))]
    pub factor: f64,
    /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are low frequencies.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub low_freq_factor: f64,
    /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are not scaled; those in
    /// between are interpolated.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub high_freq_factor: f64,
    /// The context that the model had before it was extended.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub original_max_position_embeddings: usize,
}

impl Default for RopeScalingConfig {
    fn default() -> Self {
        Self {
            rope_type: RopeType::Default,
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        }
    }
}

/// Scalings of the rotary angles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RopeType {
    /// No scaling; the other keys have no effect.
    Default,
    /// That of Llama 3.1 and later.
    Llama3,
}
