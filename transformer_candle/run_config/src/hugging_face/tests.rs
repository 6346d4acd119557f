#![allow(clippy::unwrap_used)]

use serde_json::json;

use super::*;

/// The `config.json` of Llama 3.2 1B, as published.
fn llama3() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false, "mlp_bias": false,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
        "max_position_embeddings": 131_072, "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"
        },
        "tie_word_embeddings": true, "vocab_size": 128_256
    })
}

fn config_with(key: &str, value: Value) -> Result<ModelConfig, Problem> {
    let mut config = llama3();
    config[key] = value;
    ModelConfig::from_hugging_face(&config)
}

#[test]
fn llama_3_is_read_with_its_frequency_scaling() {
    let model = ModelConfig::from_hugging_face(&llama3()).unwrap();
    assert_eq!((model.vocab_size, model.head_dim, model.num_key_value_heads), (Some(128_256), Some(64), 8));
    let scaling = model.rope_scaling;
    assert_eq!(scaling.rope_type, RopeType::Llama3);
    assert_eq!((scaling.factor, scaling.original_max_position_embeddings), (32.0, 8192));
}

#[test]
fn absent_keys_have_the_defaults_of_transformers() {
    let mut config = llama3();
    let optional = ["rope_scaling", "rope_theta", "head_dim", "num_key_value_heads", "attention_bias", "hidden_act"];
    for key in optional.into_iter().chain(["rms_norm_eps", "sliding_window"]) {
        config.as_object_mut().unwrap().remove(key);
    }
    let read = |model_type: &str| {
        let mut config = config.clone();
        config["model_type"] = json!(model_type);
        ModelConfig::from_hugging_face(&config)
    };
    let model = read("llama").unwrap();
    assert_eq!((model.rope_theta, model.head_dim, model.num_key_value_heads), (10_000.0, Some(64), 32));
    assert_eq!((model.rope_scaling, model.norm_epsilon), (RopeScalingConfig::default(), 1e-6));
    let mistral = read("mistral").unwrap();
    assert_eq!((mistral.num_key_value_heads, mistral.max_position_embeddings), (8, 4096));
    assert_eq!(read("qwen3").unwrap().head_dim, Some(128));
}

#[test]
fn transformers_5_spells_the_rotary_embedding_as_rope_parameters() {
    let mut config = llama3();
    let mut rope = config.as_object_mut().unwrap().remove("rope_scaling").unwrap();
    rope["rope_theta"] = config.as_object_mut().unwrap().remove("rope_theta").unwrap();
    config["rope_parameters"] = rope;
    let as_published = ModelConfig::from_hugging_face(&llama3()).unwrap();
    assert_eq!(ModelConfig::from_hugging_face(&config).unwrap(), as_published);
}

#[test]
fn a_sliding_window_limits_the_context() {
    let read = |model_type: &str, keys: Value| {
        let mut config = llama3();
        config["model_type"] = json!(model_type);
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        ModelConfig::from_hugging_face(&config).map(|model| model.max_position_embeddings)
    };
    for (model_type, keys, context) in [
        ("mistral", json!({ "sliding_window": null }), 131_072),
        ("mistral", json!({ "sliding_window": 131_072 }), 131_072),
        ("mistral", json!({ "sliding_window": 4096 }), 4096),
        ("llama", json!({ "sliding_window": 4096 }), 131_072),
        ("qwen2", json!({ "sliding_window": 4096, "use_sliding_window": false }), 131_072),
        ("qwen2", json!({ "sliding_window": 4096, "use_sliding_window": true, "max_window_layers": 16 }), 131_072),
        ("qwen3", json!({ "sliding_window": 4096, "use_sliding_window": true, "max_window_layers": 15 }), 4096),
        ("qwen3", json!({ "use_sliding_window": true, "layer_types": ["full_attention"] }), 131_072),
        ("qwen3", json!({ "use_sliding_window": true, "layer_types": ["sliding_attention"] }), 4096),
    ] {
        assert_eq!(read(model_type, keys.clone()), Ok(context), "{model_type} {keys}");
    }
    assert_eq!(read("qwen2", json!({ "layer_types": ["sliding_attention"] })).unwrap_err().path, "layer_types");
}

