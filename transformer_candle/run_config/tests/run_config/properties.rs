//! Properties of all configs: what is written reads back the same, and no text makes the reader
//! panic.

use std::path::PathBuf;

use proptest::prelude::*;
use run_config::{
    ActivationRecompute, Architecture, BatchSize, BestConfig, Bos, ByteSize, CheckpointConfig, DataConfig, DataFormat,
    Device, DivergenceGuardConfig, EvaluationConfig, Format, Fp8Recipe, LoggingConfig, MixtureComponent, ModelConfig,
    NEWEST_READING_VERSION, NumWorkers, OnBadFile, OnSaveError, OptimizerConfig, OverlongConversations, Packing,
    Precision, RopeScalingConfig, RunConfig, RuntimeConfig, ScheduleStrategy, SchedulerConfig, SpecialTokens,
    StageConfig, StageStart, TimeSpan, TokenizerConfig, presets,
};

/// A text that a key may hold: not empty, no zero character.
fn text() -> impl Strategy<Value = String> {
    "[^\0]{1,12}".prop_filter("not blank", |text| !text.trim().is_empty())
}

fn path() -> impl Strategy<Value = Option<PathBuf>> {
    proptest::option::of(text().prop_map(PathBuf::from))
}

fn model() -> impl Strategy<Value = ModelConfig> {
    let shape = (1..9usize, 1..5usize, 1..65usize, 1..100_000usize, 1..40usize);
    let rest = (proptest::option::of(1..200_000usize), 1.5..1e9f64, 1e-12..0.1f64, any::<bool>(), 1e-6..1.0f64);
    (shape, rest).prop_map(
        |(
            (groups, queries, half, intermediate_size, num_layers),
            (vocab_size, theta, epsilon, tie_embeddings, std),
        )| ModelConfig {
            init_from: None,
            vocab_size,
            hidden_size: groups * queries * half * 2,
            intermediate_size,
            num_layers,
            num_attention_heads: groups * queries,
            num_key_value_heads: groups,
            max_position_embeddings: 4096,
            rope_theta: theta,
            rope_scaling: RopeScalingConfig::default(),
            architecture: if tie_embeddings { Architecture::Llama } else { Architecture::Mistral },
            head_dim: tie_embeddings.then_some(2 * half),
            norm_epsilon: epsilon,
            tie_embeddings,
            init_std: std,
            base_hidden_size: (!tie_embeddings).then_some(64),
        },
    )
}

fn tokenizer() -> impl Strategy<Value = TokenizerConfig> {
    let list = proptest::collection::btree_set(text(), 0..4)
        .prop_map(|tokens| SpecialTokens::List(tokens.into_iter().collect()));
    let file = text().prop_map(|text| SpecialTokens::File(text.into()));
    let special_tokens = proptest::option::of(prop_oneof![list, file]);
    let pair = proptest::option::of((text(), text()));
    (path(), pair, special_tokens).prop_map(|(tokenizer_json, pair, special_tokens)| {
        let (vocab, merges) = pair.map(|(vocab, merges)| (vocab.into(), merges.into())).unzip();
        TokenizerConfig { tokenizer_json, vocab, merges, special_tokens }
    })
}

/// Sources of a mixture, of the Hub and local.
fn mixture() -> impl Strategy<Value = Vec<MixtureComponent>> {
    let option = || proptest::option::of(text());
    let hub = (text(), option(), option(), option())
        .prop_map(|(dataset, config, split, revision)| (Some(dataset), config, split, revision, Vec::new()));
    let local = proptest::collection::vec(text(), 1..3).prop_map(|shards| (None, None, None, None, shards));
    let component = (prop_oneof![hub, local], option(), option(), 1e-6..1e12_f64).prop_map(
        |((dataset, config, split, revision, shards), name, text_column, weight)| MixtureComponent {
            name,
            dataset,
            config,
            split,
            revision,
            shards,
            text_column,
            weight,
        },
    );
    proptest::collection::vec(component, 0..4)
}

