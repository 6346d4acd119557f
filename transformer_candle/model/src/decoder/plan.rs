//! Every buffer of a decoder, listed before any is allocated.

use kernels::memory::{Arena, BufferId, Category, Plan};
use kernels::{DType, DeviceKind, GraphCache, Upload, WriteMode, dropout, head_cross_entropy};

use super::Decoder;
use crate::activations::ActivationSettings;
use crate::backbone::BackbonePlan;
use crate::layout::ParameterLayout;
use crate::{ActivationRecompute, ModelShape, Precision, Result};

/// The size limits of the chunks that the head works in: rows of tokens whose logits exist at one time.
#[derive(Clone, Copy, Debug)]
struct Chunks {
    /// Maximum number of rows.
    rows: usize,
    /// Maximum number of elements of logits.
    elements: usize,
}

/// At 50 GB/s and 430 GFLOP/s the head's gradient, read and written once per chunk, takes 1 % of the GEMMs' time.
const CPU_CHUNKS: Chunks = Chunks { rows: 1024, elements: 1 << 25 };

/// Each chunk of C rows reads and writes the head's f32 gradient once, 8 V D bytes, beside its three GEMMs of 2 C V D
/// FLOPs each. On a GPU of F FLOP/s and B bytes/s that is 8 F / (6 C B) of the GEMMs' time, whatever V and D are: with
/// the 117 operations per byte of an RTX 5090, 7.6 % at C = 2048 and 24 % at 640. The head is 7.3 % of the 1.3 B
/// model's FLOPs, so C = 2048 costs the step half a percent if the GEMMs hide nothing of it, and 410 MB of f32 logits;
/// twice as many rows would gain a quarter of a percent. A vocabulary of more than 64 Ki takes fewer rows.
const CUDA_CHUNKS: Chunks = Chunks { rows: 2048, elements: 1 << 27 };

/// The settings of a decoder beside its shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecoderSettings {
    /// Sequences of a micro-batch, B.
    pub batch: usize,
    /// Positions of each, T.
    pub sequence_length: usize,
    /// Element type of weights and activations.
    pub precision: Precision,
    /// Which activations the backward pass recomputes instead of keeping them.
    pub recompute: ActivationRecompute,
    /// The kind of device that the model runs on.
    pub device: DeviceKind,
    /// Whether gradients can be computed, or losses only.
    pub training: bool,
    /// Coefficient of the z-loss (see [`head_cross_entropy`]); 0 for none.
    pub z_loss: f32,
}

/// The element type of weights and activations.
pub fn dtype_of(precision: Precision) -> DType {
    match precision {
        Precision::Fp32 => DType::F32,
        Precision::Bf16 => DType::BF16,
    }
}

/// A decoder whose buffers are listed but not allocated.
#[derive(Clone, Debug)]
pub struct DecoderPlan {
    shape: ModelShape,
    settings: DecoderSettings,
    layout: ParameterLayout,
    weights: BufferId,
    gradients: BufferId,
    backbone: BackbonePlan,
    logits: BufferId,
    losses: BufferId,
    loss: BufferId,
    scale: BufferId,
    /// Staging buffer of the scale's upload; None on a CPU.
    scale_staging: Option<BufferId>,
}

impl Decoder {
    /// Adds every buffer of a decoder to a memory plan.
    pub fn plan(shape: &ModelShape, settings: &DecoderSettings, plan: &mut Plan) -> DecoderPlan {
        let layout = ParameterLayout::new(shape);
        let &DecoderSettings { batch, sequence_length, recompute, training, device, .. } = settings;
        let (dtype, n) = (dtype_of(settings.precision), batch * sequence_length);
        let (rows, v) = (head_chunk_rows(n, shape.padded_vocab_size, device), shape.padded_vocab_size);
        let workspace_elements = head_cross_entropy::workspace_elements(rows, shape.hidden_size, v, device);
        let weights = plan.add("weights", Category::Weights, dtype, &[layout.elements()]);
        let gradient_elements = if training { layout.trainable_elements() } else { 0 };
        let activations = ActivationSettings {
            batch,
            sequence_length,
            dtype,
            residual_dtype: dtype,
            recompute,
            training,
            positions: sequence_length,
            device,
            workspace_elements,
        };
        DecoderPlan {
            weights,
            gradients: plan.add("gradients", Category::Gradients, DType::F32, &[gradient_elements]),
            backbone: BackbonePlan::new(shape, &activations, plan),
            logits: plan.add(
                "logits",
                Category::Scratch,
                DType::F32,
                &[rows, head_cross_entropy::logits_width(v, device)],
            ),
            losses: plan.add("losses", Category::Scratch, DType::F32, &[n]),
            loss: plan.add("loss", Category::Scratch, DType::F32, &[1]),
            scale: plan.add("loss_scale", Category::Batch, DType::F32, &[1]),
            scale_staging: (device == DeviceKind::Cuda)
                .then(|| plan.add("loss_scale.staging", Category::Batch, DType::F32, &[1])),
            shape: shape.clone(),
            settings: *settings,
            layout,
        }
    }
}

