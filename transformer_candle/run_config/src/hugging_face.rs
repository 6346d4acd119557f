//! Reads the `config.json` of a model in Hugging Face's format.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::Problem;
use crate::model::{Architecture, ModelConfig, RopeScalingConfig, RopeType};

/// Maximum number of parameters: more than any model has, and few enough that no size computed from them overflows.
const MAX_PARAMETERS: f64 = 1e15;
const MAX_POSITIONS: usize = 1 << 30;

/// Keys of features that no model that runs here has, and what the features are.
const FOREIGN_KEYS: [(&str, &str); 12] = [
    ("state_size", "state-space layers"),
    ("num_local_experts", "a mixture of experts"),
    ("num_experts", "a mixture of experts"),
    ("n_routed_experts", "a mixture of experts"),
    ("vision_config", "an encoder of images"),
    ("audio_config", "an encoder of audio"),
    ("kv_lora_rank", "low-rank keys and values"),
    ("final_logit_softcapping", "soft-capped logits"),
    ("layer_norm_eps", "LayerNorm instead of RMSNorm"),
    ("layer_norm_epsilon", "LayerNorm instead of RMSNorm"),
    ("no_rope_layers", "layers without rotary embeddings"),
    ("embedding_multiplier", "scaled embeddings"),
];

const INTEGERS: [&str; 9] = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
];

/// The scaling that leaves the frequencies of sequences within `max_position_embeddings` as they are.
const DYNAMIC_NTK: &str = "dynamic";
const FULL_ATTENTION: &str = "full_attention";
const SLIDING_ATTENTION: &str = "sliding_attention";

/// The activation function of the decoder, by each name that `transformers` has for it.
const ACTIVATIONS: [&str; 2] = ["silu", "swish"];

/// The keys of a `config.json` that decide the arithmetic; the others do not matter here.
#[derive(Deserialize)]
struct HuggingFaceConfig {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    rope_parameters: Option<RopeParameters>,
    rope_scaling: Option<RopeParameters>,
    partial_rotary_factor: Option<f64>,
    hidden_act: String,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    tie_word_embeddings: Option<bool>,
    initializer_range: Option<f64>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    quantization_config: Option<Value>,
}

/// The rotary embedding: `rope_parameters` in transformers 5, `rope_scaling` in 4.
#[derive(Deserialize, Clone)]
struct RopeParameters {
    rope_type: Option<String>,
    /// The former name of `rope_type`. Some versions of transformers save both.
    r#type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
}

/// The longest sequence that the decoder computes as `transformers` does, where that is less than
/// `max_position_embeddings`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContextLimit {
    /// The key that limits it.
    pub key: &'static str,
    /// Its tokens.
    pub tokens: usize,
}

impl ModelConfig {
    /// Reads the model that a `config.json` describes, as `transformers` does. Where attention slides over a window,
    /// `max_position_embeddings` is at most the window, within which it is the same as full attention.
    ///
    /// # Errors
    /// A problem of the `config.json`'s key that has no value, or that asks for what the decoder does not have.
    pub fn from_hugging_face(config: &Value) -> Result<Self, Problem> {
        Self::with_context_limit(config).map(|(model, _)| model)
    }

    /// Like [`Self::from_hugging_face`]; also returns what limits `max_position_embeddings`.
    pub(crate) fn with_context_limit(config: &Value) -> Result<(Self, Option<ContextLimit>), Problem> {
        let architecture = architecture(config)?;
        check_integers(config)?;
        let config = HuggingFaceConfig::deserialize(with_defaults(config, architecture))
            .map_err(|error| Problem::of_file(error.to_string()))?;
        config.check_sizes()?;
        config.check_layers(architecture)?;
        let (rope_theta, rope_scaling) = config.rope()?;
        let limit = config.context_limit(architecture);
        let model = Self {
            init_from: None,
            architecture,
            vocab_size: Some(config.vocab_size),
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            num_layers: config.num_hidden_layers,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: config.kv_heads(),
            head_dim: Some(config.head_size()),
            max_position_embeddings: limit.map_or(config.max_position_embeddings, |limit| limit.tokens),
            rope_theta,
            rope_scaling,
            norm_epsilon: config.rms_norm_eps,
            tie_embeddings: config.tie_word_embeddings.unwrap_or_default(),
            init_std: config.initializer_range.unwrap_or(0.02),
            base_hidden_size: None,
        };
        Ok((model, limit))
    }
}