fn data() -> impl Strategy<Value = DataConfig> {
    let shards = || proptest::collection::vec(text(), 0..3);
    let batch = prop_oneof![
        (1..50usize, 1..50usize).prop_map(|(batch, steps)| (BatchSize::Fixed(batch), Some(steps), batch * steps)),
        (1..2000usize).prop_map(|sequences| (BatchSize::Auto, None, sequences)),
    ];
    let workers = prop_oneof![Just(NumWorkers::Auto), (1..=256usize).prop_map(NumWorkers::Fixed)];
    let rest = (text(), 2..=4096usize, 1..1_000_000usize, workers, path(), 1e-6..=0.5f64);
    let network = ((0..1_000_000u64).prop_map(TimeSpan), (1..u64::MAX / 2).prop_map(ByteSize));
    let packing = prop_oneof![Just(Packing::Concat), Just(Packing::Documents)];
    let bos = prop_oneof![Just(Bos::Auto), Just(Bos::Always), Just(Bos::Never)];
    let reading = proptest::option::of(1..=NEWEST_READING_VERSION);
    let local = (shards(), proptest::option::of(text()), proptest::option::of(1..u64::from(u32::MAX)));
    (local, shards(), batch, rest, network, (packing, bos, reading)).prop_map(
        |(local, validation_shards, batch, rest, network, (packing, bos, reading_version))| DataConfig {
            split: local.1.filter(|_| !local.0.is_empty()),
            max_samples: local.2.filter(|_| !local.0.is_empty()),
            train_shards: local.0,
            mixture: Vec::new(),
            validation_shards,
            text_column: rest.0,
            format: DataFormat::Text,
            reading_version,
            on_bad_file: if reading_version.is_some() { OnBadFile::Stop } else { OnBadFile::Skip },
            chat_template: None,
            chat_template_date: None,
            assistant_only_loss: true,
            parse_special_tokens: None,
            overlong_conversations: OverlongConversations::Truncate,
            sequence_length: rest.1,
            packing,
            bos,
            batch_size: batch.0,
            gradient_accumulation_steps: batch.1,
            sequences_per_step: batch.2,
            shuffle_buffer_size: rest.2,
            num_workers: rest.3,
            tokens_per_step: None,
            network_patience: network.0,
            cache_dir: rest.4,
            cache_limit: network.1,
            held_out_fraction: rest.5,
        },
    )
}

fn optimizer_and_scheduler() -> impl Strategy<Value = (OptimizerConfig, SchedulerConfig)> {
    let optimizer =
        (1e-9..=1.0f64, 0.0..=1.0f64, 0.0..1.0f64, 0.0..1.0f64, 1e-12..0.1f64, proptest::option::of(1e-3..1e6f64));
    let strategy =
        prop_oneof![Just(ScheduleStrategy::Cosine), Just(ScheduleStrategy::Linear), Just(ScheduleStrategy::Wsd)];
    let by_steps = (strategy, 2..1_000_000u64).prop_map(|(strategy, steps)| (strategy, Some(steps), None));
    let by_epochs = (1..100u64).prop_map(|epochs| (ScheduleStrategy::Constant, None, Some(epochs)));
    let schedule = (prop_oneof![by_steps, by_epochs], 0.0..1.0f64, 0.01..0.4f64, any::<bool>());
    (optimizer, schedule).prop_map(
        |(optimizer, ((strategy, total_steps, total_epochs), share, decay_fraction, decay))| {
            let scheduler = SchedulerConfig {
                strategy,
                warmup_steps: total_steps.map_or(100, |steps| steps / 3),
                total_steps,
                total_epochs,
                min_lr: optimizer.0 * share,
                decay_steps: decay.then_some(1),
                decay_fraction,
                batch_warmup_steps: total_steps.unwrap_or(0) % 1000,
                batch_warmup_start: decay.then_some(1),
            };
            let (learning_rate, weight_decay, beta1, beta2, epsilon, max_grad_norm) = optimizer;
            (
                OptimizerConfig {
                    learning_rate,
                    weight_decay,
                    beta1,
                    beta2,
                    epsilon,
                    max_grad_norm,
                    ..OptimizerConfig::default()
                },
                scheduler,
            )
        },
    )
}

