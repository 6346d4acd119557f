//! Rounding to fp8 against the definition and against `NumPy`.

use proptest::prelude::*;

use super::*;
use crate::cases::BufferContents;
use crate::testing::*;
use crate::{Error, WriteMode, bf16, linear};

/// An operand with codes for both axes.
fn operand(block: ScaleBlock, [rows, columns]: [usize; 2]) -> Operand {
    let [codes_RC, codes_CR] = [[rows, columns], [columns, rows]].map(|sizes| {
        let (dtype, shape) = block.scales(sizes);
        Some(Codes { values: zeros(&sizes, DType::U8), scales: zeros(&shape, dtype) })
    });
    Operand { block, codes_RC, codes_CR }
}

fn quantized(x: &Buffer, block: ScaleBlock) -> Operand {
    let mut out = operand(block, x.sizes());
    quantize(x, &mut out, &mut workspace(0)).unwrap();
    out
}

fn rounded(x: &Buffer, block: ScaleBlock) -> Vec<f64> {
    decoded(quantized(x, block).codes_RC.as_ref().unwrap(), block)
}

/// Requires the same bits, but for those of a NaN.
fn assert_same_numbers(ours: &[f64], expected: &[f64]) {
    for (at, (ours, expected)) in ours.iter().zip(expected).enumerate() {
        let is_same = ours.to_bits() == expected.to_bits() || (ours.is_nan() && expected.is_nan());
        assert!(is_same, "{at}: {ours:e}, expected {expected:e}");
    }
    assert_eq!(ours.len(), expected.len());
}

/// All bit patterns of a BF16 number, in order: 8 exponents in each square of 32 times 32.
fn every_bf16() -> Buffer {
    let values: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let mut buffer = zeros(&[2048, 32], DType::BF16);
    buffer.write(&values).unwrap();
    buffer
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_shape_matches_the_reference(rows in 1usize..40, columns in 1usize..40, exponent in -140i32..125) {
        let values: Vec<f64> = numbers(1, rows * columns).iter().map(|x| x * 2f64.powi(exponent)).collect();
        let x = buffer(&values, &[rows, columns], DType::BF16);
        let exact: Vec<f64> = x.read_f32().unwrap().into_iter().map(f64::from).collect();
        for block in ScaleBlock::ALL {
            assert_same_numbers(&rounded(&x, block), &reference::round(&exact, [rows, columns], block));
        }
    }
}

#[test]
fn every_bf16_number_rounds_as_in_numpy() {
    let golden = Golden::load("fp8");
    let x = every_bf16();
    for (block, name) in [(ScaleBlock::Square32, "every_32"), (ScaleBlock::Square128, "every_128")] {
        assert_same_numbers(&rounded(&x, block), &golden.values(name));
    }
}

#[test]
fn matrices_round_as_in_numpy() {
    let golden = Golden::load("fp8");
    let x = buffer(&golden.values("x_RC"), golden.shape("x_RC"), DType::BF16);
    let names = ["x_tensor_RC", "x_128_RC", "x_32_RC"];
    for (block, name) in ScaleBlock::ALL.into_iter().zip(names) {
        assert_same_numbers(&rounded(&x, block), &golden.values(name));
    }
}

#[test]
fn numbers_of_codes_are_exact() {
    let x = every_bf16();
    for block in ScaleBlock::ALL {
        let codes = quantized(&x, block).codes_RC.unwrap();
        let mut numbers = zeros(x.shape(), DType::BF16);
        dequantize(&codes, block, &mut numbers).unwrap();
        let numbers: Vec<f64> = numbers.read_f32().unwrap().into_iter().map(f64::from).collect();
        assert_same_numbers(&numbers, &decoded(&codes, block));
    }
}

/// What codes and scales stand for, read as the documentation of cuBLASLt says.
fn decoded(Codes { values: codes, scales }: &Codes, block: ScaleBlock) -> Vec<f64> {
    let [rows, columns] = codes.sizes();
    let values: Vec<f64> = reference::e4m3_values().collect();
    let number = |code: u8| match (values.get(usize::from(code & 0x7f)), code & 0x80) {
        (None, _) => f64::NAN,
        (Some(value), 0) => *value,
        (Some(value), _) => -value,
    };
    let scales: Vec<f64> = match block {
        ScaleBlock::Square32 => {
            scales.read::<u8>().unwrap().into_iter().map(|exponent| 2f64.powi(i32::from(exponent) - 127)).collect()
        }
        _ => scales.read::<f32>().unwrap().into_iter().map(f64::from).collect(),
    };
    let scale = |row: usize, column: usize| match block {
        ScaleBlock::Tensor => scales[0],
        ScaleBlock::Square128 => scales[column / 128 * rows + row],
        ScaleBlock::Square32 => {
            let tile = row / 128 * columns.div_ceil(128) + column / 128;
            let (outer, inner) = (row % 128, column % 128 / 32);
            scales[tile * 512 + outer % 32 * 16 + outer / 32 * 4 + inner]
        }
    };
    let codes = codes.read::<u8>().unwrap();
    (0..rows * columns).map(|at| number(codes[at]) * scale(at / columns, at % columns)).collect()
}

