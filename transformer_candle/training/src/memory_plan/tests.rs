//! The numbers that the README and the configs promise.

mod operations;
mod ranks;
mod suggestions;

use std::time::{Duration, SystemTime};

use kernels::{DeviceKind, cuda::Gpu};
use run_config::{BatchSize, ByteSize, Device, Format, NumWorkers, presets};

use super::{
    available_memory::AvailableMemory, calibration::Calibration, cpu_speed::CpuSpeed, measured::MeasuredStep, *,
};
use crate::{
    device::GpuMemory,
    engine::{Parts, StepOf},
};

fn run_of(name: &str, overrides: &[&str]) -> ResolvedRun {
    let preset = presets().iter().find(|preset| preset.name == name).unwrap();
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    let mut config = RunConfig::parse(preset.text, Format::Yaml, &overrides).unwrap();
    config.model.vocab_size.get_or_insert(4096);
    config.runtime.threads = Some(2);
    if config.data.num_workers == NumWorkers::Auto {
        config.data.num_workers = NumWorkers::Fixed(2);
    }
    ResolvedRun {
        config,
        streaming: None,
        run_directory: "/runs/e".into(),
        special_tokens: Vec::new(),
        config_path: "/runs/e/training.yaml".into(),
        notes: Vec::new(),
    }
}

/// The fake machine's processor and its speed.
const PROCESSOR: &str = "Example 9000";
const CPU: CpuSpeed = CpuSpeed { threads: 2, flops: 420e9 };
/// Seconds of a step of any config on it.
const CPU_STEP_SECONDS: f64 = 0.25;

/// A machine with these GPUs, each with so much free, on which `bench` measured steps of so many seconds.
#[derive(Clone, Debug, Default)]
struct FakeMachine {
    gpus: Vec<Gpu>,
    free: Option<u64>,
    measured: Option<f64>,
    load: Option<f64>,
}

impl Machine for FakeMachine {
    fn processor(&self) -> Option<String> {
        Some(PROCESSOR.to_owned())
    }

    fn available_memory(&self, _: usize) -> Option<AvailableMemory> {
        Some(AvailableMemory { bytes: 64_000_000_000, origin: "free on this machine" })
    }

    fn gpus(&self) -> Vec<Gpu> {
        self.gpus.clone()
    }

    fn look_at(&self, gpu: &Gpu) -> GpuMemory {
        GpuMemory { free: self.free, ..GpuMemory::unopened(gpu) }
    }

    fn matmul_speed(&self, _: &RunConfig) -> Result<CpuSpeed> {
        Ok(CPU)
    }

    fn calibrate(&self, _: StepOf<'_>, _: CpuSpeed) -> Result<Option<Calibration>> {
        let parts = [(StepPart::Gemm, 0.2), (StepPart::Optimizer, 0.05)].into();
        Ok(Some(Calibration { seconds: CPU_STEP_SECONDS, parts }))
    }

    fn measured(&self, _: StepOf<'_>, _: &str) -> Option<MeasuredStep> {
        self.measured.map(|step_seconds| MeasuredStep { step_seconds, unix_time: 0, key: ().into() })
    }

    fn load(&self) -> Option<f64> {
        self.load
    }

    fn now(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_hours(490_896) // the first day of 2026
    }
}

/// This machine, on which `bench` has never run.
struct Unmeasured;

impl Machine for Unmeasured {
    fn processor(&self) -> Option<String> {
        ThisMachine.processor()
    }

    fn available_memory(&self, threads: usize) -> Option<AvailableMemory> {
        ThisMachine.available_memory(threads)
    }

    fn gpus(&self) -> Vec<Gpu> {
        Vec::new()
    }

    fn look_at(&self, gpu: &Gpu) -> GpuMemory {
        ThisMachine.look_at(gpu)
    }

    fn matmul_speed(&self, config: &RunConfig) -> Result<CpuSpeed> {
        ThisMachine.matmul_speed(config)
    }

