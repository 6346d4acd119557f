//! Every mistake of a config is refused with the name of its key.

use run_config::{BatchSize, Format, RunConfig, presets};

/// Key of the smoke config, a value it may not have, and a word that the message must hold.
const BAD_VALUES: [(&str, &str, &str); 130] = [
    ("model.vocab_size", "0", "from 1"),
    ("model.vocab_size", "1e9", "16777216"),
    ("model.vocab_size", "many", "integer"),
    ("model.hidden_size", "0", "from 2"),
    ("model.hidden_size", "191", "divide"),
    ("model.hidden_size", "-192", "from 2"),
    ("model.hidden_size", "192.5", "integer"),
    ("model.hidden_size", "\"192\"", "remove the quotes"),
    ("model.hidden_size", "99999999999999999999999", "65536"),
    ("model.hidden_size", "[192]", "a list"),
    ("model.hidden_size", "null", "missing"),
    ("model.hidden_size", "{a: 1}", "a section"),
    ("model.hidden_size", ".inf", ".inf"),
    ("model.hidden_size", "true", "integer"),
    ("model.hidden_size", "1990", "divide"),
    ("model.hidden_size", "66", "odd"),
    ("model.intermediate_size", "0", "from 1"),
    ("model.intermediate_size", "2e7", "1048576"),
    ("model.num_layers", "0", "from 1"),
    ("model.num_layers", "5000", "1024"),
    ("model.num_attention_heads", "0", "from 1"),
    ("model.num_attention_heads", "5", "divide"),
    ("model.num_key_value_heads", "0", "from 1"),
    ("model.num_key_value_heads", "4", "divide"),
    ("model.num_key_value_heads", "12", "divide"),
    ("model.rope_theta", "0", "greater than 1"),
    ("model.rope_theta", ".nan", ".nan"),
    ("model.norm_epsilon", "0", "greater than 0"),
    ("model.norm_epsilon", "1", "at most 0.1"),
    ("model.tie_embeddings", "no", "write false"),
    ("model.tie_embeddings", "1", "true or false"),
    ("model.init_std", "-0.02", "greater than 0"),
    ("model.attn_dropout", "0.1", "dropout"),
    ("model.residual_dropout", "0.1", "dropout"),
    ("model.rope_mode", "off", "always on"),
    ("tokenizer.tokenizer_json", "\"\"", "empty"),
    ("tokenizer.tokenizer_json", "3", "quotes"),
    ("tokenizer.tokenizer_json", "[a.json]", "a string"),
    ("tokenizer.tokenizer_json", "\"a\\0b\"", "NUL character"),
    ("tokenizer.special_tokens", "[a, 3]", "quotes"),
    ("tokenizer.special_tokens", "[a, a]", "twice"),
    ("tokenizer.special_tokens", "{a: 1}", "list"),
    ("data.train_shards", "corpus.txt", "write a list"),
    ("data.train_shards", "[a.txt, null]", "must be a string"),
    ("data.train_shards", "[a.txt, \" \"]", "empty"),
    ("data.mixture", "fineweb", "a list"),
    ("data.mixture", "[fineweb]", "a section with the keys dataset"),
    ("data.mixture", "[{dataset: a/b}]", "data.mixture[0].weight: is missing"),
    ("data.mixture", "[{dataset: a/b, weight: 0}]", "greater than 0"),
    ("data.mixture", "[{dataset: a/b, weight: .inf}]", "data.mixture[0].weight"),
    ("data.mixture", "[{dataset: a/b, wieght: 1}]", "data.mixture[0].weight"),
    ("data.mixture", "[{weight: 1}]", "names no text"),
    ("data.mixture", "[{dataset: a/b, shards: [c.txt], weight: 1}]", "both"),
    ("data.mixture", "[{shards: [c.txt], revision: abc, weight: 1}]", "no config or revision"),
    ("data.mixture", "[{shards: c.txt, weight: 1}]", "write a list"),
    ("data.mixture", "[{shards: [3], weight: 1}]", "data.mixture[0].shards[0]"),
    ("data.validation_shards", "7", "list"),
    ("data.text_column", "\"\"", "empty"),
    ("data.sequence_length", "1", "from 2"),
    ("data.sequence_length", "1e9", "1048576"),
    ("runtime.seed", "9223372036854775808", "from 0 to 9223372036854775807"),
    ("data.bos", "yes", "`auto`, true or false"),
    ("data.bos", "1", "`auto`, true or false"),
    ("data.batch_size", "0", "auto"),
    ("data.batch_size", "-1", "auto"),
    ("data.batch_size", "1.5", "auto"),
    ("data.batch_size", "automatic", "auto"),
    ("data.batch_size", "3", "divide"),
    ("data.batch_size", "32", "divide"),
    ("data.gradient_accumulation_steps", "0", "from 1"),
    ("data.gradient_accumulation_steps", "3", "divide"),
    ("data.sequences_per_step", "0", "from 1"),
    ("data.shuffle_buffer_size", "0", "from 1"),
    ("data.num_workers", "0", "from 1"),
    ("data.num_workers", "all", "`auto`"),
    ("data.tokens_per_step", "0", "from 1"),
    ("data.tokens_per_step", "5000", "4864 or 5120 would be"),
    ("data.tokens_per_step", "100", "256 would be"),
    ("data.tokens_per_step", "1e12", "at most 1048576 sequences"),
    ("data.cache_dir", "true", "a string"),
    ("data.held_out_fraction", "0", "greater than 0"),
    ("data.held_out_fraction", "0.9", "at most 0.5"),
    ("optimizer.algorithm", "sgd", "adamw"),
    ("optimizer.algorithm", "7", "adamw"),
    ("optimizer.learning_rate", "0", "greater than 0"),
    ("optimizer.learning_rate", "3", "at most 1"),
    ("optimizer.learning_rate", "1e999", ".inf"),
    ("optimizer.learning_rate", "fast", "a number"),
    ("optimizer.weight_decay", "-0.1", "from 0"),
    ("optimizer.beta1", "1", "less than 1"),
    ("optimizer.beta2", "-0.5", "at least 0"),
    ("optimizer.epsilon", "0", "greater than 0"),
    ("optimizer.max_grad_norm", "0", "null for none"),
    ("optimizer.z_loss", "-0.1", "from 0"),
    ("optimizer.embedding_learning_rate_scale", "0", "greater than 0"),
    ("runtime.utilization_every", "0s", "null for no samples"),
    ("runtime.evaluation.prompts", "The", "write a list"),
    ("runtime.evaluation.prompts", "[\"\"]", "an empty string"),
    ("runtime.evaluation.prompt_tokens", "0", "from 1"),
    ("runtime.evaluation.prompt_temperature", "-1", "from 0"),
    ("runtime.evaluation.patience", "0", "null for none"),
    ("runtime.evaluation.min_delta", "-1", "from 0"),
    ("model.head_dim", "33", "even size"),
    ("model.architecture", "qwen", "one of `llama`"),
    ("model.rope_scaling.low_freq_factor", "4.0", "not less than high_freq_factor"),
    ("model.rope_scaling.factor", "0.5", "from 1"),
    ("model.rope_scaling.rope_type", "yarn", "one of `default`, `llama3`"),
    ("model.base_hidden_size", "256", "tie_embeddings: false"),
    ("scheduler.strategy", "cosin", "did you mean `cosine`"),
    ("scheduler.strategy", "linear_warmup", "did you mean `linear`"),
    ("scheduler.warmup_steps", "-1", "from 0"),
    ("scheduler.warmup_steps", "600", "total_steps 260"),
    ("scheduler.total_steps", "0", "from 1"),
    ("scheduler.total_steps", "null", "missing"),
    ("scheduler.total_epochs", "2", "total_steps"),
    ("scheduler.min_lr", "0.5", "more than"),
    ("scheduler.decay_fraction", "0", "greater than 0"),
    ("scheduler.batch_warmup_steps", "-1", "from 0"),
    ("scheduler.batch_warmup_start", "5000", "more than data.sequences_per_step"),
    ("scheduler.max_lr", "1e-3", "optimizer.learning_rate"),
    ("runtime.device", "gpu", "cuda:N"),
    ("runtime.device", "cuda:x", "cuda:N"),
    ("runtime.seed", "-1", "from 0"),
    ("runtime.precision", "fp16", "bf16"),
    ("runtime.threads", "0", "from 1"),
    ("runtime.memory_limit", "24 parsecs", "24GB"),
    ("runtime.memory_limit", "0", "24GB"),
    ("runtime.log_every_n_steps", "0", "from 1"),
    ("runtime.activation_recompute", "some", "selective"),
    ("runtime.activation_recompute", "full", "one of"),
];

