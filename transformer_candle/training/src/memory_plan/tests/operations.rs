//! The operations of a step: counts against closed forms of the config's sizes, and sums against the plan.

use std::{collections::BTreeMap, time::Instant};

use kernels::timing;
use run_config::{Algorithm, BasePrecision, Precision};

use super::*;
use crate::{
    engine::SyntheticSteps,
    memory_plan::{
        fit::RECOMPUTES,
        gpu_table::SustainedFractions,
        roofline::{Rates, Roofline},
    },
};

// The sizes of the 1B preset: layers, hidden, intermediate, packed QKV, padded vocabulary; tokens of a micro-batch and
// of a sequence.
const L: f64 = 20.0;
const D: f64 = 2048.0;
const I: f64 = 8192.0;
const P: f64 = 3072.0;
const V: f64 = 50_048.0;
const N: f64 = 8192.0;
const T: f64 = 2048.0;
const MICRO_BATCHES: f64 = 16.0;

fn request_operations(gpu: &str) -> PlanRequest {
    PlanRequest { lists_operations: true, ..request(gpu) }
}

fn on(run: &ResolvedRun, request: &PlanRequest) -> MemoryPlan {
    plan_on(run, request, &FakeMachine::default()).unwrap()
}

/// The plan of the 1B preset in micro-batches of 4.
fn plan_1b(request: &PlanRequest, overrides: &[&str]) -> MemoryPlan {
    on(&run_of("rtx5090_1b", &[&["data.batch_size=4"], overrides].concat()), request)
}

fn near(a: f64, b: f64, tolerance: f64) {
    assert!((a / b - 1.0).abs() <= tolerance, "{a} {b}");
}

#[test]
fn the_operations_of_a_step_read_well() {
    insta::assert_snapshot!(plan_1b(&request_operations("rtx5090"), &[]).operations_table().unwrap());
    let ranks = PlanRequest { ranks: Some(4), ..request_operations("rtx5090") };
    insta::assert_snapshot!(plan_1b(&ranks, &["optimizer.algorithm=muon"]).operations_table().unwrap());
    let timed = PlanRequest { lists_operations: true, times_operations: true, ..PlanRequest::default() };
    insta::assert_snapshot!(on(&run_of("smoke_cpu", &["runtime.device=cpu"]), &timed).operations_table().unwrap());
}

#[test]
fn each_operation_has_the_cost_of_its_sizes() {
    let operations = plan_1b(&request_operations("rtx5090"), &[]).operations.unwrap();
    let parameters = 1_318_832_128.0 + 48.0 * D;
    let chunks = N / 2048.0;
    let gemm = |m: f64, n: f64, k: f64, result: f64| (2.0 * m * n * k, 2.0 * (m * k + k * n) + result * m * n);
    let bytes = |bytes: f64| (0.0, bytes);
    let (blocks, per_micro_batch) = (MICRO_BATCHES * L, MICRO_BATCHES);
    let expected = [
        ("qkv forward", blocks, gemm(N, P, D, 2.0)),
        ("attention_output dX", blocks, gemm(N, D, D, 2.0)),
        ("gate_up dW", blocks, gemm(2.0 * I, D, N, 8.0)),
        ("down forward", blocks, gemm(N, D, I, 2.0)),
        ("attention forward", blocks, (2.0 * N * T * D, 2.0 * (N * P + N * D))),
        ("attention backward", blocks, (5.0 * N * T * D, 2.0 * (2.0 * N * P + 3.0 * N * D))),
        // The first of a micro-batch has nothing to add.
        ("add_rms_norm forward", 2.0 * blocks, bytes(4.0 * N * D * (4.0 * L - 1.0) / (2.0 * L))),
        ("add_rms_norm backward", 2.0 * blocks, bytes(8.0 * N * D)),
        ("add_rms_norm normalize", 2.0 * blocks, bytes(4.0 * N * D)),
        ("rope backward", blocks, bytes(4.0 * N * (32.0 + 8.0) * 64.0)),
        ("swiglu forward", blocks, bytes(6.0 * N * I)),
        ("swiglu backward", blocks, bytes(12.0 * N * I)),
        ("head logits", per_micro_batch * chunks, gemm(2048.0, V, D, 4.0)),
        ("head softmax and gradient", per_micro_batch * chunks, bytes(10.0 * 2048.0 * V)),
        ("head dW", per_micro_batch * chunks, gemm(V, D, 2048.0, 8.0)),
        ("embedding backward", per_micro_batch, bytes(10.0 * N * D)),
        ("last norm backward", per_micro_batch, bytes(10.0 * N * D)),
        ("grad_norm forward", 1.0, bytes(4.0 * parameters)),
        ("gradients zero", 1.0, bytes(4.0 * parameters)),
        ("adamw step", 1.0, bytes(28.0 * parameters)),
    ];
    for (name, launches, (flops, bytes)) in expected {
        let row = operations.rows.iter().find(|row| row.operation == name).unwrap_or_else(|| panic!("{name}"));
        assert_eq!((row.launches, row.flops, row.bytes), (launches, flops, bytes), "{name}");
        let reached = match name {
            "attention forward" => 0.60,
            "attention backward" => 0.50,
            _ => 0.92,
        };
        let [compute, memory] = [flops / (reached * 209.5e12), bytes / (0.9 * 1.792e12)];
        near(row.seconds, launches * compute.max(memory), 1e-12);
        assert_eq!(row.bound_by, if compute > memory { BoundBy::Flops } else { BoundBy::Memory }, "{name}");
    }
}

