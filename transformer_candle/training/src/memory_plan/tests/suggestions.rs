//! What a run that does not fit is told, and the changes that make it fit.

use proptest::prelude::*;

use super::*;

#[test]
fn a_shortage_names_the_settings_that_fit() {
    let plan =
        plan_of(&run_of("rtx5090_1b", &["runtime.memory_limit=30GB", "data.batch_size=16", "runtime.device=cpu"]))
            .unwrap();
    let error = plan.check().unwrap_err();
    assert_eq!(error.exit_code(), 4);
    insta::assert_snapshot!(error);
}

#[test]
fn a_shortage_says_when_nothing_fits() {
    let error = plan_of(&run_of("rtx5090_1b", &["runtime.memory_limit=16GB", "runtime.device=cpu"]))
        .unwrap()
        .check()
        .unwrap_err();
    insta::assert_snapshot!(error);
}

#[test]
fn a_shortage_names_the_data_stream() {
    let run = run_of("smoke_cpu", &["data.num_workers=256"]);
    let shape = model_shape(&run.config).unwrap();
    let engine_settings = plan_of(&run).unwrap().engine_settings(DeviceKind::Cpu);
    let shortage = |free| {
        let budget = Budget::minus_data_stream(free, "free on this machine", dataset::memory_bound(&run.config.data));
        assert_eq!(budget.bytes, 0);
        let step = StepOf { config: &run.config, shape: &shape, settings: engine_settings };
        fit::shortage(&[step], &budget).to_string()
    };
    let message = shortage(24 << 30);
    assert!(
        message.starts_with("the data stream of this run does not fit") && message.contains("data.num_workers"),
        "{message}"
    );
    assert!(shortage(260 << 20).contains("take a smaller model"), "{}", shortage(260 << 20));
}

#[test]
fn suggested_settings_fit_and_are_the_largest() {
    let overrides =
        ["runtime.device=cpu", "runtime.memory_limit=26GB", "data.batch_size=32", "runtime.activation_recompute=none"];
    let run = run_of("rtx5090_1b", &overrides);
    let TrainerError::OutOfMemory(shortage) = plan_of(&run).unwrap().check().unwrap_err() else {
        panic!("refused for another reason")
    };
    assert!(!shortage.fits.is_empty());
    for fit in &shortage.fits {
        for (micro_batch, fits) in [(fit.micro_batch, true), (fit.micro_batch * 2, false)] {
            let mut other = run.clone();
            other.config.data.batch_size = BatchSize::Fixed(micro_batch);
            other.config.runtime.activation_recompute = fit.activation_recompute;
            assert_eq!(plan_of(&other).unwrap().check().is_ok(), fits, "{fit:?} {micro_batch}");
        }
    }
}

#[test]
fn a_plan_that_does_not_fit_lists_the_options() {
    let run = run_of("rtx5090_1b", &["data.batch_size=8", "model.num_key_value_heads=16"]);
    insta::assert_snapshot!(plan_on(&run, &request("rtx4090"), &FakeMachine::default()).unwrap());
}

/// The run with its plan's changes, as `--apply` writes it.
fn applied(run: &ResolvedRun, changes: &[Change]) -> RunConfig {
    let overrides: Vec<String> = changes.iter().map(Change::as_override).collect();
    RunConfig::parse(&run.config.to_commented_yaml(), Format::Yaml, &overrides).unwrap()
}

fn changes_on(run: &ResolvedRun, request: &PlanRequest) -> Result<Vec<Change>> {
    plan_on(run, request, &FakeMachine::default())?.changes_on(run, request, &FakeMachine::default())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_apply_writes_fits_and_keeps_the_tokens_per_step(
        layers in 2_usize..24,
        width in 2_usize..20,
        sequence_length in prop::sample::select(vec![512_usize, 1024, 2048]),
        micro_batch in prop::sample::select(vec![1_usize, 4, 16]),
        gigabytes in 4_u64..40,
        gpu in prop::sample::select(vec!["rtx5090", "a100-40", "this"]),
    ) {
        let keys = [
            format!("model.num_layers={layers}"),
            format!("model.hidden_size={}", 128 * width),
            format!("model.intermediate_size={}", 512 * width),
            format!("model.num_attention_heads={}", 2 * width),
            format!("model.num_key_value_heads={width}"),
            format!("data.sequence_length={sequence_length}"),
            format!("data.batch_size={micro_batch}"),
            "runtime.activation_recompute=none".to_owned(),
            "runtime.device=auto".to_owned(),
        ];
        let run = run_of("rtx5090_1b", &keys.each_ref().map(String::as_str));
        let request = PlanRequest { memory: Some(ByteSize(gigabytes * 1_000_000_000)), ..request(gpu) };
        match changes_on(&run, &request) {
            Ok(changes) => {
                let mut changed_run = run.clone();
                changed_run.config = applied(&run, &changes);
                let plan = plan_on(&changed_run, &request, &FakeMachine::default()).unwrap();
                prop_assert!(plan.check().is_ok(), "{changes:?}");
                prop_assert_eq!(plan.tokens_per_step, run.config.data.tokens_per_step() as u64);
                let is_small_enough = plan_on(&run, &request, &FakeMachine::default()).unwrap().check().is_ok();
                prop_assert_eq!(is_small_enough, changes.is_empty());
            }
            Err(error) => {
                let mut smallest = run.clone();
                smallest.config.model.num_layers = 1;
                smallest.config.data.batch_size = BatchSize::Fixed(1);
                smallest.config.runtime.activation_recompute = ActivationRecompute::Block;
                prop_assert_eq!(error.exit_code(), 4);
                prop_assert!(plan_on(&smallest, &request, &FakeMachine::default()).unwrap().check().is_err());
            }
        }
    }
}

