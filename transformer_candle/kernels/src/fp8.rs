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
use crate::{Buffer, DeviceKind, Result, bf16, cpu};

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
    /// Every kind of block.
    pub const ALL: [Self; 3] = [Self::Tensor, Self::Square128, Self::Square32];

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

/// The e4m3 codes of a matrix, U8, and their scales: [`ScaleBlock::scales`].
#[derive(Clone, Debug)]
pub struct Codes {
    /// One for each number.
    pub values: Buffer,
    /// One for each block.
    pub scales: Buffer,
}

/// A matrix rounded to fp8, an operand of GEMMs. On a GPU they read an operand along the axis that they sum over: the
/// codes of the matrix where they sum over its columns, those of its transpose where they sum over its rows. On a CPU
/// the former serve both.
#[derive(Clone, Debug)]
pub struct Operand {
    /// The elements that share a scale.
    pub block: ScaleBlock,
    /// The codes of the matrix.
    pub codes_RC: Option<Codes>,
    /// The codes of its transpose.
    pub codes_CR: Option<Codes>,
}

impl Operand {
    /// Adds the codes that there are to the outputs of a call.
    pub(crate) fn written_by(&self, mut arguments: Arguments, [rows, columns]: [usize; 2]) -> Arguments {
        let both = [
            (&self.codes_RC, [rows, columns], ["codes_RC", "scales of codes_RC"]),
            (&self.codes_CR, [columns, rows], ["codes_CR", "scales of codes_CR"]),
        ];
        for (codes, sizes, [values_name, scales_name]) in both {
            let (dtype, scales) = self.block.scales(sizes);
            arguments = arguments
                .optional_output(values_name, codes.as_ref().map(|codes| &codes.values), DType::U8, &sizes)
                .optional_output(scales_name, codes.as_ref().map(|codes| &codes.scales), dtype, &scales);
        }
        arguments
    }

    /// Values and scales of the codes that there are, of the matrix and of its transpose.
    pub(crate) fn pointers(&self) -> [Option<[KernelArg; 2]>; 2] {
        [&self.codes_RC, &self.codes_CR].map(|codes| codes.as_ref().map(pointers))
    }

    /// Writes the codes that there are on a CPU.
    pub(crate) fn encode(&mut self, values: &[bf16], sizes: [usize; 2], access: &Access<'_>) {
        let x = cpu::fp8::Matrix::new(values, sizes, self.block);
        for (x, codes) in [(x, &mut self.codes_RC), (x.transposed(), &mut self.codes_CR)] {
            let Some(Codes { values, scales }) = codes else { continue };
            cpu::fp8::encode(x, values.slice_mut(access));
            let scale = |row: usize, column: usize| x.scale(row, column).stored();
            write_scales(self.block, x.sizes(), scale, scales, access);
        }
    }
}

/// Rounds `x_RC` to fp8, each block with its scale, and writes the codes that `out` has. `x_RC` is BF16; on a GPU R and C
/// are multiples of 16. A block with an infinity or a NaN becomes NaN, since no scale fits; the exponents of scales are
/// at least -120, which reaches far below any gradient.
pub fn quantize(x_RC: &Buffer, out: &mut Operand, workspace: &mut Buffer) -> Result<()> {
    let (sizes @ [rows, columns], block) = (x_RC.sizes(), out.block);
    let arguments = out
        .written_by(Arguments::new("fp8::quantize").input("x_RC", x_RC, DType::BF16, &sizes), sizes)
        .workspace(workspace, workspace_elements(rows, columns, x_RC.device().kind()));
    let outputs = out.pointers();
    let partials =
        [0, cuda::fp8::FIRST_PARTIAL].map(|first| KernelArg::reinterpreted(workspace, first, cuda::fp8::PARTIAL));
    let launches = || cuda::fp8::quantize(KernelArg::from(x_RC), block, outputs, partials, sizes);
    let cpu = |access: &Access<'_>| {
        out.encode(x_RC.slice(access), sizes, access);
        Ok(())
    };
    arguments.run(cpu, launches)
}

