//! Packing: panels in which the words that the micro-kernel reads together are contiguous.
//!
//! A word holds KR elements of K; elements beyond the matrix are zero. The columns of B are the rows of its transpose.
//! Full vectors are written wherever there is room: what extends too far is overwritten by what follows, or not read.

use std::ops::Range;

use super::matrix::{Matrix, steps};
use super::micro_kernel::MicroKernel;
use super::operand::RowOperand;
use crate::Element;
use crate::cpu::simd::prefetch;
use crate::cpu::transpose::{SIDE, transpose};

/// Words of K that are packed for all panels before the next ones, so that every panel reads a cache line of the matrix
/// while it is in L1: 32 rows 1 KiB apart (or an odd multiple) fill it.
const K_BATCH: usize = 32;

/// Rows of A divided into panels as equal as possible.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    rows: usize,
    /// Rows that are not divided, [`MicroKernel::ROW_STEP`].
    step: usize,
    pub(super) count: usize,
}

impl Panels {
    /// Divides rows into as few panels as possible, or a few more if every thread then has equally many.
    pub(super) fn new<T: MicroKernel>(rows: usize, threads: usize) -> Self {
        let fewest = rows.div_ceil(T::MR);
        let even = fewest.next_multiple_of(threads);
        let height = rows.div_ceil(T::ROW_STEP) / even * T::ROW_STEP;
        let count = if height > 0 && T::height(height) == height { even } else { fewest };
        Self { rows, step: T::ROW_STEP, count }
    }

    /// Returns the rows of these panels: the first ones may have a step more than the others, the last one fewer rows.
    pub(super) fn rows(self, panel_range: Range<usize>) -> Range<usize> {
        let steps = self.rows.div_ceil(self.step);
        let (height, higher) = (steps / self.count, steps % self.count);
        let begin = |number: usize| self.rows.min((number * height + number.min(higher)) * self.step);
        begin(panel_range.start)..begin(panel_range.end)
    }
}

/// Packs at most NR rows of the transpose of B into `panel[word * NR + row]`.
#[inline(always)]
pub(super) fn pack<T: MicroKernel, E: Element>(matrix: Matrix<'_, E>, panel: &mut [f32]) {
    if matrix.transposed {
        let rows = 0..matrix.rows;
        pack_columns::<T, E>(matrix, std::iter::once(rows), panel, T::NR, panel.len());
        panel[matrix.columns.div_ceil(T::KR) * T::NR..].fill(0.0);
    } else {
        pack_squares::<T, E>(matrix, panel);
    }
}

/// Packs rows into `words[row * ROW_STRIDE + word]`.
#[inline(always)]
pub(super) fn pack_rows<'a, T: MicroKernel, E: Element>(matrix: Matrix<'_, E>, words: &'a mut [f32]) -> RowOperand<'a> {
    if matrix.transposed {
        pack_rows_of_columns::<T, E>(matrix, words);
    } else {
        for (row, packed) in (0..matrix.rows).zip(words.chunks_exact_mut(T::ROW_STRIDE)) {
            let elements = &matrix.values[row * matrix.stride..][..matrix.columns];
            for (elements, words) in elements.chunks(SIDE * T::KR).zip(packed.as_chunks_mut().0) {
                fill_row::<T, E>(words, elements);
            }
        }
    }
    RowOperand { words, stride: T::ROW_STRIDE, count: matrix.rows.next_multiple_of(T::ROW_STEP) }
}

/// [`pack_rows`] of a matrix with contiguous columns: square by square, each transposed.
#[inline(always)]
fn pack_rows_of_columns<T: MicroKernel, E: Element>(matrix: Matrix<'_, E>, words: &mut [f32]) {
    let mut square = [[0f32; SIDE]; SIDE];
    for first in (0..matrix.columns.div_ceil(T::KR)).step_by(SIDE) {
        for first_row in (0..matrix.rows).step_by(SIDE) {
            let rows = SIDE.min(matrix.rows - first_row);
            let column =
                |k: usize| if k < matrix.columns { &matrix.values[k * matrix.stride + first_row..] } else { &[] };
            for (word, words) in square.iter_mut().enumerate() {
                let (k, last) = ((first + word) * T::KR, (first + word) * T::KR + T::KR - 1);
                if let (Some(first), Some(second)) = (column(k).first_chunk(), column(last).first_chunk()) {
                    fill_column::<T, E>(words, first, second);
                    continue;
                }
                let element = |k: usize, row: usize| column(k).get(row).copied().unwrap_or_default();
                for (row, word) in words[..rows].iter_mut().enumerate() {
                    *word = T::pack(element(k, row), element(last, row));
                }
            }
            transpose(square.as_flattened(), SIDE, &mut words[first_row * T::ROW_STRIDE + first..], T::ROW_STRIDE);
        }
    }
}