#[test]
fn what_only_some_models_have_costs_what_its_sizes_need() {
    let mut adapters = run_of("rtx5090_1b", &["model.architecture=qwen2", "data.batch_size=4"]);
    (adapters.config.lora.rank, adapters.config.lora.dropout) = (Some(16), 0.1);
    let operations = on(&adapters, &request_operations("rtx5090")).operations.unwrap();
    // The inputs of q, k, v, o, gate, up and down are I + 6 D, their outputs P + D + 2 I + D.
    let blocks = MICRO_BATCHES * L;
    let (inputs, outputs) = (I + 6.0 * D, P + 2.0 * D + 2.0 * I);
    let gemms = 2.0 * N * 16.0 * blocks;
    for (name, launches, flops, bytes) in [
        ("bias forward", blocks, 0.0, Some(blocks * 4.0 * N * P)),
        ("adapters forward", 21.0 * blocks, gemms * (2.0 * inputs + outputs), None),
        ("adapters dX", 21.0 * blocks, gemms * (inputs + 2.0 * outputs), None),
        ("adapters dW", 14.0 * blocks, gemms * (inputs + outputs), None),
        ("dropout forward", 14.0 * blocks, 0.0, Some(2.0 * blocks * 4.0 * N * inputs)),
        ("dropout backward", 7.0 * blocks, 0.0, Some(blocks * 6.0 * N * inputs)),
    ] {
        let row = operations.rows.iter().find(|row| row.operation == name).unwrap_or_else(|| panic!("{name}"));
        near(row.launches, launches, 1e-12);
        let of_all = (row.launches * row.flops, bytes.map(|_| row.launches * row.bytes));
        assert_eq!(of_all, (flops, bytes), "{name}");
    }
    for name in ["bias backward", "qkv dW", "embedding backward"] {
        assert!(operations.rows.iter().all(|row| row.operation != name), "{name}: frozen");
    }
}

#[test]
fn gemms_and_attention_have_the_flops_that_mfu_counts() {
    let plan = plan_1b(&request_operations("rtx5090"), &[]);
    let operations = plan.operations.as_ref().unwrap();
    let flops = |parts: &[&str]| -> f64 {
        let rows = operations.rows.iter().filter(|row| parts.contains(&row.part));
        rows.map(|row| row.launches * row.flops).sum()
    };
    let (tokens, attention) = (plan.tokens_per_step as f64, 6.0 * L * D * T);
    near(flops(&["gemm", "head_and_loss"]), tokens * (plan.flops_per_token - attention + 6.0 * 48.0 * D), 1e-12);
    near(flops(&["attention"]), tokens * attention * 7.0 / 6.0, 1e-12);
    near(operations.mfu.unwrap(), tokens * plan.flops_per_token / operations.step_seconds / 209.5e12, 1e-12);
    near(operations.step_seconds, 6.5619, 1e-4);
    near(operations.mfu.unwrap(), 0.802, 1e-3);
}

#[test]
fn the_rows_sum_to_the_step_of_the_plan() {
    let overrides = ["optimizer.algorithm=muon", "runtime.activation_recompute=block", "runtime.precision=fp32"];
    let mut variants: Vec<_> = overrides.iter().map(|change| run_of("rtx5090_1b", &[change])).collect();
    variants.extend([run_of("rtx5090_1b", &[]), run_of("1b", &[])]);
    let mut adapters = run_of("rtx5090_1b", &[]);
    adapters.config.lora.rank = Some(16);
    variants.push(adapters);
    for gpu in &GPUS {
        for (run, ranks) in variants.iter().flat_map(|run| [None, Some(4)].map(|ranks| (run, ranks))) {
            let plan = on(run, &PlanRequest { ranks, ..request_operations(gpu.key) });
            let (operations, speed) = (plan.operations.as_ref().unwrap(), plan.speed.as_ref().unwrap());
            near(operations.rows.iter().map(|row| row.seconds).sum(), speed.step_seconds[1], 1e-9);
            near(operations.rows.iter().map(|row| row.share).sum(), 1.0, 1e-9);
            assert_eq!(operations.rows.iter().any(|row| row.bound_by == BoundBy::Network), ranks.is_some());
            for row in operations.rows.iter().filter(|row| row.bound_by != BoundBy::Network) {
                assert!(row.seconds >= row.launches * row.flops / gpu.bf16_flops(), "{}: {row}", gpu.key);
                assert!(row.seconds >= row.launches * row.bytes / gpu.bytes_per_second, "{}: {row}", gpu.key);
            }
            let table = plan.operations_table().unwrap();
            assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
            assert!(operations.rows.len() < 40, "launches of one name are one row");
        }
    }
}

