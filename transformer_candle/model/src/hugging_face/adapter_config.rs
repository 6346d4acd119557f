//! `adapter_config.json`, as peft reads it.

use std::path::Path;

use run_config::TargetModule;
use serde_json::{Value, json};

use crate::LoraShape;

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