/// Bad values, as in [`BAD_VALUES`], of keys in the sections inside `runtime`.
const BAD_RUNTIME_VALUES: [(&str, &str, &str); 13] = [
    ("runtime.checkpoint", "5", "section"),
    ("runtime.checkpoint.every_n_steps", "0", "from 1"),
    ("runtime.checkpoint.max_keep", "0", "from 1"),
    ("runtime.checkpoint.every_n_epochs", "1", "every_n_steps"),
    ("runtime.evaluation.every_n_steps", "0", "null for none"),
    ("runtime.evaluation.every_n_epochs", "1", "every_n_steps"),
    ("runtime.evaluation.max_batches", "0", "from 1"),
    ("runtime.evaluation.best.max_keep", "0", "from 1"),
    ("runtime.logging.tensorboard", "1", "true or false"),
    ("runtime.divergence_guard.max_skipped_steps", "0", "from 1"),
    ("runtime.divergence_guard.max_loss_increase", "-1", "greater than 0"),
    ("runtime.divergence_guard.window_steps", "0", "from 1"),
    ("runtime.logging.tensorboard", "on", "write true"),
];

/// Keys that do not exist, and the one that was meant.
const UNKNOWN_KEYS: [(&str, &str); 14] = [
    ("model.hiden_size", "model.hidden_size"),
    ("model.num_layer", "model.num_layers"),
    ("model.n_heads", "the keys here are"),
    ("model.learning_rate", "optimizer.learning_rate"),
    ("modle.hidden_size", "model"),
    ("learning_rate", "optimizer.learning_rate"),
    ("data.batchsize", "data.batch_size"),
    ("data.seq_length", "data.sequence_length"),
    ("optimizer.lr", "the keys here are"),
    ("optimizer.weight_deacy", "optimizer.weight_decay"),
    ("scheduler.warmup", "scheduler.warmup_steps"),
    ("runtime.checkpoints.max_keep", "runtime.checkpoint"),
    ("runtime.checkpoint.every_n_step", "runtime.checkpoint.every_n_steps"),
    ("runtime.logging.tensorbord", "runtime.logging.tensorboard"),
];

