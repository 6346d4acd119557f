//! The sizes of a model: everything that decides its parameters and its arithmetic.

use kernels::HeadLayout;
use kernels::rope::{Frequencies, Llama3Scaling};
use run_config::{
    Architecture, BasePrecision, LoraConfig, ModelConfig, Precision, RopeScalingConfig, RopeType, TargetModules,
};

/// Rows of the embedding and the head are padded to a multiple of this, so that GEMMs have whole tiles.
const VOCABULARY_MULTIPLE: usize = 64;

/// The sizes of a Llama-style decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// Which layers a block has, and what checkpoints are saved as.
    pub architecture: Architecture,
    /// Token ids: rows of the embedding on disk.
    pub vocab_size: usize,
    /// Rows of the embedding in memory: `vocab_size` rounded up to a multiple of 64.
    pub padded_vocab_size: usize,
    /// Width of the residual stream, D.
    pub hidden_size: usize,
    /// Width of the MLP, I.
    pub intermediate_size: usize,
    /// Decoder blocks.
    pub num_layers: usize,
    /// Query heads, H.
    pub num_attention_heads: usize,
    /// Key and value heads, K; each serves H / K query heads.
    pub num_key_value_heads: usize,
    /// Width of one head, E.
    pub head_size: usize,
    /// Positions that the model is made for: the longest context.
    pub max_position_embeddings: usize,
    /// Base of the rotary embedding's wave lengths.
    pub rope_theta: f64,
    /// Scaling of their frequencies.
    pub rope_scaling: RopeScalingConfig,
    /// Added to the mean square inside of each norm.
    pub norm_epsilon: f64,
    /// Whether the head is the embedding matrix.
    pub tie_embeddings: bool,
    /// Standard deviation of the initial weights; of the matrices' at `base_hidden_size`.
    pub init_std: f64,
    /// The hidden size that initialisation and learning rates were tuned at; none to use them as they are.
    pub base_hidden_size: Option<usize>,
    /// The adapters that train beside the weights, which are then frozen; None where every weight trains.
    pub lora: Option<LoraShape>,
}

impl ModelShape {
    /// The shape that a validated config describes, with a vocabulary of `vocab_size` tokens.
    pub fn new(config: &ModelConfig, vocab_size: usize) -> Self {
        Self {
            architecture: config.architecture,
            vocab_size,
            padded_vocab_size: padded(vocab_size),
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            num_layers: config.num_layers,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: config.num_key_value_heads,
            head_size: config.head_size(),
            max_position_embeddings: config.max_position_embeddings,
            rope_theta: config.rope_theta,
            rope_scaling: config.rope_scaling.clone(),
            norm_epsilon: config.norm_epsilon,
            tie_embeddings: config.tie_embeddings,
            init_std: config.init_std,
            base_hidden_size: config.base_hidden_size,
            lora: None,
        }
    }

    /// Returns the shape with these adapters, or with none.
    #[must_use]
    pub fn with_lora(self, lora: Option<LoraShape>) -> Self {
        Self { lora, ..self }
    }

    /// `base_hidden_size / hidden_size`, by powers of which initial values and learning rates of the matrices scale; 1
    /// without a base.
    pub fn width_ratio(&self) -> f64 {
        self.base_hidden_size.map_or(1.0, |base| base as f64 / self.hidden_size as f64)
    }

    /// The frequencies of the rotary embedding.
    pub fn rope_frequencies(&self) -> Frequencies {
        let RopeScalingConfig { rope_type, factor, low_freq_factor, high_freq_factor, .. } = self.rope_scaling;
        let original_context = self.rope_scaling.original_max_position_embeddings as f64;
        let scaling = Llama3Scaling { factor, low_freq_factor, high_freq_factor, original_context };
        Frequencies { theta: self.rope_theta, scaling: (rope_type == RopeType::Llama3).then_some(scaling) }
    }

    /// The layout of the heads in a packed QKV row.
    pub fn heads(&self) -> HeadLayout {
        HeadLayout { heads: self.num_attention_heads, kv_heads: self.num_key_value_heads, head_size: self.head_size }
    }

    /// Whether the projections of the blocks are frozen and held in fp8.
    pub fn has_fp8_base(&self) -> bool {
        self.lora.as_ref().is_some_and(|lora| lora.fp8_base)
    }

    /// The linear maps of every block, in the order of the forward pass.
    pub fn linear_maps(&self) -> [LinearMap; 4] {
        let (d, i, heads) = (self.hidden_size, self.intermediate_size, self.heads());
        [
            LinearMap { name: "qkv", inputs: d, outputs: heads.packed_width() },
            LinearMap { name: "attention_output", inputs: heads.query_width(), outputs: d },
            LinearMap { name: "gate_up", inputs: d, outputs: 2 * i },
            LinearMap { name: "down", inputs: i, outputs: d },
        ]
    }
}