#[test]
fn other_spellings_describe_the_same_model() {
    let published = ModelConfig::from_hugging_face(&llama3()).unwrap();
    let rope = |change: Value| {
        let mut rope = llama3()["rope_scaling"].clone();
        rope.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        rope
    };
    for (key, value) in [
        ("rope_scaling", rope(json!({ "type": "llama3" }))),
        ("rope_scaling", rope(json!({ "rope_type": null, "type": "llama3" }))),
        ("rope_parameters", json!({ "rope_type": "default", "rope_theta": 1e4 })),
        ("hidden_act", json!("swish")),
        ("torch_dtype", json!("bfloat16")),
        ("pretraining_tp", json!(1)),
    ] {
        assert_eq!(config_with(key, value.clone()).as_ref(), Ok(&published), "{key}: {value}");
    }
    let unscaled = config_with("rope_scaling", Value::Null).unwrap();
    let absent =
        [json!({}), json!({ "type": "default" }), json!({ "type": null }), json!({ "type": "dynamic", "factor": 2.0 })];
    for value in absent.into_iter().chain([json!({ "rope_type": "linear", "factor": 1.0 })]) {
        assert_eq!(config_with("rope_scaling", value.clone()).as_ref(), Ok(&unscaled), "{value}");
    }
    let whole = config_with("rope_scaling", rope(json!({ "original_max_position_embeddings": null }))).unwrap();
    assert_eq!(whole.rope_scaling.original_max_position_embeddings, 131_072);
}

#[test]
fn biases_matter_only_to_architectures_that_read_them() {
    let read = |model_type: &str, key: &str| {
        let mut config = llama3();
        (config["model_type"], config[key]) = (json!(model_type), json!(true));
        ModelConfig::from_hugging_face(&config).map(|_| ())
    };
    for (model_type, key, is_read) in [
        ("llama", "attention_bias", true),
        ("llama", "mlp_bias", true),
        ("mistral", "attention_bias", false),
        ("qwen2", "attention_bias", false),
        ("qwen2", "mlp_bias", false),
        ("qwen3", "attention_bias", true),
    ] {
        assert_eq!(read(model_type, key).is_err(), is_read, "{model_type} {key}");
    }
}

fn llama3_scaling(low: f64, high: f64) -> Value {
    json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": 8192
    })
}