#[test]
fn changes_of_the_result_come_last() {
    let change_texts = |memory: u64, keys: &[&str]| {
        let run = run_of("rtx5090_1b", keys);
        let request = PlanRequest { memory: Some(ByteSize(memory * 1_000_000_000)), ..request("rtx5090") };
        changes_on(&run, &request).unwrap().iter().map(Change::as_override).collect::<Vec<_>>()
    };
    assert_eq!(change_texts(34, &[]), [""; 0]);
    assert_eq!(change_texts(28, &["data.batch_size=16"]), ["data.batch_size=2"]);
    assert_eq!(change_texts(24, &["data.batch_size=16"]), ["data.batch_size=2", "runtime.activation_recompute=block"]);
    let smaller = change_texts(16, &[]);
    assert!(smaller[0].starts_with("model.num_layers="), "{smaller:?}");
}

/// The 1B model as one that is fine-tuned with AdamW, with adapters of this rank or none.
fn fine_tuned(rank: Option<usize>) -> ResolvedRun {
    let keys = ["data.batch_size=1", "optimizer.learning_rate=2e-5", "scheduler.min_lr=0", "optimizer.algorithm=adamw"];
    let mut run = run_of("rtx5090_1b", &keys);
    run.config.model.init_from = Some("/models/1b".into());
    run.config.lora.rank = rank;
    run.config.lora.alpha = rank.map(|rank| 2.0 * rank as f64);
    run
}

#[test]
fn fine_tuning_of_all_weights_is_offered_adapters() {
    let request = PlanRequest { memory: Some(ByteSize(8_000_000_000)), ..request("rtx5090") };
    let planned = |rank| plan_on(&fine_tuned(rank), &request, &FakeMachine::default()).unwrap();
    let (all, adapters) = (planned(None), planned(Some(16)));
    let option = all.options.iter().find(|option| option.name == "adapters (LoRA)").unwrap();
    assert_eq!((option.bytes, option.saves_bytes), (adapters.bytes, all.bytes - adapters.bytes));
    let changes: Vec<_> = changes_on(&fine_tuned(None), &request).unwrap().iter().map(Change::as_override).collect();
    assert_eq!(changes[..3], ["lora.rank=16", "lora.alpha=16", "optimizer.learning_rate=0.0002"], "{changes:?}");
    let pretraining = run_of("rtx5090_1b", &["data.batch_size=1"]);
    let plan = plan_on(&pretraining, &request, &FakeMachine::default()).unwrap();
    assert!(plan.options.iter().all(|option| option.name != "adapters (LoRA)" && option.name != "smaller rank"));
}

#[test]
fn a_base_in_fp8_is_offered_before_anything_gets_smaller() {
    let request = PlanRequest { memory: Some(ByteSize(4_000_000_000)), ..request("rtx5090") };
    let mut run = fine_tuned(Some(16));
    let plan = plan_on(&run, &request, &FakeMachine::default()).unwrap();
    let option = plan.options.iter().find(|option| option.name == "base in fp8").cloned().unwrap();
    let changes: Vec<_> = option.changes.iter().map(Change::as_override).collect();
    assert_eq!(changes, ["lora.base_precision=fp8"]);
    let all_changes: Vec<_> = changes_on(&run, &request).unwrap().iter().map(Change::as_override).collect();
    assert!(all_changes.contains(&"lora.base_precision=fp8".to_owned()), "{all_changes:?}");
    assert!(!all_changes.iter().any(|change| change.starts_with("data.sequence_length")), "{all_changes:?}");
    run.config.lora.base_precision = run_config::BasePrecision::Fp8;
    let plan = plan_on(&run, &request, &FakeMachine::default()).unwrap();
    assert_eq!(plan.bytes, option.bytes);
    assert!(plan.options.iter().all(|option| option.name != "base in fp8"));
}

#[test]
fn a_smaller_rank_keeps_the_scale_of_adapters() {
    let request = PlanRequest { memory: Some(ByteSize(3_000_000_000)), ..request("rtx5090") };
    let planned = |run: &ResolvedRun| plan_on(run, &request, &FakeMachine::default()).unwrap();
    let (large, small) = (planned(&fine_tuned(Some(256))), planned(&fine_tuned(Some(4))));
    let rank_option = |plan: &MemoryPlan| plan.options.iter().find(|option| option.name == "smaller rank").cloned();
    let option = rank_option(&large).unwrap();
    let changes: Vec<_> = option.changes.iter().map(Change::as_override).collect();
    assert_eq!(changes, ["lora.rank=4", "lora.alpha=8"], "nothing is enough, so it is the smallest");
    assert_eq!((option.bytes, option.saves_bytes, option.fits), (small.bytes, large.bytes - small.bytes, false));
    assert!(rank_option(&small).is_none());
    let mut continued = fine_tuned(Some(256));
    continued.config.lora.init_from = Some("/adapters".into());
    assert!(rank_option(&planned(&continued)).is_none(), "the rank of adapters that are there is theirs");
}