fn runtime() -> impl Strategy<Value = RuntimeConfig> {
    let device = prop_oneof![Just(Device::Auto), Just(Device::Cpu), (0..8usize).prop_map(Device::Cuda)];
    let recipes = [Fp8Recipe::Auto, Fp8Recipe::Tensorwise, Fp8Recipe::Blockwise, Fp8Recipe::Mxfp8];
    let recipe = proptest::sample::select(recipes.to_vec());
    let precision = prop_oneof![
        Just((Precision::Fp32, Fp8Recipe::default())),
        Just((Precision::Bf16, Fp8Recipe::default())),
        recipe.prop_map(|recipe| (Precision::Fp8, recipe)),
    ];
    let recompute = prop_oneof![
        Just(ActivationRecompute::None),
        Just(ActivationRecompute::Selective),
        Just(ActivationRecompute::Block)
    ];
    let memory = proptest::option::of((1..u64::MAX / 2).prop_map(ByteSize));
    let machine = (device, 0..i64::MAX as u64, precision, proptest::option::of(1..=4096usize), memory, recompute);
    let steps = (1..1000u64, 1..1000u64, proptest::option::of(1..1000u64), 1..1000usize, 1..9usize);
    let guard = (1..1000u64, proptest::option::of(1e-3..1e3f64), 1..1000u64);
    let every = proptest::option::of((1..1_000_000u64).prop_map(TimeSpan));
    let prompts = proptest::collection::vec(text(), 0..3);
    let samples = (prompts, 1..=65_536usize, 0.0..=100.0f64, proptest::option::of(1..1000u64), 0.0..=1000.0f64);
    let paths = (path(), path(), path(), any::<[bool; 2]>());
    (machine, steps, guard, paths, (every, samples)).prop_map(|(machine, steps, guard, paths, (every, samples))| {
        RuntimeConfig {
            device: machine.0,
            seed: machine.1,
            precision: machine.2.0,
            fp8_recipe: machine.2.1,
            threads: machine.3,
            memory_limit: machine.4,
            deterministic: paths.3[1],
            deterministic_reduction: None,
            utilization_every: every,
            log_every_n_steps: steps.0,
            activation_recompute: machine.5,
            divergence_guard: DivergenceGuardConfig {
                max_skipped_steps: guard.0,
                max_loss_increase: guard.1,
                window_steps: guard.2,
            },
            checkpoint: CheckpointConfig {
                directory: paths.0,
                every_n_steps: steps.1,
                max_keep: steps.4,
                on_error: if steps.4 > 1 { OnSaveError::Continue } else { OnSaveError::Stop },
            },
            evaluation: EvaluationConfig {
                every_n_steps: steps.2,
                max_batches: steps.3,
                prompts: samples.0,
                prompt_tokens: samples.1,
                prompt_temperature: samples.2,
                patience: steps.2.and(samples.3),
                min_delta: samples.4,
                best: BestConfig { directory: paths.1, max_keep: steps.4 },
            },
            logging: LoggingConfig { tensorboard: paths.3[0], tensorboard_directory: paths.2 },
        }
    })
}

