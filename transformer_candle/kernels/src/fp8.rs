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
use crate::cuda::{self, KernelArg};
use crate::{Buffer, DeviceKind, Result, cpu};

/// Rows and columns of the tiles that a GPU rounds, and by which it reads the scales of squares.
pub(crate) const TILE: usize = 128;

/// The elements of a matrix that share a scale. Squares are smaller at the matrix's lower and right edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleBlock {
    /// All of the matrix.
    Tensor,
    /// Squares of 128 rows and columns.
    Square128,
    /// Squares of 32 rows and columns.
    Square32,
}

impl ScaleBlock {
    /// Element type and shape of the scales of a matrix of [rows, columns], as cuBLASLt reads them ("Narrow Precision
    /// Data Types Usage" in its documentation).
    ///
    /// One scale is an F32. Those of squares of 128 are F32 as well, [columns / 128, rows]: the same one for all rows of
    /// a square. Those of squares of 32 are exponents with a bias of 127 in U8, [rows / 128, columns / 128, 512]: the
    /// 4 x 4 squares of a tile of 128 x 128 row by row, 32 times.
    pub fn scales(self, [rows, columns]: [usize; 2]) -> (DType, Vec<usize>) {
        let tiles = [rows, columns].map(|size| size.div_ceil(TILE));
        match self {
            Self::Tensor => (DType::F32, vec![1]),
            Self::Square128 => (DType::F32, vec![tiles[1], rows]),
            Self::Square32 => (DType::U8, vec![tiles[0], tiles[1], 512]),
        }
    }
}

/// `out_RC` = `x_RC`, each block rounded to e4m3 with its scale. Both BF16. A block with an infinity or a NaN becomes
/// NaN, since no scale fits; the exponents of scales are at least -120, which reaches far below any gradient.
pub fn round(x_RC: &Buffer, block: ScaleBlock, out_RC: &mut Buffer) -> Result<()> {
    let sizes @ [_, columns] = x_RC.sizes();
    Arguments::new("fp8::round")
        .input("x_RC", x_RC, DType::BF16, &sizes)
        .output("out_RC", out_RC, DType::BF16, &sizes)
        .cpu(|access: &Access<'_>| {
            cpu::fp8::round(x_RC.slice(access), out_RC.slice_mut(access), columns, block);
            Ok(())
        })
}

/// The e4m3 codes of a matrix, U8, and their scales: [`ScaleBlock::scales`].
#[derive(Clone, Debug)]
pub struct Codes {
    /// One for each number.
    pub values: Buffer,
    /// One for each block.
    pub scales: Buffer,
}

/// `codes_RC` = `x_RC`, each block rounded to e4m3 with its scale, as [`round`] does; and `codes_CR` the transpose: fp8
/// GEMMs read an operand along the axis that they sum over. `x_RC` is BF16; on a GPU R and C are multiples of 16.
pub fn quantize(
    x_RC: &Buffer,
    block: ScaleBlock,
    codes_RC: &mut Codes,
    codes_CR: &mut Codes,
    workspace: &mut Buffer,
) -> Result<()> {
    let sizes @ [rows, columns] = x_RC.sizes();
    let transposed_sizes = [columns, rows];
    let ((dtype, scales_RC), (_, scales_CR)) = (block.scales(sizes), block.scales(transposed_sizes));
    let arguments = Arguments::new("fp8::quantize")
        .input("x_RC", x_RC, DType::BF16, &sizes)
        .output("codes_RC", &codes_RC.values, DType::U8, &sizes)
        .output("scales of codes_RC", &codes_RC.scales, dtype, &scales_RC)
        .output("codes_CR", &codes_CR.values, DType::U8, &transposed_sizes)
        .output("scales of codes_CR", &codes_CR.scales, dtype, &scales_CR)
        .workspace(workspace, workspace_elements(rows, columns, x_RC.device().kind()));
    let outputs = [&*codes_RC, codes_CR].map(|Codes { values, scales }| [values, scales].map(KernelArg::from));
    let partials =
        [0, cuda::fp8::FIRST_PARTIAL].map(|first| KernelArg::reinterpreted(workspace, first, cuda::fp8::PARTIAL));
    let cpu = |access: &Access<'_>| {
        let x = cpu::fp8::Matrix::new(x_RC.slice(access), sizes, block);
        for (x, Codes { values, scales }) in [(x, codes_RC), (x.transposed(), codes_CR)] {
            cpu::fp8::encode(x, values.slice_mut(access));
            match block {
                ScaleBlock::Tensor => scales.slice_mut(access).fill(x.scale(0, 0).stored()),
                ScaleBlock::Square128 => cpu::fp8::vector_scales(x, scales.slice_mut(access)),
                ScaleBlock::Square32 => cpu::fp8::tiled_exponents(x, scales.slice_mut(access)),
            }
        }
        Ok(())
    };
    arguments.run(cpu, || cuda::fp8::quantize(KernelArg::from(x_RC), block, outputs, partials, sizes))
}

/// Elements of F32 workspace for [`quantize`].
pub fn workspace_elements(rows: usize, columns: usize, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => 0,
        DeviceKind::Cuda => cuda::fp8::workspace_elements(rows, columns),
    }
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
            ScaleBlock::Square128 => 128,
            ScaleBlock::Square32 => 32,
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

