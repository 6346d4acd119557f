//! Documents that share a sequence: each is as if it were alone.

use model::{DecoderSettings, Precision};

use crate::models::{self, Batch, Noise, plain, relative_error, tiny};

const T: usize = 23;
/// Lengths of the documents in each sequence; the last is cut off by its end.
const LENGTHS: [usize; 4] = [7, 1, 10, 9];

/// Two sequences of documents.
fn packed(seed: u64) -> Batch {
    Batch::drawn(&tiny(true), 2 * T, 0.1, seed).with_documents(T, &LENGTHS)
}

/// The documents of a batch, each a sequence of its own.
fn alone(batch: &Batch) -> Vec<Batch> {
    let starts = batch.documents.as_ref().unwrap();
    let mut documents: Vec<Batch> = Vec::new();
    for (place, (&input, &target)) in batch.inputs.iter().zip(&batch.targets).enumerate() {
        if starts[place] as usize == place % T {
            documents.push(Batch { inputs: Vec::new(), targets: Vec::new(), documents: None });
        }
        let document = documents.last_mut().unwrap();
        document.inputs.push(input);
        document.targets.push(target);
    }
    documents
}

#[test]
fn packed_documents_match_separate_ones() {
    for tied in [true, false] {
        let (shape, batch) = (tiny(tied), packed(3));
        let documents = alone(&batch);
        assert_eq!(documents.len(), 8);
        let mut together = models::decoder(&shape, &plain(2, T));
        let losses = batch.losses(&mut together);
        batch.train(&mut together, 0.1);
        let (mut losses_alone, mut gradients) = (Vec::new(), vec![0.0; together.gradients().elements()]);
        for document in &documents {
            let mut decoder = models::decoder(&shape, &plain(1, document.inputs.len()));
            losses_alone.extend(document.losses(&mut decoder));
            document.train(&mut decoder, 0.1);
            for (sum, gradient) in gradients.iter_mut().zip(decoder.gradients().read::<f32>().unwrap()) {
                *sum += f64::from(gradient);
            }
        }
        for (one, other) in losses.iter().zip(&losses_alone) {
            assert!((one - other).abs() <= 2e-6 * other, "{one} {other}");
        }
        let error = relative_error(&together.gradients().read::<f32>().unwrap(), &gradients);
        assert!(error <= 1e-6, "tied {tied}: {error:.1e}");

        let mut concatenated = models::decoder(&shape, &plain(2, T));
        Batch { documents: None, ..batch }.train(&mut concatenated, 0.1);
        let error = relative_error(&concatenated.gradients().read::<f32>().unwrap(), &gradients);
        assert!(error > 0.1, "or nothing was shown: {error:.1e}");
    }
}

#[test]
fn another_document_s_tokens_change_no_bit_of_a_document() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        let (shape, batch) = (tiny(true), packed(4));
        let mut decoder = models::decoder(&shape, &DecoderSettings { precision, ..plain(2, T) });
        let losses = batch.losses(&mut decoder);
        // The third document of each sequence keeps its tokens.
        let is_third_document =
            |place: usize| batch.documents.as_ref().unwrap()[place] == (LENGTHS[0] + LENGTHS[1]) as i32;
        let mut noise = Noise(9);
        let mut other = batch.clone();
        for place in (0..2 * T).filter(|&place| !is_third_document(place)) {
            other.inputs[place] = noise.below(shape.vocab_size) as u32;
        }
        let others = other.losses(&mut decoder);
        for place in 0..2 * T {
            let same = losses[place].to_bits() == others[place].to_bits();
            assert_eq!(same, is_third_document(place) || batch.targets[place] < 0, "{precision:?}, token {place}");
        }
    }
}
