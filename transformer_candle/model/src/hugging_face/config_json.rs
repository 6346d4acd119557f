//! `config.json` and `generation_config.json`, as transformers 4 and 5 read them, and `adapter_config.json`, as peft
//! reads it.

use std::path::Path;

use run_config::{Architecture, ModelConfig, Problem, RopeScalingConfig, RopeType, TargetModule};
use serde_json::{Map, Value, json};

use crate::{Error, LoraShape, ModelShape, Precision, Result};

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
        Precision::Bf16 | Precision::Fp8 => "bfloat16",
    };
    let mut config = json!({
        "architectures": [shape.architecture.class_name()],
        "model_type": shape.architecture.model_type(),
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_epsilon,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "tie_word_embeddings": shape.tie_embeddings,
        "initializer_range": shape.init_std,
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": null,
        "use_cache": true,
    });
    let (scaling, parameters) = rope(shape);
    config["rope_scaling"] = scaling;
    config["rope_parameters"] = parameters;
    match shape.architecture {
        Architecture::Llama => {
            config["attention_bias"] = json!(false);
            config["mlp_bias"] = json!(false);
        }
        Architecture::Mistral => config["sliding_window"] = Value::Null,
        Architecture::Qwen2 => config["use_sliding_window"] = json!(false),
        Architecture::Qwen3 => {
            config["attention_bias"] = json!(false);
            config["use_sliding_window"] = json!(false);
        }
    }
    config
}

/// The rotary embedding as transformers 4 spells it, `rope_scaling`, and 5, `rope_parameters`.
fn rope(shape: &ModelShape) -> (Value, Value) {
    let RopeScalingConfig { rope_type, factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } =
        shape.rope_scaling;
    let theta = shape.rope_theta;
    if rope_type == RopeType::Default {
        return (Value::Null, json!({ "rope_type": "default", "rope_theta": theta }));
    }
    let scaling = json!({
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
        "high_freq_factor": high_freq_factor, "original_max_position_embeddings": original_max_position_embeddings,
    });
    let mut parameters = scaling.clone();
    parameters["rope_theta"] = json!(theta);
    (scaling, parameters)
}

/// The `generation_config.json` of a model: where generation starts, at which tokens it stops, and the other settings
/// of the model that training started from, such as `temperature`.
pub fn generation_config_json(
    bos_token_id: Option<u32>,
    eos_token_ids: &[u32],
    settings: &Map<String, Value>,
) -> Value {
    let mut values = settings.clone();
    if values.is_empty() {
        values.insert("_from_model_config".to_owned(), json!(true));
    }
    values.extend(bos_token_id.map(|id| ("bos_token_id".to_owned(), json!(id))));
    let eos = match eos_token_ids {
        [] => None,
        [id] => Some(json!(id)),
        ids => Some(json!(ids)),
    };
    values.extend(eos.map(|eos| ("eos_token_id".to_owned(), eos)));
    Value::Object(values)
}

/// The shape that a `config.json` describes, or the key that this decoder cannot follow.
pub fn shape_from_config_json(value: &Value) -> Result<ModelShape> {
    let refused = |problem: Problem| Error::ConfigJson { problem: problem.sentence() };
    let model = ModelConfig::from_hugging_face(value).map_err(refused)?;
    let vocab_size = model.vocab_size.unwrap_or_default();
    Ok(ModelShape::new(&model, vocab_size))
}

/// The `adapter_config.json` of adapters beside the model in `base_model`.
pub fn adapter_config_json(lora: &LoraShape, base_model: &Path) -> Value {
    let modules: Vec<_> = lora.modules.modules().iter().copied().map(TargetModule::name).collect();
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": true,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": false,
        "init_lora_weights": true,
        "modules_to_save": null,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::tests::{one_billion, tiny};

    #[test]
    fn a_config_json_describes_the_shape_it_was_made_from() {
        let rope_scaling =
            RopeScalingConfig { rope_type: RopeType::Llama3, factor: 32.0, ..one_billion().rope_scaling };
        let scaled = ModelShape { rope_scaling, ..one_billion() };
        let others = Architecture::ALL.map(|architecture| ModelShape { architecture, ..tiny(false) });
        for shape in [one_billion(), tiny(true), scaled].into_iter().chain(others) {
            let text = config_json(&shape, Precision::Bf16, Some(0), Some(0)).to_string();
            assert_eq!(shape_from_config_json(&serde_json::from_str(&text).unwrap()).unwrap(), shape);
        }
    }

    #[test]
    fn generation_config_holds_only_the_tokens_there_are() {
        let stops = |eos: Value| json!({ "_from_model_config": true, "eos_token_id": eos });
        let none = Map::new();
        assert_eq!(generation_config_json(None, &[7], &none), stops(json!(7)));
        assert_eq!(generation_config_json(None, &[7, 9], &none), stops(json!([7, 9])));
        assert_eq!(generation_config_json(None, &[], &none), json!({ "_from_model_config": true }));
        let sampling = Map::from_iter([("top_p".to_owned(), json!(0.9))]);
        assert_eq!(generation_config_json(None, &[7], &sampling), json!({ "top_p": 0.9, "eos_token_id": 7 }));
    }
}
