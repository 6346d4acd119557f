//! Rounding of a GEMM's operands to fp8: e4m3 numbers of 8 bits with one scale per block.
//!
//! e4m3 (OCP 8-bit Floating Point Specification, 2023; "e4m3fn" in PyTorch) has 4 bits of exponent and 3 of mantissa: 448
//! at most, 2^-6 the smallest normal number, multiples of 2^-9 below, no infinities. A block of numbers x is stored as
//! x / s, rounded to the nearest, ties to even. The scale s is the smallest power of two with which nothing is larger
//! than 448: rounding up as in NVIDIA's recipe for MXFP8 (Mishra et al. 2025, arXiv 2506.08027), not down as in the
//! specification of OCP MX, which cuts off what is between 448 and 512.
//!
//! Scales are powers of two and blocks are square for every kind of GPU, and two things follow. A transpose moves bytes
//! and keeps scales, so that the forward GEMM and both gradients see the same rounded numbers. And what an operand
//! stands for, e4m3 times a power of two, is a BF16 number: a CPU computes with it what a GPU's fp8 GEMM is defined
//! to, but for the order of the sum.
//!
//! Legend: R rows, C columns.

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::{Buffer, Result, cpu};

/// The elements of a matrix that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleBlock {
    /// All of the matrix.
    Tensor,
    /// A square of so many rows and columns, smaller at the matrix's lower and right edge.
    Square(usize),
}

/// `out_RC` = `x_RC`, each block rounded to e4m3 with its scale. Both BF16. A block with an infinity or a NaN becomes NaN,
/// since no scale fits; the exponents of scales are at least -120, which reaches far below any gradient.
pub fn round(x_RC: &Buffer, block: ScaleBlock, out_RC: &mut Buffer) -> Result<()> {
    let sizes @ [_, columns] = x_RC.sizes();
    let has_edge = block != ScaleBlock::Square(0);
    Arguments::new("fp8::round")
        .require(has_edge, || "a block has no rows".to_owned())
        .input("x_RC", x_RC, DType::BF16, &sizes)
        .output("out_RC", out_RC, DType::BF16, &sizes)
        .cpu(|access: &Access<'_>| {
            cpu::fp8::round(x_RC.slice(access), out_RC.slice_mut(access), columns, block);
            Ok(())
        })
}

/// The operation in the plainest terms.
pub mod reference {
    use super::ScaleBlock;

    /// The finite e4m3 numbers that are not negative, by their code: 0 to 126.
    pub fn e4m3_values() -> impl Iterator<Item = f64> {
        (0..127).map(|code| {
            let (exponent, mantissa) = (code / 8, f64::from(code % 8) / 8.0);
            if exponent == 0 { mantissa * 2f64.powi(-6) } else { (1.0 + mantissa) * 2f64.powi(exponent - 7) }
        })
    }

    /// The nearest e4m3 number, of two equally near ones that with the even code. At most 448 in size.
    pub fn nearest(value: f64) -> f64 {
        let (mut nearest, mut error) = (0.0, f64::INFINITY);
        for (code, candidate) in e4m3_values().enumerate() {
            let distance = (value.abs() - candidate).abs();
            // A later candidate is larger; of two equally near ones it counts if its code is even.
            let is_nearer = if code % 2 == 0 { distance <= error } else { distance < error };
            if is_nearer {
                (nearest, error) = (candidate, distance);
            }
        }
        nearest.copysign(value)
    }

    /// The scale of a block whose largest number has this size.
    pub fn scale(largest: f64) -> f64 {
        let exponents = (-120..=120).map(|exponent| 2f64.powi(exponent));
        exponents.into_iter().find(|scale| largest <= 448.0 * scale).unwrap_or(f64::NAN)
    }

