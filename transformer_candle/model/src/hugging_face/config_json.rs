//! `config.json` and `generation_config.json`, as transformers 4 and 5 read them.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::shape::padded;
use crate::{Error, ModelShape, Precision, Result};

/// The `config.json` of a model. Transformers 5 reads `dtype` and `rope_parameters`, 4 reads `torch_dtype` and
/// `rope_theta`.
pub fn config_json(
    shape: &ModelShape,
    precision: Precision,
    bos_token_id: Option<u32>,
    eos_token_id: Option<u32>,
) -> Value {
    let dtype = match precision {
        Precision::Fp32 => "float32",
        Precision::Bf16 => "bfloat16",
    };
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_parameters": { "rope_type": "default", "rope_theta": shape.rope_theta },
        "rms_norm_eps": shape.norm_epsilon,
        "hidden_act": "silu",
        "attention_bias": false,
        "attention_dropout": 0.0,
        "mlp_bias": false,
        "tie_word_embeddings": shape.tie_embeddings,
        "initializer_range": shape.init_std,
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": null,
        "use_cache": true,
    })
}

/// The `generation_config.json` of a model: where generation starts and stops.
pub fn generation_config_json(bos_token_id: Option<u32>, eos_token_id: Option<u32>) -> Value {
    let mut values = Map::from_iter([("_from_model_config".to_owned(), json!(true))]);
    for (key, id) in [("bos_token_id", bos_token_id), ("eos_token_id", eos_token_id)] {
        if let Some(id) = id {
            values.insert(key.to_owned(), json!(id));
        }
    }
    Value::Object(values)
}

/// The keys that decide the arithmetic; what else a config.json holds does not matter here.
#[derive(Deserialize)]
struct LlamaConfig {
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
    #[serde(default = "silu")]
    hidden_act: String,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default = "usual_range")]
    initializer_range: f64,
}

/// More than any model has, and few enough that no size computed from them overflows.
const MAX_PARAMETERS: f64 = 1e15;
const MAX_POSITIONS: usize = 1 << 30;

#[derive(Deserialize)]
struct RopeParameters {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
}

fn silu() -> String {
    "silu".to_owned()
}

fn usual_range() -> f64 {
    0.02
}

/// The shape that a `config.json` describes, or the key that this decoder cannot follow.
pub fn shape_from_config_json(value: &Value) -> Result<ModelShape> {
    let config = LlamaConfig::deserialize(value).map_err(|error| refuse("(whole file)", error.to_string()))?;
    let heads = config.num_attention_heads;
    let kv_heads = config.num_key_value_heads.unwrap_or(heads);
    config.check(heads, kv_heads)?;
    let rope = config.rope_parameters.as_ref().or(config.rope_scaling.as_ref());
    let theta = rope.and_then(|rope| rope.rope_theta).or(config.rope_theta);
    Ok(ModelShape {
        vocab_size: config.vocab_size,
        padded_vocab_size: padded(config.vocab_size),
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_layers: config.num_hidden_layers,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_size: config.head_dim.unwrap_or(config.hidden_size / heads),
        max_position_embeddings: config.max_position_embeddings,
        rope_theta: theta.ok_or_else(|| refuse("rope_theta", "is missing".to_owned()))?,
        norm_epsilon: config.rms_norm_eps,
        tie_embeddings: config.tie_word_embeddings,
        init_std: config.initializer_range,
        base_hidden_size: None,
    })
}