#[test]
fn muon_takes_at_most_6_percent_of_a_step() {
    let [adamw, muon] = ["adamw", "muon"].map(|algorithm| {
        let algorithm = format!("optimizer.algorithm={algorithm}");
        plan_1b(&request_operations("rtx5090"), &[&algorithm]).operations.unwrap()
    });
    // Newton-Schulz: 5 iterations of X X^T, A A and B X, of a matrix of S x M elements with S <= M.
    let iterations = |s: f64, m: f64| 5.0 * 2.0 * (s * s * m + s * s * s + s * s * m);
    let matrices = 2.0 * iterations(D, D) + 2.0 * iterations(512.0, D) + 3.0 * iterations(D, I);
    let gemms = muon.rows.iter().find(|row| row.operation == "muon GEMMs").unwrap();
    near(gemms.launches * gemms.flops, L * matrices, 1e-12);
    let more = muon.step_seconds / adamw.step_seconds - 1.0;
    assert!((0.04..0.06).contains(&more), "{more}");
}

#[test]
fn an_unknown_rate_is_refused() {
    let request = PlanRequest { lists_operations: true, times_operations: true, ..PlanRequest::default() };
    let small = run_of("smoke_cpu", &["runtime.device=cpu", "runtime.memory_limit=1MB"]);
    let large = run_of("rtx5090_1b", &["runtime.device=cuda:0", "runtime.memory_limit=null"]);
    let gpus = vec![gpu(0, "an unknown GPU", 34_190_917_632)];
    let machine = FakeMachine { gpus, measured: Some(10.0), ..FakeMachine::default() };
    for refused in [plan_on(&small, &request, &FakeMachine::default()), plan_on(&large, &request, &machine)] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.exit_code(), 2);
        assert!(refused.to_string().starts_with("--operations: no rates are known for "), "{refused}");
    }
}

#[test]
fn operations_are_scaled_to_a_measured_step() {
    let run = run_of("rtx5090_1b", &["runtime.device=cuda:0", "runtime.memory_limit=null", "data.batch_size=4"]);
    let gpus = vec![gpu(0, "NVIDIA GeForce RTX 5090", 34_190_917_632)];
    let machine = FakeMachine { gpus, measured: Some(10.0), ..FakeMachine::default() };
    let request = PlanRequest { lists_operations: true, ..PlanRequest::default() };
    let operations = plan_on(&run, &request, &machine).unwrap().operations.unwrap();
    near(operations.scale, 10.0 / 6.5619, 1e-4);
    near(operations.rows.iter().map(|row| row.seconds).sum(), 10.0, 1e-9);
}

/// docs/decisions/012 has these numbers.
#[test]
fn mfu_depends_on_the_rates_as_documented() {
    let run = run_of("rtx5090_1b", &[]);
    let shape = model_shape(&run.config).unwrap();
    let mfu = |gpu: &GpuSpec, fractions: SustainedFractions, micro_batch: usize| {
        let settings = EngineSettings { micro_batch, ..plan_of(&run).unwrap().engine_settings(DeviceKind::Cuda) };
        let rates = Rates { fractions, ..Rates::of_gpu(gpu, &run.config)[1] };
        let seconds = Roofline::new(StepOf { config: &run.config, shape: &shape, settings }).seconds(&rates);
        let flops = shape.flops_per_token(2048) * run.config.data.tokens_per_step() as f64;
        format!("{:.1}", 100.0 * flops / seconds / gpu.bf16_flops())
    };
    for (gpu, expected) in [
        ("rtx5090", ["80.2", "91.6", "83.8", "76.6", "83.2", "72.5", "79.5", "80.2"]),
        ("h200", ["61.4", "86.6", "64.3", "58.4", "64.7", "53.3", "60.6", "61.4"]),
    ] {
        let gpu = GPUS.iter().find(|entry| entry.key == gpu).unwrap();
        let high = gpu.high;
        let attention = |factor: f64| SustainedFractions {
            attention_forward: factor * high.attention_forward,
            attention_backward: factor * high.attention_backward,
            ..high
        };
        let all = SustainedFractions { gemm: 1.0, attention_forward: 1.0, attention_backward: 1.0, memory: 1.0 };
        let cases = [
            (high, 4),
            (all, 4),
            (SustainedFractions { gemm: high.gemm + 0.05, ..high }, 4),
            (SustainedFractions { gemm: high.gemm - 0.05, ..high }, 4),
            (attention(1.5), 4),
            (attention(0.5), 4),
            (SustainedFractions { memory: 0.8, ..high }, 4),
            (high, 1),
        ];
        assert_eq!(cases.map(|(fractions, micro_batch)| mfu(gpu, fractions, micro_batch)), expected, "{}", gpu.key);
    }
}