    fn calibrate(&self, step: StepOf<'_>, matmul: CpuSpeed) -> Result<Option<Calibration>> {
        ThisMachine.calibrate(step, matmul)
    }

    fn measured(&self, _: StepOf<'_>, _: &str) -> Option<MeasuredStep> {
        None
    }

    fn load(&self) -> Option<f64> {
        None
    }

    fn now(&self) -> SystemTime {
        ThisMachine.now()
    }
}

fn plan_on(run: &ResolvedRun, request: &PlanRequest, machine: &FakeMachine) -> Result<MemoryPlan> {
    MemoryPlan::on_machine(&run.config, request, machine)
}

/// The plan on a machine without a GPU.
fn plan_of(run: &ResolvedRun) -> Result<MemoryPlan> {
    let request = PlanRequest { times_operations: true, ..PlanRequest::default() };
    plan_on(run, &request, &FakeMachine::default())
}

/// The plan on a machine with these GPUs, each with so much free.
fn plan_among(run: &ResolvedRun, gpus: &[Gpu], free: Option<u64>) -> Result<MemoryPlan> {
    plan_on(run, &PlanRequest::default(), &FakeMachine { gpus: gpus.to_vec(), free, ..FakeMachine::default() })
}

fn request(gpu: &str) -> PlanRequest {
    PlanRequest { gpu: Some(gpu.parse().unwrap()), ..PlanRequest::default() }
}

fn gpu(ordinal: usize, name: &str, total_bytes: u64) -> Gpu {
    Gpu {
        ordinal,
        name: name.to_owned(),
        uuid: String::new(),
        total_bytes,
        compute_capability: (12, 0),
        cublas: (13, 0),
    }
}

const RTX_5090: [&str; 2] = ["runtime.memory_limit=32122MiB", "runtime.device=cuda"];

fn bytes_of(plan: &MemoryPlan, category: &str) -> u64 {
    plan.bytes_by_category.iter().find(|line| line.category == category).map_or(0, |line| line.bytes)
}

#[test]
fn the_1b_preset_fits_an_rtx_5090() {
    let plan = plan_of(&run_of("rtx5090_1b", &RTX_5090)).unwrap();
    insta::assert_snapshot!(plan);
    assert!(plan.check().is_ok());
    assert_eq!((plan.parameters, plan.micro_batch, plan.gradient_accumulation_steps), (1_318_832_128, 4, 16));
    let permanent: u64 = ["weights", "master low bits", "gradients", "optimizer moments"]
        .iter()
        .map(|category| bytes_of(&plan, category))
        .sum();
    let padding = 48 * 2048;
    assert_eq!(permanent, 16 * (plan.parameters + padding), "16 bytes per parameter");
    assert_eq!(plan.checkpoint_bytes, 12 * plan.parameters, "15.8 GB on disk");
}

/// Llama 3.1 8 B at 4,096 tokens on an RTX 5090, with adapters of this rank or none.
fn llama_3_1_8b(rank: Option<usize>, recompute: ActivationRecompute) -> MemoryPlan {
    let mut run = run_of("rtx5090_1b", &[&RTX_5090[..], &["data.batch_size=1", "data.sequences_per_step=1"]].concat());
    let model = &mut run.config.model;
    (model.hidden_size, model.intermediate_size, model.num_layers) = (4096, 14_336, 32);
    (model.num_attention_heads, model.num_key_value_heads, model.head_dim) = (32, 8, Some(128));
    (model.vocab_size, model.tie_embeddings, model.max_position_embeddings) = (Some(128_256), false, 131_072);
    run.config.data.sequence_length = 4096;
    run.config.data.gradient_accumulation_steps = Some(1);
    run.config.runtime.activation_recompute = recompute;
    run.config.lora.rank = rank;
    plan_of(&run).unwrap()
}

