//! Micro-batches: what they add up to, and what must stay zero.

use model::ModelShape;

use crate::models::{self, Batch, plain, relative_error, tiny, widened};

#[test]
fn micro_batch_gradients_sum_to_the_batch() {
    let (shape, t) = (tiny(true), 11);
    // The third micro-batch has no target at all.
    let micro: Vec<Batch> =
        [0.0, 0.9, 1.1].iter().zip(1..).map(|(&ignored, seed)| Batch::drawn(&shape, 2 * t, ignored, seed)).collect();
    let whole = Batch {
        inputs: micro.iter().flat_map(|batch| batch.inputs.clone()).collect(),
        targets: micro.iter().flat_map(|batch| batch.targets.clone()).collect(),
        documents: None,
    };
    assert!(micro[1].target_count() > 0 && micro[2].target_count() == 0);
    let scale = 1.0 / whole.target_count() as f32;

    let mut at_once = models::decoder(&shape, &plain(6, t));
    whole.train(&mut at_once, scale);
    let mut in_parts = models::decoder(&shape, &plain(2, t));
    for batch in &micro {
        batch.train(&mut in_parts, scale);
    }

    let (one, other) = (models::loss(&at_once), models::loss(&in_parts));
    assert!((one - other).abs() <= 1e-6 * one, "{one} {other}");
    let expected = models::by_name(&shape, at_once.gradients());
    for (name, gradient) in models::by_name(&shape, in_parts.gradients()) {
        let error = relative_error(&gradient, &widened(&expected[&name]));
        assert!(error <= 1e-5, "{name}: {error:.1e}");
    }
}

#[test]
fn a_new_sum_has_nothing_of_the_one_before() {
    let (t, scale) = (9, 0.25);
    for (shape, micro_batches) in [(tiny(true), 1), (tiny(false), 1), (tiny(false), 2)] {
        let [mut new, mut reused] = [(); 2].map(|()| models::decoder(&shape, &plain(2, t)));
        Batch::drawn(&shape, 2 * t, 0.0, 3).train(&mut reused, scale);
        let elements = reused.layout().elements();
        reused.gradients_mut().write(&vec![f32::NAN; elements]).unwrap();
        reused.begin_accumulation().unwrap();
        for seed in 0..micro_batches {
            let batch = Batch::drawn(&shape, 2 * t, 0.2, seed);
            batch.train(&mut new, scale);
            batch.train(&mut reused, scale);
        }
        assert_eq!(models::loss(&reused).to_bits(), models::loss(&new).to_bits());
        assert_eq!(models::by_name(&shape, reused.gradients()), models::by_name(&shape, new.gradients()));
    }
}

#[test]
fn training_loss_sums_evaluation_losses() {
    let (shape, batch, t) = (tiny(false), 3, 9);
    let data = Batch::drawn(&shape, batch * t, 0.3, 5);
    let (inputs, targets) = data.buffers();
    let mut decoder = models::decoder(&shape, &plain(batch, t));
    decoder.forward_backward(&inputs, None, &targets, 1.0).unwrap();
    let total = f64::from(models::loss(&decoder));
    let losses = decoder.evaluate(&inputs, None, &targets).unwrap().read::<f32>().unwrap();
    assert!((losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() / total - 1.0).abs() < 1e-6);
    for (loss, target) in losses.iter().zip(&data.targets) {
        assert_eq!(*loss == 0.0, *target < 0);
    }

    let mut evaluating = models::decoder(&shape, &model::DecoderSettings { training: false, ..plain(batch, t) });
    assert_eq!(evaluating.evaluate(&inputs, None, &targets).unwrap().read::<f32>().unwrap(), losses);
    let training = |decoder: &mut model::Decoder| decoder.forward_backward(&inputs, None, &targets, 1.0);
    for refusal in [training(&mut evaluating), evaluating.begin_accumulation()] {
        assert!(matches!(refusal, Err(model::Error::EvaluationOnly)));
    }
    assert_eq!(evaluating.gradients().elements(), 0);
}

#[test]
fn padding_gets_no_gradient() {
    for tied in [true, false] {
        // 71 rows of 128, and norms of 20 elements that begin at multiples of 64.
        let shape: ModelShape = tiny(tied);
        let mut decoder = models::decoder(&shape, &plain(2, 8));
        Batch::drawn(&shape, 16, 0.0, 3).train(&mut decoder, 1.0);
        let mut gradients = decoder.gradients().read::<f32>().unwrap();
        for tensor in model::hugging_face::hf_tensors(&shape) {
            assert!(gradients[tensor.offset..][..tensor.elements].iter().any(|&value| value != 0.0), "{}", tensor.name);
            gradients[tensor.offset..][..tensor.elements].fill(0.0);
        }
        assert!(gradients.iter().all(|&value| value == 0.0));
    }
}

#[test]
fn inputs_that_are_no_tokens_of_the_batch_are_refused() {
    let shape = tiny(true);
    let mut decoder = models::decoder(&shape, &plain(2, 4));
    let (inputs, targets) = Batch::drawn(&shape, 12, 0.0, 3).buffers();
    assert!(decoder.forward_backward(&inputs, None, &targets, 1.0).is_err(), "12 tokens where 8 are planned");
    let mut strange = Batch::drawn(&shape, 8, 0.0, 3);
    strange.targets[5] = 71;
    let (inputs, targets) = strange.buffers();
    assert!(decoder.forward_backward(&inputs, None, &targets, 1.0).is_err(), "a target in the vocabulary's padding");
}
