//! Bitwise the same: whatever is recomputed, and however many threads there are.

use kernels::fp8::ScaleBlock;
use model::{ActivationRecompute, DecoderSettings, ModelShape, Precision};

use run_config::Architecture;

use crate::models::{self, Batch, plain, tiny};

const PRECISIONS: [(Precision, Option<ScaleBlock>); 4] = [
    (Precision::Fp32, None),
    (Precision::Bf16, None),
    (Precision::Fp8, Some(ScaleBlock::Square32)),
    (Precision::Fp8, Some(ScaleBlock::Tensor)),
];

/// Bits of the loss and of all gradients after two micro-batches, of which the second holds documents.
fn bits(shape: &ModelShape, settings: &DecoderSettings) -> Vec<u32> {
    let mut decoder = models::decoder(shape, settings);
    let random_batch = |seed| Batch::drawn(shape, settings.batch * settings.sequence_length, 0.2, seed);
    for data in [random_batch(1), random_batch(2).with_documents(settings.sequence_length, &[5, 1, 70])] {
        data.train(&mut decoder, 0.01);
    }
    let gradients = decoder.gradients().read::<f32>().unwrap();
    assert!(gradients.iter().all(|value| value.is_finite()));
    gradients.iter().chain([&models::loss(&decoder)]).map(|value| value.to_bits()).collect()
}

#[test]
fn what_is_recomputed_changes_no_bit_of_the_gradients() {
    for (precision, fp8) in PRECISIONS {
        for shape in models::variants() {
            let of = |recompute| bits(&shape, &DecoderSettings { precision, fp8, recompute, ..plain(3, 13) });
            let expected = of(ActivationRecompute::None);
            assert!(of(ActivationRecompute::Selective) == expected, "selective, {precision:?}, {shape:?}");
            assert!(of(ActivationRecompute::Block) == expected, "block, {precision:?}, {shape:?}");
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    // Large enough that every operation has several pieces to hand out.
    let large = |architecture| ModelShape {
        architecture,
        vocab_size: 1100,
        padded_vocab_size: 1152,
        hidden_size: 96,
        intermediate_size: 200,
        num_layers: 2,
        num_attention_heads: 6,
        head_size: 16,
        max_position_embeddings: 192,
        ..tiny(true)
    };
    let shapes = [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3].map(large);
    for (shape, (precision, fp8)) in shapes.iter().flat_map(|shape| PRECISIONS.map(|precision| (shape, precision))) {
        let settings = DecoderSettings { precision, fp8, ..plain(2, 161) };
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| bits(shape, &settings))
        };
        let expected = with(1);
        assert!(with(2) == expected, "2 threads, {precision:?}, {:?}", shape.architecture);
        assert!(with(4) == expected, "4 threads, {precision:?}, {:?}", shape.architecture);
    }
}
