//! The numbers that the README and the configs promise, and what a refused run is told.

use run_config::{BatchSize, ByteSize, Device, Format, presets};

use super::*;

fn run_of(name: &str, overrides: &[&str]) -> ResolvedRun {
    let preset = presets().iter().find(|preset| preset.name == name).unwrap();
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    let mut config = RunConfig::parse(preset.text, Format::Yaml, &overrides).unwrap();
    config.model.vocab_size.get_or_insert(4096);
    config.runtime.threads = Some(2);
    ResolvedRun {
        config,
        streaming: None,
        run_directory: "/runs/e".into(),
        special_tokens: Vec::new(),
        config_path: "/runs/e/training.yaml".into(),
        notes: Vec::new(),
    }
}

const RTX_5090: [&str; 2] = ["runtime.memory_limit=32607MiB", "runtime.device=cuda"];

fn bytes_of(plan: &MemoryPlan, category: &str) -> u64 {
    plan.bytes_by_category.iter().find(|line| line.category == category).map_or(0, |line| line.bytes)
}

#[test]
fn one_billion_parameters_on_a_5090_are_planned_as_the_config_says() {
    let plan = MemoryPlan::of(&run_of("rtx5090_1b", &RTX_5090)).unwrap();
    insta::assert_snapshot!(plan);
    assert!(plan.check().is_ok());
    assert_eq!((plan.parameters, plan.micro_batch, plan.gradient_accumulation_steps), (1_318_832_128, 4, 16));
    let permanent: u64 = ["weights", "master remainder", "gradients", "optimizer moments"]
        .iter()
        .map(|category| bytes_of(&plan, category))
        .sum();
    let padding = 48 * 2048;
    assert_eq!(permanent, 16 * (plan.parameters + padding), "16 bytes a parameter");
    assert_eq!(plan.checkpoint_bytes, 12 * plan.parameters, "15.8 GB on disk");
}

#[test]
fn recomputing_saves_the_activations_it_is_said_to() {
    let saved = |recompute: &str| {
        let recompute = format!("runtime.activation_recompute={recompute}");
        let plan = MemoryPlan::of(&run_of("rtx5090_1b", &[&recompute, "data.batch_size=1"])).unwrap();
        bytes_of(&plan, "saved activations") as f64 / 1e9
    };
    let near = |bytes: f64, said: f64| (bytes - said).abs() < 0.06 * said;
    let (all, selective, block) = (saved("none"), saved("selective"), saved("block"));
    assert!(near(all, 3.1) && near(selective, 2.1) && block < 0.65, "{all} {selective} {block}");
}

#[test]
fn the_other_presets_are_planned_too() {
    let medium = MemoryPlan::of(&run_of("rtx5090_500m", &RTX_5090)).unwrap();
    insta::assert_snapshot!(medium);
    let mut small = run_of("smoke_cpu", &[]);
    small.config.runtime.memory_limit = Some(ByteSize(2_000_000_000));
    small.config.runtime.device = Device::Cpu;
    insta::assert_snapshot!(MemoryPlan::of(&small).unwrap());
}

#[test]
fn a_run_that_does_not_fit_is_told_what_would() {
    let plan = MemoryPlan::of(&run_of(
        "rtx5090_1b",
        &["runtime.memory_limit=30GB", "data.batch_size=16", "runtime.device=cpu"],
    ))
    .unwrap();
    let error = plan.check().unwrap_err();
    assert_eq!(error.exit_code(), 4);
    insta::assert_snapshot!(error);
}

#[test]
fn a_run_that_could_never_fit_is_told_so() {
    let error = MemoryPlan::of(&run_of("rtx5090_1b", &["runtime.memory_limit=16GB", "runtime.device=cpu"]))
        .unwrap()
        .check()
        .unwrap_err();
    insta::assert_snapshot!(error);
}

#[test]
fn what_a_refused_run_is_told_to_take_fits_and_nothing_larger_does() {
    let overrides =
        ["runtime.device=cpu", "runtime.memory_limit=26GB", "data.batch_size=32", "runtime.activation_recompute=none"];
    let run = run_of("rtx5090_1b", &overrides);
    let TrainerError::OutOfMemory(shortage) = MemoryPlan::of(&run).unwrap().check().unwrap_err() else {
        panic!("refused for another reason")
    };
    assert!(!shortage.fits.is_empty());
    for fit in &shortage.fits {
        for (micro_batch, fits) in [(fit.micro_batch, true), (fit.micro_batch * 2, false)] {
            let mut other = run.clone();
            other.config.data.batch_size = BatchSize::Fixed(micro_batch);
            other.config.runtime.activation_recompute = fit.activation_recompute;
            assert_eq!(MemoryPlan::of(&other).unwrap().check().is_ok(), fits, "{fit} {micro_batch}");
        }
    }
}

#[test]
fn what_is_planned_is_what_is_allocated() {
    for precision in ["fp32", "bf16"] {
        let precision = format!("runtime.precision={precision}");
        let run = run_of("smoke_cpu", &[&precision]);
        let plan = MemoryPlan::of(&run).unwrap();
        let shape = shape_of(&run.config).unwrap();
        let setting =
            Setting { micro_batch: plan.micro_batch as usize, activation_recompute: plan.activation_recompute };
        let buffers = RunBuffers::of(&run.config, &shape, setting);
        let arena = buffers.plan.allocate(&kernels::Device::Cpu).unwrap();
        assert_eq!(arena.bytes(), plan.bytes);
        assert_eq!(plan.bytes_by_category.iter().map(|line| line.bytes).sum::<u64>(), plan.bytes);
    }
}

#[test]
fn auto_on_a_cpu_goes_no_further_than_is_fast() {
    let auto = |limit: &str| {
        let limit = format!("runtime.memory_limit={limit}");
        let overrides = ["data.batch_size=auto", "data.sequences_per_step=96", "data.sequence_length=256", &limit];
        MemoryPlan::of(&run_of("smoke_cpu", &overrides)).unwrap().micro_batch
    };
    assert_eq!(auto("1TB"), 32);
    assert!(auto("150MB") < 32);
}

#[test]
fn a_run_that_would_take_a_cpu_months_is_planned_for_a_card() {
    let open = MemoryPlan::of(&run_of("rtx5090_1b", &[])).unwrap();
    let card = MemoryPlan::of(&run_of("rtx5090_1b", &RTX_5090)).unwrap();
    assert_eq!((open.bytes, open.micro_batch, &open.estimate), (card.bytes, card.micro_batch, &card.estimate));
    insta::assert_snapshot!(open.budget.unwrap());
    let here = MemoryPlan::here(&run_of("rtx5090_1b", &[])).unwrap();
    assert!(here.budget.unwrap().origin.contains("this machine"));
}
