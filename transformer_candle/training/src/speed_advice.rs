//! Advice on settings of a config that make training slower than it could be on its device.

use kernels::Bf16Units;
use run_config::{ActivationRecompute, BatchSize, Fp8Recipe, NumWorkers, Precision, ResolvedRun};

use crate::{
    error::Result,
    memory_plan::{MemoryPlan, rates},
    workers::TokenSpeeds,
};

/// Number of parameters below which a model trains in minutes, whatever its precision.
const SMALL_MODEL: u64 = 10_000_000;
/// Smallest micro-batch, in sequences, that is advised instead of one sequence.
const LARGER_MICRO_BATCH: u64 = 4;
/// Number of tokens of a micro-batch that uses a device well.
const ENOUGH_TOKENS: u64 = 8192;

/// Returns one sentence for each setting that makes training slower than it could be.
///
/// `plan` is the run's plan, and `requested_batch` the config's `data.batch_size`; `plan_of` plans a changed run for the
/// same device. Without `speeds`, which a trainer measures, there is no advice on `data.num_workers`.
pub(crate) fn speed_advice(
    run: &ResolvedRun,
    requested_batch: BatchSize,
    plan: &MemoryPlan,
    plan_of: impl Fn(&ResolvedRun) -> Result<MemoryPlan>,
    speeds: Option<TokenSpeeds>,
) -> Result<Vec<String>> {
    let advice = [
        recompute(run, &plan_of)?,
        micro_batch(run, requested_batch, plan, &plan_of)?,
        precision(run, plan, has_bf16(plan)),
        fp8(run, plan, &plan_of)?,
        speeds.and_then(|speeds| workers(run, speeds)),
    ];
    Ok(advice.into_iter().flatten().collect())
}

/// Advises selective recomputation where whole blocks are recomputed although it would fit.
fn recompute(run: &ResolvedRun, plan_of: impl Fn(&ResolvedRun) -> Result<MemoryPlan>) -> Result<Option<String>> {
    if run.config.runtime.activation_recompute != ActivationRecompute::Block {
        return Ok(None);
    }
    let mut lighter = run.clone();
    lighter.config.runtime.activation_recompute = ActivationRecompute::Selective;
    let fits = plan_of(&lighter)?.shortage.is_none();
    Ok(fits.then(|| {
        "runtime.activation_recompute is block, which adds a third to the FLOPs: selective fits as well and costs almost \
         nothing"
            .to_owned()
    }))
}

/// Advises a larger micro-batch where it is one short sequence although several would fit.
fn micro_batch(
    run: &ResolvedRun,
    requested_batch: BatchSize,
    plan: &MemoryPlan,
    plan_of: impl Fn(&ResolvedRun) -> Result<MemoryPlan>,
) -> Result<Option<String>> {
    let is_small = plan.micro_batch * plan.sequence_length < ENOUGH_TOKENS;
    if run.config.stages.is_some()
        || requested_batch != BatchSize::Fixed(1)
        || !is_small
        || plan.sequences_per_step < LARGER_MICRO_BATCH
    {
        return Ok(None);
    }
    let mut larger = run.clone();
    larger.config.data.batch_size = BatchSize::Auto;
    larger.config.data.gradient_accumulation_steps = None;
    let fits = plan_of(&larger)?;
    Ok((fits.shortage.is_none() && fits.micro_batch >= LARGER_MICRO_BATCH).then(|| {
        format!(
            "data.batch_size is 1, and {} sequences at a time would fit: a larger micro-batch reads weights and gradients \
             less often (data.batch_size: auto; results change by rounding only)",
            fits.micro_batch
        )
    }))
}

/// Advises bf16 where the config says f32 on a device that multiplies bf16 faster, or fp8 on a CPU.
fn precision(run: &ResolvedRun, plan: &MemoryPlan, has_bf16: bool) -> Option<String> {
    let is_cpu = plan.device.memory_bytes.is_none();
    if run.config.runtime.precision == Precision::Fp8 && is_cpu {
        return Some(
            "runtime.precision is fp8 on a CPU, which rounds operands as a GPU would and multiplies them in bf16: it shows \
             what fp8 costs in loss; bf16 is faster and needs less memory"
                .to_owned(),
        );
    }
    let is_slow = run.config.runtime.precision == Precision::Fp32 && has_bf16 && plan.parameters >= SMALL_MODEL;
    is_slow.then(|| {
        "runtime.precision is fp32 on a device with bf16 instructions: bf16 multiplies at least twice as fast and needs less \
         memory, with master weights and sums in f32 as before"
            .to_owned()
    })
}

/// Advises bf16 where a GPU is predicted to be no faster in fp8: rounding the operands of narrow matmuls takes longer than
/// what these save.
fn fp8(
    run: &ResolvedRun,
    plan: &MemoryPlan,
    plan_of: impl Fn(&ResolvedRun) -> Result<MemoryPlan>,
) -> Result<Option<String>> {
    let is_cpu = plan.device.memory_bytes.is_none();
    let Some(speed) = plan.speed.as_ref().filter(|_| run.config.runtime.precision == Precision::Fp8 && !is_cpu) else {
        return Ok(None);
    };
    let mut wider = run.clone();
    (wider.config.runtime.precision, wider.config.runtime.fp8_recipe) = (Precision::Bf16, Fp8Recipe::Auto);
    // What was measured of one and predicted of the other is no comparison.
    let Some(bf16) = plan_of(&wider)?.speed.filter(|bf16| bf16.source == speed.source) else { return Ok(None) };
    let is_slower = speed.tokens_per_second.iter().zip(&bf16.tokens_per_second).all(|(fp8, bf16)| fp8 < bf16);
    Ok(is_slower.then(|| {
        format!(
            "runtime.precision is fp8, and bf16 is faster at these widths: {} tokens/s predicted instead of {}, since \
             rounding operands takes longer than narrow matmuls save",
            rates(bf16.tokens_per_second),
            rates(speed.tokens_per_second)
        )
    }))
}

/// Advises more data workers where they tokenise more slowly than training may need.
fn workers(run: &ResolvedRun, speeds: TokenSpeeds) -> Option<String> {
    let NumWorkers::Fixed(workers) = run.config.data.num_workers else {
        return None;
    };
    let TokenSpeeds { encoder, training } = speeds;
    (workers as f64 * encoder < training).then(|| {
        format!(
            "data.num_workers is {workers}, which tokenises about {:.1} M tokens/s where training may need {:.1} M: write \
             {} or auto",
            workers as f64 * encoder / 1e6,
            training / 1e6,
            speeds.needed()
        )
    })
}

/// Whether the device that is planned for multiplies bf16 faster than f32.
fn has_bf16(plan: &MemoryPlan) -> bool {
    let is_gpu = plan.device.memory_bytes.is_some();
    is_gpu || Bf16Units::of_this_processor() != Bf16Units::F32
}
