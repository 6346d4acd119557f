//! Adapters beside frozen weights: values, gradients, and what they leave alone.

use std::collections::BTreeMap;

use kernels::{Buffer, DType};
use model::hugging_face::trainable_tensors;
use model::{ActivationRecompute, Decoder, DecoderSettings, Generator, ModelShape, Precision};
use run_config::TargetModule;

use crate::autograd::Tape;
use crate::models::{self, Batch, plain, relative_error, tiny, widened, with_adapters};

/// Adapters beside every module, beside one of several that are packed, and beside some of another architecture.
fn variants() -> [ModelShape; 4] {
    use TargetModule::{DownProj, KProj, OProj, QProj, UpProj, VProj};
    let [tied, untied, qwen2, qwen3] = models::variants();
    [
        with_adapters(tied, &TargetModule::ALL),
        with_adapters(untied, &[VProj, UpProj]),
        with_adapters(qwen2, &[QProj, KProj, DownProj]),
        with_adapters(qwen3, &[OProj, QProj]),
    ]
}

/// The gradients of all that trains, by name.
fn gradients(decoder: &Decoder) -> BTreeMap<String, Vec<f32>> {
    let read = |offset, elements| decoder.gradients().view(offset, &[elements]).unwrap().read::<f32>().unwrap();
    let tensors = trainable_tensors(decoder.shape()).into_iter();
    tensors.map(|tensor| (tensor.name, read(tensor.offset, tensor.elements))).collect()
}

fn trained(shape: &ModelShape, settings: &DecoderSettings, data: &Batch) -> Decoder {
    let mut decoder = models::decoder(shape, settings);
    data.train(&mut decoder, 1.0 / data.target_count() as f32);
    decoder
}

#[test]
fn every_gradient_of_adapters_agrees_with_candle_s_autograd() {
    let (batch, t) = (3, 13);
    for shape in variants() {
        let data = Batch::drawn(&shape, batch * t, 0.2, 11);
        let (expected, theirs) = Tape::new(&shape).differentiate(&data, batch).unwrap();
        let decoder = trained(&shape, &plain(batch, t), &data);
        assert!((f64::from(models::loss(&decoder)) / expected - 1.0).abs() < 1e-6);
        let ours = gradients(&decoder);
        assert!(ours.len() >= 4 * shape.num_layers);
        for (name, ours) in ours {
            let error = relative_error(&ours, &theirs[&name]);
            assert!(error <= 1e-5, "{name}, {:?}: {error:.1e}", shape.architecture);
        }
    }
}

#[test]
fn recomputing_changes_no_bit_of_adapters_gradients() {
    let (batch, t) = (2, 11);
    for shape in variants() {
        let data = Batch::drawn(&shape, batch * t, 0.2, 5);
        let of = |recompute| gradients(&trained(&shape, &DecoderSettings { recompute, ..plain(batch, t) }, &data));
        let kept = of(ActivationRecompute::None);
        assert!(of(ActivationRecompute::Selective) == kept);
        assert!(of(ActivationRecompute::Block) == kept);
    }
}

#[test]
fn adapters_gradients_add_up_over_micro_batches_and_documents() {
    let (shape, t) = (with_adapters(tiny(true), &TargetModule::ALL), 12);
    let whole = Batch::drawn(&shape, 4 * t, 0.2, 9).with_documents(t, &[5, 3, 4]);
    let scale = 1.0 / whole.target_count() as f32;
    let part = |from: usize| Batch {
        inputs: whole.inputs[from * t..][..2 * t].to_vec(),
        targets: whole.targets[from * t..][..2 * t].to_vec(),
        documents: whole.documents.as_ref().map(|starts| starts[from * t..][..2 * t].to_vec()),
    };
    let mut at_once = models::decoder(&shape, &plain(4, t));
    whole.train(&mut at_once, scale);
    let mut in_parts = models::decoder(&shape, &plain(2, t));
    in_parts.begin_accumulation().unwrap();
    [0, 2].map(|from| part(from).train(&mut in_parts, scale));
    let expected = gradients(&at_once);
    for (name, ours) in gradients(&in_parts) {
        let error = relative_error(&ours, &widened(&expected[&name]));
        assert!(error <= 1e-5, "{name}: {error:.1e}");
    }
}

#[test]
fn the_number_of_threads_changes_no_bit_of_adapters_gradients() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        let shape = with_adapters(tiny(false), &TargetModule::ALL);
        let data = Batch::drawn(&shape, 3 * 17, 0.1, 2);
        let settings = DecoderSettings { precision, ..plain(3, 17) };
        let of = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| gradients(&trained(&shape, &settings, &data)))
        };
        assert!(of(1) == of(4));
    }
}

#[test]
fn generation_and_evaluation_use_the_adapters() {
    let base = tiny(true);
    let shape = with_adapters(base.clone(), &TargetModule::ALL);
    let tokens: Vec<u32> = (3..15).collect();
    let mut generator = Generator::new(&shape, &models::flat_weights(&shape, DType::F32), 24).unwrap();
    let logits: Vec<f32> = generator.prefill(&tokens).unwrap();
    let expected = Tape::new(&shape).logits(&tokens, 1).unwrap().to_vec2::<f64>().unwrap();
    assert!(relative_error(&logits, expected.last().unwrap()) < 1e-5);

    let data = Batch::drawn(&shape, 24, 0.0, 4);
    let mut evaluating = models::decoder(&shape, &DecoderSettings { training: false, ..plain(2, 12) });
    let losses = data.losses(&mut evaluating);
    assert_eq!(losses, data.losses(&mut models::decoder(&shape, &plain(2, 12))));
    assert_ne!(losses, data.losses(&mut models::decoder(&base, &plain(2, 12))));
}

#[test]
fn frozen_weights_have_neither_gradient_nor_state() {
    let shape = with_adapters(tiny(true), &TargetModule::ALL);
    let decoder = models::decoder(&shape, &plain(1, 4));
    let adapters: usize = trainable_tensors(&shape).iter().map(|tensor| tensor.elements).sum();
    assert_eq!(shape.trainable_parameter_count(), adapters as u64);
    let gradients: &Buffer = decoder.gradients();
    assert!((adapters..adapters + 64 * 42).contains(&gradients.elements()), "but for the parameters' alignment");
    assert_eq!(shape.parameter_count(), tiny(true).parameter_count());
    let per_token = shape.flops_per_token(4) - 6.0 * adapters as f64;
    let attention = 6.0 * (3 * 24 * 4) as f64;
    assert!(((per_token - attention) * 6.0 / 4.0 + attention - tiny(true).flops_per_token(4)).abs() < 1e-6);
}