fn transposed(values: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    (0..rows * columns).map(|at| values[at % rows * columns + at / rows]).collect()
}

#[test]
fn codes_of_the_transpose_stand_for_the_same_numbers() {
    let golden = Golden::load("fp8");
    let (rows, columns) = (150, 200);
    let x = buffer(&golden.values("x_RC"), golden.shape("x_RC"), DType::BF16).view(7, &[rows, columns]).unwrap();
    for block in ScaleBlock::ALL {
        let both = quantized(&x, block);
        let [codes_RC, codes_CR_of_both] = [&both.codes_RC, &both.codes_CR].map(|codes| codes.as_ref().unwrap());
        assert_same_numbers(&decoded(codes_CR_of_both, block), &transposed(&decoded(codes_RC, block), rows, columns));

        let mut turned = Operand { codes_RC: None, ..operand(block, [rows, columns]) };
        transpose(&both, &mut turned).unwrap();
        let mut alone = Operand { codes_RC: None, ..operand(block, [rows, columns]) };
        quantize(&x, &mut alone, &mut workspace(0)).unwrap();
        for Operand { codes_CR, .. } in [turned, alone] {
            let Codes { values, scales } = codes_CR.unwrap();
            assert_eq!(values.read::<u8>().unwrap(), codes_CR_of_both.values.read::<u8>().unwrap());
            assert_eq!(BufferContents::read(&scales).unwrap(), BufferContents::read(&codes_CR_of_both.scales).unwrap());
        }
    }
}

/// GEMMs read the codes of either axis; a CPU multiplies the numbers that they stand for.
#[test]
fn fp8_gemms_are_those_of_the_rounded_numbers() {
    let [n, i, o] = [50, 170, 140];
    for block in ScaleBlock::ALL {
        let spread = |seed, count| -> Vec<f64> {
            numbers(seed, count).into_iter().enumerate().map(|(at, x)| x * 2f64.powi((at % 23) as i32 - 11)).collect()
        };
        let [x, w, dy] = [(1, [n, i]), (2, [o, i]), (3, [n, o])]
            .map(|(seed, sizes): (u64, [usize; 2])| buffer(&spread(seed, sizes[0] * sizes[1]), &sizes, DType::BF16));
        let [x_fp8, w_fp8, dy_fp8] = [&x, &w, &dy].map(|x| quantized(x, block));
        let [x, w, dy] = [&x, &w, &dy].map(|x| buffer(&rounded(x, block), x.shape(), DType::BF16));
        let mut space = workspace(linear::fp8_workspace_elements(n, i, o, DeviceKind::Cpu));
        let results = || [zeros(&[n, o], DType::BF16), zeros(&[n, i], DType::BF16), zeros(&[o, i], DType::F32)];
        let [mut y, mut dx, mut dw] = results();
        linear::forward(&x, &w, &mut y, &mut space).unwrap();
        linear::backward_input(&dy, &w, &mut dx, &mut space).unwrap();
        linear::backward_weight(&dy, &x, &mut dw, WriteMode::Accumulate, &mut space).unwrap();
        let without = |operand: &Operand, rows: bool| {
            let Operand { block, codes_RC, codes_CR } = operand.clone();
            Operand { block, codes_RC: codes_RC.filter(|_| rows), codes_CR: codes_CR.filter(|_| !rows) }
        };
        // As on a GPU, and as on a CPU.
        for over_rows in [false, true] {
            let [x_rows, w_rows, dy_rows] = [&x_fp8, &w_fp8, &dy_fp8].map(|operand| without(operand, true));
            let [x_again, w_again, dy_again] = [&x_fp8, &w_fp8, &dy_fp8].map(|operand| without(operand, over_rows));
            let [mut y_fp8, mut dx_fp8, mut dw_fp8] = results();
            linear::forward(&x_rows, &w_rows, &mut y_fp8, &mut space).unwrap();
            linear::backward_input(&dy_rows, &w_again, &mut dx_fp8, &mut space).unwrap();
            linear::backward_weight(&dy_again, &x_again, &mut dw_fp8, WriteMode::Accumulate, &mut space).unwrap();
            for (ours, expected) in [(y_fp8, &y), (dx_fp8, &dx), (dw_fp8, &dw)] {
                assert_eq!(BufferContents::read(&ours).unwrap(), BufferContents::read(expected).unwrap());
            }
        }
    }
}