/// Calls for checks and benchmarks, of sizes [R, C].
pub mod cases {
    use super::{Codes, ScaleBlock, quantize, workspace_elements};
    use crate::DType;
    use crate::cases::bounds::EXACT;
    use crate::cases::{Case, CaseList, Inputs, Size};

    pub(crate) fn add(size: Size, dtype: DType, list: &mut CaseList) {
        let sizes = match size {
            Size::Small => vec![[48, 144]],
            Size::Medium => vec![[304, 272]],
            Size::Full => vec![[208, 272], [2048, 2048], [8192, 2048], [2048, 16_384]],
        };
        for sizes in sizes.into_iter().filter(|_| dtype == DType::BF16) {
            for block in [ScaleBlock::Tensor, ScaleBlock::Square128, ScaleBlock::Square32] {
                list.add(move |inputs| codes(inputs, sizes, block));
            }
        }
    }

    /// [`quantize`].
    pub fn codes(inputs: &mut Inputs, [r, c]: [usize; 2], block: ScaleBlock) -> Case {
        let ((dtype, scales_RC), (_, scales_CR)) = (block.scales([r, c]), block.scales([c, r]));
        Case::new(inputs.name("fp8::quantize"), format!("{r} x {c}, {block:?}"))
            .in_given_types()
            .input("x", &[r, c], inputs.numbers(&[r, c]))
            .output("codes", &[r, c], DType::U8, EXACT)
            .output("scales", &scales_RC, dtype, EXACT)
            .output("transposed codes", &[c, r], DType::U8, EXACT)
            .output("transposed scales", &scales_CR, dtype, EXACT)
            .workspace(move |device| workspace_elements(r, c, device))
            .call(move |[x, values_RC, scales_RC, values_CR, scales_CR, workspace]| {
                let [mut codes_RC, mut codes_CR] = [(values_RC, scales_RC), (values_CR, scales_CR)]
                    .map(|(values, scales)| Codes { values: values.clone(), scales: scales.clone() });
                quantize(x, block, &mut codes_RC, &mut codes_CR, workspace)
            })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Error;
    use crate::bf16;
    use crate::testing::*;

    const BLOCKS: [ScaleBlock; 3] = [ScaleBlock::Tensor, ScaleBlock::Square128, ScaleBlock::Square32];

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
        for (block, name) in [(ScaleBlock::Square32, "every_32"), (ScaleBlock::Square128, "every_128")] {
            assert_same_numbers(&rounded(&x, block), &golden.values(name));
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

    /// What codes and scales stand for, read as the documentation of cuBLASLt says.
    fn decoded(Codes { values: codes, scales }: &Codes, block: ScaleBlock) -> Vec<f64> {
        let [rows, columns] = codes.sizes();
        let values: Vec<f64> = reference::e4m3_values().collect();
        let number = |code: u8| match (values.get(usize::from(code & 0x7f)), code & 0x80) {
            (None, _) => f64::NAN,
            (Some(value), 0) => *value,
            (Some(value), _) => -value,
        };
        let scale = |row: usize, column: usize| match block {
            ScaleBlock::Tensor => f64::from(scales.read::<f32>().unwrap()[0]),
            ScaleBlock::Square128 => f64::from(scales.read::<f32>().unwrap()[column / 128 * rows + row]),
            ScaleBlock::Square32 => {
                let tile = row / 128 * columns.div_ceil(128) + column / 128;
                let (outer, inner) = (row % 128, column % 128 / 32);
                let exponent = scales.read::<u8>().unwrap()[tile * 512 + outer % 32 * 16 + outer / 32 * 4 + inner];
                2f64.powi(i32::from(exponent) - 127)
            }
        };
        let codes = codes.read::<u8>().unwrap();
        (0..rows * columns).map(|at| number(codes[at]) * scale(at / columns, at % columns)).collect()
    }

    #[test]
    fn codes_and_scales_stand_for_the_rounded_numbers_along_both_axes() {
        let golden = Golden::load("fp8");
        let mut x = buffer(&golden.values("x_RC"), golden.shape("x_RC"), DType::BF16);
        let (rows, columns) = (150, 200);
        x = x.view(7, &[rows, columns]).unwrap();
        for block in BLOCKS {
            let [mut codes_RC, mut codes_CR] = [[rows, columns], [columns, rows]].map(|sizes| {
                let (dtype, shape) = block.scales(sizes);
                Codes { values: zeros(&sizes, DType::U8), scales: zeros(&shape, dtype) }
            });
            quantize(&x, block, &mut codes_RC, &mut codes_CR, &mut workspace(1)).unwrap();
            let expected = rounded(&x, block);
            let transposed: Vec<f64> =
                (0..rows * columns).map(|at| expected[at % rows * columns + at / rows]).collect();
            assert_same_numbers(&decoded(&codes_RC, block), &expected);
            assert_same_numbers(&decoded(&codes_CR, block), &transposed);
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
        assert!(matches!(round(&x, ScaleBlock::Tensor, &mut x.clone()).unwrap_err(), Error::Aliased { .. }));
    }

    #[test]
    fn a_matrix_without_rows_is_rounded_to_itself() {
        for block in BLOCKS {
            round(&zeros(&[0, 3], DType::BF16), block, &mut zeros(&[0, 3], DType::BF16)).unwrap();
        }
    }
}