impl LlamaConfig {
    fn check(&self, heads: usize, kv_heads: usize) -> Result<()> {
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
            return Err(refuse(key, "is 0; it must be at least 1".to_owned()));
        }
        if self.model_type != "llama" {
            return Err(refuse("model_type", format!("is `{}`; only `llama` models run here", self.model_type)));
        }
        if self.hidden_act != "silu" {
            return Err(refuse("hidden_act", format!("is `{}`; only `silu` runs here", self.hidden_act)));
        }
        if self.attention_bias || self.mlp_bias {
            let key = if self.attention_bias { "attention_bias" } else { "mlp_bias" };
            return Err(refuse(key, "is true; this decoder has no biases".to_owned()));
        }
        if self.max_position_embeddings > MAX_POSITIONS {
            let problem = format!("is {}; it must be at most {MAX_POSITIONS}", self.max_position_embeddings);
            return Err(refuse("max_position_embeddings", problem));
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(refuse("num_key_value_heads", format!("is {kv_heads}, which does not divide {heads} heads")));
        }
        let head_size = self.head_dim.unwrap_or(self.hidden_size / heads);
        if head_size == 0 || !head_size.is_multiple_of(2) {
            return Err(refuse("head_dim", format!("is {head_size}; rotary embeddings need an even size")));
        }
        self.check_parameters(heads, kv_heads, head_size)?;
        for (key, rope) in [("rope_parameters", &self.rope_parameters), ("rope_scaling", &self.rope_scaling)] {
            let kind = rope.as_ref().and_then(|rope| rope.rope_type.as_deref()).unwrap_or("default");
            if kind != "default" {
                return Err(refuse(key, format!("is of type `{kind}`; only `default` runs here")));
            }
        }
        Ok(())
    }

    /// Everything that is computed from the sizes is at most a small multiple of the parameters, and must not overflow.
    fn check_parameters(&self, heads: usize, kv_heads: usize, head_size: usize) -> Result<()> {
        let [vocab_size, hidden, intermediate, layers] =
            [self.vocab_size, self.hidden_size, self.intermediate_size, self.num_hidden_layers].map(|size| size as f64);
        let attention_widths = (2.0 * heads as f64 + 2.0 * kv_heads as f64) * head_size as f64;
        let parameters = (layers * (attention_widths + 3.0 * intermediate + 2.0) + 2.0 * vocab_size) * hidden;
        if parameters > MAX_PARAMETERS {
            let largest = [
                ("vocab_size", self.vocab_size),
                ("hidden_size", self.hidden_size),
                ("intermediate_size", self.intermediate_size),
                ("num_hidden_layers", self.num_hidden_layers),
                ("num_attention_heads", heads),
                ("head_dim", head_size),
            ];
            let (key, size) = largest.into_iter().max_by_key(|(_, size)| *size).unwrap_or_default();
            return Err(refuse(
                key,
                format!("is {size}, which makes {parameters:.1e} parameters; no machine holds them"),
            ));
        }
        Ok(())
    }
}

fn refuse(key: &str, problem: String) -> Error {
    Error::ConfigJson { key: key.to_owned(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::tests::{one_billion, tiny};

    #[test]
    fn a_config_json_describes_the_shape_it_was_made_from() {
        for shape in [one_billion(), tiny(true), tiny(false)] {
            let text = config_json(&shape, Precision::Bf16, Some(0), Some(0)).to_string();
            assert_eq!(shape_from_config_json(&serde_json::from_str(&text).unwrap()).unwrap(), shape);
        }
    }

    #[test]
    fn transformers_4_and_5_both_find_the_wave_lengths() {
        let mut value = config_json(&tiny(true), Precision::Fp32, None, None);
        value.as_object_mut().unwrap().remove("rope_parameters");
        assert!(shape_from_config_json(&value).is_ok());
        value["rope_parameters"] = json!({ "rope_type": "default", "rope_theta": 500_000.0 });
        value.as_object_mut().unwrap().remove("rope_theta");
        assert!((shape_from_config_json(&value).unwrap().rope_theta - 500_000.0).abs() < 1e-9);
    }

    #[test]
    fn what_this_decoder_is_not_is_refused_by_its_key() {
        let changes = [
            ("model_type", json!("mistral")),
            ("hidden_act", json!("gelu")),
            ("attention_bias", json!(true)),
            ("mlp_bias", json!(true)),
            ("num_key_value_heads", json!(3)),
            ("num_attention_heads", json!(0)),
            ("head_dim", json!(5)),
            ("rope_parameters", json!({ "rope_type": "llama3", "rope_theta": 1e4 })),
            ("rope_scaling", json!({ "type": "linear", "factor": 2.0 })),
        ];
        for (key, value) in changes {
            let mut config = config_json(&tiny(true), Precision::Fp32, None, None);
            config[key] = value;
            let message = shape_from_config_json(&config).unwrap_err().to_string();
            assert!(message.contains(key), "{key}: {message}");
        }
    }

    #[test]
    fn absurd_sizes_are_refused_by_their_key() {
        let keys = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"];
        for (key, size) in keys.iter().flat_map(|key| [1_u64 << 40, 1 << 62, u64::MAX - 1].map(|size| (key, size))) {
            let mut config = config_json(&one_billion(), Precision::Fp32, None, None);
            config[key] = json!(size);
            let message = shape_from_config_json(&config).unwrap_err().to_string();
            assert!(message.contains(&format!("`{key}` is {size}")), "{key}: {message}");
        }
        let mut config = config_json(&tiny(true), Precision::Fp32, None, None);
        config["max_position_embeddings"] = json!(1_u64 << 50);
        assert!(shape_from_config_json(&config).unwrap_err().to_string().contains("at most 1073741824"));
    }

    #[test]
    fn a_missing_key_is_named() {
        let mut config = config_json(&tiny(true), Precision::Fp32, None, None);
        config.as_object_mut().unwrap().remove("rms_norm_eps");
        assert!(shape_from_config_json(&config).unwrap_err().to_string().contains("rms_norm_eps"));
    }

    #[test]
    fn generation_config_holds_only_the_tokens_there_are() {
        assert_eq!(generation_config_json(None, Some(7)), json!({ "_from_model_config": true, "eos_token_id": 7 }));
    }
}
