//! Adapters beside frozen weights: values, gradients, and what they leave alone.

use std::collections::BTreeMap;

use kernels::{Buffer, DType};
use model::hugging_face::trainable_tensors;
use model::{ActivationRecompute, Decoder, DecoderSettings, Generator, LoraShape, ModelShape, Precision};
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
        let without_recompute = of(ActivationRecompute::None);
        assert!(of(ActivationRecompute::Selective) == without_recompute);
        assert!(of(ActivationRecompute::Block) == without_recompute);
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
    for from in [0, 2] {
        part(from).train(&mut in_parts, scale);
    }
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
    let expected = Tape::new(&shape).logits(&tokens, 1).unwrap().to_vec2::<f64>().unwrap();
    for (dtype, bound) in [(DType::F32, 1e-5), (DType::BF16, 0.03)] {
        let mut generator = Generator::new(&shape, &models::weights(&shape, dtype), 24).unwrap();
        assert!(relative_error(&generator.prefill(&tokens).unwrap(), expected.last().unwrap()) < bound, "{dtype:?}");
    }

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

/// The same model with dropout in its adapters.
fn dropping(shape: ModelShape) -> ModelShape {
    let lora = shape.lora.clone().map(|lora| LoraShape { dropout: 0.3, ..lora });
    shape.with_lora(lora)
}

#[test]
fn gradients_with_dropout_are_the_slopes_of_the_loss() {
    let t = 7;
    for shape in variants().map(dropping) {
        let data = Batch::drawn(&shape, 2 * t, 0.2, 11);
        let loss = |decoder: &mut Decoder| {
            decoder.begin_accumulation().unwrap();
            data.train(decoder, 1.0);
            f64::from(models::loss(decoder))
        };
        let mut decoder = models::decoder(&shape, &plain(2, t));
        decoder.set_dropout(77, 0);
        let with = loss(&mut decoder);
        let ours = gradients(&decoder);
        let mut without = models::decoder(&ModelShape { lora: None, ..shape.clone() }, &plain(2, t));
        assert!((with - loss(&mut without)).abs() > 1e-3);
        // Along the gradient the loss rises by its square; f32 holds sums of some ten tokens to seven digits.
        for tensor in trainable_tensors(&shape) {
            let gradient = &ours[&tensor.name];
            let square: f64 = gradient.iter().map(|&value| f64::from(value).powi(2)).sum();
            let step = 0.02 / square.sqrt();
            let values = decoder.weights().flat.view(tensor.offset, &[tensor.elements]).unwrap().read::<f32>().unwrap();
            let mut moved = |sign: f64| {
                let shifted = values.iter().zip(gradient);
                let shifted: Vec<f32> = shifted
                    .map(|(&value, &slope)| (f64::from(value) + sign * step * f64::from(slope)) as f32)
                    .collect();
                decoder.weights_mut().flat.view(tensor.offset, &[tensor.elements]).unwrap().write(&shifted).unwrap();
                loss(&mut decoder)
            };
            let slope = (moved(1.0) - moved(-1.0)) / (2.0 * step * square);
            moved(0.0);
            assert!((slope - 1.0).abs() < 0.02, "{}: {slope}", tensor.name);
        }
    }
}

#[test]
fn dropout_is_the_same_in_every_recompute_mode_and_micro_batch() {
    let (shape, t) = (dropping(with_adapters(tiny(false), &TargetModule::ALL)), 6);
    let whole = Batch::drawn(&shape, 4 * t, 0.0, 3);
    let of = |settings: &DecoderSettings, seed| {
        let mut decoder = models::decoder(&shape, settings);
        decoder.begin_accumulation().unwrap();
        for first in (0..4).step_by(settings.batch) {
            let tokens = first * t..(first + settings.batch) * t;
            let part = Batch {
                inputs: whole.inputs[tokens.clone()].to_vec(),
                targets: whole.targets[tokens.clone()].to_vec(),
                documents: None,
            };
            decoder.set_dropout(seed, tokens.start as u64);
            part.train(&mut decoder, 1.0);
        }
        gradients(&decoder)
    };
    let at_once = of(&plain(4, t), 5);
    for recompute in [ActivationRecompute::Selective, ActivationRecompute::Block] {
        assert!(of(&DecoderSettings { recompute, ..plain(4, t) }, 5) == at_once);
    }
    for (name, ours) in of(&plain(1, t), 5) {
        let error = relative_error(&ours, &widened(&at_once[&name]));
        assert!(error <= 1e-5, "{name}: {error:.1e}");
    }
    assert!(of(&plain(4, t), 6) != at_once);
}

#[test]
fn evaluation_drops_nothing() {
    let shape = with_adapters(tiny(true), &TargetModule::ALL);
    let data = Batch::drawn(&shape, 24, 0.0, 4);
    let mut decoder = models::decoder(&dropping(shape.clone()), &plain(2, 12));
    data.train(&mut decoder, 1.0);
    assert_eq!(data.losses(&mut decoder), data.losses(&mut models::decoder(&shape, &plain(2, 12))));
}
