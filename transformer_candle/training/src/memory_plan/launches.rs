//! The launches of an optimizer step: how many there are of each operation, and the FLOPs and bytes of one.
//!
//! Operations of micro-batches are those that crate `model` calls. Once per step only those are listed that pass over
//! parameters.

use std::convert::Infallible;

use kernels::{DeviceKind, muon};
use model::{
    AdapterParameters, Fp8Fusion, LinearMap, ModelShape, ParameterKind, ParameterLayout, ParameterSpec, Parameters,
    dtype_of, head_chunk_rows,
};
use run_config::{ActivationRecompute, Algorithm, Precision, RunConfig};

use super::operation::{ADAPTERS, KernelAndScope, Operation, Rate};
use crate::engine::{EngineSettings, Shard, StepOf, fp8_block, muon_flops, shards};

/// Bytes per parameter that `AdamW` reads (gradient, weight with low bits, two moments) and writes (all but the gradient).
const ADAMW_BYTES: f64 = 4.0 + 12.0 + 12.0;

/// Lists the operations of a step on one device.
pub(super) fn of_step(step: StepOf<'_>) -> Vec<Operation> {
    let StepOf { config, shape, settings } = step;
    let micro_batch = MicroBatch::new(step);
    let mut operations = micro_batch.projections();
    operations.extend(micro_batch.attention());
    operations.extend(micro_batch.norms_and_pointwise());
    operations.extend(micro_batch.adapters());
    operations.extend(micro_batch.head());
    operations.extend(micro_batch.embedding_and_last_norm());
    let micro_batches = config.data.sequences_per_step as f64 / settings.micro_batch as f64;
    for operation in &mut operations {
        operation.count *= micro_batches / processors(settings) as f64;
    }
    operations.extend(once_per_step(config, shape, settings));
    operations.retain(|operation| operation.count > 0.0);
    operations
}

/// Returns how many devices the ranks divide a step between: each has a GPU, or its share of its machine's CPU.
pub(super) fn processors(EngineSettings { device, rank_info, .. }: EngineSettings) -> usize {
    match device {
        DeviceKind::Cuda => rank_info.world_size,
        DeviceKind::Cpu => rank_info.world_size / rank_info.local_world_size,
    }
}

/// An operation that only moves bytes.
fn pass((kernel, scope): KernelAndScope, count: f64, bytes: f64) -> Operation {
    Operation { kernel, scope, rate: Rate::Gemm, count, flops: 0.0, bytes }
}

/// The sizes that the operations of a micro-batch follow from. N tokens of a micro-batch, D hidden, I intermediate,
/// V vocabulary, P packed QKV width, A width of all query heads, R rank of adapters.
struct MicroBatch<'a> {
    shape: &'a ModelShape,
    device: DeviceKind,
    sequence_length: f64,
    tokens: usize,
    /// Bytes of a weight or activation.
    element: f64,
    layers: f64,
    /// Blocks whose forward pass runs again before their backward pass: all but the last, or none.
    recomputed_blocks: f64,
    /// Whether the operands of projections are rounded to fp8.
    is_fp8: bool,
    /// Whether projections are held in fp8 and multiplied in bf16.
    dequantizes: bool,
    /// What is computed in fp8 for the projections after it.
    fusion: Fp8Fusion,
    /// Whether the backward pass of a block computes norms and `SwiGLU` again.
    recomputes: bool,
}

impl<'a> MicroBatch<'a> {
    fn new(StepOf { config, shape, settings }: StepOf<'a>) -> Self {
        let layers = shape.num_layers as f64;
        let recomputes_blocks = settings.activation_recompute == ActivationRecompute::Block;
        let recomputes = settings.activation_recompute != ActivationRecompute::None;
        let fp8 = fp8_block(&config.runtime);
        Self {
            shape,
            device: settings.device,
            sequence_length: config.data.sequence_length as f64,
            tokens: settings.micro_batch * config.data.sequence_length,
            element: dtype_of(config.runtime.precision).size_in_bytes() as f64,
            is_fp8: fp8.is_some(),
            dequantizes: fp8.is_none() && shape.has_fp8_base(),
            fusion: Fp8Fusion::new(shape, fp8, settings.activation_recompute, settings.device),
            layers,
            recomputed_blocks: if recomputes_blocks { layers - 1.0 } else { 0.0 },
            recomputes,
        }
    }

