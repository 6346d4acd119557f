//! `RoPE` against its plain version, `PyTorch`, Candle's autograd and finite differences.

use candle_core::{Device as CandleDevice, Tensor, Var};
use proptest::prelude::*;

use super::*;
use crate::testing::*;

type Operation = fn(&mut Buffer, &HeadLayout, &RopeTables, usize, usize) -> Result<()>;

const THETA: f64 = 10_000.0;
const BASE: Frequencies = Frequencies { theta: THETA, scaling: None };
const LAYOUT: HeadLayout = HeadLayout { heads: 4, kv_heads: 2, head_size: 6 };

fn run(operation: Operation, qkv: &[f64], layout: &HeadLayout, length: usize, first: usize, dtype: DType) -> Buffer {
    let width = layout.packed_width();
    let mut qkv = buffer(qkv, &[qkv.len() / width, width], dtype);
    let tables = tables(first + length, layout.head_size, &BASE, &Device::Cpu).unwrap();
    operation(&mut qkv, layout, &tables, length, first).unwrap();
    qkv
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn any_shape_matches_the_reference(
        kv_heads in 1usize..4, group in 1usize..4, half in 1usize..20, batch in 1usize..4, length in 1usize..30, first in 0usize..50,
    ) {
        let layout = HeadLayout { heads: kv_heads * group, kv_heads, head_size: 2 * half };
        let qkv = numbers(1, batch * length * layout.packed_width());
        for dtype in [DType::F32, DType::BF16] {
            let turned = run(forward, &qkv, &layout, length, first, dtype);
            assert_near(&turned, &reference::forward(&qkv, &layout, THETA, length, first));
            let back = run(backward, &qkv, &layout, length, first, dtype);
            assert_near(&back, &reference::backward(&qkv, &layout, THETA, length, first));
        }
    }
}

#[test]
fn f32_matches_pytorch() {
    let golden = Golden::load("rope");
    let heads = golden.integers("heads_3");
    let layout = HeadLayout { heads: heads[0] as usize, kv_heads: heads[1] as usize, head_size: heads[2] as usize };
    let [length, later] = ["sequence_length", "first_position"].map(|name| golden.integers(name)[0] as usize);
    assert_eq!(golden.values("theta"), [THETA]);
    let (qkv, drotated) = (golden.values("qkv_NP"), golden.values("drotated_NP"));
    let turned = |operation, values: &[f64], first| run(operation, values, &layout, length, first, DType::F32);
    assert_near(&turned(forward, &qkv, 0), &golden.values("rotated_NP"));
    assert_near(&turned(forward, &qkv, later), &golden.values("later_rotated_NP"));
    assert_near(&turned(backward, &drotated, 0), &golden.values("dqkv_NP"));
}

#[test]
fn f32_matches_candle_autograd() {
    let (length, width) = (5, LAYOUT.packed_width());
    let (qkv, drotated) = (numbers(1, length * width), numbers(2, length * width));
    let leaf = Var::from_tensor(&Tensor::from_vec(qkv.clone(), (length, width), &CandleDevice::Cpu).unwrap()).unwrap();
    let heads = leaf.reshape((length, LAYOUT.heads + 2 * LAYOUT.kv_heads, LAYOUT.head_size)).unwrap();
    let turning = heads.narrow(1, 0, LAYOUT.heads + LAYOUT.kv_heads).unwrap();
    let (left, right) = (turning.narrow(2, 0, 3).unwrap(), turning.narrow(2, 3, 3).unwrap());
    let table = |function: fn(f64) -> f64| {
        let angle = |at: usize| (at / 3) as f64 * THETA.powf(-2.0 * (at % 3) as f64 / 6.0);
        let values: Vec<f64> = (0..length * 3).map(|at| function(angle(at))).collect();
        Tensor::from_vec(values, (length, 1, 3), &CandleDevice::Cpu).unwrap()
    };
    let (cos, sin) = (table(f64::cos), table(f64::sin));
    let times = |a: &Tensor, b: &Tensor| a.broadcast_mul(b).unwrap();
    let new_left = (times(&left, &cos) - times(&right, &sin)).unwrap();
    let new_right = (times(&right, &cos) + times(&left, &sin)).unwrap();
    let values = heads.narrow(1, LAYOUT.heads + LAYOUT.kv_heads, LAYOUT.kv_heads).unwrap();
    let rotated = Tensor::cat(&[Tensor::cat(&[new_left, new_right], 2).unwrap(), values], 1).unwrap();
    let weights = Tensor::from_vec(drotated.clone(), rotated.dims(), &CandleDevice::Cpu).unwrap();
    let gradients = (&rotated * weights).unwrap().sum_all().unwrap().backward().unwrap();
    let numbers = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    assert_near(&run(forward, &qkv, &LAYOUT, length, 0, DType::F32), &numbers(&rotated));
    assert_near(&run(backward, &drotated, &LAYOUT, length, 0, DType::F32), &numbers(gradients.get(&leaf).unwrap()));
}