#[test]
fn an_8b_model_with_adapters_fits_an_rtx_5090() {
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    let near = |bytes: u64, expected: f64| {
        assert!((gigabytes(bytes) - expected).abs() < 0.006, "{} {expected}", gigabytes(bytes));
    };
    let plan = llama_3_1_8b(Some(16), ActivationRecompute::Selective);
    insta::assert_snapshot!(plan);
    assert_eq!((plan.parameters, plan.trainable_parameters), (8_030_261_248, 41_943_040));
    let base = 2 * plan.parameters;
    near(base, 16.06);
    let adapters = ["weights", "master low bits", "gradients", "optimizer moments"];
    let adapters = adapters.iter().map(|category| bytes_of(&plan, category)).sum::<u64>() - base;
    assert_eq!(adapters, 16 * plan.trainable_parameters, "2 + 2 + 4 + 8 bytes per parameter");
    near(adapters, 0.67);
    near(bytes_of(&plan, "saved activations"), 12.43);
    assert!((29.5..30.5).contains(&gigabytes(plan.bytes)), "{}", plan.bytes);
    assert!(plan.check().is_ok());
    assert_eq!(plan.checkpoint_bytes, 12 * plan.trainable_parameters, "bf16 adapters, low bits and moments");
    let attention = 6.0 * (32 * 4096 * 4096) as f64;
    let in_matmul = plan.parameters as f64 - (128_256.0 + 65.0) * 4096.0;
    assert!((plan.flops_per_token - attention - 4.0 * in_matmul - 6.0 * 41_943_040.0).abs() < 1.0);

    let block = llama_3_1_8b(Some(16), ActivationRecompute::Block);
    assert!((18.5..19.7).contains(&gigabytes(block.bytes)), "{}", block.bytes);
    let full = llama_3_1_8b(None, ActivationRecompute::Block);
    assert!(gigabytes(full.bytes) > 128.0, "{}", full.bytes);
    assert_eq!(full.check().unwrap_err().exit_code(), 4);
}

#[test]
fn recomputing_reduces_saved_activations() {
    let saved = |recompute: &str| {
        let recompute = format!("runtime.activation_recompute={recompute}");
        let plan = plan_of(&run_of("rtx5090_1b", &[&recompute, "data.batch_size=1"])).unwrap();
        bytes_of(&plan, "saved activations") as f64 / 1e9
    };
    let near = |bytes: f64, expected: f64| (bytes - expected).abs() < 0.06 * expected;
    let (all, selective, block) = (saved("none"), saved("selective"), saved("block"));
    assert!(near(all, 3.1) && near(selective, 2.1) && block < 0.65, "{all} {selective} {block}");
}

#[test]
fn the_other_presets_are_planned() {
    let medium = plan_of(&run_of("rtx5090_500m", &RTX_5090)).unwrap();
    insta::assert_snapshot!(medium);
    let mut small = run_of("smoke_cpu", &[]);
    small.config.runtime.memory_limit = Some(ByteSize(2_000_000_000));
    small.config.runtime.device = Device::Cpu;
    insta::assert_snapshot!(plan_of(&small).unwrap());
}

#[test]
fn the_plan_equals_the_allocation() {
    for precision in ["fp32", "bf16"] {
        let precision = format!("runtime.precision={precision}");
        let run = run_of("smoke_cpu", &[&precision]);
        let plan = plan_of(&run).unwrap();
        let shape = model_shape(&run.config).unwrap();
        let settings = plan.engine_settings(DeviceKind::Cpu);
        let step = StepOf { config: &run.config, shape: &shape, settings };
        assert_eq!(step.bytes(), plan.bytes);
        let engine = allocate(&run.config, &shape, settings, &kernels::Device::Cpu).unwrap();
        assert!(engine.optimizer.state().iter().all(|tensor| tensor.buffer.tensor().is_ok()));
        assert_eq!(plan.bytes_by_category.iter().map(|line| line.bytes).sum::<u64>(), plan.bytes);
    }
}