impl DecoderPlan {
    /// The layout of the flat buffers: the place that each parameter will have.
    pub fn layout(&self) -> &ParameterLayout {
        &self.layout
    }

    /// The decoder over allocated buffers.
    pub fn bind(&self, arena: &Arena) -> Result<Decoder> {
        let Self { shape, settings, layout, .. } = self;
        let (weights, gradients) = (arena.buffer(self.weights), arena.buffer(self.gradients));
        let parameters = layout.weights(&weights, settings.training.then_some(&gradients))?;
        let scale_1 = arena.buffer(self.scale);
        Ok(Decoder {
            shape: shape.clone(),
            layout: layout.clone(),
            weights,
            gradients,
            backbone: self.backbone.bind(arena, &parameters)?,
            head: parameters.head,
            logits_CW: arena.buffer(self.logits),
            losses_N: arena.buffer(self.losses),
            loss_1: arena.buffer(self.loss),
            scale_upload: Upload::new(scale_1.clone(), self.scale_staging.map(|id| arena.buffer(id)))?,
            scale_1,
            scale: None,
            // All that was allocated is zero.
            write_mode: WriteMode::Accumulate,
            z_loss: self.settings.z_loss,
            dropout: dropout::Key { seed: 0, first_row: 0, enabled: true },
            graphs: GraphCache::default(),
        })
    }
}

/// Returns the rows of the chunks that the head works in: whole tiles.
pub fn head_chunk_rows(tokens: usize, padded_vocab_size: usize, device: DeviceKind) -> usize {
    let chunks = match device {
        DeviceKind::Cpu => CPU_CHUNKS,
        DeviceKind::Cuda => CUDA_CHUNKS,
    };
    let rows = (chunks.elements / padded_vocab_size).min(chunks.rows) / 64 * 64;
    rows.max(64).min(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::tests::one_billion;

    fn plan(batch: usize, training: bool) -> Plan {
        let settings = DecoderSettings {
            batch,
            sequence_length: 2048,
            precision: Precision::Bf16,
            recompute: ActivationRecompute::Selective,
            device: DeviceKind::Cuda,
            training,
            z_loss: 0.0,
        };
        let mut plan = Plan::new();
        Decoder::plan(&one_billion(), &settings, &mut plan);
        plan
    }

    #[test]
    fn a_bf16_model_takes_two_bytes_a_weight_and_four_a_gradient() {
        let (plan, parameters) = (plan(4, true), one_billion().parameter_count() as f64);
        let bytes = |category| plan.bytes_of(category) as f64 / parameters;
        assert!((bytes(Category::Weights) - 2.0).abs() < 1e-3);
        assert!((bytes(Category::Gradients) - 4.0).abs() < 1e-3);
    }

    #[test]
    fn a_gpu_of_32_gib_fits_a_billion_parameters_in_fours() {
        // The masters' low bits and the moments, 10 bytes per parameter, are the optimizer's.
        let total = plan(4, true).bytes() + 10 * one_billion().parameter_count();
        // What CUDA reports of an RTX 5090.
        assert!(total < 32_122 * 1024 * 1024 / 100 * 95, "{total}");
    }

    #[test]
    fn evaluation_alone_plans_no_gradients() {
        let plan = plan(4, false);
        assert_eq!(plan.bytes_of(Category::Gradients), 0);
        assert_eq!(plan.bytes_of(Category::SavedActivations), 0);
    }

    #[test]
    fn the_head_works_in_whole_tiles_of_bounded_size() {
        let rows = |tokens, vocabulary| head_chunk_rows(tokens, vocabulary, DeviceKind::Cpu);
        assert_eq!([rows(8192, 50_048), rows(100, 50_048), rows(8192, 1 << 24)], [640, 100, 64]);
        let rows = |tokens, vocabulary| head_chunk_rows(tokens, vocabulary, DeviceKind::Cuda);
        assert_eq!([rows(8192, 50_048), rows(100, 50_048), rows(8192, 256_000)], [2048, 100, 512]);
    }
}