/// A linear map of a block: its name in profiles, and the widths of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearMap {
    /// `qkv`, `attention_output`, `gate_up` or `down`.
    pub name: &'static str,
    /// Width of a row that it reads.
    pub inputs: usize,
    /// Width of a row that it writes.
    pub outputs: usize,
}

/// Rows of a vocabulary in memory, padding included.
pub(crate) fn padded(vocab_size: usize) -> usize {
    vocab_size.next_multiple_of(VOCABULARY_MULTIPLE)
}

/// The adapters of a model: everything that decides their parameters and their arithmetic.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraShape {
    /// Width between the two matrices, R.
    pub rank: usize,
    /// The scale of an adapter's output, before it is divided by R or its square root.
    pub alpha: f64,
    /// Whether `alpha` is divided by the square root of R instead of R.
    pub rslora: bool,
    /// Probability that an input of an adapter is zero in training.
    pub dropout: f64,
    /// The modules of every block that have an adapter.
    pub modules: TargetModules,
    /// Whether the frozen projections of the blocks are held in fp8.
    pub fp8_base: bool,
}

impl LoraShape {
    /// The adapters that a validated config asks for, if any, in a run of this precision.
    pub fn from_config(config: &LoraConfig, precision: Precision) -> Option<Self> {
        let &LoraConfig { alpha, rslora, dropout, ref target_modules, base_precision, .. } = config;
        let fp8_base = match base_precision {
            BasePrecision::Auto => precision == Precision::Fp8,
            BasePrecision::Fp8 => true,
        };
        let of_rank = |rank| {
            let (alpha, modules) = (alpha.unwrap_or(rank as f64), target_modules.clone());
            Self { rank, alpha, rslora, dropout, modules, fp8_base }
        };
        config.rank.map(of_rank)
    }

    /// The factor of an adapter's output: `alpha` over R or its square root.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The model of `configs/rtx5090_1b.yaml`.
    pub(crate) fn one_billion() -> ModelShape {
        ModelShape {
            architecture: Architecture::Llama,
            vocab_size: 50_000,
            padded_vocab_size: padded(50_000),
            hidden_size: 2048,
            intermediate_size: 8192,
            num_layers: 20,
            num_attention_heads: 32,
            num_key_value_heads: 8,
            head_size: 64,
            max_position_embeddings: 2048,
            rope_theta: 10_000.0,
            rope_scaling: RopeScalingConfig::default(),
            norm_epsilon: 1e-5,
            tie_embeddings: true,
            init_std: 0.02,
            base_hidden_size: None,
            lora: None,
        }
    }

    /// Small, with grouped heads and sizes that are no multiple of anything.
    pub(crate) fn tiny(tie_embeddings: bool) -> ModelShape {
        ModelShape {
            vocab_size: 71,
            padded_vocab_size: padded(71),
            hidden_size: 20,
            intermediate_size: 36,
            num_layers: 3,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_size: 6,
            max_position_embeddings: 24,
            tie_embeddings,
            init_std: 0.2,
            base_hidden_size: None,
            ..one_billion()
        }
    }

    #[test]
    fn parameters_and_flops_match_the_design() {
        let shape = one_billion();
        assert_eq!(shape.padded_vocab_size, 50_048);
        assert_eq!(shape.parameter_count(), 1_318_832_128);
        assert!((shape.flops_per_token(2048) - 8.416e9).abs() < 0.5e6);
    }

    #[test]
    fn the_preset_of_the_design_s_model_has_its_shape() {
        let preset = run_config::presets().iter().find(|preset| preset.name == "rtx5090_1b").unwrap();
        let config = run_config::RunConfig::parse(preset.text, run_config::Format::Yaml, &[]).unwrap();
        assert_eq!(ModelShape::new(&config.model, config.model.vocab_size.unwrap()), one_billion());
    }

    #[test]
    fn absurdly_many_layers_are_counted_at_once() {
        let [none, one, many] =
            [0, 1, 1 << 40].map(|num_layers| ModelShape { num_layers, ..tiny(true) }.parameter_count());
        assert_eq!(many, none + (one - none) * (1 << 40));
    }

    #[test]
    fn untying_adds_parameters_but_no_flops() {
        let (tied, untied) = (tiny(true), tiny(false));
        assert_eq!(untied.parameter_count() - tied.parameter_count(), 71 * 20);
        assert_eq!(untied.flops_per_token(8).to_bits(), tied.flops_per_token(8).to_bits());
    }
}
