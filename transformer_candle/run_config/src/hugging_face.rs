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

/// The keys of a `config.json` that decide the arithmetic; the others do not matter here.
#[derive(Deserialize)]
struct HuggingFaceConfig {
    model_type: String,
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
    #[serde(default = "silu")]
    hidden_act: String,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default = "usual_std")]
    initializer_range: f64,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    layer_types: Option<Vec<String>>,
    quantization_config: Option<Value>,
}

/// The rotary embedding: `rope_parameters` in transformers 5, `rope_scaling` in 4.
#[derive(Deserialize, Clone)]
struct RopeParameters {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
}

fn silu() -> String {
    "silu".to_owned()
}

fn usual_std() -> f64 {
    0.02
}

impl ModelConfig {
    /// Reads the model that a `config.json` describes, as `transformers` does.
    ///
    /// # Errors
    /// A problem of the `config.json`'s key that is missing, or that asks for what the decoder does not have.
    pub fn from_hugging_face(config: &Value) -> Result<Self, Problem> {
        let architecture = architecture(config)?;
        check_integers(config)?;
        let config = HuggingFaceConfig::deserialize(with_defaults(config, architecture))
            .map_err(|error| Problem::of_file(error.to_string()))?;
        config.check_sizes()?;
        config.check_layers()?;
        let (rope_theta, rope_scaling) = config.rope()?;
        Ok(Self {
            init_from: None,
            architecture,
            vocab_size: Some(config.vocab_size),
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            num_layers: config.num_hidden_layers,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: config.kv_heads(),
            head_dim: Some(config.head_size()),
            max_position_embeddings: config.max_position_embeddings,
            rope_theta,
            rope_scaling,
            norm_epsilon: config.rms_norm_eps,
            tie_embeddings: config.tie_word_embeddings,
            init_std: config.initializer_range,
            base_hidden_size: None,
        })
    }
}

/// Returns the architecture that `model_type` names; the problem of one that does not run here says what it would need.
fn architecture(config: &Value) -> Result<Architecture, Problem> {
    let names = Architecture::ALL.map(|known| format!("`{}`", known.model_type())).join(", ");
    let Some(model_type) = config["model_type"].as_str() else {
        return Err(Problem::of_file(format!("does not say its `model_type`; the models that run here are {names}")));
    };
    let known = Architecture::ALL.into_iter().find(|architecture| architecture.model_type() == model_type);
    known.ok_or_else(|| {
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
        let other = activations.find_map(|key| config[key].as_str()).filter(|name| *name != "silu")?;
        Some(format!("the activation `{other}`"))
    })
}

/// Refuses sizes that are no integers and names their key, which the error of the JSON library does not.
fn check_integers(config: &Value) -> Result<(), Problem> {
    let given = INTEGERS.iter().filter_map(|key| Some((key, config.get(*key)?)));
    let Some((key, value)) = given.into_iter().find(|(_, value)| !value.is_u64() && !value.is_null()) else {
        return Ok(());
    };
    Err(Problem::new(*key, format!("is {value}; it must be an integer of at least 1")))
}

/// Returns the config with the values that `transformers` takes for absent keys. A key that is null is not absent.
fn with_defaults(config: &Value, architecture: Architecture) -> Value {
    let defaults = match architecture {
        Architecture::Llama => json!({}),
        Architecture::Mistral => json!({ "num_key_value_heads": 8, "sliding_window": 4096 }),
        Architecture::Qwen2 => json!({ "num_key_value_heads": 32 }),
        Architecture::Qwen3 => json!({ "num_key_value_heads": 32, "head_dim": 128 }),
    };
    let mut config = config.clone();
    if let (Some(given), Value::Object(defaults)) = (config.as_object_mut(), defaults) {
        given.entry("rms_norm_eps").or_insert_with(|| json!(1e-6));
        for (key, value) in defaults {
            given.entry(key).or_insert(value);
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
    fn check_layers(&self) -> Result<(), Problem> {
        if self.hidden_act != "silu" {
            return Err(Problem::new("hidden_act", format!("is `{}`; only `silu` runs here", self.hidden_act)));
        }
        for (key, value) in [("attention_bias", self.attention_bias), ("mlp_bias", self.mlp_bias)] {
            if value == Some(true) {
                return Err(Problem::new(key, "is true; these biases do not run here"));
            }
        }
        let is_used = self.use_sliding_window.unwrap_or(self.model_type == "mistral");
        if let Some(window) = self.sliding_window.filter(|window| is_used && *window < self.max_position_embeddings) {
            let problem = format!("is {window}; attention is not limited to a sliding window here");
            return Err(Problem::new("sliding_window", problem));
        }
        let other = self.layer_types.iter().flatten().find(|kind| *kind != "full_attention");
        if let Some(kind) = other {
            return Err(Problem::new("layer_types", format!("has `{kind}`; only `full_attention` runs here")));
        }
        if self.quantization_config.is_some() {
            return Err(Problem::new("quantization_config", "is given; only unquantized weights are read"));
        }
        Ok(())
    }

    /// Returns base and scaling of the rotary embedding's frequencies.
    fn rope(&self) -> Result<(f64, RopeScalingConfig), Problem> {
        let (key, rope) = match (&self.rope_parameters, &self.rope_scaling) {
            (Some(rope), _) => ("rope_parameters", Some(rope)),
            (None, rope) => ("rope_scaling", rope.as_ref()),
        };
        let factor = rope.and_then(|rope| rope.partial_rotary_factor).or(self.partial_rotary_factor);
        if let Some(factor) = factor.filter(|factor| (factor - 1.0).abs() > f64::EPSILON) {
            return Err(Problem::new("partial_rotary_factor", format!("is {factor}; whole heads are rotated here")));
        }
        // Llama 2 was published before the key existed.
        let theta = rope.and_then(|rope| rope.rope_theta).or(self.rope_theta).unwrap_or(10_000.0);
        if !theta.is_finite() || theta <= 1.0 {
            return Err(Problem::new("rope_theta", format!("is {theta}; it must be greater than 1")));
        }
        let scaling = match rope.map(|rope| (rope, rope.rope_type.as_deref().unwrap_or("default"))) {
            None | Some((_, "default")) => RopeScalingConfig::default(),
            Some((rope, "llama3")) => rope.llama3().ok_or_else(|| {
                Problem::new(key, "is of type `llama3` but lacks a factor or original_max_position_embeddings")
            })?,
            Some((_, other)) => {
                return Err(Problem::new(key, format!("is of type `{other}`; only `default` and `llama3` run here")));
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
    fn llama3(&self) -> Option<RopeScalingConfig> {
        Some(RopeScalingConfig {
            rope_type: RopeType::Llama3,
            factor: self.factor?,
            low_freq_factor: self.low_freq_factor?,
            high_freq_factor: self.high_freq_factor?,
            original_max_position_embeddings: self.original_max_position_embeddings?,
        })
    }
}

#[cfg(test)]
mod tests;
