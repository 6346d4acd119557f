//! Attention against its plain version, `PyTorch`, Candle's autograd and finite differences; decoding against whole
//! sequences.

use candle_core::{Device, Tensor, Var};
use proptest::prelude::*;

use super::*;
use crate::Error;
use crate::testing::*;

const LAYOUT: HeadLayout = heads(4, 2, 6);

const fn heads(heads: usize, kv_heads: usize, head_size: usize) -> HeadLayout {
    HeadLayout { heads, kv_heads, head_size }
}

const fn shape(heads: HeadLayout, batch: usize, sequence_length: usize) -> AttentionShape {
    AttentionShape { heads, batch, sequence_length }
}

/// out, lse, dqkv of one call; `dqkv` held NaN before.
fn run(qkv: &[f64], dout: &[f64], layout: &HeadLayout, batch: usize, dtype: DType) -> [Buffer; 3] {
    run_packed(qkv, None, dout, layout, batch, dtype)
}

/// [`run`] of sequences that hold several documents.
fn run_packed(
    qkv: &[f64],
    documents: Option<&[i32]>,
    dout: &[f64],
    layout: &HeadLayout,
    batch: usize,
    dtype: DType,
) -> [Buffer; 3] {
    let n = qkv.len() / layout.packed_width();
    let length = n / batch;
    let shape = shape(*layout, batch, length);
    let (width, query_width) = (layout.packed_width(), layout.query_width());
    let (qkv, dout) = (buffer(qkv, &[n, width], dtype), buffer(dout, &[n, query_width], dtype));
    let documents = documents.map(integers);
    let (mut out, mut lse) = (zeros(&[n, query_width], dtype), zeros(&[batch, layout.heads, length], DType::F32));
    let mut dqkv = buffer(&vec![f64::NAN; n * width], &[n, width], dtype);
    let mut space = workspace(forward_workspace_elements(&shape, DeviceKind::Cpu));
    forward(&qkv, documents.as_ref(), &shape, &mut out, &mut lse, &mut space).unwrap();
    let mut space = workspace(backward_workspace_elements(&shape, DeviceKind::Cpu));
    let saved = Saved { qkv_NP: &qkv, documents_N: documents.as_ref(), out_NHE: &out, lse_BHT: &lse };
    backward(&saved, &dout, &shape, &mut dqkv, &mut space).unwrap();
    [out, lse, dqkv]
}

/// Queries, keys and values spread wide enough for the softmax to matter, and the gradient of the output.
fn inputs(layout: &HeadLayout, tokens: usize) -> [Vec<f64>; 2] {
    let qkv = numbers(1, tokens * layout.packed_width()).into_iter().map(|x| 4.0 * x).collect();
    [qkv, numbers(2, tokens * layout.query_width())]
}

fn matches_reference(layout: &HeadLayout, batch: usize, length: usize) {
    packed_matches_reference(layout, None, batch, length);
}

fn packed_matches_reference(layout: &HeadLayout, documents: Option<&[i32]>, batch: usize, length: usize) {
    let [qkv, dout] = inputs(layout, batch * length);
    let [exact_out, exact_lse] = reference::forward(&qkv, documents, layout, batch);
    let exact_dqkv = reference::backward(&qkv, documents, &exact_out, &exact_lse, &dout, layout, batch);
    let [out, lse, dqkv] = run_packed(&qkv, documents, &dout, layout, batch, DType::F32);
    assert_near(&out, &exact_out);
    assert_near(&lse, &exact_lse);
    assert_near(&dqkv, &exact_dqkv);
    let [out, lse, dqkv] = run_packed(&qkv, documents, &dout, layout, batch, DType::BF16);
    assert_near(&out, &exact_out);
    assert_near(&lse, &exact_lse);
    // The gradient sees the output as it was rounded, of which little may be left where gradients cancel out.
    let rounded_out: Vec<f64> = out.read_f32().unwrap().into_iter().map(f64::from).collect();
    let dqkv_of_rounded = reference::backward(&qkv, documents, &rounded_out, &exact_lse, &dout, layout, batch);
    assert_near(&dqkv, &dqkv_of_rounded);
}

/// Returns the start of every token's document, from the documents' lengths; the last document of each sequence is cut
/// where the sequence ends.
fn documents(sequences: &[Vec<usize>], length: usize) -> Vec<i32> {
    let mut begins = Vec::new();
    for lengths in sequences {
        let mut begin = 0;
        let each = lengths.iter().chain([&length]).flat_map(|&count| {
            let tokens = vec![begin; count];
            begin += count as i32;
            tokens
        });
        begins.extend(each.take(length));
    }
    begins
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_shape_matches_the_reference(
        kv_heads in 1usize..4, group in 1usize..6, half in 1usize..24, batch in 1usize..4, length in 1usize..90,
    ) {
        matches_reference(&heads(kv_heads * group, kv_heads, 2 * half), batch, length);
    }
}

