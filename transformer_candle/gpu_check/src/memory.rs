//! GPU memory: planned against used bytes, the limit, and that steps after the first allocate nothing. At full size
//! also the speed of the operations, since the model of a billion parameters is loaded.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use kernels::cuda::{Cuda, PoolMemory};
use kernels::{Buffer, DType, Device, timing};
use run_config::{Format, Precision, ResolvedRun, RunConfig};

use super::part::Size;
use super::report::{CheckRow, Findings, SpeedRow};
use super::speed;
use training::engine::{Engine, StepOutcome, model_shape, synthetic};
use training::memory_plan::{self, GpuSpec, MemoryPlan};
use training::stop::StopSignal;
use training::units::bytes;
use training::{Result, TrainerError};

/// The largest relative difference between used and planned bytes.
const PLAN_TOLERANCE: f64 = 0.03;
/// Bytes that loaded kernels and CUDA graphs may take beside the plan; relevant to small plans only.
const LOADED_CODE: u64 = 64 << 20;
/// The memory limit of the small model, in bytes.
const SMALL_LIMIT: u64 = 768 << 20;
/// Steps after the first, which must not allocate.
const MORE_STEPS: u64 = 2;

const SMALL: &str = "model: {vocab_size: 128, hidden_size: 64, intermediate_size: 96, num_layers: 1, num_attention_heads: 2, \
                     num_key_value_heads: 1}\ndata: {sequence_length: 32, batch_size: auto, sequences_per_step: 2}\n\
                     scheduler: {total_steps: 10}\nruntime: {precision: bf16, activation_recompute: selective}\n";

/// Measurements of a GPU's memory, in bytes.
#[derive(Clone, Copy, Debug)]
struct MemoryUse {
    /// Used before anything was allocated: by the context and its libraries, and by other programs.
    at_opening: u64,
    planned: u64,
    /// Free memory before and after the plan was allocated, and after the first and the last step. Other programs may
    /// change it at any time.
    free_before: u64,
    allocated: u64,
    first_step: u64,
    last_step: u64,
    /// This process's memory pool after the first and the last step; `None` if the driver keeps none.
    pool: [Option<PoolMemory>; 2],
    limit: u64,
    /// Whether an allocation above the limit was refused.
    refused: bool,
}

/// Checks a GPU's memory, and returns the speed of its operations at full size. Nothing is checked on a CPU.
pub(super) fn check(device: &Device, size: Size, seed: u64, findings: &mut Findings<'_>) -> Result<Vec<SpeedRow>> {
    let Some(gpu) = device.as_cuda() else { return Ok(Vec::new()) };
    let limit = if size == Size::Small { SMALL_LIMIT } else { GpuSpec::rtx_5090().memory_bytes };
    gpu.set_memory_limit(limit);
    let reached = check_limited(gpu, device, size, limit, seed, findings);
    // The limit is for this model only.
    gpu.set_memory_limit(u64::MAX);
    reached
}

fn check_limited(
    gpu: &Cuda,
    device: &Device,
    size: Size,
    limit: u64,
    seed: u64,
    findings: &mut Findings<'_>,
) -> Result<Vec<SpeedRow>> {
    let memory = gpu.memory()?;
    let run = model(size, limit)?;
    let plan = MemoryPlan::here(&run, device)?;
    let sizes = format!("{} x {} tokens", plan.micro_batch, plan.sequence_length);
    if let Err(lack) = plan.check() {
        findings.add(CheckRow::new("memory: the plan fits", &sizes).require(false, || lack.to_string()));
        return Ok(Vec::new());
    }
    let free_before = gpu.memory()?.free;
    let shape = model_shape(&run.config)?;
    let mut engine = memory_plan::allocate(&run.config, &shape, plan.engine_settings(device.kind()), device)?;
    let allocated = gpu.memory()?.free;
    engine.initialize(seed)?;
    let data = &run.config.data;
    let batch = synthetic(data.sequences_per_step, data.sequence_length, shape.vocab_size);
    let mut step = |engine: &mut Engine, step| engine.step(&batch, step, 1e-4, &StopSignal::new());
    step(&mut engine, 1)?;
    let (first_step, pool) = (gpu.memory()?.free, gpu.pool_memory()?);
    for number in 2..2 + MORE_STEPS {
        step(&mut engine, number)?;
    }
    let memory_use = MemoryUse {
        at_opening: memory.total - memory.free,
        planned: plan.bytes,
        free_before,
        allocated,
        first_step,
        last_step: gpu.memory()?.free,
        pool: [pool, gpu.pool_memory()?],
        limit,
        refused: refuses(gpu, device, limit),
    };
    for row in rows(&memory_use, &sizes) {
        findings.add(row);
    }
    if size == Size::Small {
        return Ok(Vec::new());
    }
    let times = operation_times(&mut engine, &mut step)?;
    let costs = memory_plan::operation_costs(&run.config, &shape, plan.engine_settings(device.kind()));
    Ok(speed::rows(&times, &costs, gpu))
}

fn rows(memory_use: &MemoryUse, sizes: &str) -> Vec<CheckRow> {
    let used_bytes = memory_use.free_before.saturating_sub(memory_use.last_step);
    let difference = (used_bytes as f64 - memory_use.planned as f64).abs() / memory_use.planned as f64;
    let bound = PLAN_TOLERANCE.max(LOADED_CODE as f64 / memory_use.planned as f64);
    let used_in_all = memory_use.at_opening + used_bytes;
    let row = |check: &str| CheckRow::new(check, sizes);
    vec![
        row("memory: planned and used").within(difference, bound).note(format!(
            "{} planned, {} used, of it {} by the first step",
            bytes(memory_use.planned),
            bytes(used_bytes),
            bytes(memory_use.allocated.saturating_sub(memory_use.first_step))
        )),
        row("memory: under the limit")
            .require(used_in_all <= memory_use.limit, || {
                format!("{} are used of {}", bytes(used_in_all), bytes(memory_use.limit))
            })
            .note(format!(
                "{} before anything was allocated: context, libraries, others",
                bytes(memory_use.at_opening)
            )),
        no_allocation(row("memory: no allocation after step 1"), memory_use.pool),
        row("memory: the limit holds").require(memory_use.refused, || "more than the limit was allocated".to_owned()),
    ]
}