#[test]
fn the_references_gradient_is_the_slope_of_its_forward() {
    let (qkv, drotated) = (numbers(1, 3 * LAYOUT.packed_width()), numbers(2, 3 * LAYOUT.packed_width()));
    let scalar = |qkv: &[f64]| dot(&reference::forward(qkv, &LAYOUT, THETA, 3, 7), &drotated);
    let gradient = reference::backward(&drotated, &LAYOUT, THETA, 3, 7);
    assert_same_gradient(&gradient, &finite_differences(scalar, &qkv));
}

#[test]
fn values_are_untouched_and_backward_inverts_forward() {
    let qkv = numbers(1, 9 * LAYOUT.packed_width());
    let mut turned = run(forward, &qkv, &LAYOUT, 9, 0, DType::F32);
    let tables = tables(9, 6, &BASE, &Device::Cpu).unwrap();
    backward(&mut turned, &LAYOUT, &tables, 9, 0).unwrap();
    assert_within(&turned, &qkv, 1e-7);
    let values = |row: &[f32]| row[36..].to_vec();
    let (now, before) = (turned.read_f32().unwrap(), to_f32(&qkv));
    assert!(now.chunks(48).map(values).eq(before.chunks(48).map(values)));
}

#[test]
fn angles_of_far_positions_come_from_double_precision() {
    let tables = tables(200_001, 4, &Frequencies::of_base(500_000.0), &Device::Cpu).unwrap();
    let last: [f32; 2] = tables.sin_TE2.read::<f32>().unwrap()[400_000..].try_into().unwrap();
    assert_eq!(last, [200_000f64.sin() as f32, (200_000.0 * 500_000f64.powf(-0.5)).sin() as f32]);
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let tables_TE2 = tables(8, 6, &BASE, &Device::Cpu).unwrap();
    let refused = |shape: &[usize], length, first| {
        forward(&mut zeros(shape, DType::F32), &LAYOUT, &tables_TE2, length, first).unwrap_err().to_string()
    };
    assert_eq!(refused(&[8, 48], 8, 1), "rope::forward: positions up to 9 are needed, the tables have 8");
    assert_eq!(refused(&[9, 48], 4, 0), "rope::forward: 9 rows are not whole sequences of 4");
    assert_eq!(refused(&[8, 47], 8, 0), "rope::forward: `qkv_NP` has shape [8, 47], expected [8, 48]");
    assert!(refused(&[8, 48], 0, 0).contains("whole sequences of 0"));
    let mut inside = tables_TE2.cos_TE2.view(0, &[0, 48]).unwrap();
    assert!(backward(&mut inside, &LAYOUT, &tables_TE2, 8, 0).is_ok(), "no rows, nothing to do");
    let table = zeros(&[16, 3], DType::F32);
    let own = RopeTables { cos_TE2: table.view(0, &[16, 3]).unwrap(), sin_TE2: zeros(&[16, 3], DType::F32) };
    let error = forward(&mut table.view(0, &[1, 48]).unwrap(), &LAYOUT, &own, 1, 0).unwrap_err();
    assert!(matches!(error, Error::Aliased { output: "qkv_NP", other: "cos_TE2", .. }), "{error}");
    assert!(
        tables(8, 5, &BASE, &Device::Cpu).is_err() && tables(8, 6, &Frequencies::of_base(0.0), &Device::Cpu).is_err()
    );
}

/// `ROPE_INIT_FUNCTIONS["llama3"]` of transformers 5.23, which computes in f32.
#[test]
fn scaled_frequencies_equal_those_of_transformers() {
    let scaling = Llama3Scaling { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 };
    let frequencies = Frequencies { theta: 500_000.0, scaling: Some(scaling) };
    let expected = [
        1.0,
        0.193_922_758,
        0.037_606_030_7,
        0.007_292_665_08,
        0.000_524_846_022,
        3.428_102_35e-5,
        6.647_869_67e-6,
        1.289_173_16e-6,
    ];
    for (j, expected) in expected.into_iter().enumerate() {
        let radians = frequencies.radians(j, 16);
        assert!((radians / expected - 1.0_f64).abs() < 2e-6, "{j}: {radians} {expected}");
    }
}