    /// Bytes of N rows of so many elements.
    fn rows(&self, elements: usize) -> f64 {
        self.element * (self.tokens * elements) as f64
    }

    /// The GEMM `[m, k] x [k, n]`; the result has elements of `out` bytes, read as well where it is accumulated.
    fn gemm(
        &self,
        (kernel, scope): KernelAndScope,
        count: f64,
        [m, n, k]: [usize; 3],
        out: f64,
        accumulates: bool,
    ) -> Operation {
        let [m, n, k] = [m, n, k].map(|size| size as f64);
        let result = m * n * out * if accumulates { 2.0 } else { 1.0 };
        let bytes = self.element * (m * k + k * n) + result;
        Operation { kernel, scope, rate: Rate::Gemm, count, flops: 2.0 * m * n * k, bytes }
    }

    /// Passes forward of each projection. A recomputed block stops before `down`.
    fn forwards(&self, projection: &str) -> f64 {
        if projection == "down" { self.layers } else { self.layers + self.recomputed_blocks }
    }

    /// A GEMM of a projection: in fp8 if the run is. A CPU reads its operands as codes, and multiplies them in bf16.
    fn projection_gemm(
        &self,
        name: KernelAndScope,
        count: f64,
        sizes: [usize; 3],
        out: f64,
        accumulates: bool,
    ) -> Operation {
        let gemm = self.gemm(name, count, sizes, out, accumulates);
        if !self.is_fp8 {
            return gemm;
        }
        let [m, n, k] = sizes.map(|size| size as f64);
        Operation { rate: Rate::Fp8Gemm, bytes: gemm.bytes - (self.element - 1.0) * (m * k + k * n), ..gemm }
    }

    /// Lists the GEMMs of every block: forward, and the gradients of inputs and weights.
    fn projections(&self) -> Vec<Operation> {
        let (n, mut operations) = (self.tokens, Vec::new());
        for LinearMap { name: projection, inputs, outputs } in self.shape.linear_maps() {
            let [forward, input, weight] = ["linear::forward", "linear::backward_input", "linear::backward_weight"]
                .map(|kernel| (kernel, projection));
            operations.extend([
                self.projection_gemm(forward, self.forwards(projection), [n, outputs, inputs], self.element, false),
                self.projection_gemm(input, self.layers, [n, inputs, outputs], self.element, false),
            ]);
            if self.trains_all() {
                operations.push(self.projection_gemm(weight, self.layers, [outputs, inputs, n], 4.0, true));
            }
            operations.extend(self.fp8_operands(projection, [inputs, outputs]));
        }
        operations
    }

    /// The roundings of a projection's inputs, and of the gradients of its outputs, to fp8: read in bf16, and written once
    /// for each axis that a GEMM sums over. A GPU has the weights' transpose made beside. Before bf16 GEMMs, what is held in
    /// fp8 becomes bf16.
    fn fp8_operands(&self, projection: &'static str, [inputs, outputs]: [usize; 2]) -> Vec<Operation> {
        if self.dequantizes {
            // Codes are read, and bf16 numbers written.
            let count = self.forwards(projection) + self.layers;
            return vec![pass(("fp8::dequantize", projection), count, 3.0 * (inputs * outputs) as f64)];
        }
        if !self.is_fp8 {
            return Vec::new();
        }
        let (is_gpu, trains) = (self.device == DeviceKind::Cuda, self.trains_all());
        let quantize = |count, elements: usize, copies: f64| {
            pass(("fp8::quantize", projection), count, (2.0 + copies) * (self.tokens * elements) as f64)
        };
        let of_norm = self.fusion.norms && ["qkv", "gate_up"].contains(&projection);
        let input_again = if trains && !of_norm { self.layers } else { 0.0 };
        let transposes = if is_gpu { self.layers } else { 0.0 };
        let of_swiglu = |map| self.fusion.swiglu && projection == map;
        vec![
            quantize(if of_swiglu("down") { 0.0 } else { self.forwards(projection) + input_again }, inputs, 1.0),
            quantize(
                if of_swiglu("gate_up") { 0.0 } else { self.layers },
                outputs,
                if is_gpu && trains { 2.0 } else { 1.0 },
            ),
            pass(("fp8::transpose", projection), transposes, 2.0 * (inputs * outputs) as f64),
        ]
    }

