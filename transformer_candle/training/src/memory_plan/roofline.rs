//! The time of an optimizer step by a roofline of each operation: `max(FLOPs / rate, bytes / bandwidth)`, with the
//! rates that launches sustain. Bytes are what a launch must move if caches keep nothing between launches.
//! `plan --operations` prints the list; docs/decisions/012 discusses it for one config.

use std::{collections::BTreeMap, ops::Add};

use super::{
    gpu_table::{GpuSpec, SustainedFractions},
    operation::{ADAPTERS, KernelAndScope, Operation, Rate},
    peak_rates::Bounds,
    step_part::StepPart,
};
use crate::engine::{EngineSettings, Shard, StepOf, muon_flops, shards};
use kernels::{DeviceKind, muon};
use model::{ModelShape, ParameterKind, ParameterLayout, dtype_of, head_chunk_rows};
use run_config::{ActivationRecompute, Algorithm, RunConfig};
use serde::Serialize;

/// On a GPU a launch takes at least this long from the previous one's end.
pub(super) const LAUNCH_SECONDS: f64 = 2e-6;
/// Bytes per parameter that `AdamW` reads (gradient, weight with low bits, two moments) and writes (all but the gradient).
const ADAMW_BYTES: f64 = 4.0 + 12.0 + 12.0;

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
        [gpu.low, gpu.high].map(|fractions| Self { flops, bytes_per_second, fractions, launch_seconds })
    }

    /// FLOPs per second that launches of a kind sustain.
    pub(super) fn sustained_flops(&self, rate: Rate) -> f64 {
        let share = match rate {
            Rate::Gemm => self.fractions.gemm,
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

/// Returns how many devices the ranks divide a step between: each has a GPU, or its share of its machine's CPU.
pub(super) fn processors(EngineSettings { device, rank_info, .. }: EngineSettings) -> usize {
    match device {
        DeviceKind::Cuda => rank_info.world_size,
        DeviceKind::Cpu => rank_info.world_size / rank_info.local_world_size,
    }
}

/// Elements that the busiest device updates: of projections, and of all the rest. One device holds a whole rank's shard
/// at least.
fn updated(layout: &ParameterLayout, settings: EngineSettings) -> [f64; 2] {
    let projections = layout.range(ParameterKind::Projection);
    let shards = shards(layout, processors(settings));
    let overlap = |shard: &Shard| shard.overlap(&projections).len();
    let most = |elements: &dyn Fn(&Shard) -> usize| shards.iter().map(elements).max().unwrap_or(0) as f64;
    [most(&overlap), most(&|shard| shard.len() - overlap(shard))]
}

/// The operations of an optimizer step of one config and micro-batch.
#[derive(Clone, Debug)]
pub(super) struct Roofline {
    pub(super) operations: Vec<Operation>,
}

impl Roofline {
    /// Lists the operations of a step.
    pub(super) fn new(step: StepOf<'_>) -> Self {
        let StepOf { config, shape, settings } = step;
        let step = Step::new(step);
        let layout = ParameterLayout::new(shape);
        let mut operations = step.blocks();
        operations.extend(step.adapters(&layout));
        operations.extend(step.head());
        operations.extend(step.embedding_and_last_norm());
        let micro_batches = config.data.sequences_per_step as f64 / settings.micro_batch as f64;
        for operation in &mut operations {
            operation.count *= micro_batches / processors(settings) as f64;
        }
        operations.extend(step.optimizer(config, &layout, settings));
        Self { operations }
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
/// adapters and Muon by their modules.
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

/// The sizes that a step's operations follow from. N tokens of a micro-batch, D hidden, I intermediate, V vocabulary,
/// L layers, P packed QKV width, A width of all query heads.
struct Step<'a> {
    shape: &'a ModelShape,
    recompute: ActivationRecompute,
    device: DeviceKind,
    sequence_length: f64,
    tokens: usize,
    /// Bytes of a weight or activation.
    element: f64,
}

impl<'a> Step<'a> {
    fn new(StepOf { config, shape, settings }: StepOf<'a>) -> Self {
        Self {
            shape,
            recompute: settings.activation_recompute,
            device: settings.device,
            sequence_length: config.data.sequence_length as f64,
            tokens: settings.micro_batch * config.data.sequence_length,
            element: dtype_of(config.runtime.precision).size_in_bytes() as f64,
        }
    }

    /// The GEMM `[m, k] x [k, n]`; the result has elements of `out` bytes, read as well where it is accumulated.
    fn gemm(
        &self,
        (kernel, scope): KernelAndScope,
        count: f64,
        [m, n, k]: [f64; 3],
        out: f64,
        accumulates: bool,
    ) -> Operation {
        let result = m * n * out * if accumulates { 2.0 } else { 1.0 };
        let bytes = self.element * (m * k + k * n) + result;
        Operation { kernel, scope, rate: Rate::Gemm, count, flops: 2.0 * m * n * k, bytes }
    }

    fn pass((kernel, scope): KernelAndScope, count: f64, bytes: f64) -> Operation {
        Operation { kernel, scope, rate: Rate::Gemm, count, flops: 0.0, bytes }
    }

    /// Lists the operations of every block in one micro-batch: forward, backward and what is recomputed.
    fn blocks(&self) -> Vec<Operation> {
        let heads = self.shape.heads();
        let (n, layers) = (self.tokens as f64, self.shape.num_layers as f64);
        let (d, i) = (self.shape.hidden_size as f64, self.shape.intermediate_size as f64);
        let (packed, a) = (heads.packed_width() as f64, heads.query_width() as f64);
        let recomputes_block = self.recompute == ActivationRecompute::Block;
        let again = if recomputes_block { 2.0 } else { 1.0 };
        let mut operations = Vec::new();
        // Inputs and outputs of each projection, and its passes forward. A recomputed block stops before `down`.
        for (projection, inputs, outputs, forwards) in [
            ("qkv", d, packed, again),
            ("attention_output", a, d, again),
            ("gate_up", d, 2.0 * i, again),
            ("down", i, d, 1.0),
        ] {
            let [forward, input, weight] = ["linear::forward", "linear::backward_input", "linear::backward_weight"]
                .map(|kernel| (kernel, projection));
            operations.extend([
                self.gemm(forward, layers * forwards, [n, outputs, inputs], self.element, false),
                self.gemm(input, layers, [n, inputs, outputs], self.element, false),
            ]);
            if self.trains_all() {
                operations.push(self.gemm(weight, layers, [outputs, inputs, n], 4.0, true));
            }
        }
        let causal = n * self.sequence_length * a;
        let (row, wide) = (self.element * n * d, self.element * n * packed);
        let attended = self.element * n * a;
        let attention = |kernel, rate, count, gemms, bytes| {
            let flops = gemms * causal;
            Operation { kernel, scope: "", rate, count, flops, bytes }
        };
        operations.extend([
            attention("attention::forward", Rate::AttentionForward, layers * again, 2.0, wide + attended),
            attention("attention::backward", Rate::AttentionBackward, layers, 5.0, 2.0 * wide + 3.0 * attended),
        ]);
        let rotated = self.element * n * (packed - heads.kv_heads as f64 * heads.head_size as f64);
        let normalizes = if self.recompute == ActivationRecompute::None { 0.0 } else { 2.0 };
        let pointwise = |kernel, count: f64, bytes| Self::pass((kernel, ""), count * layers, bytes);
        let swiglu_backward = if normalizes > 0.0 { "swiglu::backward_recomputing" } else { "swiglu::backward" };
        operations.extend([
            pointwise("add_rms_norm::forward_add", 2.0, 4.0 * row),
            pointwise("add_rms_norm::backward", 2.0, 4.0 * row),
            pointwise("add_rms_norm::normalize", normalizes, 2.0 * row), // its output again
            pointwise("rope::forward", again, 2.0 * rotated),
            pointwise("rope::backward", 1.0, 2.0 * rotated),
            pointwise("swiglu::forward", 1.0, self.element * 3.0 * n * i),
            pointwise(swiglu_backward, 1.0, self.element * 6.0 * n * i),
        ]);
        if recomputes_block {
            operations.push(pointwise("add_rms_norm::forward_add", 1.0, 4.0 * row));
        }
        if self.shape.architecture.has_qk_norm() {
            operations.extend([
                pointwise("qk_norm::forward", again, 2.0 * rotated),
                pointwise("qk_norm::backward", 1.0, 4.0 * rotated),
            ]);
        }
        operations
    }

    /// Whether every weight trains, not adapters only.
    fn trains_all(&self) -> bool {
        self.shape.lora.is_none()
    }

    /// Lists the GEMMs of each adapter's two matrices: forward, and the gradients of inputs and weights.
    fn adapters(&self, layout: &ParameterLayout) -> Vec<Operation> {
        let n = self.tokens as f64;
        let forwards = if self.recompute == ActivationRecompute::Block { 2.0 } else { 1.0 };
        let adapters = layout.parameters().iter().filter(|parameter| parameter.spec.kind == ParameterKind::Adapter);
        let operations = adapters.flat_map(|parameter| {
            let (outputs, inputs) = (parameter.spec.shape[0] as f64, parameter.spec.shape[1] as f64);
            [
                self.gemm((ADAPTERS, "adapters"), forwards, [n, outputs, inputs], self.element, true),
                self.gemm((ADAPTERS, "adapters"), 1.0, [n, inputs, outputs], self.element, true),
                self.gemm((ADAPTERS, "adapters"), 1.0, [outputs, inputs, n], 4.0, true),
            ]
        });
        operations.collect()
    }

    /// Lists the operations of head and loss in chunks of rows: f32 logits, read twice, and their gradients.
    fn head(&self) -> Vec<Operation> {
        let (d, v) = (self.shape.hidden_size as f64, self.shape.padded_vocab_size as f64);
        let rows = head_chunk_rows(self.tokens, self.shape.padded_vocab_size, self.device) as f64;
        let chunks = self.tokens as f64 / rows;
        let [logits, softmax, input, weight] = ["head logits", "head softmax and gradient", "head dX", "head dW"]
            .map(|scope| ("head_cross_entropy::forward_backward", scope));
        let mut operations = vec![
            self.gemm(logits, chunks, [rows, v, d], 4.0, false),
            Self::pass(softmax, chunks, rows * v * (4.0 + 4.0 + self.element)),
            self.gemm(input, chunks, [rows, d, v], self.element, false),
        ];
        if self.trains_all() {
            operations.push(self.gemm(weight, chunks, [v, d, rows], 4.0, true));
        }
        operations
    }

    fn embedding_and_last_norm(&self) -> [Operation; 4] {
        let row = self.element * self.tokens as f64 * self.shape.hidden_size as f64;
        // The embedding's gradient is added to f32 rows.
        [
            (("embedding::forward", ""), 2.0 * row),
            (("embedding::backward", ""), 5.0 * row),
            (("add_rms_norm::forward_add", "last norm"), 4.0 * row),
            (("add_rms_norm::backward", "last norm"), 5.0 * row),
        ]
        .map(|(place, bytes)| Self::pass(place, 1.0, bytes))
    }

    /// Lists what happens once per step: norm of the gradients, the update, and setting the gradients to zero.
    fn optimizer(&self, config: &RunConfig, layout: &ParameterLayout, settings: EngineSettings) -> Vec<Operation> {
        let all = layout.trainable_elements() as f64;
        let (norm, zero, adamw) = (("grad_norm::forward", ""), ("Buffer::zero", "gradients"), ("adamw::step", ""));
        // A CPU's first micro-batch overwrites the gradients of matrices.
        let zeroed = if self.device == DeviceKind::Cpu { all - layout.decayed_elements() as f64 } else { all };
        let largest = shards(layout, processors(settings)).iter().map(Shard::len).max().unwrap_or(0) as f64;
        let mut operations = vec![Self::pass(norm, 1.0, 4.0 * largest), Self::pass(zero, 1.0, 4.0 * zeroed.max(0.0))];
        if config.optimizer.algorithm == Algorithm::AdamW {
            operations.push(Self::pass(adamw, 1.0, ADAMW_BYTES * largest));
            return operations;
        }
        let [matrices, others] = updated(layout, settings);
        operations.push(Self::pass(adamw, 1.0, ADAMW_BYTES * others));
        // Gradient and momentum read, momentum and update written; the update read for its norm, read and written to
        // divide by it; and read to change the weights.
        let element = self.element;
        operations.push(Self::pass(
            ("muon", "muon momentum and step"),
            1.0,
            (4.0 + 8.0 + 4.0 * element + 2.0 + 8.0) * matrices,
        ));
        let launches = (3 * muon::ITERATIONS * self.shape.num_layers) as f64;
        let share = matrices / layout.range(ParameterKind::Projection).len().max(1) as f64;
        let flops = share * muon_flops(layout) / launches;
        let (kernel, scope) = ("muon", "muon GEMMs");
        operations.push(Operation { kernel, scope, rate: Rate::Gemm, count: launches, flops, bytes: 0.0 });
        operations
    }
}