#[test]
fn auto_limits_the_micro_batch_on_a_cpu() {
    let auto = |limit: &str| {
        let limit = format!("runtime.memory_limit={limit}");
        let overrides = ["data.batch_size=auto", "data.sequences_per_step=96", "data.sequence_length=256", &limit];
        plan_of(&run_of("smoke_cpu", &overrides)).unwrap().micro_batch
    };
    assert_eq!(auto("1TB"), 32);
    assert!(auto("150MB") < 32);
}

#[test]
fn a_run_of_months_on_a_cpu_is_planned_for_a_gpu() {
    let open = plan_of(&run_of("rtx5090_1b", &[])).unwrap();
    let gpu = plan_of(&run_of("rtx5090_1b", &RTX_5090)).unwrap();
    assert_eq!((open.bytes, open.micro_batch, &open.speed), (gpu.bytes, gpu.micro_batch, &gpu.speed));
    insta::assert_snapshot!(open.budget.unwrap());
    let here = MemoryPlan::here(&run_of("rtx5090_1b", &[]), &kernels::Device::Cpu).unwrap();
    assert!(here.budget.unwrap().origin.contains("this machine"));
    assert_eq!(here.speed, None, "a trainer does not spend time on a guess");
}

#[test]
fn a_small_step_is_timed_whole_on_a_cpu() {
    for precision in ["fp32", "bf16"] {
        let mut run = run_of("smoke_cpu", &[&format!("runtime.precision={precision}")]);
        (run.config.runtime.device, run.config.runtime.threads) = (Device::Cpu, Some(3));
        let request = PlanRequest { times_operations: true, ..PlanRequest::default() };
        let plan = MemoryPlan::on_machine(&run.config, &request, &Unmeasured).unwrap();
        let speed = plan.speed.unwrap();
        assert_eq!((plan.device.name.contains("3 threads"), speed.source), (true, SpeedSource::Calibration));
        assert!(speed.step_seconds[0] > 0.0 && speed.step_seconds[0].is_finite());
        let parts = speed.parts.unwrap();
        assert!((parts.values().sum::<f64>() - 1.0).abs() < 1e-9 && parts["gemm"] > 0.2, "{parts:?}");
        let time = plan.training_time.unwrap().seconds.unwrap();
        assert!((time[0] * speed.tokens_per_second[0] / plan.total_tokens.unwrap() as f64 - 1.0).abs() < 1e-9);
    }
}

#[test]
fn a_step_too_large_to_time_is_estimated_by_matmuls() {
    let run = run_of("1b", &["runtime.device=cpu", "runtime.threads=2"]);
    let request = PlanRequest { times_operations: true, ..PlanRequest::default() };
    let speed = MemoryPlan::on_machine(&run.config, &request, &Unmeasured).unwrap().speed.unwrap();
    assert!(speed.step_seconds[0] > speed.step_seconds[1] && speed.source == SpeedSource::Roofline, "{speed:?}");
    assert!(speed.origin.starts_with("by the speed of matmuls on this CPU"), "{}", speed.origin);
}

#[test]
fn a_measured_step_replaces_the_prediction() {
    let run = run_of("rtx5090_1b", &["runtime.device=cuda:0", "runtime.memory_limit=null"]);
    let machine = |name: &str| {
        let gpus = vec![gpu(0, name, 34_190_917_632)];
        FakeMachine { gpus, measured: Some(10.0), ..FakeMachine::default() }
    };
    let speed = |name| plan_on(&run, &PlanRequest::default(), &machine(name)).unwrap().speed.unwrap();
    for name in ["NVIDIA GeForce RTX 5090", "an unknown GPU"] {
        let speed = speed(name);
        assert_eq!((speed.source, speed.step_seconds), (SpeedSource::Bench, [10.0; 2]), "{name}");
        assert_eq!(speed.origin, "as `bench` measured it here on 1970-01-01");
    }
    let prediction = plan_on(&run, &request("rtx5090"), &machine("NVIDIA GeForce RTX 5090")).unwrap().speed.unwrap();
    assert_eq!(prediction.source, SpeedSource::Roofline, "another machine's GPU was not measured");
    let unmeasured = FakeMachine { measured: None, ..machine("an unknown GPU") };
    assert_eq!(plan_on(&run, &PlanRequest::default(), &unmeasured).unwrap().speed, None);
}