    /// Whether every weight trains, not adapters only.
    fn trains_all(&self) -> bool {
        self.shape.lora.is_none()
    }

    fn attention(&self) -> [Operation; 2] {
        let heads = self.shape.heads();
        let (packed, attended) = (self.rows(heads.packed_width()), self.rows(heads.query_width()));
        let causal = self.tokens as f64 * self.sequence_length * heads.query_width() as f64;
        let forwards = self.layers + self.recomputed_blocks;
        let attention = |kernel, rate, count, gemms: f64, bytes| {
            let flops = gemms * causal;
            Operation { kernel, scope: "", rate, count, flops, bytes }
        };
        [
            attention("attention::forward", Rate::AttentionForward, forwards, 2.0, packed + attended),
            attention("attention::backward", Rate::AttentionBackward, self.layers, 5.0, 2.0 * packed + 3.0 * attended),
        ]
    }

    /// Lists what else is in the blocks: norms, biases, rotation and `SwiGLU`.
    fn norms_and_pointwise(&self) -> Vec<Operation> {
        let &Self { layers, recomputed_blocks, recomputes, .. } = self;
        let (heads, architecture) = (self.shape.heads(), self.shape.architecture);
        let [row, packed, wide] =
            [self.shape.hidden_size, heads.packed_width(), self.shape.intermediate_size].map(|width| self.rows(width));
        let rotated = self.rows(heads.query_width() + heads.key_width());
        let operation = |kernel, count, bytes| pass((kernel, ""), count, bytes);
        // The first norm has nothing to add. A recomputed block has the sum before its first norm.
        let norms_again = if recomputes { 2.0 * layers } else { 0.0 };
        let (recomputed_norms, in_fp8) = if self.fusion.norms { (0.0, norms_again) } else { (norms_again, 0.0) };
        let forwards = layers + recomputed_blocks;
        // Rotated are the normed heads, which are not kept.
        let rotations = if recomputes && architecture.has_qk_norm() { forwards + layers } else { forwards };
        // Gate, up and the gradient are read in bf16; codes of three and, for both axes, of two are written.
        let (swiglu_forward, outputs) =
            if self.fusion.swiglu { ("swiglu_fp8::forward", 2.5) } else { ("swiglu::forward", 3.0) };
        let (swiglu_backward, gradients) = match (self.fusion.swiglu, recomputes) {
            (true, _) => ("swiglu_fp8::backward", 5.5),
            (false, true) => ("swiglu::backward_recomputing", 6.0),
            (false, false) => ("swiglu::backward", 5.0),
        };
        let mut operations = vec![
            operation("add_rms_norm::forward", 1.0, 2.0 * row),
            operation("add_rms_norm::forward_add", 2.0 * layers - 1.0 + recomputed_blocks, 4.0 * row),
            operation("add_rms_norm::backward", 2.0 * layers, 4.0 * row),
            operation("add_rms_norm::normalize", recomputed_norms + recomputed_blocks, 2.0 * row),
            operation("add_rms_norm_fp8::normalize", in_fp8, 1.5 * row),
            operation("rope::forward", rotations, 2.0 * rotated),
            operation("rope::backward", layers, 2.0 * rotated),
            operation(swiglu_forward, layers, outputs * wide),
            operation(swiglu_backward, layers, gradients * wide),
        ];
        if architecture.has_qkv_bias() {
            operations.push(operation("bias::forward", forwards, 2.0 * packed));
            if self.trains_all() {
                operations.push(operation("bias::backward", layers, packed));
            }
        }
        if architecture.has_qk_norm() {
            operations.extend([
                operation("qk_norm::forward", rotations, 2.0 * packed),
                operation("qk_norm::backward", layers, 3.0 * rotated),
            ]);
        }
        operations
    }

