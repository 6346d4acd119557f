//! What decides the sizes of a decoder's buffers.

use kernels::fp8::ScaleBlock;
use kernels::{DType, DeviceKind};

use crate::{ActivationRecompute, Precision};

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
    /// The elements that share a scale where the operands of the blocks' GEMMs are rounded to fp8, beside BF16
    /// activations; None where they are not.
    pub fp8: Option<ScaleBlock>,
    /// Which activations the backward pass recomputes instead of keeping them.
    pub recompute: ActivationRecompute,
    /// The kind of device that the model runs on.
    pub device: DeviceKind,
    /// Whether gradients can be computed, or losses only.
    pub training: bool,
    /// Coefficient of the z-loss (see [`kernels::head_cross_entropy`]); 0 for none.
    pub z_loss: f32,
}

/// The element type of weights and activations.
pub fn dtype_of(precision: Precision) -> DType {
    match precision {
        Precision::Fp32 => DType::F32,
        Precision::Bf16 | Precision::Fp8 => DType::BF16,
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
    use kernels::memory::{Category, Plan, count};

    use super::*;
    use crate::Decoder;
    use crate::shape::tests::one_billion;

    fn plan(batch: usize, training: bool) -> Plan {
        let settings = DecoderSettings {
            batch,
            sequence_length: 2048,
            precision: Precision::Bf16,
            fp8: None,
            recompute: ActivationRecompute::Selective,
            device: DeviceKind::Cuda,
            training,
            z_loss: 0.0,
        };
        count(|arena| Decoder::new(&one_billion(), &settings, arena)).unwrap().1
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
