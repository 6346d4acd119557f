//! The keys of `lora`: what they default to, what they take from adapters, and what cannot work.

use std::fs;
use std::path::Path;

use run_config::{AdapterDescription, BasePrecision, Format, LoraConfig, RunConfig, TargetModule, TargetModules};
use serde_json::{Value, json};
use tempfile::TempDir;

fn base() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({
        "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5
    });
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

fn parsed(base: &Path, lora: &Value) -> Result<RunConfig, String> {
    let config = json!({
        "model": { "init_from": base },
        "lora": lora,
        "runtime": { "precision": "bf16" },
        "data": { "sequence_length": 32, "sequences_per_step": 2 },
        "scheduler": { "total_steps": 10 },
    });
    RunConfig::parse(&config.to_string(), Format::Json, &[]).map_err(|error| error.to_string())
}

/// Adapters of peft with one key changed.
fn adapters(base: &Path, key: &str, value: Value) -> TempDir {
    let mut config = json!({
        "peft_type": "LORA", "base_model_name_or_path": base, "r": 8, "lora_alpha": 16, "lora_dropout": 0.05,
        "target_modules": ["v_proj", "model.layers.0.self_attn.q_proj"], "bias": "none", "modules_to_save": null
    });
    config[key] = value;
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
    folder
}

#[test]
fn without_a_rank_every_weight_trains() {
    let base = base();
    for lora in [json!(null), json!({}), json!({ "rank": null })] {
        assert_eq!(parsed(base.path(), &lora).unwrap().lora, LoraConfig::default());
    }
}

#[test]
fn the_keys_of_lora_are_written_and_read_back() {
    let base = base();
    let config = parsed(base.path(), &json!({ "rank": 8, "target_modules": ["v_proj", "q_proj", "v_proj"] })).unwrap();
    let modules = TargetModules::new([TargetModule::QProj, TargetModule::VProj]);
    assert_eq!((config.lora.alpha, &config.lora.target_modules), (Some(8.0), &modules));
    let reread = RunConfig::parse(&config.to_commented_yaml(), Format::Yaml, &[]).unwrap();
    assert_eq!(reread, config);
    let all = parsed(base.path(), &json!({ "rank": 8, "target_modules": "all-linear" })).unwrap();
    assert_eq!(all.lora.target_modules.modules(), TargetModule::ALL);
}

#[test]
fn a_base_in_fp8_is_multiplied_in_bf16_or_fp8() {
    let base = base();
    let with_precision = |precision: &str| {
        let config = json!({
            "model": { "init_from": base.path() },
            "lora": { "rank": 8, "base_precision": "fp8" },
            "runtime": { "precision": precision },
            "data": { "sequence_length": 32, "sequences_per_step": 2 },
            "scheduler": { "total_steps": 10 },
        });
        RunConfig::parse(&config.to_string(), Format::Json, &[]).map_err(|error| error.to_string())
    };
    for precision in ["bf16", "fp8"] {
        assert_eq!(with_precision(precision).unwrap().lora.base_precision, BasePrecision::Fp8);
    }
    let error = with_precision("fp32").unwrap_err();
    assert!(error.contains("lora.base_precision: is fp8, but runtime.precision is fp32"), "{error}");
    let error = parsed(base.path(), &json!({ "base_precision": "fp8" })).unwrap_err();
    assert!(error.contains("lora.rank: is missing, though lora.base_precision is given"), "{error}");
    let error = parsed(base.path(), &json!({ "rank": 8, "base_precision": "nf4" })).unwrap_err();
    assert!(error.contains("lora.base_precision"), "{error}");
}

#[test]
fn adapters_give_the_keys_that_are_left_out() {
    let base = base();
    let folder = adapters(base.path(), "use_rslora", json!(true));
    let given = json!({ "init_from": folder.path(), "dropout": 0.0, "base_precision": "fp8" });
    let lora = parsed(base.path(), &given).unwrap().lora;
    let target_modules = TargetModules::new([TargetModule::QProj, TargetModule::VProj]);
    let (init_from, rank, alpha) = (Some(folder.path().to_owned()), Some(8), Some(16.0));
    let base_precision = BasePrecision::Fp8;
    let expected = LoraConfig { rank, alpha, dropout: 0.0, target_modules, rslora: true, base_precision, init_from };
    assert_eq!(lora, expected);

    let text = json!({
        "lora": { "init_from": folder.path() },
        "data": { "sequence_length": 32, "sequences_per_step": 2 },
        "scheduler": { "total_steps": 10 },
    });
    let config = RunConfig::parse(&text.to_string(), Format::Json, &[]).unwrap();
    assert_eq!(config.model.init_from.as_deref(), Some(base.path()), "their base is the model");
    assert_eq!(config.model.hidden_size, 64);

    let error = parsed(base.path(), &json!({ "init_from": folder.path(), "alpha": 8.0 })).unwrap_err();
    assert!(error.contains("lora.alpha: is 8.0, but the adapters in"), "{error}");
}

#[test]
fn adapters_that_compute_something_else_are_refused_by_their_key() {
    let base = base();
    for (key, value) in [
        ("peft_type", json!("IA3")),
        ("use_dora", json!(true)),
        ("bias", json!("all")),
        ("modules_to_save", json!(["lm_head"])),
        ("rank_pattern", json!({ "q_proj": 4 })),
        ("target_modules", json!(["embed_tokens"])),
        ("r", json!(0)),
    ] {
        let folder = adapters(base.path(), key, value);
        let error = parsed(base.path(), &json!({ "init_from": folder.path() })).unwrap_err();
        assert!(error.contains("lora.init_from") && error.contains(&format!("`{key}`")), "{error}");
    }
    let config = json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": "all-linear" });
    let description = AdapterDescription::from_json(&config).unwrap();
    assert_eq!(description.lora.target_modules.modules(), TargetModule::ALL);
}
