//! A GEMM as an operation asks for it: `cuda.multiply(&Matmul::set(y, [n, o, i], x, w.transposed(), space))`.

use candle_core::DType;

use crate::fp8::ScaleBlock;
use crate::{Error, Result, WriteMode};

/// What the sizes of an fp8 GEMM are multiples of: rows of its operands are loaded 16 bytes at a time.
pub(crate) const FP8_STEP: usize = 16;

/// Elements of the F32 workspace that every GEMM is given: 32 MiB, as much as the library asks for on Hopper and
/// Blackwell, and what it takes to begin at a multiple of 256 bytes.
pub(crate) const WORKSPACE_ELEMENTS: usize = Workspace::elements_for(WORKSPACE_BYTES / size_of::<f32>());
pub(crate) const WORKSPACE_BYTES: usize = 32 << 20;
pub(super) const WORKSPACE_ALIGNMENT: usize = 256;

/// `c = scale a b` or `c += scale a b` of row-major matrices, a [m, k], b [k, n], c [m, n], either operand stored
/// transposed; or a batch of such, whose matrices are stored one after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matmul {
    /// Rows of the result.
    pub(crate) m: usize,
    /// Columns of the result.
    pub(crate) n: usize,
    /// Columns of `a` and rows of `b`, over which products are summed.
    pub(crate) k: usize,
    /// Number of GEMMs of these sizes; 1 without a batch.
    pub(crate) batch: usize,
    /// The left operand, F32, BF16 or F8E4M3.
    pub(crate) a: Operand,
    /// The right operand, of the same element type as `a`.
    pub(crate) b: Operand,
    /// The result, never transposed; F32, or the operands' type, BF16 if that is F8E4M3.
    pub(crate) c: Operand,
    /// The scales of F8E4M3 operands.
    pub(crate) scales: Option<Scales>,
    /// Factor of the product of `a` and `b`; 1 by default.
    pub(crate) scale: f32,
    /// Whether `c` is overwritten or added to.
    pub(crate) write_mode: WriteMode,
    /// Scratch that the library may use while the GEMM runs.
    pub(crate) workspace: Workspace,
}

/// A matrix in the GPU's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    /// Address of the first element.
    pub(crate) address: usize,
    /// F32 or BF16.
    pub(crate) dtype: DType,
    /// Elements from one stored row to the next.
    pub(crate) stride: usize,
    /// Whether the stored rows are the matrix's columns.
    pub(crate) transposed: bool,
    /// Elements of its buffer from the first one on.
    pub(super) elements: usize,
}

/// The scales of two operands of F8E4M3 numbers. These lie along the axis that the GEMM sums over: `a` is not
/// transposed, `b` is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scales {
    /// The elements that share one.
    pub(crate) block: ScaleBlock,
    /// Address of the left operand's.
    pub(crate) a: usize,
    /// Address of the right operand's.
    pub(crate) b: usize,
}

/// Scratch memory on the GPU, beginning where the library wants it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workspace {
    /// Address of its first byte.
    pub(crate) address: usize,
    /// Size in bytes.
    pub(crate) bytes: usize,
}

impl Matmul {
    /// The GEMM `c = a b`; sizes are [m, n, k].
    pub(crate) fn set(c: Operand, [m, n, k]: [usize; 3], a: Operand, b: Operand, workspace: Workspace) -> Self {
        Self { m, n, k, batch: 1, a, b, c, scales: None, scale: 1.0, write_mode: WriteMode::Overwrite, workspace }
    }

    /// Checks that the three matrices lie within their buffers, that their element types go together and that the
    /// workspace is large enough: from here on there are only addresses.
    pub(crate) fn check(&self) -> Result<()> {
        let Self { m, n, k, batch, a, b, c, .. } = *self;
        let fits = a.holds(batch, m, k) && b.holds(batch, k, n) && c.holds(batch, m, n) && !c.transposed;
        let dtypes = (a.dtype, b.dtype, c.dtype);
        let problem = if !fits {
            format!("a matrix of {self:?} lies outside of its buffer")
        } else if !matches!(
            (dtypes, self.scales),
            ((DType::F32, DType::F32, DType::F32) | (DType::BF16, DType::BF16, DType::BF16 | DType::F32), None)
                | ((DType::F8E4M3, DType::F8E4M3, DType::BF16 | DType::F32), Some(_))
        ) {
            format!("no matmul of {dtypes:?}")
        } else if self.scales.is_some() && !self.is_fp8_gemm() {
            format!("{self:?} is no fp8 GEMM: sizes of {FP8_STEP} and operands along the axis of the sum")
        } else if self.workspace.bytes < WORKSPACE_BYTES {
            format!("a workspace of {} bytes, {WORKSPACE_BYTES} are needed", self.workspace.bytes)
        } else {
            return Ok(());
        };
        Err(Error::Invalid { operation: "multiply", problem })
    }

    /// Whether fp8 operands lie as every GPU that multiplies them takes them.
    fn is_fp8_gemm(&self) -> bool {
        let Self { m, n, k, batch, a, b, .. } = *self;
        let even = [m, n, k, a.stride, b.stride].into_iter().all(|size| size.is_multiple_of(FP8_STEP));
        batch == 1 && even && !a.transposed && b.transposed
    }
}

impl Operand {
    /// The matrix without its first `rows` stored rows.
    pub(crate) fn skip_rows(self, rows: usize) -> Self {
        let skipped = rows * self.stride;
        let address = self.address + skipped * self.dtype.size_in_bytes();
        Self { address, elements: self.elements.saturating_sub(skipped), ..self }
    }

    /// The matrix without the first `columns` elements of each stored row.
    pub(crate) fn skip_columns(self, columns: usize) -> Self {
        let address = self.address + columns * self.dtype.size_in_bytes();
        Self { address, elements: self.elements.saturating_sub(columns), ..self }
    }

    /// The transpose of the matrix, in the same memory.
    pub(crate) fn transposed(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// The same memory as elements of another type: each row begins where it did.
    pub(crate) fn reinterpreted(self, dtype: DType) -> Self {
        let scaled = |elements: usize| elements * self.dtype.size_in_bytes() / dtype.size_in_bytes();
        Self { dtype, stride: scaled(self.stride), elements: scaled(self.elements), ..self }
    }

    /// Whether this many matrices of this size lie within its buffer.
    fn holds(&self, batch: usize, rows: usize, columns: usize) -> bool {
        let (rows, columns) = if self.transposed { (columns, rows) } else { (rows, columns) };
        let all_rows = batch * rows;
        all_rows == 0 || (columns <= self.stride && (all_rows - 1) * self.stride + columns <= self.elements)
    }
}

impl Workspace {
    /// The F32 elements that a buffer needs to have this many left from its first multiple of 256 bytes on.
    pub(crate) const fn elements_for(elements: usize) -> usize {
        elements + WORKSPACE_ALIGNMENT / size_of::<f32>()
    }
}