/// [`pack`] of contiguous rows: square by square, each transposed.
#[inline(always)]
fn pack_squares<T: MicroKernel, E: Element>(matrix: Matrix<'_, E>, panel: &mut [f32]) {
    let width = T::NR;
    let (mut square, mut transposed) = ([[0f32; SIDE]; SIDE], [0f32; SIDE * SIDE]);
    for first in (0..panel.len() / width).step_by(SIDE) {
        for top in (0..width.min(matrix.rows)).step_by(SIDE) {
            for (row, words) in (top..matrix.rows).zip(&mut square) {
                let elements = &matrix.values[row * matrix.stride..][first * T::KR..matrix.columns];
                fill_row::<T, E>(words, elements);
            }
            let target = &mut panel[first * width + top..];
            if target.len() >= (SIDE - 1) * width + SIDE {
                transpose(square.as_flattened(), SIDE, target, width);
            } else {
                transpose(square.as_flattened(), SIDE, &mut transposed, SIDE);
                for (words, column) in target.chunks_mut(width).zip(transposed.chunks_exact(SIDE)) {
                    let count = words.len().min(SIDE);
                    words[..count].copy_from_slice(&column[..count]);
                }
            }
        }
    }
}

/// Packs these rows of a matrix with contiguous columns into panels `panel[word * width + row]`, `panel_stride` words
/// apart.
#[inline(always)]
pub(super) fn pack_columns<T: MicroKernel, E: Element>(
    matrix: Matrix<'_, E>,
    rows: impl Iterator<Item = Range<usize>> + Clone,
    panels: &mut [f32],
    width: usize,
    panel_stride: usize,
) {
    assert!(width <= SIDE || width.is_multiple_of(SIDE), "full vectors would overwrite the next word's rows");
    let (whole, stride) = (matrix.columns / T::KR, matrix.stride);
    for near in steps(whole, K_BATCH) {
        for k in near.end * T::KR..matrix.columns.min((near.end + K_BATCH) * T::KR) {
            prefetch(&matrix.values[k * stride..][..matrix.rows]);
        }
        for (rows, panel) in rows.clone().zip(panels.chunks_mut(panel_stride)) {
            for piece in steps(rows.len(), SIDE) {
                let values = &matrix.values[rows.start + piece.start..];
                let pair = |word: usize| {
                    let (first, second) = (word * T::KR, word * T::KR + T::KR - 1);
                    (&values[first * stride..], &values[second * stride..])
                };
                let mut word = near.start;
                while word < near.end {
                    let (first, second) = pair(word);
                    let words = panel[word * width + piece.start..].first_chunk_mut();
                    let (Some(words), Some(first), Some(second)) = (words, first.first_chunk(), second.first_chunk())
                    else {
                        break;
                    };
                    fill_column::<T, E>(words, first, second);
                    word += 1;
                }
                // Words whose vectors would extend beyond the panel or the matrix.
                for word in word..near.end {
                    let (first, second) = pair(word);
                    let words = &mut panel[word * width + piece.start..][..piece.len()];
                    for (word, (&first, &second)) in words.iter_mut().zip(first.iter().zip(second)) {
                        *word = T::pack(first, second);
                    }
                }
            }
        }
    }
    if whole * T::KR < matrix.columns {
        let last = &matrix.values[whole * T::KR * stride..][..matrix.rows];
        for (rows, panel) in rows.zip(panels.chunks_mut(panel_stride)) {
            for (word, &element) in panel[whole * width..].iter_mut().zip(&last[rows]) {
                *word = T::pack(element, E::default());
            }
        }
    }
}

#[inline(always)]
fn fill_column<T: MicroKernel, E: Element>(words: &mut [f32; SIDE], first: &[E; SIDE], second: &[E; SIDE]) {
    for j in 0..SIDE {
        words[j] = T::pack(first[j], second[j]);
    }
}

/// Packs up to SIDE words of a row; zeros follow its last element.
#[inline(always)]
fn fill_row<T: MicroKernel, E: Element>(words: &mut [f32; SIDE], elements: &[E]) {
    if T::KR == 1
        && let Some(elements) = elements.first_chunk::<SIDE>()
    {
        fill_column::<T, E>(words, elements, elements);
    } else if T::KR == 2
        && let Some(pairs) = elements.as_chunks::<2>().0.first_chunk::<SIDE>()
    {
        for j in 0..SIDE {
            words[j] = T::pack(pairs[j][0], pairs[j][1]);
        }
    } else {
        let element = |k: usize| elements.get(k).copied().unwrap_or_default();
        for (j, word) in words.iter_mut().enumerate() {
            *word = T::pack(element(j * T::KR), element(j * T::KR + T::KR - 1));
        }
    }
}
