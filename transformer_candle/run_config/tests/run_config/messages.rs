//! The texts that people read when a config is wrong.

use insta::assert_snapshot;
use run_config::{Format, RunConfig, presets};

/// Returns the error message of a wrong config.
fn complaint(text: &str, format: Format, overrides: &[&str]) -> String {
    let overrides: Vec<_> = overrides.iter().map(|&text| text.to_owned()).collect();
    RunConfig::parse(text, format, &overrides).unwrap_err().to_string()
}

fn yaml(text: &str) -> String {
    complaint(text, Format::Yaml, &[])
}

#[test]
fn every_problem_of_a_file_is_reported_at_once() {
    let text = "
model: {hidden_size: 100, intermediate_size: wide, num_layer: 4, num_attention_heads: 3}
data: {sequence_length: 256, batch_size: 3, sequences_per_step: 8}
optimizer: {learning_rate: '3e-4', beta2: 1.0}
learning_rate: 3e-4
scheduler: {strategy: cosin, warmup_steps: 700, total_steps: 600, max_lr: 1e-3}
runtime: {precision: fp16, memory_limit: 24XB, device: gpu, logging: {tensorboard: yes}}
";
    assert_snapshot!(yaml(text), @r#"
    the config: 14 problems
      scheduler.max_lr: is 0.001, but the peak is `optimizer.learning_rate`; write it there and remove this key
      learning_rate: is an unknown key; did you mean `optimizer.learning_rate`?
      model.num_layer: is an unknown key; did you mean `model.num_layers`?
      model.intermediate_size: is "wide", but must be an integer from 1 to 1048576
      optimizer.learning_rate: is "3e-4", but must be a number greater than 0 and at most 1; remove the quotes: 3e-4
      optimizer.beta2: is 1.0, but must be a number of at least 0 and less than 1
      scheduler.strategy: is "cosin", but must be one of `cosine`, `linear`, `constant`, `wsd`; did you mean `cosine`?
      runtime.device: is "gpu", but must be `auto`, `cpu`, `cuda` or `cuda:N` with a device number N
      runtime.precision: is "fp16", but must be one of `fp32`, `bf16`, `fp8`; did you mean `bf16`?
      runtime.memory_limit: is "24XB", but must be an amount of memory such as `24GB` or `30GiB`
      runtime.logging.tensorboard: is "yes", but must be true or false; write true
      data.batch_size: is 3, which does not divide data.sequences_per_step 8; 2 would
      model.num_attention_heads: is 3, which does not divide model.hidden_size 100; 2 would
      scheduler.warmup_steps: is 700, not less than scheduler.total_steps 600; 30 is usual
    "#);
}

#[test]
fn an_empty_file_says_what_a_config_needs() {
    assert_snapshot!(yaml(""), @r"
    the config: 7 problems
      model.hidden_size: is missing; it must be an integer from 2 to 65536
      model.intermediate_size: is missing; it must be an integer from 1 to 1048576
      model.num_layers: is missing; it must be an integer from 1 to 1024
      model.num_attention_heads: is missing; it must be an integer from 1 to 1024
      data.sequence_length: is missing; it must be an integer from 2 to 1048576
      data.sequences_per_step: is missing: how many sequences make an optimizer step; give it, or batch_size and gradient_accumulation_steps
      scheduler.total_steps: is missing: how long to train; give it (20 tokens per parameter are usual) or scheduler.total_epochs
    ");
}

#[test]
fn keys_and_values_cannot_write_to_the_terminal() {
    assert_snapshot!(yaml("\"mo\\e[31m\\ndel\": 1\nmodel: {}\nruntime: {device: \"\\e[31m\"}").lines().filter(|line| line.contains("31m")).collect::<String>(), @r#"  mo\u{1b}[31m\ndel: is an unknown key; the keys here are model, lora, tokenizer, data, optimizer, scheduler, stages, runtime  runtime.device: is "\u001b[31m", but must be `auto`, `cpu`, `cuda` or `cuda:N` with a device number N"#);
}

#[test]
fn broken_yaml_says_where() {
    assert_snapshot!(yaml("model:\n  hidden_size: 1\n  hidden_size: 2\n"), @"the config: is not valid YAML: duplicate mapping key: hidden_size not allowed here at line 3, column 3");
    assert_snapshot!(yaml("model:\n\thidden_size: 1\n"), @"the config: is not valid YAML: tabs disallowed within this context (block indentation) at line 2, column 2");
    assert_snapshot!(yaml("model: [1, 2\n"), @"the config: is not valid YAML: unclosed bracket '[' at line 1, column 8");
    assert_snapshot!(yaml("model: {a: 1}\n---\nmodel: {}\n"), @"the config: is not valid YAML: only single YAML document expected but multiple found at line 3, column 1");
    assert_snapshot!(yaml("- 1\n"), @"the config: is a list, but must be sections such as `model:` and `data:`");
    assert_snapshot!(yaml(&"[".repeat(100)), @"the config: is not valid YAML: recursion limit exceeded at line 1, column 33");
    assert_snapshot!(yaml("a: &x [1]\nb: *y\n"), @"the config: is not valid YAML: reference to unknown value at line 2, column 4");
}

#[test]
fn broken_toml_says_where() {
    let toml = |text| complaint(text, Format::Toml, &[]);
    assert_snapshot!(toml("[model]\nhidden_size = 1\nhidden_size = 2\n"), @"the config: is not valid TOML: duplicate key at line 3, column 1");
    assert_snapshot!(toml("[model\n"), @"the config: is not valid TOML: unclosed table, expected `]` at line 1, column 7");
}

#[test]
fn broken_json_says_where() {
    let json = |text| complaint(text, Format::Json, &[]);
    assert_snapshot!(json("{\"model\": {\n  \"num_layers\": 1,\n  \"num_layers\": 2}}"), @"the config: is not valid JSON: the key `num_layers` stands here twice at line 3, column 18");
    assert_snapshot!(json("{\"model\": "), @"the config: is not valid JSON: EOF while parsing a value at line 1, column 10");
    assert_snapshot!(json("{\"model\": 1e999}"), @"the config: is not valid JSON: number out of range at line 1, column 15");
}

#[test]
fn a_wrong_override_is_named_as_one() {
    let complain = |text| complaint(presets()[0].text, Format::Yaml, &[text]);
    assert_snapshot!(complain("optimizer.learning_rat=1e-3"), @"the config: optimizer.learning_rat: is an unknown key (given by --override); did you mean `optimizer.learning_rate`?");
    assert_snapshot!(complain("optimizer.learning_rate=-1"), @"the config: optimizer.learning_rate: is -1, but must be a number greater than 0 and at most 1 (given by --override)");
    assert_snapshot!(complain("optimizer.learning_rate"), @r#"the config: --override: "optimizer.learning_rate" is not of the form section.key=value"#);
    assert_snapshot!(complain("optimizer=3"), @"the config: optimizer: is 3, but must be a section with keys such as `algorithm`, `learning_rate`, `weight_decay` (given by --override)");
    assert_snapshot!(complain("model.hidden_size.width=3"), @"the config: model.hidden_size.width: `hidden_size` is a value, it has no keys of its own");
    assert_snapshot!(complain("tokenizer.tokenizer_json=@x"), @r#"the config: tokenizer.tokenizer_json: the value of the override "@x" is not valid YAML: unexpected character: `@' at line 1, column 1; put a string in quotes"#);
    assert_snapshot!(complain("runtime.seed="), @"the config: runtime.seed: has an override without a value; write null to leave the key out");
    assert_snapshot!(complain("=3"), @r#"the config: --override: "=3" is not of the form section.key=value"#);
}
