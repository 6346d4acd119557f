//! The norm against its plain version, `PyTorch`, Candle's autograd and finite differences.

use candle_core::{Device, Tensor, Var};
use proptest::prelude::*;

use super::*;
use crate::testing::*;
use crate::{Error, bf16};

const EPSILON: f32 = 1e-5;

struct Inputs {
    x: Vec<f64>,
    output: Vec<f64>,
    weight: Vec<f64>,
    dnormed: Vec<f64>,
    dresidual: Vec<f64>,
}

struct Outputs {
    sum: Buffer,
    normed: Buffer,
    inv_rms: Buffer,
    dsum: Buffer,
    dweight: Buffer,
}

fn inputs(n: usize, d: usize) -> Inputs {
    // Rounded to bf16 beforehand, so that only the result is rounded.
    let weight = numbers(3, d).into_iter().map(|w| bf16::from_f64(1.0 + w / 2.0).to_f64()).collect();
    let [x, output, dnormed, dresidual] = [1, 2, 4, 5].map(|seed| numbers(seed, n * d));
    Inputs { x, output, weight, dnormed, dresidual }
}

/// Forward with the residual add, and backward onto a gradient that is there already.
fn run(inputs: &Inputs, dtype: DType) -> Outputs {
    let d = inputs.weight.len();
    let n = inputs.x.len() / d;
    let rows = |values: &[f64]| buffer(values, &[n, d], dtype);
    let (x, output, weight) = (rows(&inputs.x), rows(&inputs.output), buffer(&inputs.weight, &[d], dtype));
    let (mut sum, mut normed, mut inv_rms) = (rows(&inputs.x), zeros(&[n, d], dtype), zeros(&[n], DType::F32));
    forward_add(&x, &output, &weight, EPSILON, &mut sum, &mut normed, &mut inv_rms).unwrap();
    let (mut dsum, mut dweight) = (rows(&inputs.dresidual), zeros(&[d], DType::F32));
    let mut space = workspace(workspace_elements(n, d, DeviceKind::Cpu));
    backward(&sum, &weight, &inv_rms, &rows(&inputs.dnormed), &mut dsum, Some(&mut dweight), &mut space).unwrap();
    Outputs { sum, normed, inv_rms, dsum, dweight }
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn matches_reference(n: usize, d: usize, dtype: DType) {
    let inputs = inputs(n, d);
    let outputs = run(&inputs, dtype);
    assert_near(&outputs.sum, &add(&inputs.x, &inputs.output));
    // What follows is the norm of the sum as it was rounded.
    let sum: Vec<f64> = outputs.sum.read_f32().unwrap().into_iter().map(f64::from).collect();
    let [normed, inv_rms] = reference::forward(&sum, &inputs.weight, f64::from(EPSILON));
    assert_near(&outputs.normed, &normed);
    assert_near(&outputs.inv_rms, &inv_rms);
    let [dsum, dweight] = reference::backward(&sum, &inputs.weight, &inv_rms, &inputs.dnormed);
    assert_near(&outputs.dsum, &add(&inputs.dresidual, &dsum));
    assert_within(&outputs.dweight, &dweight, 1e-5);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn any_shape_matches_the_reference(n in 1usize..80, d in 1usize..150) {
        matches_reference(n, d, DType::F32);
        matches_reference(n, d, DType::BF16);
    }
}

#[test]
fn many_rows_match_the_reference() {
    matches_reference(2500, 6, DType::F32);
    matches_reference(2500, 6, DType::BF16);
    assert!(workspace_elements(1 << 20, 1024, DeviceKind::Cpu) <= 64 * 1024);
}

#[test]
fn an_f32_residual_stream_is_not_rounded_beside_bf16() {
    let (n, d) = (7, 48);
    let Inputs { x, output, weight, .. } = inputs(n, d);
    // Sums of numbers that bf16 does not hold.
    let [x, output] = [x, output].map(|values| values.iter().map(|value| value / 3.0).collect::<Vec<_>>());
    let [x_ND, output_ND] = [&x, &output].map(|values| buffer(values, &[n, d], DType::F32));
    let weight_D = buffer(&weight, &[d], DType::BF16);
    let (mut sum, mut normed, mut inv_rms) =
        (zeros(&[n, d], DType::F32), zeros(&[n, d], DType::BF16), zeros(&[n], DType::F32));
    let exact = |sum: &[f64]| reference::forward(sum, &weight, f64::from(EPSILON));
    forward(&x_ND, &weight_D, EPSILON, &mut normed, &mut inv_rms).unwrap();
    assert_near(&normed, &exact(&x)[0]);
    assert_near(&inv_rms, &exact(&x)[1]);
    forward_add(&x_ND, &output_ND, &weight_D, EPSILON, &mut sum, &mut normed, &mut inv_rms).unwrap();
    assert_near(&sum, &add(&x, &output));
    assert_near(&normed, &exact(&add(&x, &output))[0]);
}

#[test]
fn f32_matches_pytorch() {
    let golden = Golden::load("add_rms_norm");
    let [x, output, weight] = ["x_ND", "branch_ND", "weight_D"].map(|name| golden.values(name));
    let [dnormed, dresidual] = ["dnormed_ND", "dresidual_ND"].map(|name| golden.values(name));
    assert_eq!(golden.values("epsilon"), [1e-5]);
    let inputs = Inputs { x, output, weight, dnormed, dresidual };
    let outputs = run(&inputs, DType::F32);
    assert_near(&outputs.sum, &golden.values("sum_ND"));
    assert_near(&outputs.normed, &golden.values("normed_ND"));
    assert_near(&outputs.inv_rms, &golden.values("inv_rms_N"));
    assert_near(&outputs.dsum, &golden.values("dsum_ND"));
    assert_near(&outputs.dweight, &golden.values("dweight_D"));

    let (x, weight) = (golden.buffer("x_ND"), golden.buffer("weight_D"));
    let (mut normed, mut inv_rms) = (zeros(x.shape(), DType::F32), zeros(&x.shape()[..1], DType::F32));
    forward(&x, &weight, EPSILON, &mut normed, &mut inv_rms).unwrap();
    assert_near(&normed, &golden.values("plain_normed_ND"));
    assert_near(&inv_rms, &golden.values("plain_inv_rms_N"));
}

#[test]
fn f32_matches_candle_autograd() {
    let (n, d) = (11, 20);
    let inputs = inputs(n, d);
    let tensor = |values: &[f64]| Tensor::from_vec(values.to_vec(), (values.len() / d, d), &Device::Cpu).unwrap();
    let [x, weight] = [&inputs.x, &inputs.weight].map(|values| Var::from_tensor(&tensor(values)).unwrap());
    let sum = (x.as_tensor() + tensor(&inputs.output)).unwrap();
    let mean = sum.sqr().unwrap().mean_keepdim(1).unwrap();
    let rms = (mean + f64::from(EPSILON)).unwrap().sqrt().unwrap();
    let normed = sum.broadcast_div(&rms).unwrap().broadcast_mul(&weight).unwrap();
    let through_norm = (&normed * tensor(&inputs.dnormed)).unwrap().sum_all().unwrap();
    let past_norm = (&sum * tensor(&inputs.dresidual)).unwrap().sum_all().unwrap();
    let gradients = (through_norm + past_norm).unwrap().backward().unwrap();
    let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let outputs = run(&inputs, DType::F32);
    assert_near(&outputs.normed, &values(&normed));
    assert_near(&outputs.dsum, &values(gradients.get(&x).unwrap()));
    assert_near(&outputs.dweight, &values(gradients.get(&weight).unwrap()));
}

#[test]
fn the_references_gradients_are_the_slopes_of_its_forward() {
    let Inputs { x, weight, dnormed, .. } = inputs(3, 5);
    let [_, inv_rms] = reference::forward(&x, &weight, 1e-5);
    let [dsum, dweight] = reference::backward(&x, &weight, &inv_rms, &dnormed);
    let scalar = |x: &[f64], weight: &[f64]| dot(&reference::forward(x, weight, 1e-5)[0], &dnormed);
    assert_same_gradient(&dsum, &finite_differences(|x| scalar(x, &weight), &x));
    assert_same_gradient(&dweight, &finite_differences(|weight| scalar(&x, weight), &weight));
}

#[test]
fn normalize_writes_what_forward_wrote_bit_for_bit() {
    for dtype in [DType::F32, DType::BF16] {
        let inputs = inputs(70, 67);
        let outputs = run(&inputs, dtype);
        let mut recomputed = zeros(&[70, 67], dtype);
        let weight = buffer(&inputs.weight, &[67], dtype);
        normalize(&outputs.sum, &weight, &outputs.inv_rms, &mut recomputed).unwrap();
        assert_eq!(recomputed.read_f32().unwrap(), outputs.normed.read_f32().unwrap());
    }
}

#[test]
fn the_weights_gradient_is_added_to_what_is_there() {
    let Inputs { x, weight, dnormed, .. } = inputs(40, 3);
    let rows = |values: &[f64]| buffer(values, &[40, 3], DType::F32);
    let (x, weight, dnormed) = (rows(&x), buffer(&weight, &[3], DType::F32), rows(&dnormed));
    let (inv_rms, mut dsum) = (buffer(&[1.0; 40], &[40], DType::F32), zeros(&[40, 3], DType::F32));
    let (mut dweight, mut space) = (zeros(&[3], DType::F32), workspace(workspace_elements(40, 3, DeviceKind::Cpu)));
    let mut add = || {
        backward(&x, &weight, &inv_rms, &dnormed, &mut dsum, Some(&mut dweight), &mut space).unwrap();
        dweight.read::<f32>().unwrap()
    };
    let (single_sum, double_sum) = (add(), add());
    assert!(single_sum.iter().zip(&double_sum).all(|(single_sum, double_sum)| 2.0 * single_sum == *double_sum));
}

#[test]
fn no_row_leaves_the_weights_gradient_as_it_is() {
    let dweight = run(&inputs(0, 4), DType::F32).dweight;
    assert_eq!(dweight.read::<f32>().unwrap(), [0.0; 4]);
}

#[test]
fn wrong_arguments_of_forward_are_refused_by_name() {
    let [x, mut normed] = [0, 1].map(|_| zeros(&[4, 3], DType::F32));
    let (weight, mut inv_rms) = (zeros(&[3], DType::F32), zeros(&[4], DType::F32));
    let long = zeros(&[4], DType::F32);
    let refused = forward(&x, &long, EPSILON, &mut normed, &mut inv_rms).unwrap_err();
    let message = "add_rms_norm::forward: `weight_D` has shape [4], expected [3]";
    assert_eq!(refused.to_string(), message);
    let mut same = x.clone();
    let refused = forward(&x, &weight, EPSILON, &mut same, &mut inv_rms).unwrap_err();
    assert!(refused.to_string().contains("`normed_ND` overlaps `x_ND`"), "{refused}");
    let refused = forward_add(&x, &x, &weight, EPSILON, &mut same, &mut normed, &mut inv_rms);
    assert!(matches!(refused, Err(Error::Aliased { output: "sum_ND", .. })), "{refused:?}");
    let refused = normalize(&x, &weight, &inv_rms, &mut same);
    assert!(matches!(refused, Err(Error::Aliased { output: "normed_ND", .. })), "{refused:?}");
}

#[test]
fn wrong_arguments_of_backward_are_refused_by_name() {
    let [x, dnormed, mut dsum] = [0, 1, 2].map(|_| zeros(&[4, 3], DType::F32));
    let (weight, inv_rms) = (zeros(&[3], DType::F32), zeros(&[4], DType::F32));
    let mut refused = |dweight: &mut Buffer, space: usize| {
        let mut space = workspace(space);
        let result = backward(&x, &weight, &inv_rms, &dnormed, &mut dsum, Some(dweight), &mut space);
        result.unwrap_err().to_string()
    };
    let (mut narrow, mut dweight) = (zeros(&[3], DType::BF16), zeros(&[3], DType::F32));
    assert!(refused(&mut narrow, 3).contains("`dweight_D` holds BF16, expected F32"));
    assert!(refused(&mut dweight, 2).contains("the workspace holds 2 elements, 3 are needed"));
    assert!(refused(&mut weight.clone(), 3).contains("`dweight_D` overlaps `weight_D`"));
}