#[test]
fn a_busy_cpu_is_told_beside_what_was_timed_on_it() {
    let run = run_of("smoke_cpu", &["runtime.device=cpu"]);
    let request = PlanRequest { times_operations: true, ..PlanRequest::default() };
    let machine = |load| FakeMachine { load, ..FakeMachine::default() };
    let origin = |load| plan_on(&run, &request, &machine(load)).unwrap().speed.unwrap().origin;
    assert_eq!(origin(Some(1.9)), origin(None), "its own threads");
    assert!(origin(Some(8.3)).ends_with("timed on this CPU while other programs kept it busy (load average 8.3)"));
}

#[test]
fn a_plan_for_conversations_counts_positions() {
    let speed = |overrides: &[&str]| {
        let run = run_of("smoke_cpu", &[&["runtime.precision=bf16"], overrides].concat());
        plan_on(&run, &request("rtx4090"), &FakeMachine::default()).unwrap().to_string()
    };
    let (text, conversations) = (speed(&[]), speed(&["data.format=chat", "data.packing=padded"]));
    assert!(text.contains(" tokens/s, ") && !text.contains("positions/s"), "{text}");
    assert!(conversations.contains(" positions/s, ") && !conversations.contains("tokens/s"), "{conversations}");
}

#[test]
fn every_gpu_of_the_table_is_planned_for() {
    let run = run_of("rtx5090_1b", &["runtime.memory_limit=null", "runtime.device=cpu"]);
    for gpu in &GPUS {
        let plan = plan_on(&run, &request(gpu.key), &FakeMachine::default()).unwrap();
        let (speed, time) = (plan.speed.as_ref().unwrap(), plan.training_time.as_ref().unwrap());
        let [low, high] = speed.tokens_per_second;
        assert!(low < high && speed.mfu.unwrap()[1] < 0.9, "{}: {speed:?}", gpu.key);
        assert!(time.seconds.unwrap()[1] * high > 0.99 * time.tokens as f64);
        assert_eq!(plan.device.memory_bytes, Some(gpu.memory_bytes));
        assert!(plan.check().is_ok(), "{}: {:?}", gpu.key, plan.shortage);
    }
}

#[test]
fn prices_follow_from_the_time() {
    let run = run_of("rtx5090_1b", &["scheduler.total_steps=1000", "scheduler.warmup_steps=10"]);
    let request = PlanRequest { price_per_kwh: Some(0.5), price_per_hour: Some(2.0), ..request("rtx5090") };
    let plan = plan_on(&run, &request, &FakeMachine::default()).unwrap();
    let (seconds, cost) = (plan.training_time.unwrap().seconds.unwrap(), plan.cost.unwrap());
    let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-9, "{a} {b}");
    for (end, seconds) in seconds.iter().enumerate() {
        let hours = seconds / 3600.0;
        near(cost.kilowatt_hours.unwrap()[end], hours * 0.575);
        near(cost.electricity.unwrap()[end], hours * 0.575 * 0.5);
        near(cost.rent.unwrap()[end], hours * 2.0);
    }
    let own = PlanRequest { watts: Some(1000.0), ..request };
    near(
        plan_on(&run, &own, &FakeMachine::default()).unwrap().cost.unwrap().kilowatt_hours.unwrap()[0],
        seconds[0] / 3600.0,
    );
}

#[test]
fn a_plan_for_a_gpu_with_prices_reads_well() {
    let run = run_of("rtx5090_500m", &["scheduler.total_steps=20000", "runtime.activation_recompute=none"]);
    let request = PlanRequest { price_per_kwh: Some(0.3), price_per_hour: Some(1.2), ..request("a100-40") };
    insta::assert_snapshot!(plan_on(&run, &request, &FakeMachine::default()).unwrap());
}

