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

fn changed(key: &str, value: Value) -> Result<ModelConfig, Problem> {
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
    assert_eq!(
        read("mistral").unwrap_err().to_string(),
        "sliding_window: is 4096; attention is not limited to a sliding window here"
    );
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
fn mistral_is_read_unless_its_window_is_shorter_than_its_context() {
    let mistral = |window: Value| {
        let mut config = llama3();
        config["model_type"] = json!("mistral");
        config["sliding_window"] = window;
        ModelConfig::from_hugging_face(&config)
    };
    assert_eq!(mistral(Value::Null).unwrap().architecture, Architecture::Mistral);
    assert_eq!(mistral(json!(131_072)).unwrap().architecture, Architecture::Mistral);
    assert_eq!(mistral(json!(4096)).unwrap_err().path, "sliding_window");
}

#[test]
fn qwen_is_read_unless_it_uses_a_sliding_window() {
    let qwen = |model_type: &str, use_sliding_window: bool| {
        let mut config = llama3();
        config["model_type"] = json!(model_type);
        (config["sliding_window"], config["use_sliding_window"]) = (json!(4096), json!(use_sliding_window));
        config.as_object_mut().unwrap().remove("head_dim");
        ModelConfig::from_hugging_face(&config)
    };
    let [qwen2, qwen3] = ["qwen2", "qwen3"].map(|model_type| qwen(model_type, false).unwrap());
    assert_eq!((qwen2.architecture, qwen2.head_dim), (Architecture::Qwen2, Some(64)));
    assert_eq!((qwen3.architecture, qwen3.head_dim), (Architecture::Qwen3, Some(128)));
    assert_eq!(qwen("qwen2", true).unwrap_err().path, "sliding_window");
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
        ("rope_parameters", json!({ "rope_type": "yarn", "rope_theta": 1e4 })),
        ("rope_scaling", json!({ "type": "linear", "factor": 2.0 })),
        ("rope_scaling", json!({ "rope_type": "llama3", "factor": 2.0 })),
        ("rope_scaling", llama3_scaling(4.0, 4.0)),
        ("rope_scaling", llama3_scaling(f64::from(f32::MIN), 4.0)),
        ("quantization_config", json!({ "bits": 4 })),
    ];
    for (key, value) in changes {
        assert_eq!(changed(key, value).unwrap_err().path, key);
    }
}

#[test]
fn a_foreign_architecture_is_refused_by_what_it_has() {
    let known = "the models that run here are `llama`, `mistral`, `qwen2`, `qwen3`";
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
        assert_eq!(refused(config), format!("`model_type` is `{model_type}`, which has {lacking}; {known}"));
    }
    let phi3 = json!({ "model_type": "phi3", "hidden_act": "silu" });
    assert_eq!(refused(phi3), format!("`model_type` is `phi3`, an architecture that does not run here; {known}"));
    assert_eq!(refused(json!({})), format!("does not say its `model_type`; {known}"));
}

#[test]
fn absurd_sizes_are_refused_by_their_key() {
    let keys = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"];
    for (key, size) in keys.iter().flat_map(|key| [1_u64 << 40, 1 << 62, u64::MAX - 1].map(|size| (*key, size))) {
        let problem = changed(key, json!(size)).unwrap_err();
        assert_eq!(problem.path, key);
        assert!(problem.message.contains(&format!("is {size}")), "{problem}");
    }
    let problem = changed("max_position_embeddings", json!(1_u64 << 50)).unwrap_err();
    assert!(problem.message.contains("at most 1073741824"));
}

#[test]
fn a_missing_size_is_named() {
    let mut config = llama3();
    config.as_object_mut().unwrap().remove("hidden_size");
    assert_eq!(ModelConfig::from_hugging_face(&config).unwrap_err().sentence(), "missing field `hidden_size`");
}