/// Overrides that are wrong only together, the key that is named, and a word of the message.
const BAD_TOGETHER: [(&[&str], &str, &str); 13] = [
    (&["data.tokens_per_step=8192", "data.sequences_per_step=16"], "data.tokens_per_step", "sequences_per_step is 16"),
    (
        &["runtime.evaluation.patience=3", "runtime.evaluation.every_n_steps=null"],
        "runtime.evaluation.patience",
        "nothing is evaluated",
    ),
    (
        &["data.batch_size=4", "data.gradient_accumulation_steps=4", "data.sequences_per_step=8"],
        "data.sequences_per_step",
        "= 16",
    ),
    (
        &["data.batch_size=65536", "data.gradient_accumulation_steps=65536"],
        "data.gradient_accumulation_steps",
        "at most",
    ),
    (&["data.batch_size=auto", "data.sequences_per_step=null"], "data.sequences_per_step", "missing"),
    (&["model.max_position_embeddings=128"], "data.sequence_length", "max_position_embeddings 128"),
    (&["scheduler.strategy=wsd", "scheduler.decay_steps=590"], "scheduler.decay_steps", "do not fit"),
    (&["scheduler.strategy=wsd", "scheduler.decay_fraction=1"], "scheduler.decay_fraction", "do not fit"),
    (&["scheduler.total_steps=null", "scheduler.total_epochs=1"], "scheduler.strategy", "beforehand"),
    (
        &["data.mixture=[{dataset: a/b, weight: 1}]", "data.train_shards=[c.txt]"],
        "data.train_shards",
        "put the files into the mixture",
    ),
    (
        &[
            "data.mixture=[{dataset: a/b, weight: 1}]",
            "scheduler.total_steps=null",
            "scheduler.total_epochs=1",
            "scheduler.strategy=constant",
        ],
        "scheduler.total_epochs",
        "end at different times",
    ),
    (&["tokenizer.vocab=vocab.json"], "tokenizer.merges", "give both"),
    (&["tokenizer.merges=merges.txt"], "tokenizer.vocab", "give both"),
];

