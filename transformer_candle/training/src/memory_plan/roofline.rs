//! The time of an optimizer step by a roofline of each operation: `max(FLOPs / rate, bytes / bandwidth)`, with the
//! rates that launches sustain. Bytes are what a launch must move if caches keep nothing between launches.
//! `plan --operations` prints the list; docs/decisions/012 discusses it for one config.

use std::{collections::BTreeMap, ops::Add};

use model::ModelShape;
use run_config::RunConfig;
use serde::Serialize;

use super::{
    gpu_table::{GpuSpec, SustainedFractions},
    launches,
    operation::{Operation, Rate},
    peak_rates::Bounds,
    step_part::StepPart,
};
use crate::engine::{EngineSettings, StepOf};

/// On a GPU a launch takes at least this long from the previous one's end.
pub(super) const LAUNCH_SECONDS: f64 = 2e-6;

/// What bounds the time of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BoundBy {
    /// Its FLOPs, at the rate that such launches sustain.
    Flops,
    /// Its bytes, at the memory bandwidth that is sustained.
    Memory,
    /// The time that any launch takes.
    Launch,
    /// The link between ranks.
    Network,
}

/// The rates that a step is timed with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rates {
    /// Nominal FLOPs per second.
    pub(super) flops: f64,
    /// The factor of these in fp8 GEMMs; 1 where they are bf16 GEMMs of rounded operands, as on a CPU.
    pub(super) fp8_speedup: f64,
    /// Nominal bytes per second.
    pub(super) bytes_per_second: f64,
    pub(super) fractions: SustainedFractions,
    /// Seconds that a launch takes at least.
    pub(super) launch_seconds: f64,
}

/// FLOPs and bytes of the operations of one kind in a step, and the seconds that they take at least.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Bound {
    pub(crate) flops: f64,
    pub(crate) bytes: f64,
    pub(crate) seconds: f64,
}

impl Add for Bound {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let Self { flops, bytes, seconds } = other;
        Self { flops: self.flops + flops, bytes: self.bytes + bytes, seconds: self.seconds + seconds }
    }
}

impl Rates {
    /// Pessimistic and optimistic rates of a GPU.
    pub(super) fn of_gpu(gpu: &GpuSpec, config: &RunConfig) -> [Self; 2] {
        let flops = gpu.matmul_flops(config.runtime.precision);
        let (bytes_per_second, launch_seconds) = (gpu.bytes_per_second, LAUNCH_SECONDS);
        let speedups = gpu.fp8_speedup(config).map_or([1.0; 2], |speedup| speedup.sustained);
        let rates = |(fractions, fp8_speedup)| Self { flops, fp8_speedup, bytes_per_second, fractions, launch_seconds };
        let [low, high] = speedups;
        [(gpu.low, low), (gpu.high, high)].map(rates)
    }

    /// FLOPs per second that launches of a kind sustain.
    pub(super) fn sustained_flops(&self, rate: Rate) -> f64 {
        let share = match rate {
            Rate::Gemm => self.fractions.gemm,
            Rate::Fp8Gemm => self.fractions.gemm * self.fp8_speedup,
            Rate::AttentionForward => self.fractions.attention_forward,
            Rate::AttentionBackward => self.fractions.attention_backward,
        };
        self.flops * share
    }

    /// Seconds of all launches of an operation.
    fn seconds(&self, operation: &Operation) -> f64 {
        self.bound(operation).0
    }

    /// Seconds of all launches of an operation, and what bounds them.
    pub(super) fn bound(&self, operation: &Operation) -> (f64, BoundBy) {
        let compute = operation.flops / self.sustained_flops(operation.rate);
        let memory = operation.bytes / (self.bytes_per_second * self.fractions.memory);
        let by = if self.launch_seconds > compute.max(memory) {
            BoundBy::Launch
        } else if memory > compute {
            BoundBy::Memory
        } else {
            BoundBy::Flops
        };
        (operation.count * compute.max(memory).max(self.launch_seconds), by)
    }
}

/// The operations of an optimizer step of one config and micro-batch.
#[derive(Clone, Debug)]
pub(super) struct Roofline {
    pub(super) operations: Vec<Operation>,
}

impl Roofline {
    /// Lists the operations of a step.
    pub(super) fn new(step: StepOf<'_>) -> Self {
        Self { operations: launches::of_step(step) }
    }

    /// Seconds of a step.
    pub(super) fn seconds(&self, rates: &Rates) -> f64 {
        self.operations.iter().map(|operation| rates.seconds(operation)).sum()
    }

    /// Returns the seconds of a step by part.
    pub(super) fn seconds_by_part(&self, rates: &Rates) -> BTreeMap<StepPart, f64> {
        let mut parts = BTreeMap::new();
        for operation in &self.operations {
            *parts.entry(operation.part()).or_default() += rates.seconds(operation);
        }
        parts
    }

    /// Returns the bounds of a step's operations, by part and label; those without a label share the part's empty one.
    pub(super) fn bounds(&self, rates: &Rates) -> Bounds {
        let mut bounds = Bounds::new();
        for operation in &self.operations {
            let bound = bounds.entry((operation.part(), operation.label())).or_default();
            bound.flops += operation.count * operation.flops;
            bound.bytes += operation.count * operation.bytes;
            bound.seconds += rates.seconds(operation);
        }
        bounds
    }
}

/// FLOPs and bytes of the launches of one operation in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OperationCost {
    /// FLOPs of GEMMs; attention's over the causal half, 2 GEMMs forward and 5 backward.
    pub flops: f64,
    /// Bytes read and written, if caches keep nothing between launches.
    pub bytes: f64,
}

/// Returns the cost of each operation of a step, by its name in crate `kernels`, such as `linear::backward_weight`;
/// Muon by its module.
pub fn operation_costs(
    config: &RunConfig,
    shape: &ModelShape,
    settings: EngineSettings,
) -> BTreeMap<&'static str, OperationCost> {
    let mut costs: BTreeMap<_, OperationCost> = BTreeMap::new();
    for Operation { kernel, count, flops, bytes, .. } in Roofline::new(StepOf { config, shape, settings }).operations {
        let cost = costs.entry(kernel).or_default();
        cost.flops += count * flops;
        cost.bytes += count * bytes;
    }
    costs
}