#[test]
fn features_that_do_not_run_here_are_refused_by_their_key() {
    let changes = [
        ("model_type", json!("gpt2")),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
        ("hidden_act", json!("gelu")),
        ("attention_bias", json!(true)),
        ("mlp_bias", json!(true)),
        ("num_key_value_heads", json!(3)),
        ("num_attention_heads", json!(0)),
        ("hidden_size", json!("large")),
        ("intermediate_size", json!(-1)),
        ("head_dim", json!(5)),
        ("rope_theta", json!(0.5)),
        ("partial_rotary_factor", json!(0.5)),
        (
            "rope_scaling",
            json!({ "rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0] }),
        ),
        ("rope_scaling", json!({ "rope_type": "llama3", "factor": 2.0 })),
        ("rope_scaling", llama3_scaling(4.0, 4.0)),
        ("rope_scaling", llama3_scaling(f64::from(f32::MIN), 4.0)),
        ("quantization_config", json!({ "bits": 4 })),
    ];
    for (key, value) in changes {
        assert_eq!(config_with(key, value).unwrap_err().path, key);
    }
}

#[test]
fn a_rotary_embedding_that_does_not_run_here_is_named() {
    let factors = json!([1.0, 2.0]);
    for (key, kind, rope) in [
        ("rope_scaling", "yarn", json!({ "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64 })),
        ("rope_scaling", "linear", json!({ "type": "linear", "factor": 2.0 })),
        (
            "rope_scaling",
            "longrope",
            json!({ "rope_type": "longrope", "short_factor": factors, "long_factor": factors }),
        ),
        ("rope_scaling", "su", json!({ "type": "su", "short_factor": factors, "long_factor": factors })),
        ("rope_scaling", "mrope", json!({ "type": "mrope", "mrope_section": [16, 24, 24] })),
        ("rope_parameters", "yarn", json!({ "rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0 })),
    ] {
        let mut config = llama3();
        config.as_object_mut().unwrap().remove("rope_scaling");
        config[key] = rope;
        let refused = ModelConfig::from_hugging_face(&config).unwrap_err().sentence();
        let expected = format!(
            "`{key}` is of type `{kind}`; only `default`, `llama3` and, up to max_position_embeddings, `dynamic`"
        );
        assert!(refused.contains(&expected), "{refused}");
    }
}

#[test]
fn a_foreign_architecture_is_refused_by_what_it_has() {
    let supported_models = "the models that run here are `llama`, `mistral`, `qwen2`, `qwen3`";
    let refused = |config: Value| ModelConfig::from_hugging_face(&config).unwrap_err().sentence();
    for (config, lacking) in [
        (json!({ "model_type": "mixtral", "hidden_act": "silu", "num_local_experts": 8 }), "a mixture of experts"),
        (json!({ "model_type": "qwen3_moe", "num_experts": 128 }), "a mixture of experts"),
        (json!({ "model_type": "mllama", "vision_config": {}, "text_config": {} }), "an encoder of images"),
        (json!({ "model_type": "phi", "layer_norm_eps": 1e-5 }), "LayerNorm instead of RMSNorm"),
        (json!({ "model_type": "gpt2", "n_embd": 768, "layer_norm_epsilon": 1e-5 }), "LayerNorm instead of RMSNorm"),
        (json!({ "model_type": "gemma2", "final_logit_softcapping": 30.0 }), "soft-capped logits"),
        (json!({ "model_type": "gemma", "hidden_act": "gelu" }), "the activation `gelu`"),
    ] {
        let model_type = config["model_type"].as_str().unwrap().to_owned();
        assert_eq!(refused(config), format!("`model_type` is `{model_type}`, which has {lacking}; {supported_models}"));
    }
    let phi3 = json!({ "model_type": "phi3", "hidden_act": "silu" });
    assert_eq!(
        refused(phi3),
        format!("`model_type` is `phi3`, an architecture that does not run here; {supported_models}")
    );
    assert_eq!(refused(json!({})), format!("does not say its `model_type`; {supported_models}"));
}

#[test]
fn absurd_sizes_are_refused_by_their_key() {
    let keys = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"];
    for (key, size) in keys.iter().flat_map(|key| [1_u64 << 40, 1 << 62, u64::MAX - 1].map(|size| (*key, size))) {
        let problem = config_with(key, json!(size)).unwrap_err();
        assert_eq!(problem.path, key);
        assert!(problem.message.contains(&format!("is {size}")), "{problem}");
    }
    let problem = config_with("max_position_embeddings", json!(1_u64 << 50)).unwrap_err();
    assert!(problem.message.contains("at most 1073741824"));
}

#[test]
fn missing_sizes_are_those_of_transformers() {
    let size = |model_type: &str| {
        let model = ModelConfig::from_hugging_face(&json!({ "model_type": model_type })).unwrap();
        (model.vocab_size.unwrap(), model.intermediate_size, model.max_position_embeddings)
    };
    assert_eq!(size("llama"), (32_000, 11_008, 2048));
    assert_eq!(size("mistral"), (32_000, 14_336, 4096));
    assert_eq!(size("qwen2"), (151_936, 22_016, 32_768));
    assert_eq!(size("qwen3"), (151_936, 22_016, 32_768));
}