#[test]
fn few_tokens_match_the_reference() {
    for (group, half, length) in
        (1..4).flat_map(|group| (1..5).flat_map(move |half| (1..6).map(move |length| (group, half, length))))
    {
        for batch in [1, 2] {
            matches_reference(&heads(group, 1, 2 * half), batch, length);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn packed_documents_of_any_lengths_match_the_reference(
        kv_heads in 1usize..3, group in 1usize..4, half in 1usize..20, length in 1usize..200,
        lengths in prop::collection::vec(prop::collection::vec(1usize..90, 0..5), 1..3),
    ) {
        let layout = heads(kv_heads * group, kv_heads, 2 * half);
        packed_matches_reference(&layout, Some(&documents(&lengths, length)), lengths.len(), length);
    }
}

#[test]
fn a_document_gives_the_bits_that_it_gives_alone() {
    let layout = heads(4, 2, 16);
    let [qkv, dout] = inputs(&layout, 64 + 70);
    let begins = documents(&[vec![64]], 134);
    let [out, _, dqkv] = run_packed(&qkv, Some(&begins), &dout, &layout, 1, DType::F32);
    let (start, query_start) = (64 * layout.packed_width(), 64 * layout.query_width());
    let [alone, _, dalone] = run(&qkv[start..], &dout[query_start..], &layout, 1, DType::F32);
    assert_eq!(out.read::<f32>().unwrap()[query_start..], alone.read::<f32>().unwrap());
    assert_eq!(dqkv.read::<f32>().unwrap()[start..], dalone.read::<f32>().unwrap());
    let [whole, one] =
        [None, Some(&vec![0; 134][..])].map(|begins| run_packed(&qkv, begins, &dout, &layout, 1, DType::F32));
    for (whole, one) in whole.iter().zip(&one) {
        assert_eq!(whole.read::<f32>().unwrap(), one.read::<f32>().unwrap());
    }
}

#[test]
fn f32_of_packed_documents_matches_pytorch() {
    let golden = Golden::load("attention_documents");
    let [h, k, e] = [0, 1, 2].map(|at| golden.integers("heads_3")[at] as usize);
    let batch = golden.integers("batch")[0] as usize;
    let (qkv, dout) = (golden.values("qkv_NP"), golden.values("dout_NHE"));
    let begins: Vec<i32> = golden.integers("documents_N").into_iter().map(|begin| begin as i32).collect();
    let results = run_packed(&qkv, Some(&begins), &dout, &heads(h, k, e), batch, DType::F32);
    for (result, name) in results.iter().zip(["out_NHE", "lse_BHT", "dqkv_NP"]) {
        assert_near(result, &golden.values(name));
    }
}

#[test]
fn many_tiles_and_every_usual_head_size_match_the_reference() {
    matches_reference(&heads(2, 1, 32), 1, 200);
    matches_reference(&heads(4, 1, 64), 2, 131);
    matches_reference(&heads(1, 1, 128), 1, 193);
    matches_reference(&heads(3, 3, 256), 1, 65);
}

#[test]
fn more_query_heads_than_a_tile_has_rows_match_the_reference() {
    matches_reference(&heads(70, 1, 32), 1, 9);
}

#[test]
fn more_heads_than_tasks_at_a_time_match_the_reference() {
    matches_reference(&heads(8, 4, 8), 11, 70);
    matches_reference(&heads(6, 2, 64), 20, 33);
}

#[test]
fn f32_matches_pytorch() {
    let golden = Golden::load("attention");
    let [h, k, e] = [0, 1, 2].map(|at| golden.integers("heads_3")[at] as usize);
    let batch = golden.integers("batch")[0] as usize;
    let (qkv, dout) = (golden.values("qkv_NP"), golden.values("dout_NHE"));
    let results = run(&qkv, &dout, &heads(h, k, e), batch, DType::F32);
    for (result, name) in results.iter().zip(["out_NHE", "lse_BHT", "dqkv_NP"]) {
        assert_near(result, &golden.values(name));
    }
}

#[test]
fn f32_matches_candle_autograd() {
    let (batch, length, &HeadLayout { heads, kv_heads, head_size }) = (2, 13, &LAYOUT);
    let [qkv, dout] = inputs(&LAYOUT, batch * length);
    let shape = (batch, length, heads + 2 * kv_heads, head_size);
    let leaf = Var::from_tensor(&Tensor::from_vec(qkv.clone(), shape, &Device::Cpu).unwrap()).unwrap();
    let part = |first, count| leaf.narrow(2, first, count).unwrap().transpose(1, 2).unwrap().contiguous().unwrap();
    let repeated = |first| {
        let heads_of_keys = part(first, kv_heads);
        let each: Vec<Tensor> = (0..heads).map(|h| heads_of_keys.narrow(1, h / 2, 1).unwrap()).collect();
        Tensor::cat(&each, 1).unwrap()
    };
    let (q, k, v) = (part(0, heads), repeated(heads), repeated(heads + kv_heads));
    let scores = (q.matmul(&k.t().unwrap()).unwrap() / (head_size as f64).sqrt()).unwrap();
    let above = |at: usize| {
        if at % length > at / length { -1e30 } else { 0.0 }
    };
    let mask = Tensor::from_vec((0..length * length).map(above).collect::<Vec<f64>>(), (length, length), &Device::Cpu);
    let powers = scores.broadcast_add(&mask.unwrap()).unwrap().exp().unwrap();
    let sums = powers.sum_keepdim(3).unwrap();
    let attended = powers.broadcast_div(&sums).unwrap().matmul(&v).unwrap();
    let out_tensor = attended.transpose(1, 2).unwrap().contiguous().unwrap();
    let weights = Tensor::from_vec(dout.clone(), out_tensor.dims(), &Device::Cpu).unwrap();
    let gradients = (&out_tensor * weights).unwrap().sum_all().unwrap().backward().unwrap();
    let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f64>().unwrap();

    let [out, lse, dqkv] = run(&qkv, &dout, &LAYOUT, batch, DType::F32);
    assert_near(&out, &values(&out_tensor));
    assert_near(&lse, &values(&sums.log().unwrap()));
    assert_near(&dqkv, &values(gradients.get(&leaf).unwrap()));
}

#[test]
fn the_references_gradient_is_the_slope_of_its_forward() {
    let [qkv, dout] = inputs(&LAYOUT, 2 * 4);
    for begins in [None, Some(&[0, 0, 2, 2, 0, 1, 1, 1][..])] {
        let [out, lse] = reference::forward(&qkv, begins, &LAYOUT, 2);
        let gradient = reference::backward(&qkv, begins, &out, &lse, &dout, &LAYOUT, 2);
        let slope = finite_differences(|qkv| dot(&reference::forward(qkv, begins, &LAYOUT, 2)[0], &dout), &qkv);
        assert_same_gradient(&gradient, &slope);
    }
}

/// Returns the rows that `decode` writes for one sequence in pieces of these lengths, with a cache that held NaN.
fn decoded(qkv: &[f64], layout: &HeadLayout, pieces: &[usize], dtype: DType) -> Vec<f32> {
    let capacity = pieces.iter().sum::<usize>() + 3;
    let empty = vec![f64::NAN; capacity * layout.key_width()];
    let mut cache = [0, 1].map(|_| buffer(&empty, &[capacity, layout.key_width()], dtype));
    let (mut past, mut rows) = (0, Vec::new());
    for &new in pieces {
        let packed = &qkv[past * layout.packed_width()..(past + new) * layout.packed_width()];
        let mut out = zeros(&[new, layout.query_width()], dtype);
        let mut space = workspace(decode_workspace_elements(layout, new, DeviceKind::Cpu));
        let [keys, values] = &mut cache;
        let qkv = buffer(packed, &[new, layout.packed_width()], dtype);
        decode(&qkv, layout, past, keys, values, &mut out, &mut space).unwrap();
        rows.extend(out.read_f32().unwrap());
        past += new;
    }
    rows
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn decoding_in_any_pieces_gives_the_rows_of_forward(
        kv_heads in 1usize..3, group in 1usize..5, half in 1usize..20, pieces in prop::collection::vec(1usize..80, 1..5),
    ) {
        let layout = heads(kv_heads * group, kv_heads, 2 * half);
        let [qkv, dout] = inputs(&layout, pieces.iter().sum());
        for dtype in [DType::F32, DType::BF16] {
            let [out, ..] = run(&qkv, &dout, &layout, 1, dtype);
            prop_assert_eq!(decoded(&qkv, &layout, &pieces, dtype), out.read_f32().unwrap());
        }
    }
}

#[test]
fn a_prompt_then_single_tokens_give_the_rows_of_forward() {
    let [qkv, dout] = inputs(&LAYOUT, 75);
    let [out, ..] = run(&qkv, &dout, &LAYOUT, 1, DType::F32);
    let pieces: Vec<usize> = std::iter::once(60).chain([1; 15]).collect();
    assert_eq!(decoded(&qkv, &LAYOUT, &pieces, DType::F32), out.read_f32().unwrap());
}

#[test]
fn nan_spreads_only_causally_within_its_sequence() {
    let [mut qkv, dout] = inputs(&LAYOUT, 2 * 10);
    qkv[4 * LAYOUT.packed_width()..5 * LAYOUT.packed_width()].fill(f64::NAN);
    let [out, _, dqkv] = run(&qkv, &dout, &LAYOUT, 2, DType::F32);
    let spoiled = |buffer: &Buffer| -> Vec<bool> {
        let rows = buffer.read::<f32>().unwrap();
        rows.chunks(buffer.shape()[1]).map(|row| row.iter().any(|x| x.is_nan())).collect()
    };
    assert!(spoiled(&out)[4..10].iter().all(|&row| row) && spoiled(&dqkv)[4..10].iter().all(|&row| row));
    assert!(!spoiled(&out)[10..].contains(&true) && !spoiled(&dqkv)[10..].contains(&true));
}

#[test]
fn scores_far_apart_stay_finite() {
    let mut qkv = vec![0.0; 3 * LAYOUT.packed_width()];
    for (at, x) in qkv.iter_mut().enumerate() {
        *x = if at % 2 == 0 { 60.0 } else { -60.0 } * (at % 7) as f64;
    }
    let dout = numbers(2, 3 * LAYOUT.query_width());
    let [out, lse] = reference::forward(&qkv, None, &LAYOUT, 1);
    let results = run(&qkv, &dout, &LAYOUT, 1, DType::F32);
    assert_near(&results[0], &out);
    assert_near(&results[1], &lse);
    assert!(results[2].read::<f32>().unwrap().iter().all(|x| x.is_finite()));
}

#[test]
fn the_workspace_follows_from_the_sizes_and_stays_small() {
    let layout = heads(32, 8, 64);
    assert!(workspace_elements(&shape(layout, 1, 2048), DeviceKind::Cpu) <= 10_000_000);
    assert!(workspace_elements(&shape(layout, 64, 2048), DeviceKind::Cpu) <= 10_000_000);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let inside = pool.install(|| workspace_elements(&shape(layout, 4, 512), DeviceKind::Cpu));
    assert_eq!(inside, workspace_elements(&shape(layout, 4, 512), DeviceKind::Cpu));
}

#[test]
fn wrong_arguments_of_forward_are_refused_by_name() {
    let refused = |qkv: &Buffer, layout: &HeadLayout, batch: usize, out: &mut Buffer, space: usize| {
        let (mut lse, mut space) = (zeros(&[1, 4, 4], DType::F32), workspace(space));
        let result = forward(qkv, None, &shape(*layout, batch, 4 / batch), out, &mut lse, &mut space);
        result.unwrap_err().to_string()
    };
    let (qkv, mut out) = (zeros(&[4, 48], DType::F32), zeros(&[4, 24], DType::F32));
    let enough = workspace_elements(&shape(LAYOUT, 1, 4), DeviceKind::Cpu);
    let message = refused(&qkv, &LAYOUT, 3, &mut out, enough);
    assert_eq!(message, "attention::forward: `qkv_NP` has shape [4, 48], expected [3, 48]");
    let message = refused(&qkv, &heads(5, 2, 6), 1, &mut out, enough);
    assert_eq!(message, "attention::forward: 5 heads cannot share 2 key/value heads evenly");
    let message = refused(&qkv, &LAYOUT, 1, &mut out, 7);
    assert!(message.contains("the workspace holds 7 elements"), "{message}");
    let mut inside = qkv.view(0, &[4, 24]).unwrap();
    let message = refused(&qkv, &LAYOUT, 1, &mut inside, enough);
    assert!(message.contains("`out_NHE` overlaps `qkv_NP`"), "{message}");
}

#[test]
fn gradients_and_caches_in_the_memory_of_others_are_refused() {
    let (qkv, mut out) = (zeros(&[4, 48], DType::F32), zeros(&[4, 24], DType::F32));
    let (lse, mut same) = (zeros(&[1, 4, 4], DType::F32), qkv.clone());
    let mut space = workspace(workspace_elements(&shape(LAYOUT, 1, 4), DeviceKind::Cpu));
    let saved = Saved { qkv_NP: &qkv, documents_N: None, out_NHE: &out, lse_BHT: &lse };
    let refused = backward(&saved, &out, &shape(LAYOUT, 1, 4), &mut same, &mut space);
    assert!(matches!(refused, Err(Error::Aliased { output: "dqkv_NP", .. })), "{refused:?}");
    let (mut keys, mut values) = (zeros(&[6, 12], DType::F32), zeros(&[6, 12], DType::F32));
    let refused = decode(&qkv, &LAYOUT, 3, &mut keys, &mut values, &mut out, &mut space);
    let message = "attention::decode: 4 tokens after 3 do not fit a cache of 6";
    assert_eq!(refused.unwrap_err().to_string(), message);
    let mut same = keys.clone();
    let refused = decode(&qkv, &LAYOUT, 0, &mut keys, &mut same, &mut out, &mut space);
    assert!(matches!(refused, Err(Error::Aliased { .. })), "{refused:?}");
}
