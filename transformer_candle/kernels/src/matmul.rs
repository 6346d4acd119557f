//! One GEMM of views of buffers: `out = scale a b`, or `out += a b`. On a CPU sums are in f32 whatever the
//! operands are, and two bf16 operands are multiplied as such where the CPU can; a GPU's run in cuBLASLt. fp8 operands
//! are bf16 numbers to a CPU, and are decoded first.
//!
//! Legend: M rows of the result, N its columns, K what is summed over.

use candle_core::DType;
use rayon::prelude::*;

use crate::access::{Access, Arguments};
use crate::buffer::PIECE;
use crate::cpu;
use crate::cpu::gemm::{self, Matrix};
use crate::cpu::schedule::ForEachTask;
use crate::element::with_elements;
use crate::fp8::{self, Codes, ScaleBlock};
use crate::{Buffer, DeviceKind, Element, Result, bf16, cuda};

/// Whether a gradient overwrites its buffer or is added to it, as when the gradients of several micro-batches
/// accumulate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WriteMode {
    /// `C = A B` (beta 0): the buffer is not read, so that it does not have to be zeroed.
    Overwrite,
    /// `C = C + A B` (beta 1).
    Accumulate,
}

/// An operand of a linear map's GEMMs.
#[derive(Clone, Copy, Debug)]
pub enum GemmOperand<'a> {
    /// F32 or BF16 numbers.
    Plain(&'a Buffer),
    /// Numbers rounded to fp8.
    Fp8(&'a fp8::Operand),
}

impl<'a> From<&'a Buffer> for GemmOperand<'a> {
    fn from(buffer: &'a Buffer) -> Self {
        Self::Plain(buffer)
    }
}

impl<'a> From<&'a mut Buffer> for GemmOperand<'a> {
    fn from(buffer: &'a mut Buffer) -> Self {
        Self::Plain(buffer)
    }
}

impl<'a> From<&'a fp8::Operand> for GemmOperand<'a> {
    fn from(operand: &'a fp8::Operand) -> Self {
        Self::Fp8(operand)
    }
}

/// The axis of an operand that a GEMM sums over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SumOver {
    Columns,
    Rows,
}

/// A matrix in a buffer of two axes: all of it, or some columns of it; or the transpose of these.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    /// The argument's name.
    name: &'static str,
    buffer: &'a Buffer,
    /// The scales of fp8 codes, which are of the whole buffer.
    scales: Option<Scales<'a>>,
    columns: Option<Columns>,
    transposed: bool,
}

/// The scales of an fp8 operand.
#[derive(Clone, Copy)]
struct Scales<'a> {
    block: ScaleBlock,
    codes: &'a Codes,
}

/// Columns of wider rows: the outputs of a module among those of several, which lie side by side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns {
    pub(crate) first: usize,
    pub(crate) count: usize,
}

impl<'a> View<'a> {
    pub(crate) fn of(name: &'static str, buffer: &'a Buffer) -> Self {
        Self { name, buffer, scales: None, columns: None, transposed: false }
    }