/// Returns the architecture that `model_type` names; the problem of one that does not run here says what it would need.
fn architecture(config: &Value) -> Result<Architecture, Problem> {
    let names = Architecture::ALL.map(|architecture| format!("`{}`", architecture.model_type())).join(", ");
    let Some(model_type) = config["model_type"].as_str() else {
        return Err(Problem::of_file(format!("does not say its `model_type`; the models that run here are {names}")));
    };
    let architecture = Architecture::ALL.into_iter().find(|architecture| architecture.model_type() == model_type);
    architecture.ok_or_else(|| {
        let lacking = lacking(config).map_or_else(
            || "an architecture that does not run here".to_owned(),
            |feature| format!("which has {feature}"),
        );
        let problem = format!("is `{model_type}`, {lacking}; the models that run here are {names}");
        Problem::new("model_type", problem)
    })
}

/// Returns a feature that a config of another architecture shows and the decoder does not have.
fn lacking(config: &Value) -> Option<String> {
    let is_given = |key: &str| config.get(key).is_some_and(|value| !value.is_null());
    let foreign = FOREIGN_KEYS.iter().find(|(key, _)| is_given(key)).map(|(_, feature)| (*feature).to_owned());
    foreign.or_else(|| {
        let mut activations = ["hidden_activation", "hidden_act", "activation_function"].into_iter();
        let other = activations.find_map(|key| config[key].as_str()).filter(|name| !ACTIVATIONS.contains(name))?;
        Some(format!("the activation `{other}`"))
    })
}

/// Refuses sizes that are no integers and names their key, which the error of the JSON library does not.
fn check_integers(config: &Value) -> Result<(), Problem> {
    let values = INTEGERS.iter().filter_map(|key| Some((key, config.get(*key)?)));
    let Some((key, value)) = values.into_iter().find(|(_, value)| !value.is_u64() && !value.is_null()) else {
        return Ok(());
    };
    Err(Problem::new(*key, format!("is {value}; it must be an integer of at least 1")))
}