    /// Lists the operations of every block's adapters.
    fn adapters(&self) -> Vec<Operation> {
        let Ok(parameters) = Parameters::build(self.shape, Ok::<_, Infallible>);
        let Some(adapters) = parameters.blocks.first().map(|block| &block.adapters) else { return Vec::new() };
        [
            ("qkv", &adapters.qkv),
            ("attention_output", &adapters.attention_output),
            ("gate_up", &adapters.gate_up),
            ("down", &adapters.down),
        ]
        .into_iter()
        .flat_map(|(projection, adapters)| adapters.iter().map(move |adapter| (self.forwards(projection), adapter)))
        .flat_map(|(forwards, adapter)| self.adapter(forwards, adapter))
        .collect()
    }

    /// Lists the operations of an adapter with `x A^T` in so many passes forward, and twice more in the backward pass.
    fn adapter(&self, forwards: f64, adapter: &AdapterParameters<ParameterSpec>) -> Vec<Operation> {
        let (n, layers, element) = (self.tokens, self.layers, self.element);
        let (outputs, rank, inputs) = (adapter.b.shape[0], adapter.a.shape[0], adapter.a.shape[1]);
        let drops = self.shape.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        let input_gradient = if drops { "linear::backward_input" } else { "lora::backward_input" };
        let [project, expand, backward_expand, input_gradient, a_gradient, b_gradient] = [
            "lora::project",
            "lora::expand",
            "lora::backward_expand",
            input_gradient,
            "linear::backward_weight",
            "lora::backward_b",
        ]
        .map(|kernel| (kernel, ADAPTERS));
        let mut operations = vec![
            self.gemm(project, forwards + layers, [n, rank, inputs], element, false),
            self.gemm(expand, forwards, [n, outputs, rank], element, true),
            self.gemm(backward_expand, 2.0 * layers, [n, rank, outputs], element, false),
            self.gemm(input_gradient, layers, [n, inputs, rank], element, !drops),
            self.gemm(a_gradient, layers, [rank, inputs, n], 4.0, true),
            self.gemm(b_gradient, layers, [outputs, rank, n], 4.0, true),
        ];
        if drops {
            operations.extend([
                pass(("dropout::forward", ""), forwards + layers, 2.0 * self.rows(inputs)),
                pass(("dropout::backward", ""), layers, 3.0 * self.rows(inputs)),
            ]);
        }
        operations
    }

    /// Lists the operations of head and loss in chunks of rows: f32 logits, read twice, and their gradients.
    fn head(&self) -> Vec<Operation> {
        let &ModelShape { hidden_size: d, padded_vocab_size: v, .. } = self.shape;
        let rows = head_chunk_rows(self.tokens, v, self.device);
        let chunks = self.tokens as f64 / rows as f64;
        let [logits, softmax, input, weight] = ["head logits", "head softmax and gradient", "head dX", "head dW"]
            .map(|scope| ("head_cross_entropy::forward_backward", scope));
        let mut operations = vec![
            self.gemm(logits, chunks, [rows, v, d], 4.0, false),
            pass(softmax, chunks, (rows * v) as f64 * (4.0 + 4.0 + self.element)),
            self.gemm(input, chunks, [rows, d, v], self.element, false),
        ];
        if self.trains_all() {
            operations.push(self.gemm(weight, chunks, [v, d, rows], 4.0, true));
        }
        operations
    }

