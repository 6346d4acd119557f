//! The time of an optimizer step by a roofline of each operation: `max(FLOPs / rate, bytes / bandwidth)`, with the
//! rates that launches sustain. Bytes are what a launch must move if caches keep nothing between launches.
//! docs/decisions/012 has the same list for one config; `benches/gpu/roofline.py` prints it.

use std::{collections::BTreeMap, ops::Add};

use super::{
    gpu_table::{GpuSpec, SustainedFractions},
    peak_rates::PartAndLabel,
    step_part::StepPart,
};
use crate::engine::{EngineSettings, Shard, muon_flops, shards};
use kernels::{DeviceKind, muon};
use model::{ModelShape, ParameterKind, ParameterLayout, dtype_of, head_chunk_rows};
use run_config::{ActivationRecompute, Algorithm, RunConfig};

/// On a GPU a launch takes at least this long from the previous one's end.
pub(super) const LAUNCH_SECONDS: f64 = 2e-6;
/// Bytes per parameter that `AdamW` reads (gradient, weight with low bits, two moments) and writes (all but the gradient).
const ADAMW_BYTES: f64 = 4.0 + 12.0 + 12.0;

/// Which sustained rate bounds an operation's FLOPs per second.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rate {
    Gemm,
    AttentionForward,
    AttentionBackward,
}

/// Launches of one kind in a step.
#[derive(Clone, Copy, Debug)]
struct Operation {
    part: StepPart,
    /// Its [`StepPart::label`]; empty for operations that have no bound of their own.
    label: &'static str,
    rate: Rate,
    /// Launches per step.
    count: f64,
    /// FLOPs of one.
    flops: f64,
    /// Bytes that one moves.
    bytes: f64,
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

    fn seconds(&self, operation: &Operation) -> f64 {
        let share = match operation.rate {
            Rate::Gemm => self.fractions.gemm,
            Rate::AttentionForward => self.fractions.attention_forward,
            Rate::AttentionBackward => self.fractions.attention_backward,
        };
        let compute = operation.flops / (self.flops * share);
        let memory = operation.bytes / (self.bytes_per_second * self.fractions.memory);
        operation.count * compute.max(memory).max(self.launch_seconds)
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
    operations: Vec<Operation>,
}

impl Roofline {
    /// Lists the operations of a step.
    pub(super) fn new(config: &RunConfig, shape: &ModelShape, settings: EngineSettings) -> Self {
        let step = Step::new(config, shape, settings);
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
            *parts.entry(operation.part).or_default() += rates.seconds(operation);
        }
        parts
    }

    /// Returns the bounds of a step's operations, by part and label; those without a label share the part's empty one.
    pub(super) fn bounds(&self, rates: &Rates) -> BTreeMap<(StepPart, &'static str), Bound> {
        let mut bounds: BTreeMap<_, Bound> = BTreeMap::new();
        for operation in &self.operations {
            let Operation { part, label, count, flops, bytes, .. } = *operation;
            let bound = bounds.entry((part, label)).or_default();
            bound.flops += count * flops;
            bound.bytes += count * bytes;
            bound.seconds += rates.seconds(operation);
        }
        bounds
    }
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
    fn new(config: &RunConfig, shape: &'a ModelShape, settings: EngineSettings) -> Self {
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
        (part, label): PartAndLabel,
        count: f64,
        [m, n, k]: [f64; 3],
        out: f64,
        accumulates: bool,
    ) -> Operation {
        let result = m * n * out * if accumulates { 2.0 } else { 1.0 };
        let bytes = self.element * (m * k + k * n) + result;
        Operation { part, label, rate: Rate::Gemm, count, flops: 2.0 * m * n * k, bytes }
    }

