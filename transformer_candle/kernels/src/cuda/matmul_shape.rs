//! The shape of a GEMM, by which its algorithm is chosen, and its translation to column-major matrices.

use std::fmt;
use std::str::FromStr;

use candle_core::DType;

use super::{Matmul, Operand};
use crate::WriteMode;
use crate::fp8::ScaleBlock;

/// Rows that generation passes through a model together, at most.
const FEW_ROWS: usize = 128;

/// A GEMM without its addresses. Its text names the choice of an algorithm: `8192x16384x2048 a bf16 2048 @256, b bf16
/// 2048 transposed @256, c bf16 16384 @256`, with `c +=` where the result is added; sizes are m x n x k, of a batch of
/// 3 `3*m x n x k`, the numbers a matrix's stride in elements and its alignment in bytes. One with scales begins with
/// the elements that share one: `Square32 8192x2048x8192 a f8e4m3 8192 @256, ...`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) sizes: [usize; 3],
    pub(crate) batch: usize,
    pub(crate) a: Layout,
    pub(crate) b: Layout,
    pub(crate) c: Layout,
    pub(crate) write_mode: WriteMode,
    pub(crate) scales: Option<ScaleBlock>,
}

/// How a matrix lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Layout {
    pub(crate) dtype: DType,
    pub(crate) stride: usize,
    pub(crate) transposed: bool,
    /// Alignment of the first element's address in bytes.
    pub(crate) alignment: u32,
}

/// A matrix in the library's terms: element (row, column) is at `row + column * leading`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ColumnMajor {
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) leading: usize,
    /// Matrices of a batch, `leading * columns` elements apart.
    pub(crate) batch: usize,
    /// Whether the operand is this matrix transposed.
    pub(crate) transposed: bool,
    pub(crate) alignment: u32,
}

/// `result = left right`, column-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ColumnMajorMatmul {
    pub(crate) left: ColumnMajor,
    pub(crate) right: ColumnMajor,
    pub(crate) result: ColumnMajor,
}

impl Shape {
    pub(crate) fn new(matmul: &Matmul) -> Self {
        let &Matmul { m, n, k, batch, write_mode, .. } = matmul;
        let (a, b, c) = ((&matmul.a).into(), (&matmul.b).into(), (&matmul.c).into());
        Self { sizes: [m, n, k], batch, a, b, c, write_mode, scales: matmul.scales.map(|scales| scales.block) }
    }

    /// Whether it is y = x W^T of at most [`FEW_ROWS`]. Reading W takes most of its time, whatever the algorithm, and
    /// generation asks for another shape with every length of a prompt.
    pub(crate) fn is_linear_of_few_rows(&self) -> bool {
        let is_linear = !self.a.transposed && self.b.transposed && self.write_mode == WriteMode::Overwrite;
        is_linear && self.sizes[0] <= FEW_ROWS
    }

    /// The same GEMM with column-major matrices. A row-major matrix is the transpose of the column-major one in the
    /// same memory, and c^T = b^T a^T: the operands change places and nothing moves.
    pub(crate) fn column_major(&self) -> ColumnMajorMatmul {
        let ([m, n, k], batch) = (self.sizes, self.batch);
        ColumnMajorMatmul {
            left: self.b.column_major(n, k, batch),
            right: self.a.column_major(k, m, batch),
            result: self.c.column_major(n, m, batch),
        }
    }
}

impl From<&Operand> for Layout {
    fn from(operand: &Operand) -> Self {
        let Operand { address, dtype, stride, transposed, .. } = *operand;
        Self { dtype, stride, transposed, alignment: alignment(address) }
    }
}

impl Layout {
    /// Describes the matrix as the operand [rows, columns] of a column-major GEMM.
    fn column_major(&self, rows: usize, columns: usize, batch: usize) -> ColumnMajor {
        let Self { dtype, stride, transposed, alignment } = *self;
        let (rows, columns) = if transposed { (columns, rows) } else { (rows, columns) };
        ColumnMajor { dtype, rows, columns, leading: stride, batch, transposed, alignment }
    }
}

/// The alignment of an address that the library may assume: 256 bytes, as allocations have; else 16, the widest access
/// to memory there is; else the exact one. Three steps and not every power of two, so that the layers of a model share
/// their choices.
fn alignment(address: usize) -> u32 {
    match 1 << address.trailing_zeros().min(8) {
        256 => 256,
        exact => exact.min(16),
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sizes: [m, n, k], batch, a, b, c, write_mode, scales } = self;
        let plus = match write_mode {
            WriteMode::Overwrite => "",
            WriteMode::Accumulate => "+= ",
        };
        if let Some(block) = scales {
            write!(formatter, "{block:?} ")?;
        }
        if *batch != 1 {
            write!(formatter, "{batch}*")?;
        }
        write!(formatter, "{m}x{n}x{k} a {a}, b {b}, c {plus}{c}")
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dtype, stride, transposed, alignment } = self;
        let transposed = if *transposed { "transposed " } else { "" };
        write!(formatter, "{} {stride} {transposed}@{alignment}", dtype.as_str())
    }
}

/// The error for a text that [`Shape`] did not write.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NoShape;

impl FromStr for Shape {
    type Err = NoShape;

    fn from_str(text: &str) -> Result<Self, NoShape> {
        let (sizes, rest) = text.split_once(" a ").ok_or(NoShape)?;
        let (a, rest) = rest.split_once(", b ").ok_or(NoShape)?;
        let (b, c) = rest.split_once(", c ").ok_or(NoShape)?;
        let (c, write_mode) = match c.strip_prefix("+= ") {
            Some(c) => (c, WriteMode::Accumulate),
            None => (c, WriteMode::Overwrite),
        };
        let (scales, sizes) = match sizes.split_once(' ') {
            Some((block, sizes)) => (Some(scale_block(block)?), sizes),
            None => (None, sizes),
        };
        let (batch, sizes) = match sizes.split_once('*') {
            Some((batch, sizes)) => (number(batch)?, sizes),
            None => (1, sizes),
        };
        let sizes: Vec<usize> = sizes.split('x').map(number).collect::<Result<_, _>>()?;
        let sizes = sizes.try_into().map_err(|_| NoShape)?;
        let (a, b, c) = (a.parse()?, b.parse()?, c.parse()?);
        Ok(Self { sizes, batch, a, b, c, write_mode, scales })
    }
}

impl FromStr for Layout {
    type Err = NoShape;

    fn from_str(text: &str) -> Result<Self, NoShape> {
        let (words, alignment) = text.split_once('@').ok_or(NoShape)?;
        let (dtype, stride, transposed) = match words.split_whitespace().collect::<Vec<_>>()[..] {
            [dtype, stride] => (dtype, stride, false),
            [dtype, stride, "transposed"] => (dtype, stride, true),
            _ => return Err(NoShape),
        };
        let dtype = dtype.parse().map_err(|_| NoShape)?;
        Ok(Self { dtype, stride: number(stride)?, transposed, alignment: number(alignment)? })
    }
}

fn scale_block(name: &str) -> Result<ScaleBlock, NoShape> {
    ScaleBlock::ALL.into_iter().find(|block| format!("{block:?}") == name).ok_or(NoShape)
}

fn number<T: FromStr>(text: &str) -> Result<T, NoShape> {
    text.parse().map_err(|_| NoShape)
}

#[cfg(test)]
#[path = "matmul_shape_tests.rs"]
mod tests;