/// Writes the codes of a matrix's transpose to `to`, from those of the matrix in `from`: bytes change places, and numbers
/// stay. Does nothing where `to` has none of the transpose, as on a CPU.
pub fn transpose(from: &Operand, to: &mut Operand) -> Result<()> {
    let block = from.block;
    let (Some(from), Some(to)) = (from.codes_RC.as_ref(), to.codes_CR.as_mut()) else { return Ok(()) };
    let sizes = from.values.sizes();
    let transposed_sizes = [sizes[1], sizes[0]];
    let ((dtype, scales), (_, transposed_scales)) = (block.scales(sizes), block.scales(transposed_sizes));
    let arguments = Arguments::new("fp8::transpose")
        .input("codes_RC", &from.values, DType::U8, &sizes)
        .input("scales of codes_RC", &from.scales, dtype, &scales)
        .output("codes_CR", &to.values, DType::U8, &transposed_sizes)
        .output("scales of codes_CR", &to.scales, dtype, &transposed_scales);
    let pointers = [pointers(from), pointers(to)];
    let cpu = |access: &Access<'_>| {
        cpu::fp8::transpose(from.values.slice(access), to.values.slice_mut(access), sizes);
        let scales = from.scales_on_cpu(block, access);
        write_scales(block, transposed_sizes, |row, column| scales.at(column, row), &mut to.scales, access);
        Ok(())
    };
    arguments.run(cpu, || cuda::fp8::transpose(block, pointers, sizes))
}

/// Writes the numbers that the codes of a matrix stand for to `x_RC`, BF16: exactly. On a GPU R and C are multiples of 16.
pub fn dequantize(from: &Codes, block: ScaleBlock, x_RC: &mut Buffer) -> Result<()> {
    let sizes = x_RC.sizes();
    let (dtype, scales) = block.scales(sizes);
    let arguments = Arguments::new("fp8::dequantize")
        .input("codes_RC", &from.values, DType::U8, &sizes)
        .input("scales of codes_RC", &from.scales, dtype, &scales)
        .output("x_RC", x_RC, DType::BF16, &sizes);
    let (codes, x) = (pointers(from), KernelArg::from(&*x_RC));
    let cpu = |access: &Access<'_>| {
        let scales = from.scales_on_cpu(block, access);
        cpu::fp8::decode(from.values.slice(access), scales, sizes[1], x_RC.slice_mut(access));
        Ok(())
    };
    arguments.run(cpu, || cuda::fp8::dequantize(block, codes, x, sizes))
}

fn pointers(Codes { values, scales }: &Codes) -> [KernelArg; 2] {
    [values, scales].map(KernelArg::from)
}

/// Writes the scales of a matrix; `scale` returns that of the block that begins at a row and a column.
fn write_scales(
    block: ScaleBlock,
    sizes: [usize; 2],
    scale: impl Fn(usize, usize) -> f32 + Sync,
    scales: &mut Buffer,
    access: &Access<'_>,
) {
    match block {
        ScaleBlock::Tensor => scales.slice_mut(access).fill(scale(0, 0)),
        ScaleBlock::Square128 => cpu::fp8::vector_scales(sizes, scale, scales.slice_mut(access)),
        ScaleBlock::Square32 => cpu::fp8::tiled_exponents(sizes, scale, scales.slice_mut(access)),
    }
}