    /// See [`super::round`]; [rows, columns] are the sizes of `x_RC`.
    pub fn round(x_RC: &[f64], [rows, columns]: [usize; 2], block: ScaleBlock) -> Vec<f64> {
        let edge = match block {
            ScaleBlock::Tensor => rows.max(columns),
            ScaleBlock::Square(edge) => edge,
        };
        let block_of = |at: usize| (at / columns / edge, at % columns / edge);
        let largest = |block| {
            let inside = x_RC.iter().enumerate().filter(|&(at, _)| block_of(at) == block);
            inside
                .fold(0f64, |largest, (_, value)| if value.is_nan() { f64::INFINITY } else { largest.max(value.abs()) })
        };
        let rounded = |(at, &value): (usize, &f64)| {
            let scale = scale(largest(block_of(at)));
            if scale.is_nan() { f64::NAN } else { nearest(value / scale) * scale }
        };
        x_RC.iter().enumerate().map(rounded).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Error;
    use crate::bf16;
    use crate::testing::*;

    const BLOCKS: [ScaleBlock; 4] =
        [ScaleBlock::Tensor, ScaleBlock::Square(128), ScaleBlock::Square(32), ScaleBlock::Square(3)];

    fn rounded(x: &Buffer, block: ScaleBlock) -> Vec<f64> {
        let mut out = zeros(x.shape(), DType::BF16);
        round(x, block, &mut out).unwrap();
        out.read_f32().unwrap().into_iter().map(f64::from).collect()
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
            for block in BLOCKS {
                assert_same_numbers(&rounded(&x, block), &reference::round(&exact, [rows, columns], block));
            }
        }
    }

    #[test]
    fn every_bf16_number_rounds_as_in_numpy() {
        let golden = Golden::load("fp8");
        let x = every_bf16();
        for (block, name) in [(32, "every_32"), (128, "every_128")] {
            assert_same_numbers(&rounded(&x, ScaleBlock::Square(block)), &golden.values(name));
        }
    }

    #[test]
    fn matrices_round_as_in_numpy() {
        let golden = Golden::load("fp8");
        let x = buffer(&golden.values("x_RC"), golden.shape("x_RC"), DType::BF16);
        let names = ["x_tensor_RC", "x_128_RC", "x_32_RC"];
        for (block, name) in BLOCKS.into_iter().zip(names) {
            assert_same_numbers(&rounded(&x, block), &golden.values(name));
        }
    }

    #[test]
    fn a_transpose_has_the_same_rounded_numbers() {
        let (rows, columns) = (70, 300);
        let transposed = |values: &[f64], rows: usize, columns: usize| -> Vec<f64> {
            (0..rows * columns).map(|at| values[at % rows * columns + at / rows]).collect()
        };
        let x = numbers(5, rows * columns);
        for block in BLOCKS {
            let of_rows = rounded(&buffer(&x, &[rows, columns], DType::BF16), block);
            let x_transposed = buffer(&transposed(&x, rows, columns), &[columns, rows], DType::BF16);
            assert_same_numbers(&rounded(&x_transposed, block), &transposed(&of_rows, rows, columns));
        }
    }

    #[test]
    fn rounding_twice_changes_nothing() {
        for block in BLOCKS {
            let once = rounded(&buffer(&numbers(3, 64 * 64), &[64, 64], DType::BF16), block);
            assert_same_numbers(&rounded(&buffer(&once, &[64, 64], DType::BF16), block), &once);
        }
    }

    #[test]
    fn a_number_that_is_not_finite_spoils_its_block_alone() {
        for infinite in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
            let mut x = numbers(7, 64 * 64);
            x[40 * 64 + 3] = infinite;
            let ours = rounded(&buffer(&x, &[64, 64], DType::BF16), ScaleBlock::Square(32));
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
        for block in BLOCKS {
            assert_same_at_any_thread_count(|| {
                let mut out = zeros(x.shape(), DType::BF16);
                round(&x, block, &mut out).unwrap();
                vec![out]
            });
        }
    }

    #[test]
    fn wrong_arguments_are_refused_by_name() {
        let x = zeros(&[4, 3], DType::BF16);
        let error = round(&x, ScaleBlock::Tensor, &mut zeros(&[3, 4], DType::BF16)).unwrap_err();
        assert_eq!(error.to_string(), "fp8::round: `out_RC` has shape [3, 4], expected [4, 3]");
        let error = round(&zeros(&[4, 3], DType::F32), ScaleBlock::Tensor, &mut zeros(&[4, 3], DType::BF16));
        assert!(matches!(error.unwrap_err(), Error::DType { argument: "x_RC", .. }));
        assert!(round(&x, ScaleBlock::Square(0), &mut zeros(&[4, 3], DType::BF16)).is_err());
        let mut empty = zeros(&[0, 3], DType::BF16);
        round(&empty.clone(), ScaleBlock::Square(32), &mut zeros(&[0, 3], DType::BF16)).unwrap();
        assert!(round(&x, ScaleBlock::Tensor, &mut x.clone()).is_err());
        empty.zero().unwrap();
    }
}