    fn pass((part, label): PartAndLabel, count: f64, bytes: f64) -> Operation {
        Operation { part, label, rate: Rate::Gemm, count, flops: 0.0, bytes }
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
        for ([forward, backward], inputs, outputs, forwards) in [
            (["qkv forward", "qkv backward"], d, packed, again),
            (["attention_output forward", "attention_output backward"], a, d, again),
            (["gate_up forward", "gate_up backward"], d, 2.0 * i, again),
            (["down forward", "down backward"], i, d, 1.0),
        ] {
            let [forward, backward] = [forward, backward].map(|label| (StepPart::Gemm, label));
            operations.extend([
                self.gemm(forward, layers * forwards, [n, outputs, inputs], self.element, false),
                self.gemm(backward, layers, [n, inputs, outputs], self.element, false),
            ]);
            if self.trains_all() {
                operations.push(self.gemm(backward, layers, [outputs, inputs, n], 4.0, true));
            }
        }
        let causal = n * self.sequence_length * a;
        let (row, wide) = (self.element * n * d, self.element * n * packed);
        let attended = self.element * n * a;
        let attention = |label, rate, count, gemms, bytes| Operation {
            part: StepPart::Attention,
            label,
            rate,
            count,
            flops: gemms * causal,
            bytes,
        };
        operations.extend([
            attention("attention forward", Rate::AttentionForward, layers * again, 2.0, wide + attended),
            attention("attention backward", Rate::AttentionBackward, layers, 5.0, 2.0 * wide + 3.0 * attended),
        ]);
        let rotated = self.element * n * (packed - heads.kv_heads as f64 * heads.head_size as f64);
        let normalizes = if self.recompute == ActivationRecompute::None { 0.0 } else { 2.0 };
        let pointwise =
            |label, count: f64, bytes| Self::pass((StepPart::NormAndPointwise, label), count * layers, bytes);
        operations.extend([
            pointwise("add_rms_norm forward", 2.0, 4.0 * row),
            pointwise("add_rms_norm backward", 2.0, 4.0 * row),
            pointwise("add_rms_norm forward", normalizes, 2.0 * row), // its output again
            pointwise("rope forward", again, 2.0 * rotated),
            pointwise("rope backward", 1.0, 2.0 * rotated),
            pointwise("swiglu forward", 1.0, self.element * 3.0 * n * i),
            pointwise("swiglu backward", 1.0, self.element * 6.0 * n * i), // recomputing
        ]);
        if recomputes_block {
            operations.push(pointwise("add_rms_norm forward", 1.0, 4.0 * row));
        }
        if self.shape.architecture.has_qk_norm() {
            operations.extend([
                pointwise("qk_norm forward", again, 2.0 * rotated),
                pointwise("qk_norm backward", 1.0, 4.0 * rotated),
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
                self.gemm((StepPart::Gemm, ""), forwards, [n, outputs, inputs], self.element, true),
                self.gemm((StepPart::Gemm, ""), 1.0, [n, inputs, outputs], self.element, true),
                self.gemm((StepPart::Gemm, ""), 1.0, [outputs, inputs, n], 4.0, true),
            ]
        });
        operations.collect()
    }

    /// Lists the operations of head and loss in chunks of rows: f32 logits, read twice, and their gradients.
    fn head(&self) -> Vec<Operation> {
        let (d, v) = (self.shape.hidden_size as f64, self.shape.padded_vocab_size as f64);
        let rows = head_chunk_rows(self.tokens, self.shape.padded_vocab_size, self.device) as f64;
        let (place, chunks) = ((StepPart::HeadAndLoss, "head_cross_entropy"), self.tokens as f64 / rows);
        let mut operations = vec![
            self.gemm(place, chunks, [rows, v, d], 4.0, false),
            Self::pass(place, chunks, rows * v * (4.0 + 4.0 + self.element)),
            self.gemm(place, chunks, [rows, d, v], self.element, false),
        ];
        if self.trains_all() {
            operations.push(self.gemm(place, chunks, [v, d, rows], 4.0, true));
        }
        operations
    }

    fn embedding_and_last_norm(&self) -> [Operation; 4] {
        let row = self.element * self.tokens as f64 * self.shape.hidden_size as f64;
        // The embedding's gradient is added to f32 rows.
        [
            ("embedding forward", 2.0 * row),
            ("embedding backward", 5.0 * row),
            ("add_rms_norm forward", 4.0 * row),
            ("add_rms_norm backward", 5.0 * row),
        ]
        .map(|(label, bytes)| Self::pass((StepPart::NormAndPointwise, label), 1.0, bytes))
    }

    /// Lists what happens once per step: norm of the gradients, the update, and setting the gradients to zero.
    fn optimizer(&self, config: &RunConfig, layout: &ParameterLayout, settings: EngineSettings) -> Vec<Operation> {
        let (part, all) = (StepPart::Optimizer, layout.trainable_elements() as f64);
        let [norm, zero, adamw, muon] =
            ["grad_norm forward", "Buffer::zero", "adamw step", "muon"].map(|label| (part, label));
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
        operations.push(Self::pass(muon, 1.0, (4.0 + 8.0 + 4.0 * element + 2.0 + 8.0) * matrices));
        let launches = (3 * muon::ITERATIONS * self.shape.num_layers) as f64;
        let share = matrices / layout.range(ParameterKind::Projection).len().max(1) as f64;
        let flops = share * muon_flops(layout) / launches;
        let (part, label) = muon;
        operations.push(Operation { part, label, rate: Rate::Gemm, count: launches, flops, bytes: 0.0 });
        operations
    }
}