    fn embedding_and_last_norm(&self) -> [Operation; 4] {
        let d = self.shape.hidden_size;
        let row = self.rows(d);
        // Rows of the gradient in f32, which the embedding's gradients are added to.
        let added = 2.0 * 4.0 * (self.tokens * d) as f64;
        let trained = if self.trains_all() { 1.0 } else { 0.0 };
        [
            pass(("embedding::forward", ""), 1.0, 2.0 * row),
            pass(("embedding::backward", ""), trained, row + added),
            pass(("add_rms_norm::forward_add", "last norm"), 1.0, 4.0 * row),
            // It adds to a gradient that was set to zero.
            pass(("add_rms_norm::backward", "last norm"), 1.0, 5.0 * row),
        ]
    }
}

/// Lists what passes over parameters once per step: norm of the gradients, the update, setting the gradients to zero,
/// and the sums of virtual shards.
fn once_per_step(config: &RunConfig, shape: &ModelShape, settings: EngineSettings) -> Vec<Operation> {
    let layout = ParameterLayout::new(shape);
    let all = layout.trainable_elements() as f64;
    // A CPU's first micro-batch overwrites the gradients of matrices.
    let is_cpu = settings.device == DeviceKind::Cpu;
    let zeroed = if is_cpu { all - layout.decayed_elements() as f64 } else { all };
    let largest = shards(&layout, processors(settings)).iter().map(Shard::len).max().unwrap_or(0) as f64;
    let mut operations = vec![
        pass(("grad_norm::forward", ""), 1.0, 4.0 * largest),
        pass(("Buffer::zero", "gradients"), 1.0, 4.0 * zeroed.max(0.0)),
    ];
    if config.runtime.precision == Precision::Fp8 && shape.lora.is_none() {
        // Read in bf16, and written as codes.
        let weights = shape.linear_maps().into_iter().map(|LinearMap { name, inputs, outputs }| {
            pass(("fp8::quantize", name), shape.num_layers as f64, 3.0 * (inputs * outputs) as f64)
        });
        operations.extend(weights);
    }
    if let Some(virtual_shards) = config.runtime.deterministic_reduction {
        let sums = virtual_shards.saturating_sub(settings.rank_info.world_size) as f64 / processors(settings) as f64;
        operations.push(pass(("accumulate::forward", ""), sums, 3.0 * 4.0 * all));
    }
    match config.optimizer.algorithm {
        Algorithm::AdamW => operations.push(pass(("adamw::step", ""), 1.0, ADAMW_BYTES * largest)),
        Algorithm::Muon => operations.extend(muon_and_adamw(config, shape, &layout, settings)),
    }
    operations
}

/// Lists the updates of matrices by Muon, and of the rest by `AdamW`.
fn muon_and_adamw(
    config: &RunConfig,
    shape: &ModelShape,
    layout: &ParameterLayout,
    settings: EngineSettings,
) -> [Operation; 3] {
    let [matrices, others] = updated(layout, settings);
    // Gradient and momentum read, momentum and update written; the update read for its norm, read and written to
    // divide by it; and read to change the weights.
    let element = dtype_of(config.runtime.precision).size_in_bytes() as f64;
    let bytes = (4.0 + 8.0 + 4.0 * element + 2.0 + 8.0) * matrices;
    let count = (3 * muon::ITERATIONS * shape.num_layers) as f64;
    let share = matrices / layout.range(ParameterKind::Projection).len().max(1) as f64;
    let flops = share * muon_flops(layout) / count;
    let gemms = Operation { kernel: "muon", scope: "muon GEMMs", rate: Rate::Gemm, count, flops, bytes: 0.0 };
    [pass(("adamw::step", ""), 1.0, ADAMW_BYTES * others), pass(("muon", "muon momentum and step"), 1.0, bytes), gemms]
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