/// Requires that steps neither allocate nor free memory: measured by the process's own pool, which other programs do
/// not change.
fn no_allocation(row: CheckRow, pool: [Option<PoolMemory>; 2]) -> CheckRow {
    let [Some(first), Some(last)] = pool else { return row.note("not known: the driver keeps no memory pool") };
    let pool_text = |of: PoolMemory| format!("{} bytes used and {} reserved", of.used, of.reserved);
    row.require(first == last, || {
        format!("{} after the first step, {} after the last", pool_text(first), pool_text(last))
    })
}

/// Whether a buffer above the limit is refused for that reason, though it may fit in the GPU's memory.
fn refuses(gpu: &Cuda, device: &Device, limit: u64) -> bool {
    let elements = (limit / 4).min(gpu.memory().map_or(u64::MAX, |memory| memory.total)) as usize;
    matches!(Buffer::zeros(&[elements], DType::F32, device), Err(kernels::Error::OutOfMemory { limit: Some(_), .. }))
}

/// Returns the preset of the RTX 5090, or a tiny model; at most 8 sequences per step, so that the check takes seconds.
fn model(size: Size, limit: u64) -> Result<ResolvedRun> {
    let text = match size {
        Size::Small => SMALL,
        Size::Full => {
            let preset = run_config::presets().iter().find(|preset| preset.name == "rtx5090_1b");
            preset
                .map(|preset| preset.text)
                .ok_or_else(|| TrainerError::Request("there is no preset rtx5090_1b".into()))?
        }
    };
    let mut config = RunConfig::parse(text, Format::Yaml, &[])?;
    config.runtime.memory_limit = Some(run_config::ByteSize(limit));
    config.runtime.precision = Precision::Bf16;
    config.data.sequences_per_step = config.data.sequences_per_step.min(8);
    Ok(ResolvedRun {
        config,
        streaming: None,
        run_directory: PathBuf::new(),
        special_tokens: Vec::new(),
        config_path: PathBuf::new(),
        notes: Vec::new(),
    })
}

/// Measures the time of each operation in one step.
fn operation_times(
    engine: &mut Engine,
    step: &mut (impl FnMut(&mut Engine, u64) -> Result<Option<StepOutcome>> + Send),
) -> Result<BTreeMap<&'static str, Duration>> {
    let (pool, device) = (engine.pool(), engine.device().clone());
    let (outcome, times) = pool.install(|| timing::measure(&device, || Ok(step(engine, 2 + MORE_STEPS))))?;
    outcome?;
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;
    const POOL: Option<PoolMemory> = Some(PoolMemory { used: 30_000_000_256, reserved: 30_064_771_072 });
    const CORRECT: MemoryUse = MemoryUse {
        at_opening: GB / 2,
        planned: 30 * GB,
        free_before: 139 * GB,
        allocated: 109 * GB,
        first_step: 108_900_000_000,
        // A desktop has taken a little meanwhile.
        last_step: 108_899_000_000,
        pool: [POOL; 2],
        limit: GpuSpec::rtx_5090().memory_bytes,
        refused: true,
    };

    fn failed(memory_use: &MemoryUse) -> Vec<String> {
        let rows = rows(memory_use, "").into_iter().filter(|row| row.failure.is_some());
        rows.map(|row| row.check.trim_start_matches("memory: ").to_owned()).collect()
    }

    #[test]
    fn each_thing_that_can_be_wrong_with_memory_is_one_row() {
        assert_eq!(failed(&CORRECT), Vec::<String>::new());
        assert_eq!(failed(&MemoryUse { pool: [None; 2], ..CORRECT }), Vec::<String>::new());
        assert_eq!(failed(&MemoryUse { planned: 29 * GB, ..CORRECT }), ["planned and used"]);
        assert_eq!(failed(&MemoryUse { at_opening: 5 * GB, ..CORRECT }), ["under the limit"]);
        let grown = |grow: fn(&mut PoolMemory)| {
            let mut last = POOL;
            last.iter_mut().for_each(grow);
            failed(&MemoryUse { pool: [POOL, last], ..CORRECT })
        };
        assert_eq!(grown(|pool| pool.used += 256), ["no allocation after step 1"]);
        assert_eq!(grown(|pool| pool.reserved += 1), ["no allocation after step 1"]);
        assert_eq!(failed(&MemoryUse { refused: false, ..CORRECT }), ["the limit holds"]);
    }

    #[test]
    fn both_models_are_configs_that_a_gpu_may_train() {
        for (size, limit) in [(Size::Small, SMALL_LIMIT), (Size::Full, GpuSpec::rtx_5090().memory_bytes)] {
            let run = model(size, limit).unwrap();
            assert_eq!(training::device::refusal(&run.config, GpuSpec::rtx_5090().into()).unwrap(), None);
            assert_eq!(run.config.runtime.precision, Precision::Bf16);
        }
    }

    #[test]
    fn a_cpu_has_nothing_to_check() {
        let mut ignore = |_: &CheckRow| {};
        let mut findings = Findings::new(&mut ignore);
        assert!(check(&Device::Cpu, Size::Small, 1, &mut findings).unwrap().is_empty());
        assert!(findings.rows.is_empty());
    }
}
