//! The keys of peft's `adapter_config.json`, and what each does where adapters are loaded.
//!
//! A key that this file does not know is refused unless it is off, so that adapters of a newer peft never compute
//! something else without a word.

use serde_json::Value;

use crate::error::Problem;

/// Keys that are read: what the adapters compute follows from them.
const READ: [&str; 7] =
    ["peft_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora"];

/// Keys that change nothing that loaded adapters compute, whatever their value.
const WITHOUT_EFFECT: [&str; 14] = [
    // About the file.
    "auto_mapping",
    "peft_version",
    "revision",
    "inference_mode",
    // For layers that the models which run here do not have; peft resets it for the others.
    "fan_in_fan_out",
    // Settings of what other keys switch on, which are refused.
    "layers_pattern",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
    "corda_config",
    "lora_ga_config",
    // How the matrices began, before they were trained.
    "eva_config",
    // For adapters of embeddings, which are refused.
    "ensure_weight_tying",
    "runtime_config",
];

/// Values of `init_lora_weights` with which peft leaves the model's weights as they are.
const PLAIN_BEGINNINGS: [&str; 4] = ["gaussian", "eva", "orthogonal", "mica"];

/// Keys and beginnings that `orchestrate export` writes as plain adapters.
const CONVERTED: [&str; 4] = ["rank_pattern", "alpha_pattern", "layers_to_transform", "exclude_modules"];
const CONVERTED_BEGINNINGS: [&str; 2] = ["pissa", "olora"];
const CONVERSION: &str = "`orchestrate export --format adapter` writes them as plain adapters, which run everywhere";

/// Refuses a key that makes adapters compute what plain adapters do not.
pub(crate) fn check(config: &Value) -> Result<(), Problem> {
    let Some(config) = config.as_object() else {
        return Err(Problem::new("(whole file)", "is no JSON object"));
    };
    for (key, value) in config {
        match key.as_str() {
            key if READ.contains(&key) || WITHOUT_EFFECT.contains(&key) => {}
            "task_type" if value.is_null() || value == "CAUSAL_LM" => {}
            "task_type" => return refused(key, value, "only adapters of causal language models run here"),
            "bias" if value.is_null() || value == "none" => {}
            "init_lora_weights" => check_beginning(value)?,
            _ if is_off(value) => {}
            key if CONVERTED.contains(&key) => return refused(key, value, CONVERSION),
            _ => return refused(key, value, "only plain LoRA adapters run here"),
        }
    }
    Ok(())
}

fn check_beginning(value: &Value) -> Result<(), Problem> {
    const KEY: &str = "init_lora_weights";
    let Some(name) = value.as_str() else {
        return if value.is_boolean() || value.is_null() {
            Ok(())
        } else {
            refused(KEY, value, "peft knows no such value")
        };
    };
    let name = name.to_lowercase();
    if PLAIN_BEGINNINGS.contains(&name.as_str()) {
        Ok(())
    } else if CONVERTED_BEGINNINGS.contains(&name.as_str()) {
        refused(KEY, value, &format!("the adapters belong to a model whose weights it changes; {CONVERSION}"))
    } else {
        let reason = "the adapters belong to a model whose weights it changes, by data or random numbers that are not in \
                      the file; peft's `save_pretrained(..., path_initial_model_for_weight_conversion=...)` writes them \
                      as plain adapters";
        refused(KEY, value, reason)
    }
}

/// Whether a value is what peft has for a setting that is not used.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(is_on) => !is_on,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Number(_) => false,
    }
}

fn refused(key: &str, value: &Value, reason: &str) -> Result<(), Problem> {
    Err(Problem::new(key, format!("is {value}: {reason}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_that_compute_otherwise_are_refused_by_name() {
        for (key, value) in [
            ("use_dora", json!(true)),
            ("alora_invocation_tokens", json!([5, 7])),
            ("layers_to_transform", json!(0)),
            ("trainable_token_indices", json!([3])),
            ("init_lora_weights", json!("pissa")),
            ("init_lora_weights", json!("OLoRA")),
            ("init_lora_weights", json!("pissa_niter_16")),
            ("init_lora_weights", json!("loftq")),
            ("init_lora_weights", json!("a_new_one")),
            ("init_lora_weights", json!(3)),
            ("task_type", json!("SEQ_CLS")),
            ("a_key_of_tomorrow", json!(0.5)),
            ("another_key_of_tomorrow", json!({ "on": true })),
        ] {
            let problem = check(&json!({ "peft_type": "LORA", key: value })).unwrap_err();
            assert_eq!(problem.path, key);
            assert!(problem.message.contains(&value.to_string()), "{}", problem.message);
        }
    }

    #[test]
    fn keys_without_effect_are_accepted() {
        let config = json!({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "auto_mapping": { "base_model_class": "LlamaForCausalLM" },
            "init_lora_weights": "gaussian", "loftq_config": { "loftq_bits": 4 }, "qalora_group_size": 16,
            "megatron_core": "megatron.core", "use_dora": false, "rank_pattern": {}, "modules_to_save": [],
            "layers_to_transform": null, "bias": "none", "a_key_of_tomorrow": null, "exclude_modules": "",
        });
        check(&config).unwrap();
    }
}