#[test]
fn the_budget_is_the_free_memory_of_the_gpu() {
    let run = run_of("rtx5090_1b", &["runtime.device=auto", "runtime.memory_limit=null"]);
    let gpus = [gpu(0, "NVIDIA GeForce RTX 5090", 34_190_917_632), gpu(1, "NVIDIA L4", 24_000_000_000)];
    let micro_batch = |free| plan_among(&run, &gpus, free).unwrap().micro_batch;
    assert_eq!([micro_batch(None), micro_batch(Some(33_600_000_000)), micro_batch(Some(27_000_000_000))], [4, 4, 2]);
    insta::assert_snapshot!(plan_among(&run, &gpus, Some(33_100_000_000)).unwrap());
    let crowded = plan_among(&run, &gpus, Some(20_000_000_000)).unwrap().check().unwrap_err();
    assert!(crowded.to_string().contains("NVIDIA GeForce RTX 5090 with 20.00 GB free of 34.19 GB"), "{crowded}");
    let limited = run_of("rtx5090_1b", &["runtime.device=cuda:0", "runtime.memory_limit=28GB"]);
    let plan = plan_among(&limited, &[gpu(0, "NVIDIA H200", 150_000_000_000)], Some(149_000_000_000)).unwrap();
    assert!(plan.budget.as_ref().unwrap().origin.starts_with("runtime.memory_limit: 28GB"));
    assert!(plan.bytes < 27_000_000_000 && plan.speed.unwrap().origin.contains("H200"));
    let plan = plan_among(&limited, &[gpu(0, "NVIDIA H200", 150_000_000_000)], Some(145_000_000_000)).unwrap();
    assert_eq!(plan.budget.unwrap().bytes, 23_000_000_000, "others have 5 GB of the 28 already");
}

#[test]
fn auto_plans_for_the_cpu_if_no_gpu_supports_the_model() {
    let gpus = [gpu(0, "NVIDIA GeForce RTX 5090", 34_190_917_632)];
    let narrow = [
        "model.num_attention_heads=128",
        "model.num_key_value_heads=8",
        "scheduler.total_steps=10",
        "scheduler.warmup_steps=1",
    ];
    let heads_of_16 = run_of("rtx5090_1b", &[&["runtime.device=auto"], narrow.as_slice()].concat());
    let plan = plan_among(&heads_of_16, &gpus, None).unwrap();
    assert!(plan.device.name.contains("threads"), "{}", plan.device.name);
    let error =
        plan_among(&run_of("rtx5090_1b", &[&["runtime.device=cuda:0"], narrow.as_slice()].concat()), &gpus, None)
            .unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains("(model.head_dim) is 16"), "{error}");
}

#[test]
fn a_gpu_plan_includes_the_staging_buffers() {
    let batch = |packing, device| {
        let run = run_of("rtx5090_1b", &[RTX_5090.as_slice(), &[packing]].concat());
        let shape = model_shape(&run.config).unwrap();
        let settings = plan_of(&run).unwrap().engine_settings(device);
        let step = StepOf { config: &run.config, shape: &shape, settings };
        Parts::count(&[step]).1.bytes_of(kernels::memory::Category::Batch)
    };
    // Ids and targets of 4 sequences of 2048 tokens, and the loss's scale; on a GPU also two staging slots of ids and
    // targets, and one of the scale.
    let of = |packing| [DeviceKind::Cpu, DeviceKind::Cuda].map(|device| batch(packing, device));
    assert_eq!(of("data.packing=concat"), [65_536 + 4, 3 * 65_536 + 8]);
    // Also the start of each token's document.
    assert_eq!(of("data.packing=documents"), [98_304 + 4, 3 * 98_304 + 8]);
}
