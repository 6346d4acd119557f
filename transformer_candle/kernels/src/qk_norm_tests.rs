//! The norms of heads against their plain version, `PyTorch` and finite differences.

use proptest::prelude::*;

use super::*;
use crate::Error;
use crate::testing::*;

const EPSILON: f32 = 1e-5;
const LAYOUT: HeadLayout = HeadLayout { heads: 4, kv_heads: 2, head_size: 6 };

struct Inputs {
    projected: Vec<f64>,
    weight: Vec<f64>,
    dqkv: Vec<f64>,
}

fn inputs(n: usize, layout: &HeadLayout) -> Inputs {
    let [projected, dqkv] = [1, 2].map(|seed| numbers(seed, n * layout.packed_width()));
    Inputs { projected, weight: numbers(3, 2 * layout.head_size).into_iter().map(|w| 1.0 + w / 2.0).collect(), dqkv }
}

/// The rows, their gradient and that of the weight, onto ones.
fn run(inputs: &Inputs, layout: &HeadLayout, dtype: DType) -> [Buffer; 3] {
    let (width, weight_elements) = (layout.packed_width(), 2 * layout.head_size);
    let n = inputs.projected.len() / width;
    let rows = |values: &[f64]| buffer(values, &[n, width], dtype);
    let (projected, mut qkv, mut dqkv) = (rows(&inputs.projected), zeros(&[n, width], dtype), rows(&inputs.dqkv));
    let weight = buffer(&inputs.weight, &[weight_elements], dtype);
    let mut dweight = buffer(&vec![1.0; weight_elements], &[weight_elements], DType::F32);
    forward(&projected, &weight, EPSILON, layout, &mut qkv).unwrap();
    let mut space = workspace(workspace_elements(n, layout.head_size, DeviceKind::Cpu));
    backward(&projected, &weight, EPSILON, layout, &mut dqkv, Some(&mut dweight), &mut space).unwrap();
    [qkv, dqkv, dweight]
}

fn matches_reference(n: usize, layout: &HeadLayout, dtype: DType) {
    let mut inputs = inputs(n, layout);
    // Rounded to the element type beforehand, so that only the result is rounded.
    for values in [&mut inputs.projected, &mut inputs.weight, &mut inputs.dqkv] {
        let rounded = buffer(values, &[values.len()], dtype).read_f32().unwrap();
        *values = rounded.into_iter().map(f64::from).collect();
    }
    let [qkv, dqkv, dweight] = run(&inputs, layout, dtype);
    let Inputs { projected, weight, dqkv: dnormed } = &inputs;
    assert_near(&qkv, &reference::forward(projected, weight, f64::from(EPSILON), layout));
    let [rows, sums] = reference::backward(projected, weight, f64::from(EPSILON), layout, dnormed);
    assert_near(&dqkv, &rows);
    assert_within(&dweight, &sums.into_iter().map(|sum| 1.0 + sum).collect::<Vec<_>>(), 1e-5);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn any_shape_matches_the_reference(
        kv_heads in 1usize..4, group in 1usize..4, half in 1usize..40, n in 1usize..70,
    ) {
        let layout = HeadLayout { heads: kv_heads * group, kv_heads, head_size: 2 * half };
        matches_reference(n, &layout, DType::F32);
        matches_reference(n, &layout, DType::BF16);
    }
}

#[test]
fn many_rows_match_the_reference() {
    matches_reference(2500, &LAYOUT, DType::F32);
    matches_reference(2500, &LAYOUT, DType::BF16);
}

#[test]
fn f32_matches_pytorch() {
    let golden = Golden::load("qk_norm");
    let heads = golden.integers("heads_3");
    let layout = HeadLayout { heads: heads[0] as usize, kv_heads: heads[1] as usize, head_size: heads[2] as usize };
    assert_eq!(golden.values("epsilon"), [1e-5]);
    let [projected, weight, dqkv] = ["projected_NP", "weight_2E", "dqkv_NP"].map(|name| golden.values(name));
    let [qkv, dprojected, dweight] = run(&Inputs { projected, weight, dqkv }, &layout, DType::F32);
    assert_near(&qkv, &golden.values("qkv_NP"));
    assert_near(&dprojected, &golden.values("dprojected_NP"));
    let expected = golden.values("dweight_2E").into_iter().map(|sum| 1.0 + sum).collect::<Vec<_>>();
    assert_near(&dweight, &expected);
}

#[test]
fn the_references_gradients_are_the_slopes_of_its_forward() {
    let Inputs { projected, weight, dqkv } = inputs(3, &LAYOUT);
    let [dprojected, dweight] = reference::backward(&projected, &weight, 1e-5, &LAYOUT, &dqkv);
    let scalar = |x: &[f64], weight: &[f64]| dot(&reference::forward(x, weight, 1e-5, &LAYOUT), &dqkv);
    assert_same_gradient(&dprojected, &finite_differences(|x| scalar(x, &weight), &projected));
    assert_same_gradient(&dweight, &finite_differences(|weight| scalar(&projected, weight), &weight));
}

#[test]
fn values_and_their_gradients_are_untouched() {
    let inputs = inputs(9, &LAYOUT);
    let [qkv, dqkv, _] = run(&inputs, &LAYOUT, DType::F32);
    for (ours, theirs) in [(qkv, &inputs.projected), (dqkv, &inputs.dqkv)] {
        let values = |row: &[f32]| row[36..].to_vec();
        let (ours, theirs) = (ours.read_f32().unwrap(), to_f32(theirs));
        assert!(ours.chunks(48).map(values).eq(theirs.chunks(48).map(values)));
    }
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let (projected, weight) = (zeros(&[4, 48], DType::F32), zeros(&[12], DType::F32));
    let refused =
        |weight: &Buffer, mut qkv: Buffer| forward(&projected, weight, EPSILON, &LAYOUT, &mut qkv).unwrap_err();
    let error = refused(&zeros(&[6], DType::F32), zeros(&[4, 48], DType::F32));
    assert_eq!(error.to_string(), "qk_norm::forward: `weight_2E` has shape [6], expected [12]");
    let error = refused(&weight, projected.clone());
    assert!(matches!(error, Error::Aliased { output: "qkv_NP", other: "projected_NP", .. }), "{error}");
    let error = refused(&weight, zeros(&[4, 48], DType::BF16));
    assert!(matches!(error, Error::DType { argument: "qkv_NP", .. }), "{error}");
}