    /// An operand of a GEMM that sums over one of its axes.
    ///
    /// # Panics
    /// If an fp8 operand has no codes.
    pub(crate) fn of_operand(name: &'static str, operand: impl Into<GemmOperand<'a>>, sum_over: SumOver) -> Self {
        let operand = match operand.into() {
            GemmOperand::Plain(buffer) => return Self::of(name, buffer),
            GemmOperand::Fp8(operand) => operand,
        };
        let of = |codes: &'a Codes| Self {
            scales: Some(Scales { block: operand.block, codes }),
            ..Self::of(name, &codes.values)
        };
        let (matrix, transpose) = (operand.codes_RC.as_ref().map(of), operand.codes_CR.as_ref().map(of));
        let (matrix, transpose) = (matrix, transpose.map(Self::transposed));
        let view = if sum_over == SumOver::Columns { matrix.or(transpose) } else { transpose.or(matrix) };
        view.expect("an fp8 operand has codes")
    }

    pub(crate) fn columns(self, columns: Columns) -> Self {
        Self { columns: Some(columns), ..self }
    }

    pub(crate) fn transposed(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// Rows and columns of the view.
    fn sizes(&self) -> [usize; 2] {
        self.oriented([self.buffer.size(0), self.columns.map_or(self.buffer.size(1), |columns| columns.count)])
    }

    /// Exchanges the sizes of a matrix if the view is of its transpose.
    fn oriented(&self, [rows, columns]: [usize; 2]) -> [usize; 2] {
        if self.transposed { [columns, rows] } else { [rows, columns] }
    }

    /// Requires that the view has these sizes, and adds its buffer as an input.
    fn check(&self, arguments: Arguments, dtype: DType, sizes: [usize; 2]) -> Arguments {
        let Self { name, buffer, columns, .. } = *self;
        let sizes_in_buffer = stored_sizes(buffer, columns, self.oriented(sizes));
        let arguments = require_inside(arguments, buffer, columns).input(name, buffer, dtype, &sizes_in_buffer);
        let Some(Scales { block, codes }) = self.scales else { return arguments };
        let (dtype, shape) = block.scales(sizes_in_buffer);
        arguments.input("scales", &codes.scales, dtype, &shape)
    }

    fn on_cpu<E: Element>(&self, access: &'a Access<'_>) -> Matrix<'a, E> {
        let ([rows, columns], first) = (self.oriented(self.sizes()), self.columns.map_or(0, |columns| columns.first));
        let values = self.buffer.slice(access).get(first..).unwrap_or_default();
        let matrix = Matrix::strided(values, rows, columns, self.buffer.size(1));
        if self.transposed { matrix.transposed() } else { matrix }
    }

    /// The numbers that fp8 codes stand for, written to memory for at least as many.
    fn decoded<'n>(
        &self,
        Scales { block, codes }: Scales<'a>,
        access: &Access<'_>,
        numbers: &'n mut [bf16],
    ) -> Matrix<'n, bf16> {
        let [rows, columns] = self.buffer.sizes();
        let numbers = &mut numbers[..rows * columns];
        cpu::fp8::decode(codes.values.slice(access), codes.scales_on_cpu(block, access), columns, numbers);
        let matrix = Matrix::new(numbers, rows, columns);
        if self.transposed { matrix.transposed() } else { matrix }
    }

    fn on_gpu(&self) -> cuda::Operand {
        let operand = cuda::Operand::from(self.buffer).skip_columns(self.columns.map_or(0, |columns| columns.first));
        if self.transposed { operand.transposed() } else { operand }
    }
}

/// The sizes that a buffer must have for a view of these sizes: the rows of some columns may be of any width.
fn stored_sizes(buffer: &Buffer, columns: Option<Columns>, [rows, count]: [usize; 2]) -> [usize; 2] {
    [rows, if columns.is_some() { buffer.size(1) } else { count }]
}

fn require_inside(arguments: Arguments, buffer: &Buffer, columns: Option<Columns>) -> Arguments {
    let (Columns { first, count }, width) = (columns.unwrap_or(Columns { first: 0, count: 0 }), buffer.size(1));
    arguments.require(first.checked_add(count).is_some_and(|end| end <= width), || {
        format!("{count} columns from {first} on are not within rows of {width}")
    })
}

/// The GEMM that an operation consists of.
#[derive(Clone, Copy)]
pub(crate) struct Gemm<'a> {
    /// The name of the operation.
    pub(crate) operation: &'static str,
    /// The left operand, [M, K]. F32 or BF16.
    pub(crate) a: View<'a>,
    /// The right operand, [K, N]. Of the type of `a`.
    pub(crate) b: View<'a>,
    /// The element type of the result: that of the operands, or F32.
    pub(crate) dtype: DType,
    /// Factor of `a b`; 1 where it is added to what is there.
    pub(crate) scale: f32,
    pub(crate) write_mode: WriteMode,
}

impl<'a> Gemm<'a> {
    /// `a b`, of the operands' type.
    pub(crate) fn new(operation: &'static str, a: View<'a>, b: View<'a>) -> Self {
        let dtype = if a.scales.is_some() { DType::BF16 } else { a.buffer.dtype() };
        Self { operation, a, b, dtype, scale: 1.0, write_mode: WriteMode::Overwrite }
    }

    /// M, N and K.
    fn sizes(&self) -> [usize; 3] {
        let ([m, _], [k, n]) = (self.a.sizes(), self.b.sizes());
        [m, n, k]
    }

