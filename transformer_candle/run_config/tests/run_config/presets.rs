//! The files of `configs/`, configs of the first version, and keys that follow from others.

use std::fs;
use std::path::Path;

use run_config::{Architecture, BatchSize, Format, RunConfig, ScheduleStrategy, presets};

#[test]
fn every_file_in_configs_loads() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "yaml") {
            RunConfig::load_for_planning(&path, &[]).unwrap();
            let text = fs::read_to_string(&path).unwrap();
            assert_eq!(text.lines().next(), Some("# yaml-language-server: $schema=schema.json"), "{}", path.display());
            names.push(path.file_stem().unwrap().to_str().unwrap().to_owned());
        }
    }
    names.sort();
    let mut embedded: Vec<_> = presets().iter().map(|preset| preset.name).collect();
    embedded.sort_unstable();
    assert_eq!(names, embedded, "every config is a preset");
}

/// Counts the parameters: embedding and head, blocks of attention, feed-forward, two norms and with QK-norm those of the
/// heads, and the last norm.
fn parameters(config: &RunConfig) -> usize {
    let model = &config.model;
    let (width, groups) = (model.hidden_size, model.num_key_value_heads * model.head_size());
    let head_norms = if model.architecture == Architecture::Qwen3 { 2 * model.head_size() } else { 0 };
    let block = 2 * width * width + 2 * width * groups + 3 * width * model.intermediate_size + 2 * width + head_norms;
    let tables = if model.tie_embeddings { 1 } else { 2 };
    tables * model.vocab_size.unwrap() * width + model.num_layers * block + width
}

#[test]
fn the_comments_of_the_presets_count_right() {
    let of = |name: &str| {
        let preset = presets().iter().find(|preset| preset.name == name).unwrap();
        (RunConfig::parse(preset.text, Format::Yaml, &[]).unwrap(), preset.text)
    };
    for (name, count, count_text) in
        [("rtx5090_1b", 1_318_832_128, "1,318,832,128"), ("rtx5090_500m", 630_498_816, "630,498,816")]
    {
        let (config, text) = of(name);
        assert_eq!(parameters(&config), count);
        assert!(text.contains(count_text));
        let tokens = config.scheduler.total_steps.unwrap() as f64 * config.data.tokens_per_step() as f64;
        assert!((tokens / count as f64 - 20.0).abs() < 0.1, "{name} trains on 20 tokens per parameter");
        assert_eq!((config.data.batch_size, config.data.sequences_per_step), (BatchSize::Auto, 64));
    }
    for (name, count, count_text) in [
        ("25m", 25_176_960, "25,176,960"),
        ("125m", 125_856_512, "125,856,512"),
        ("350m", 349_237_760, "349,237,760"),
        ("500m", 502_076_928, "502,076,928"),
        ("1b", 1_036_079_616, "1,036,079,616"),
    ] {
        let (config, text) = of(name);
        assert_eq!(parameters(&config), count, "{name}");
        assert!(text.contains(count_text), "{name}");
        let tokens = config.scheduler.total_steps.unwrap() as f64 * config.data.tokens_per_step() as f64;
        assert!((tokens / count as f64 - 20.0).abs() < 0.1, "{name} trains on 20 tokens per parameter");
        assert_eq!(config.data.batch_size, BatchSize::Auto);
    }
    let (smoke, _) = of("smoke_cpu");
    assert_eq!((smoke.scheduler.warmup_steps, smoke.scheduler.strategy), (13, ScheduleStrategy::Wsd));
}

#[test]
fn configs_of_the_first_version_load() {
    let text = "
model: {hidden_size: 1280, intermediate_size: 5120, num_layers: 16, num_attention_heads: 20, num_key_value_heads: 20,
  max_position_embeddings: 512, attn_dropout: null, residual_dropout: 0.0, rope_mode: null, rope_theta: null}
tokenizer: {tokenizer_json: a/tokenizer.json, vocab: a/vocab.json, merges: a/merges.txt, special_tokens: b/special_tokens.txt}
data: {train_shards: [], validation_shards: [], sequence_length: 512, batch_size: 8, gradient_accumulation_steps: 8,
  shuffle_buffer_size: 32768, num_workers: 6, cache_dir: /workspace/cache}
optimizer: {algorithm: adam_w, learning_rate: 1.8e-4, weight_decay: 0.01, beta1: 0.9, beta2: 0.95, epsilon: 1.0e-8}
scheduler: {strategy: cosine_with_warmup, warmup_steps: 3000, total_steps: 300000, total_epochs: null, min_lr: 1.8e-5, max_lr: null}
runtime:
  seed: 42
  precision: fp32
  log_every_n_steps: 50
  checkpoint: {directory: c, every_n_steps: 1500, every_n_epochs: null, max_keep: 5}
  evaluation: {every_n_steps: 4500, every_n_epochs: null, max_batches: 16, best: {directory: d, max_keep: 2}}
  logging: {enable_stdout: true, tensorboard: /workspace/tensorboard, tensorboard_flush_every_n: 100}
";
    let config = RunConfig::parse(text, Format::Yaml, &[]).unwrap();
    assert_eq!(config.data.sequences_per_step, 64);
    assert_eq!(config.model.rope_theta.to_bits(), 10_000f64.to_bits());
    assert!(config.runtime.logging.tensorboard);
    assert_eq!(config.runtime.logging.tensorboard_directory, Some("/workspace/tensorboard".into()));
}

#[test]
fn batch_keys_follow_from_two_of_them_and_from_overrides() {
    let split = |overrides: &[&str]| {
        let full = "data.batch_size=2 data.gradient_accumulation_steps=4 data.sequences_per_step=8";
        let complete =
            RunConfig::parse(presets()[0].text, Format::Yaml, &full.split(' ').map(str::to_owned).collect::<Vec<_>>())
                .unwrap();
        let overrides: Vec<_> = overrides.iter().map(|&text| text.to_owned()).collect();
        let data = RunConfig::parse(&complete.to_commented_yaml(), Format::Yaml, &overrides).unwrap().data;
        (data.batch_size, data.gradient_accumulation_steps, data.sequences_per_step)
    };
    assert_eq!(split(&[]), (BatchSize::Fixed(2), Some(4), 8));
    assert_eq!(split(&["data.batch_size=4"]), (BatchSize::Fixed(4), Some(2), 8));
    assert_eq!(split(&["data.batch_size=auto"]), (BatchSize::Auto, None, 8));
    assert_eq!(split(&["data.gradient_accumulation_steps=8"]), (BatchSize::Fixed(1), Some(8), 8));
    assert_eq!(split(&["data.sequences_per_step=16"]), (BatchSize::Fixed(2), Some(8), 16));
    assert_eq!(split(&["data.batch_size=3", "data.gradient_accumulation_steps=5"]), (BatchSize::Fixed(3), Some(5), 15));
    assert_eq!(split(&["data.batch_size=null", "data.gradient_accumulation_steps=null"]), (BatchSize::Auto, None, 8));
}