/// The problems of the smoke config with these overrides, as `(path, text)`.
fn problems(overrides: &[&str]) -> Vec<(String, String)> {
    let overrides: Vec<_> = overrides.iter().map(|&text| text.to_owned()).collect();
    match RunConfig::parse(presets()[0].text, Format::Yaml, &overrides) {
        Ok(_) => Vec::new(),
        Err(error) => error.problems.iter().map(|problem| (problem.path.clone(), problem.to_string())).collect(),
    }
}

/// Whether some problem is about the key and holds the word. Rules between keys may name the other
/// key of a pair.
fn names(problems: &[(String, String)], key: &str, word: &str) -> bool {
    problems.iter().any(|(_, text)| text.contains(key) && text.contains(word))
}

#[test]
fn a_value_out_of_place_is_refused_with_its_key() {
    for (key, value, word) in BAD_VALUES.iter().chain(&BAD_RUNTIME_VALUES) {
        let problems = problems(&[&format!("{key}={value}")]);
        assert!(names(&problems, key, word), "{key}={value} should be refused with {word:?}: {problems:#?}");
    }
}

#[test]
fn an_unknown_key_is_refused_with_the_nearest_one() {
    for (key, suggestion) in UNKNOWN_KEYS {
        let problems = problems(&[&format!("{key}=1")]);
        assert!(
            problems.iter().any(|(path, text)| key.starts_with(path) && text.contains(suggestion)),
            "{key} should suggest {suggestion}: {problems:#?}"
        );
    }
}

#[test]
fn keys_that_contradict_each_other_are_refused() {
    for (overrides, key, word) in BAD_TOGETHER {
        let problems = problems(overrides);
        assert!(names(&problems, key, word), "{overrides:?} should be refused with {key} and {word:?}: {problems:#?}");
        assert_eq!(problems.len(), 1, "{overrides:?} is one mistake: {problems:#?}");
    }
}