fn config() -> impl Strategy<Value = RunConfig> {
    (model(), tokenizer(), (data(), mixture()), optimizer_and_scheduler(), runtime(), 0..4_u64).prop_map(
        |(model, tokenizer, (mut data, mixture), (optimizer, scheduler), mut runtime, stages)| {
            // A mixture stands alone and needs a number of steps.
            if scheduler.total_epochs.is_none() && !mixture.is_empty() {
                data = DataConfig { train_shards: Vec::new(), split: None, max_samples: None, mixture, ..data };
            }
            // Virtual shards divide the micro-batches of a step.
            if let (BatchSize::Fixed(sequences), true) = (data.batch_size, stages % 2 == 1) {
                let micro_batches = data.sequences_per_step / sequences;
                runtime.deterministic_reduction = Some(1 << micro_batches.trailing_zeros().min(16));
            }
            let total = scheduler.total_steps.filter(|_| scheduler.batch_warmup_steps == 0).unwrap_or(0);
            let stage = |index| StageConfig {
                steps: Some(total / stages + u64::from(index < total % stages)),
                at: if index > 0 && data.mixture.is_empty() { StageStart::WindowEnd } else { StageStart::NextWindow },
                sequence_length: Some(data.sequence_length),
                sequences_per_step: Some(data.sequences_per_step),
                batch_size: Some(data.batch_size),
                learning_rate: (index == 1).then_some(optimizer.learning_rate / 2.0),
                ..StageConfig::default()
            };
            let stages = (stages > 0 && total >= stages).then(|| (0..stages).map(stage).collect());
            RunConfig { model, tokenizer, data, optimizer, scheduler, runtime, stages, ..RunConfig::default() }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_config_written_as_commented_yaml_reads_back_the_same(config in config()) {
        let text = config.to_commented_yaml();
        let reread = RunConfig::parse(&text, Format::Yaml, &[])
            .map_err(|error| TestCaseError::fail(format!("{error}\n{text}")))?;
        prop_assert_eq!(&reread, &config);
        prop_assert_eq!(reread.to_commented_yaml(), text);
    }

    #[test]
    fn a_config_written_as_json_or_toml_reads_back_the_same(config in config()) {
        let json = serde_json::to_string(&config).unwrap();
        prop_assert_eq!(&RunConfig::parse(&json, Format::Json, &[]).unwrap(), &config);
        let toml = toml::to_string(&config).unwrap();
        let reread = RunConfig::parse(&toml, Format::Toml, &[]).unwrap();
        // TOML cannot write that a key is null, so the keys whose default is a value come back.
        let defaults = RunConfig::default();
        let mut expected = config;
        expected.optimizer.max_grad_norm = expected.optimizer.max_grad_norm.or(defaults.optimizer.max_grad_norm);
        let runtime = &mut expected.runtime;
        runtime.utilization_every = runtime.utilization_every.or(defaults.runtime.utilization_every);
        runtime.evaluation.every_n_steps = runtime.evaluation.every_n_steps.or(defaults.runtime.evaluation.every_n_steps);
        let guard = &mut runtime.divergence_guard;
        guard.max_loss_increase = guard.max_loss_increase.or(defaults.runtime.divergence_guard.max_loss_increase);
        prop_assert_eq!(reread, expected);
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in "\\PC{0,200}", format in 0..3usize) {
        let _ = RunConfig::parse(&text, [Format::Yaml, Format::Toml, Format::Json][format], &[]);
    }

    #[test]
    fn no_text_in_a_config_makes_the_reader_panic(cut in 0..2000usize, junk in "[\\[\\]{}:,&*!|>'\"%@`#?\\-\n\t 0-9a-z.]{0,20}") {
        let mut text = presets()[0].text.to_owned();
        let cut = (0..=cut.min(text.len())).rev().find(|index| text.is_char_boundary(*index)).unwrap_or(0);
        text.insert_str(cut, &junk);
        let _ = RunConfig::parse(&text, Format::Yaml, &[]);
    }

    #[test]
    fn no_override_makes_the_reader_panic(key in "[a-z_.]{0,30}", value in "\\PC{0,20}") {
        let _ = RunConfig::parse(presets()[0].text, Format::Yaml, &[format!("{key}={value}"), value, format!("data.{key}={key}")]);
    }

    #[test]
    fn any_number_as_any_key_is_accepted_or_refused_by_name(index in 0..60usize, number in any::<f64>()) {
        let schema = RunConfig::json_schema();
        let mut keys = Vec::new();
        leaves(&schema, "", &mut keys);
        let key = &keys[index % keys.len()];
        if let Err(error) = RunConfig::parse(presets()[0].text, Format::Yaml, &[format!("{key}={number:?}")]) {
            prop_assert!(error.to_string().contains(key.rsplit('.').next().unwrap()), "{key}={number:?}: {error}");
        }
    }
}

fn leaves(schema: &serde_json::Value, path: &str, leaf_paths: &mut Vec<String>) {
    match schema["properties"].as_object() {
        None => leaf_paths.push(path.trim_start_matches('.').to_owned()),
        Some(properties) => {
            properties.iter().for_each(|(key, schema)| leaves(schema, &format!("{path}.{key}"), leaf_paths));
        }
    }
}