    /// Writes the result to the buffer `name`, or to some of its columns.
    pub(crate) fn write_to(
        self,
        name: &'static str,
        out: &mut Buffer,
        columns: Option<Columns>,
        workspace: &mut Buffer,
    ) -> Result<()> {
        let Self { operation, a, b, dtype, .. } = self;
        let ([m, n, k], operands) = (self.sizes(), a.buffer.dtype());
        let sizes_in_buffer = stored_sizes(out, columns, [m, n]);
        let workspace_elements = match a.buffer.device().kind() {
            DeviceKind::Cuda => cuda::WORKSPACE_ELEMENTS,
            DeviceKind::Cpu => gemm::workspace_for(m, n, k) + self.decoded_words(),
        };
        let [a_block, b_block] = [a, b].map(|view| view.scales.map(|scales| scales.block));
        let arguments = b.check(a.check(Arguments::new(operation), operands, [m, k]), operands, [k, n]);
        let arguments = arguments.require(a_block == b_block, || {
            format!("operands have scales of other blocks: {a_block:?} and {b_block:?}")
        });
        let arguments = require_inside(arguments, out, columns)
            .output(name, out, dtype, &sizes_in_buffer)
            .workspace(workspace, workspace_elements);
        let matmul = self.on_gpu(out, columns, workspace);
        let cpu = |access: &Access<'_>| {
            let (numbers, workspace) = workspace.slice_mut(access).split_at_mut(self.decoded_words());
            if let (Some(a_scales), Some(b_scales)) = (a.scales, b.scales) {
                let (a_numbers, b_numbers) =
                    cpu::fp8::as_bf16(numbers).split_at_mut(a.buffer.elements().next_multiple_of(2));
                let (a, b) = (a.decoded(a_scales, access, a_numbers), b.decoded(b_scales, access, b_numbers));
                return with_elements!(operation, self.a.name, [DType::BF16, dtype], [_E, O] => {
                    self.multiply::<_, O>(a, b, out, columns, workspace, access);
                    Ok(())
                });
            }
            with_elements!(operation, a.name, [operands, dtype], [E, O] => {
                self.multiply::<E, O>(a.on_cpu(access), b.on_cpu(access), out, columns, workspace, access);
                Ok(())
            })
        };
        arguments.run(cpu, || [cuda::Launch::Gemm(matmul)])
    }

    /// Multiplies on a CPU.
    fn multiply<E: Element, O: Element>(
        &self,
        a: Matrix<'_, E>,
        b: Matrix<'_, E>,
        out: &mut Buffer,
        columns: Option<Columns>,
        workspace: &mut [f32],
        access: &Access<'_>,
    ) {
        let Self { scale, write_mode, .. } = *self;
        let (stride, first) = (out.size(1), columns.map_or(0, |columns| columns.first));
        let out = out.slice_mut::<O>(access).get_mut(first..).unwrap_or_default();
        match write_mode {
            WriteMode::Overwrite => gemm::multiply(a, b, out, stride, workspace),
            WriteMode::Accumulate => gemm::multiply_accumulate(a, b, out, stride, write_mode, workspace),
        }
        if scale.to_bits() != 1f32.to_bits() {
            scale_in_place(out, scale);
        }
    }

    /// Elements of F32 workspace that the numbers of fp8 operands take on a CPU.
    fn decoded_words(&self) -> usize {
        if self.a.scales.is_some() { decoded_words(self.sizes()) } else { 0 }
    }

    /// The call of cuBLASLt on a GPU.
    pub(crate) fn on_gpu(&self, out: &Buffer, columns: Option<Columns>, workspace: &Buffer) -> cuda::Matmul {
        let c = cuda::Operand::from(out).skip_columns(columns.map_or(0, |columns| columns.first));
        let workspace = cuda::Workspace::from_buffer(workspace);
        let matmul = cuda::Matmul::set(c, self.sizes(), self.a.on_gpu(), self.b.on_gpu(), workspace);
        let scales = self.a.scales.zip(self.b.scales).map(|(a, b)| cuda::Scales {
            block: a.block,
            a: a.codes.scales.address(),
            b: b.codes.scales.address(),
        });
        cuda::Matmul { scale: self.scale, write_mode: self.write_mode, scales, ..matmul }
    }
}

/// Elements of F32 workspace that two fp8 operands take on a CPU, decoded to BF16.
pub(crate) fn decoded_words([m, n, k]: [usize; 3]) -> usize {
    (m * k).div_ceil(2) + (k * n).div_ceil(2)
}

fn scale_in_place<E: Element>(values: &mut [E], scale: f32) {
    values.par_chunks_mut(PIECE).for_each_task(|piece| {
        for value in piece {
            *value = E::narrow(scale * value.widen());
        }
    });
}