#[test]
fn tokens_per_step_is_another_spelling_of_sequences_per_step() {
    let batch = |file: &str, overrides: &[&str]| {
        let text = presets()[0].text.replace("  batch_size: 8\n  sequences_per_step: 16\n", file);
        let overrides: Vec<_> = overrides.iter().map(|&text| text.to_owned()).collect();
        let data = RunConfig::parse(&text, Format::Yaml, &overrides).unwrap().data;
        assert_eq!(data.tokens_per_step, None);
        (data.batch_size, data.gradient_accumulation_steps, data.sequences_per_step)
    };
    let fixed = BatchSize::Fixed;
    let (tokens, sequences) = ("  tokens_per_step: 8192\n", "  batch_size: 8\n  sequences_per_step: 16\n");
    assert_eq!(batch(tokens, &[]), (BatchSize::Auto, None, 32));
    assert_eq!(batch("  tokens_per_step: 8192\n  sequences_per_step: 32\n", &[]), (BatchSize::Auto, None, 32));
    assert_eq!(batch("  batch_size: 4\n  tokens_per_step: 8192\n", &[]), (fixed(4), Some(8), 32));
    assert_eq!(batch(tokens, &["data.sequence_length=512"]), (BatchSize::Auto, None, 16));
    assert_eq!(batch(tokens, &["data.sequences_per_step=4"]), (BatchSize::Auto, None, 4));
    assert_eq!(batch(tokens, &["data.batch_size=2"]), (fixed(2), Some(16), 32));
    assert_eq!(batch(tokens, &["data.batch_size=2", "data.gradient_accumulation_steps=3"]), (fixed(2), Some(3), 6));
    assert_eq!(batch(sequences, &["data.tokens_per_step=8192"]), (fixed(8), Some(4), 32));
    assert_eq!(batch(sequences, &["data.tokens_per_step=8192", "data.batch_size=2"]), (fixed(2), Some(16), 32));
}

#[test]
fn numbers_may_be_written_as_people_do() {
    for (key, value) in [
        ("scheduler.total_steps", "1e5"),
        ("scheduler.total_steps", "2000.0"),
        ("optimizer.learning_rate", "3e-4"),
        ("optimizer.learning_rate", "0.0003"),
        ("optimizer.weight_decay", "0"),
        ("runtime.seed", "0x2A"),
        ("runtime.memory_limit", "1.5 GiB"),
        ("runtime.memory_limit", "1000000"),
        ("runtime.device", "cuda:1"),
        ("optimizer.max_grad_norm", "null"),
        ("model.rope_theta", "null"),
    ] {
        assert_eq!(problems(&[&format!("{key}={value}")]), [], "{key}={value}");
    }
}

#[test]
fn one_mistake_is_one_problem() {
    for (key, value, _) in BAD_VALUES.iter().chain(&BAD_RUNTIME_VALUES) {
        let problems = problems(&[&format!("{key}={value}")]);
        assert_eq!(problems.len(), 1, "{key}={value}: {problems:#?}");
    }
}

#[test]
fn every_bad_value_is_refused_in_every_format() {
    let text = "[model]\nhidden_size = 192\nrope_theta = nan\n[data]\nsequence_length = 2024-01-01\n";
    let toml = RunConfig::parse(text, Format::Toml, &[]).unwrap_err().to_string();
    assert!(
        toml.contains("model.rope_theta: is .nan") && toml.contains("data.sequence_length: is \"2024-01-01\""),
        "{toml}"
    );
    let json = RunConfig::parse("{\"model\": {\"hidden_size\": \"wide\"}}", Format::Json, &[]).unwrap_err().to_string();
    assert!(json.contains("model.hidden_size: is \"wide\""), "{json}");
}

#[test]
fn documents_beyond_the_limits_are_refused_quickly() {
    let nested_json = format!("{}{}", "[".repeat(60), "]".repeat(60));
    let bomb = (1..12).fold("a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned(), |text, level| {
        let references = vec![format!("*a{}", level - 1); 9].join(", ");
        format!("{text}a{level}: &a{level} [{references}]\n")
    });
    let long = format!("# {}\n", "x".repeat(1 << 20));
    for (text, format) in [(nested_json.as_str(), Format::Json), (&bomb, Format::Yaml), (&long, Format::Yaml)] {
        let start = std::time::Instant::now();
        let error = RunConfig::parse(text, format, &[]).unwrap_err().to_string();
        assert!(start.elapsed().as_secs() < 5 && error.lines().count() == 1, "{error}");
    }
}
