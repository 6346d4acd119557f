//! Operands as the micro-kernel reads them: packed, or in place where the matrix has the same words and caches can hold
//! its rows.
//!
//! A tile may have more rows or columns than the operand: these are computed from any values and not written.

use std::ops::Range;

use super::blocks::Blocks;
use super::matrix::Matrix;
use super::micro_kernel::MicroKernel;
use crate::Element;

/// The smallest caches of current x86 and ARM cores.
const L1: Cache = Cache { ways: 8, way_bytes: 1 << 12 };
const L2: Cache = Cache { ways: 16, way_bytes: 1 << 16 };

/// A set-associative cache. Addresses a multiple of `way_bytes` apart are in the same set, which has one line per way.
struct Cache {
    ways: usize,
    way_bytes: usize,
}

impl Cache {
    /// Whether it holds a line of each of this many stored rows at once: rows a power of two apart are in few sets.
    fn holds<E>(&self, matrix: &Matrix<'_, E>, rows: usize) -> bool {
        let spacing = 1 << (matrix.stride * size_of::<E>()).trailing_zeros();
        rows <= self.ways * (self.way_bytes / spacing).max(1)
    }
}

/// The A operand of a micro-kernel.
pub(super) trait AOperand: Copy {
    /// Returns a function that reads word `word` of row `row`, of `words` words and R rows.
    fn reader<const R: usize>(self, words: usize) -> impl Fn(usize, usize) -> f32;

    /// Returns where its words lie.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "for micro-kernels in assembly"))]
    fn strided(&self) -> Strided<'_>;
}

/// An operand whose word `word` of row `row` is `words[row * row_step + word * word_step]`.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "for micro-kernels in assembly"))]
pub(super) struct Strided<'a> {
    pub(super) words: &'a [f32],
    pub(super) row_step: usize,
    pub(super) word_step: usize,
}

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "for micro-kernels in assembly"))]
impl Strided<'_> {
    /// Whether this many words of this many rows, at least one, lie in memory.
    pub(super) fn holds(&self, rows: usize, words: usize) -> bool {
        (rows - 1) * self.row_step + (words - 1) * self.word_step < self.words.len()
    }
}

/// A row-major operand.
#[derive(Clone, Copy)]
pub(super) struct RowOperand<'a> {
    pub(super) words: &'a [f32],
    /// Words from one row to the next.
    pub(super) stride: usize,
    pub(super) count: usize,
}

impl<'a> RowOperand<'a> {
    /// An operand that reads a matrix in place; None unless its elements are words as they are, as many as are
    /// multiplied at a time, and L1 holds a line of every row of a panel.
    pub(super) fn in_place<T: MicroKernel, E: Element>(matrix: Matrix<'a, E>) -> Option<Self> {
        let whole = matrix.columns.is_multiple_of(T::KR * T::WORD_STEP)
            && matrix.rows.is_multiple_of(T::ROW_STEP)
            && matrix.stride.is_multiple_of(T::KR);
        let words = as_words(matrix, T::KR).filter(|_| whole)?;
        let fits_in_l1 = L1.holds(&matrix, matrix.rows.min(T::MR));
        (!matrix.transposed && fits_in_l1).then_some(Self { words, stride: matrix.stride / T::KR, count: matrix.rows })
    }

    pub(super) fn rows(self, rows: Range<usize>) -> Self {
        Self { words: &self.words[rows.start * self.stride..], count: rows.len(), ..self }
    }
}

impl AOperand for RowOperand<'_> {
    /// Rows beyond the last read the last one.
    #[inline(always)]
    fn reader<const R: usize>(self, words: usize) -> impl Fn(usize, usize) -> f32 {
        let last = (self.count - 1).min(R - 1);
        assert!(last * self.stride + words <= self.words.len());
        // SAFETY: rows are clamped to the last, which ends inside of the slice.
        let row =
            |row: usize| unsafe { self.words.get_unchecked(row.min(last) * self.stride..).get_unchecked(..words) };
        let rows: [&[f32]; R] = std::array::from_fn(row);
        #[inline(always)]
        move |word, row| rows[row][word]
    }

    fn strided(&self) -> Strided<'_> {
        Strided { words: self.words, row_step: self.stride, word_step: 1 }
    }
}

/// Words of several rows of A, or columns of B, side by side for each word of K: a packed panel, or a column-major
/// matrix.
#[derive(Clone, Copy)]
pub(super) struct PanelOperand<'a> {
    pub(super) words: &'a [f32],
    /// Words from one word of K to the next.
    pub(super) stride: usize,
}

impl<'a> PanelOperand<'a> {
    /// An operand that reads a transposed matrix in place; None unless its elements are words as they are, at most as
    /// many as a packed block of B has, and caches can hold it. Its panels must be full.
    pub(super) fn in_place<T: MicroKernel, E: Element>(matrix: Matrix<'a, E>, blocks: Blocks) -> Option<Self> {
        let words = as_words(matrix, T::KR).filter(|_| T::KR == 1 && matrix.transposed)?;
        let stride = matrix.stride;
        let is_cached = matrix.columns * stride <= blocks.b_words && L2.holds(&matrix, matrix.columns);
        is_cached.then_some(Self { words, stride })
    }

    pub(super) fn from(self, first: usize) -> Self {
        Self { words: &self.words[first..], ..self }
    }

    /// Returns a function that reads `width` words of one of `words` words of K.
    #[inline(always)]
    pub(super) fn reader_of(self, words: usize, width: usize) -> impl Fn(usize) -> &'a [f32] {
        assert!(words > 0 && (words - 1) * self.stride + width <= self.words.len());
        #[inline(always)]
        move |word| {
            assert!(word < words);
            // SAFETY: the last of `words` ends inside of the slice, as asserted above.
            unsafe { self.words.get_unchecked(word * self.stride..word * self.stride + width) }
        }
    }
}

impl AOperand for PanelOperand<'_> {
    #[inline(always)]
    fn reader<const R: usize>(self, words: usize) -> impl Fn(usize, usize) -> f32 {
        let read = self.reader_of(words, R);
        #[inline(always)]
        move |word, row| read(word)[row]
    }

    fn strided(&self) -> Strided<'_> {
        Strided { words: self.words, row_step: 1, word_step: self.stride }
    }
}

/// Returns the elements of a matrix as words of KR elements; None unless they have the same representation.
fn as_words<E: Element>(matrix: Matrix<'_, E>, kr: usize) -> Option<&[f32]> {
    if size_of::<E>() * kr != size_of::<f32>() {
        return None;
    }
    // SAFETY: f32 and bf16 are plain bits, and KR of them have the size of an f32.
    let (prefix, words, _) = unsafe { matrix.values.align_to() };
    prefix.is_empty().then_some(words)
}