/// Returns the config with the values that `transformers` takes for absent keys. A key that is null is not absent.
fn with_defaults(config: &Value, architecture: Architecture) -> Value {
    let common = json!({
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu",
        "rms_norm_eps": 1e-6
    });
    let own = match architecture {
        Architecture::Llama => {
            json!({ "vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048 })
        }
        Architecture::Mistral => json!({
            "vocab_size": 32_000, "intermediate_size": 14_336, "max_position_embeddings": 131_072,
            "num_key_value_heads": 8, "sliding_window": 4096
        }),
        Architecture::Qwen2 => json!({
            "vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768,
            "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28
        }),
        Architecture::Qwen3 => json!({
            "vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768,
            "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128
        }),
    };
    let mut config = config.clone();
    if let Some(object) = config.as_object_mut() {
        for (key, value) in [common, own].iter().filter_map(Value::as_object).flatten() {
            object.entry(key).or_insert_with(|| value.clone());
        }
    }
    config
}

impl HuggingFaceConfig {
    fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    fn head_size(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads)
    }

    fn check_sizes(&self) -> Result<(), Problem> {
        let (heads, kv_heads) = (self.num_attention_heads, self.kv_heads());
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", heads),
            ("num_key_value_heads", kv_heads),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        if let Some((key, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(Problem::new(*key, "is 0; it must be at least 1"));
        }
        if self.max_position_embeddings > MAX_POSITIONS {
            let problem = format!("is {}; it must be at most {MAX_POSITIONS}", self.max_position_embeddings);
            return Err(Problem::new("max_position_embeddings", problem));
        }
        if !heads.is_multiple_of(kv_heads) {
            let problem = format!("is {kv_heads}, which does not divide {heads} heads");
            return Err(Problem::new("num_key_value_heads", problem));
        }
        let head_size = self.head_size();
        if head_size == 0 || !head_size.is_multiple_of(2) {
            return Err(Problem::new("head_dim", format!("is {head_size}; rotary embeddings need an even size")));
        }
        self.check_parameters()
    }

    /// Limits the parameters: all that is computed from the sizes is at most a small multiple, and must not overflow.
    fn check_parameters(&self) -> Result<(), Problem> {
        let largest = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("head_dim", self.head_size()),
        ];
        let [vocab_size, hidden, intermediate, layers, heads, head_size] = largest.map(|(_, size)| size as f64);
        let attention_widths = (2.0 * heads + 2.0 * self.kv_heads() as f64) * head_size;
        let parameters = (layers * (attention_widths + 3.0 * intermediate + 2.0) + 2.0 * vocab_size) * hidden;
        if parameters <= MAX_PARAMETERS {
            return Ok(());
        }
        let (key, size) = largest.into_iter().max_by_key(|(_, size)| *size).unwrap_or_default();
        let problem = format!("is {size}, which makes {parameters:.1e} parameters; no machine holds them");
        Err(Problem::new(key, problem))
    }

    /// Refuses layers that the decoder does not have.
    fn check_layers(&self, architecture: Architecture) -> Result<(), Problem> {
        if !ACTIVATIONS.contains(&self.hidden_act.as_str()) {
            return Err(Problem::new("hidden_act", format!("is `{}`; only `silu` runs here", self.hidden_act)));
        }
        // The other architectures do not read these keys.
        let is_llama = architecture == Architecture::Llama;
        let biases = [
            ("attention_bias", self.attention_bias, is_llama || architecture == Architecture::Qwen3),
            ("mlp_bias", self.mlp_bias, is_llama),
        ];
        if let Some((key, ..)) = biases.iter().find(|(_, value, is_read)| *is_read && *value == Some(true)) {
            return Err(Problem::new(*key, "is true; these biases do not run here"));
        }
        let slides = self.window(architecture).is_some();
        let mut kinds = self.layer_types.iter().flatten();
        if let Some(kind) = kinds.find(|kind| *kind != FULL_ATTENTION && !(slides && *kind == SLIDING_ATTENTION)) {
            return Err(Problem::new("layer_types", format!("has `{kind}`; only `{FULL_ATTENTION}` runs here")));
        }
        if self.quantization_config.is_some() {
            return Err(Problem::new("quantization_config", "is given; only unquantized weights are read"));
        }
        Ok(())
    }

    /// The number of tokens, itself included, that a token attends to in layers with a sliding window; `None` if no
    /// layer has one.
    fn window(&self, architecture: Architecture) -> Option<usize> {
        let slides = match architecture {
            Architecture::Llama => false,
            Architecture::Mistral => true,
            Architecture::Qwen2 | Architecture::Qwen3 => {
                let some_layer_slides = match &self.layer_types {
                    Some(kinds) => kinds.iter().any(|kind| kind == SLIDING_ATTENTION),
                    None => self.max_window_layers.is_none_or(|first| first < self.num_hidden_layers),
                };
                self.use_sliding_window == Some(true) && some_layer_slides
            }
        };
        self.sliding_window.filter(|_| slides)
    }

    fn context_limit(&self, architecture: Architecture) -> Option<ContextLimit> {
        let longest = self.max_position_embeddings;
        let window = self.window(architecture).filter(|window| *window < longest);
        let window = window.map(|tokens| ContextLimit { key: "sliding_window", tokens });
        window.or_else(|| {
            let (key, rope) = self.rope_section();
            let is_dynamic = rope.is_some_and(|rope| rope.kind() == DYNAMIC_NTK);
            is_dynamic.then_some(ContextLimit { key, tokens: longest })
        })
    }

    /// Returns the section that describes the rotary embedding, and its key.
    fn rope_section(&self) -> (&'static str, Option<&RopeParameters>) {
        match (&self.rope_scaling, &self.rope_parameters) {
            (Some(rope), _) if !rope.is_empty() => ("rope_scaling", Some(rope)),
            (_, rope) => ("rope_parameters", rope.as_ref()),
        }
    }

    /// Returns base and scaling of the rotary embedding's frequencies.
    fn rope(&self) -> Result<(f64, RopeScalingConfig), Problem> {
        let (key, rope) = self.rope_section();
        let factor = rope.and_then(|rope| rope.partial_rotary_factor).or(self.partial_rotary_factor);
        if let Some(factor) = factor.filter(|factor| (factor - 1.0).abs() > f64::EPSILON) {
            return Err(Problem::new("partial_rotary_factor", format!("is {factor}; whole heads are rotated here")));
        }
        // Llama 2 was published before the key existed.
        let theta = rope.and_then(|rope| rope.rope_theta).or(self.rope_theta).unwrap_or(10_000.0);
        if !theta.is_finite() || theta <= 1.0 {
            return Err(Problem::new("rope_theta", format!("is {theta}; it must be greater than 1")));
        }
        let scaling = match rope.map(|rope| (rope, rope.kind())) {
            None | Some((_, "default" | DYNAMIC_NTK)) => RopeScalingConfig::default(),
            Some((rope, "linear")) if rope.factor == Some(1.0) => RopeScalingConfig::default(),
            Some((rope, "llama3")) => rope.llama3(self.max_position_embeddings).ok_or_else(|| {
                Problem::new(key, "is of type `llama3` but lacks factor, low_freq_factor or high_freq_factor")
            })?,
            Some((_, other)) => {
                let supported_types = "`default`, `llama3` and, up to max_position_embeddings, `dynamic`";
                return Err(Problem::new(key, format!("is of type `{other}`; only {supported_types} run here")));
            }
        };
        let RopeScalingConfig { factor, low_freq_factor: low, high_freq_factor: high, .. } = scaling;
        if !(factor >= 1.0 && low > 0.0 && low < high) {
            let problem = format!(
                "has factor {factor}, low_freq_factor {low} and high_freq_factor {high}; the factor must be at least 1 \
                 and low_freq_factor between 0 and high_freq_factor"
            );
            return Err(Problem::new(key, problem));
        }
        Ok((theta, scaling))
    }
}

impl RopeParameters {
    /// Whether no key is given: transformers then looks elsewhere.
    fn is_empty(&self) -> bool {
        let numbers = [self.rope_theta, self.partial_rotary_factor, self.factor, self.low_freq_factor];
        let is_named = self.rope_type.is_some() || self.r#type.is_some();
        !is_named
            && numbers.iter().chain([&self.high_freq_factor]).all(Option::is_none)
            && self.original_max_position_embeddings.is_none()
    }

    fn kind(&self) -> &str {
        self.rope_type.as_deref().or(self.r#type.as_deref()).unwrap_or("default")
    }

    /// Returns the scaling of Llama 3; `longest` is the model's `max_position_embeddings`.
    fn llama3(&self, longest: usize) -> Option<RopeScalingConfig> {
        Some(RopeScalingConfig {
            rope_type: RopeType::Llama3,
            factor: self.factor?,
            low_freq_factor: self.low_freq_factor?,
            high_freq_factor: self.high_freq_factor?,
            original_max_position_embeddings: self.original_max_position_embeddings.unwrap_or(longest),
        })
    }
}

#[cfg(test)]
mod tests;