/// docs/decisions/028 has these numbers.
#[test]
fn steps_in_fp8_are_predicted_as_documented() {
    let cases = [
        ("rtx5090", "auto", "2951.1"),
        ("rtx5090", "tensorwise", "4463.4"),
        ("h100", "auto", "1541.4"),
        ("h100", "tensorwise", "1575.2"),
    ];
    for (gpu, recipe, expected) in cases {
        let recipe_override = format!("runtime.fp8_recipe={recipe}");
        let plan = plan_1b(&request_operations(gpu), &["runtime.precision=fp8", &recipe_override]);
        let milliseconds = 1e3 * plan.operations.unwrap().step_seconds;
        assert_eq!(format!("{milliseconds:.1}"), expected, "{gpu} {recipe}");
    }
}

/// Launches of a step by operation.
type Launches = BTreeMap<&'static str, f64>;

/// Returns the launches of micro-batches as they are listed, and as a step calls them.
fn launches(run: &ResolvedRun) -> [Launches; 2] {
    let shape = model_shape(&run.config).unwrap();
    let settings = plan_of(run).unwrap().engine_settings(DeviceKind::Cpu);
    let [mut listed, mut called] = [(); 2].map(|()| Launches::new());
    for operation in Roofline::new(StepOf { config: &run.config, shape: &shape, settings }).operations {
        *listed.entry(operation.kernel).or_default() += operation.count;
    }
    let engine = allocate(&run.config, &shape, settings, &kernels::Device::Cpu).unwrap();
    let (pool, mut steps) = (engine.pool(), SyntheticSteps::new(engine, &run.config).unwrap());
    // The first one rounds frozen weights to fp8 too.
    pool.install(|| steps.step()).unwrap();
    let recording_outcome = pool.install(|| timing::record(&kernels::Device::Cpu, Instant::now(), || Ok(steps.step())));
    let (outcome, recording) = recording_outcome.unwrap();
    outcome.unwrap();
    for operation in recording.operations() {
        *called.entry(operation.name).or_default() += 1.0;
    }
    [listed, called].map(|mut launches| {
        // The loss is one call with several launches; norm and update may be calls for each parameter or group of them.
        for name in ["head_cross_entropy::forward_backward", "grad_norm::forward", "adamw::step", "Buffer::zero"] {
            assert!(launches.remove(name) > Some(0.0), "{name} of {launches:?}");
        }
        // Uploads, downloads and the scalars of the update.
        launches.retain(|name, _| !name.starts_with("Buffer::") && *name != "grad_norm::clip");
        launches
    })
}

fn adapters(dropout: f64) -> ResolvedRun {
    let mut run = run_of("smoke_cpu", &["model.architecture=qwen2"]);
    run.config.lora.rank = Some(8);
    run.config.lora.dropout = dropout;
    run
}

#[test]
fn the_operations_that_a_step_calls_are_listed() {
    let architectures = ["llama", "qwen2", "qwen3"].map(|name| format!("model.architecture={name}"));
    let mut runs: Vec<_> = architectures.iter().map(|name| run_of("smoke_cpu", &[name])).collect();
    let [mut fp8_adapters, mut fp8_base] = [adapters(0.1), adapters(0.0)];
    fp8_adapters.config.runtime.precision = Precision::Fp8;
    fp8_base.config.runtime.precision = Precision::Bf16;
    fp8_base.config.lora.base_precision = BasePrecision::Fp8;
    runs.extend([
        adapters(0.0),
        adapters(0.1),
        run_of("smoke_cpu", &["data.batch_size=4", "runtime.deterministic_reduction=4"]),
        run_of("smoke_cpu", &["runtime.precision=fp8"]),
        fp8_adapters,
        fp8_base,
    ]);
    for (mut run, recompute) in runs.into_iter().flat_map(|run| RECOMPUTES.map(|recompute| (run.clone(), recompute))) {
        run.config.data.sequence_length = 32;
        run.config.optimizer.algorithm = Algorithm::AdamW;
        run.config.runtime.activation_recompute = recompute;
        let [listed, called] = launches(&run);
        assert_eq!(listed, called, "{:?} {:?} {recompute:?}", run.config.model.architecture, run.config.lora);
    }
}