#[test]
fn a_transpose_has_the_same_rounded_numbers() {
    let (rows, columns) = (70, 300);
    let x = numbers(5, rows * columns);
    for block in ScaleBlock::ALL {
        let of_rows = rounded(&buffer(&x, &[rows, columns], DType::BF16), block);
        let x_transposed = buffer(&transposed(&x, rows, columns), &[columns, rows], DType::BF16);
        assert_same_numbers(&rounded(&x_transposed, block), &transposed(&of_rows, rows, columns));
    }
}

#[test]
fn rounding_twice_changes_nothing() {
    for block in ScaleBlock::ALL {
        let once = rounded(&buffer(&numbers(3, 64 * 64), &[64, 64], DType::BF16), block);
        assert_same_numbers(&rounded(&buffer(&once, &[64, 64], DType::BF16), block), &once);
    }
}

#[test]
fn a_number_that_is_not_finite_spoils_its_block_alone() {
    for infinite in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
        let mut x = numbers(7, 64 * 64);
        x[40 * 64 + 3] = infinite;
        let ours = rounded(&buffer(&x, &[64, 64], DType::BF16), ScaleBlock::Square32);
        for (at, value) in ours.iter().enumerate() {
            assert_eq!(value.is_nan(), at / 64 >= 32 && at % 64 < 32, "{at}");
        }
        let all = rounded(&buffer(&x, &[64, 64], DType::BF16), ScaleBlock::Tensor);
        assert!(all.iter().all(|value| value.is_nan()));
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let x = buffer(&numbers(2, 500 * 700), &[500, 700], DType::BF16);
    for block in ScaleBlock::ALL {
        assert_same_at_any_thread_count(|| {
            let Operand { codes_RC, codes_CR, .. } = quantized(&x, block);
            [codes_RC, codes_CR].into_iter().flatten().flat_map(|codes| [codes.values, codes.scales]).collect()
        });
    }
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let (x, block) = (zeros(&[4, 3], DType::BF16), ScaleBlock::Tensor);
    let refusal = |x: &Buffer, mut out: Operand| quantize(x, &mut out, &mut workspace(0)).unwrap_err();
    let error = refusal(&x, operand(block, [3, 4]));
    assert_eq!(error.to_string(), "fp8::quantize: `codes_RC` has shape [3, 4], expected [4, 3]");
    let error = refusal(&x, Operand { block: ScaleBlock::Square32, ..operand(block, [4, 3]) });
    assert_eq!(error.to_string(), "fp8::quantize: `scales of codes_RC` has shape [1], expected [1, 1, 512]");
    assert!(matches!(
        refusal(&zeros(&[4, 3], DType::F32), operand(block, [4, 3])),
        Error::DType { argument: "x_RC", .. }
    ));
    let mut aliased = operand(block, [4, 3]);
    aliased.codes_CR.as_mut().unwrap().scales = aliased.codes_RC.as_ref().unwrap().scales.clone();
    assert!(matches!(refusal(&x, aliased), Error::Aliased { .. }));
}

#[test]
fn an_fp8_gemm_needs_two_fp8_operands_with_scales_of_one_kind() {
    let (x, w) = (quantized(&zeros(&[4, 3], DType::BF16), ScaleBlock::Tensor), operand(ScaleBlock::Square32, [5, 3]));
    let mut space = workspace(linear::fp8_workspace_elements(4, 3, 5, DeviceKind::Cpu));
    let mut y = zeros(&[4, 5], DType::BF16);
    let error = linear::forward(&x, &w, &mut y, &mut space).unwrap_err();
    assert_eq!(
        error.to_string(),
        "linear::forward: operands have scales of other blocks: Some(Tensor) and Some(Square32)"
    );
    let error = linear::forward(&x, &zeros(&[5, 3], DType::BF16), &mut y, &mut space).unwrap_err();
    assert!(matches!(error, Error::DType { argument: "w_OI", .. }), "{error}");
}