impl Codes {
    /// The scales as a CPU reads them.
    pub(crate) fn scales_on_cpu<'a>(&'a self, block: ScaleBlock, access: &'a Access<'_>) -> cpu::fp8::Scales<'a> {
        let [rows, columns] = self.values.sizes();
        match block {
            ScaleBlock::Tensor => cpu::fp8::Scales::Tensor(self.scales.slice(access)[0]),
            ScaleBlock::Square128 => cpu::fp8::Scales::Vectors { scales: self.scales.slice(access), rows },
            ScaleBlock::Square32 => cpu::fp8::Scales::Tiles { exponents: self.scales.slice(access), columns },
        }
    }
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

    /// The numbers that the codes of [`super::quantize`] stand for; [rows, columns] are the sizes of `x_RC`.
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
    use super::{Codes, Operand, ScaleBlock, dequantize, quantize, transpose, workspace_elements};
    use crate::cases::bounds::EXACT;
    use crate::cases::{BufferContents, Case, CaseList, Inputs, Size};
    use crate::{Buffer, DType, Result};

    pub(crate) fn add(size: Size, dtype: DType, list: &mut CaseList) {
        let sizes = match size {
            Size::Small => vec![[48, 144]],
            Size::Medium => vec![[304, 272]],
            Size::Full => vec![[208, 272], [2048, 2048], [8192, 2048], [2048, 16_384]],
        };
        for sizes in sizes.into_iter().filter(|_| dtype == DType::BF16) {
            for block in ScaleBlock::ALL {
                list.add(move |inputs| codes(inputs, sizes, block));
                list.add(move |inputs| codes_of_transpose(inputs, sizes, block));
                list.add(move |inputs| transposed_codes(inputs, sizes, block));
                list.add(move |inputs| numbers_of_codes(inputs, sizes, block));
            }
        }
    }

    /// An operand of the memory of its values and scales.
    pub(crate) fn operand(
        block: ScaleBlock,
        codes_RC: Option<[&Buffer; 2]>,
        codes_CR: Option<[&Buffer; 2]>,
    ) -> Operand {
        let [codes_RC, codes_CR] = [codes_RC, codes_CR]
            .map(|codes| codes.map(|[values, scales]| Codes { values: values.clone(), scales: scales.clone() }));
        Operand { block, codes_RC, codes_CR }
    }

    /// Adds scratch memory for the codes of a matrix.
    pub(crate) fn scratch_codes(case: Case, sizes: [usize; 2], block: ScaleBlock) -> Case {
        let (dtype, scales) = block.scales(sizes);
        case.scratch("codes", &sizes, DType::U8).scratch("scales", &scales, dtype)
    }

    /// Writes how many elements of two lists of buffers differ.
    pub(crate) fn count_differing(one: &[&mut Buffer], other: &[&mut Buffer], count: &mut Buffer) -> Result<()> {
        let mut differing = 0;
        for (one, other) in one.iter().zip(other) {
            let (one, other) = (BufferContents::read(one)?, BufferContents::read(other)?);
            differing += one.bits.iter().zip(&other.bits).filter(|(one, other)| one != other).count();
        }
        count.write(&[differing as f32])
    }

    fn case(inputs: &mut Inputs, operation: &str, sizes @ [r, c]: [usize; 2], block: ScaleBlock) -> Case {
        Case::new(inputs.name(operation), format!("{r} x {c}, {block:?}"))
            .in_given_types()
            .input("x", &sizes, inputs.numbers(&sizes))
            .workspace(move |device| workspace_elements(r, c, device))
    }

    /// [`quantize`] along both axes.
    pub fn codes(inputs: &mut Inputs, sizes @ [r, c]: [usize; 2], block: ScaleBlock) -> Case {
        let ((dtype, scales_RC), (_, scales_CR)) = (block.scales(sizes), block.scales([c, r]));
        case(inputs, "fp8::quantize", sizes, block)
            .output("codes", &sizes, DType::U8, EXACT)
            .output("scales", &scales_RC, dtype, EXACT)
            .output("transposed codes", &[c, r], DType::U8, EXACT)
            .output("transposed scales", &scales_CR, dtype, EXACT)
            .call(move |[x, workspace, values_RC, scales_RC, values_CR, scales_CR]| {
                let codes = [[&*values_RC, &*scales_RC], [&*values_CR, &*scales_CR]].map(Some);
                quantize(x, &mut operand(block, codes[0], codes[1]), workspace)
            })
    }

    /// [`quantize`] for sums over rows only.
    pub fn codes_of_transpose(inputs: &mut Inputs, sizes @ [r, c]: [usize; 2], block: ScaleBlock) -> Case {
        let (dtype, scales_CR) = block.scales([c, r]);
        case(inputs, "fp8::quantize transposed", sizes, block)
            .output("codes", &[c, r], DType::U8, EXACT)
            .output("scales", &scales_CR, dtype, EXACT)
            .call(move |[x, workspace, values, scales]| {
                quantize(x, &mut operand(block, None, Some([values, scales])), workspace)
            })
    }

    /// [`dequantize`] of what [`quantize`] writes.
    pub fn numbers_of_codes(inputs: &mut Inputs, sizes: [usize; 2], block: ScaleBlock) -> Case {
        let (dtype, scales) = block.scales(sizes);
        case(inputs, "fp8::dequantize", sizes, block)
            .output("codes", &sizes, DType::U8, EXACT)
            .output("scales", &scales, dtype, EXACT)
            .output("numbers", &sizes, DType::BF16, EXACT)
            .call(move |[x, workspace, values, scales, numbers]| {
                let mut matrix = operand(block, Some([values, scales]), None);
                quantize(x, &mut matrix, workspace)?;
                matrix.codes_RC.map_or(Ok(()), |codes| dequantize(&codes, block, numbers))
            })
    }

    /// [`transpose`] of what [`quantize`] writes for sums over columns.
    pub fn transposed_codes(inputs: &mut Inputs, sizes @ [r, c]: [usize; 2], block: ScaleBlock) -> Case {
        let ((dtype, scales_RC), (_, scales_CR)) = (block.scales(sizes), block.scales([c, r]));
        case(inputs, "fp8::transpose", sizes, block)
            .output("codes", &sizes, DType::U8, EXACT)
            .output("scales", &scales_RC, dtype, EXACT)
            .output("transposed codes", &[c, r], DType::U8, EXACT)
            .output("transposed scales", &scales_CR, dtype, EXACT)
            .call(move |[x, workspace, values_RC, scales_RC, values_CR, scales_CR]| {
                let mut matrix = operand(block, Some([values_RC, scales_RC]), None);
                quantize(x, &mut matrix, workspace)?;
                transpose(&matrix, &mut operand(block, None, Some([values_CR, scales_CR])))
            })
    }
}

#[cfg(test)]
#[path = "fp8_tests.rs"]
mod tests;
