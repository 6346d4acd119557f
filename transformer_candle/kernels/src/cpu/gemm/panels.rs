//! Panels: rows of an operand, in which what a tile takes at a time lies together.
//!
//! A place holds one element of K or two (`Tile::DEPTH`); elements of K that a matrix does not have are zero. The right operand's
//! columns are the rows of its transpose. Whole vectors are written wherever there is room: what reaches too far is written again
//! with what follows, or never read.

use std::ops::Range;

use super::places::Rows;
use super::tile::{ROW_STRIDE, Tile};
use super::{Matrix, steps};
use crate::Element;
use crate::cpu::simd::prefetch;
use crate::cpu::transpose::{SIDE, transpose};

/// Places packed for one panel after the other, so that a line of the matrix is read by all of them while it is near: no more than a
/// first-level cache holds of rows that lie 1 KiB apart, or an odd multiple of it.
const NEAR: usize = 32;

/// Rows in panels as even as possible.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    rows: usize,
    pub(super) count: usize,
}

impl Panels {
    /// As few as can be, or some more if each thread has as many of them then, almost as high.
    pub(super) fn of<T: Tile>(rows: usize, threads: usize) -> Self {
        let fewest = rows.div_ceil(T::ROWS);
        let even = fewest.next_multiple_of(threads);
        let height = rows / even;
        let count = if height > 0 && T::height(height) == height { even } else { fewest };
        Self { rows, count }
    }

    /// The rows of some, by their numbers: the first panels have one more where the last have too few.
    pub(super) fn rows(self, numbers: Range<usize>) -> Range<usize> {
        let (height, higher) = (self.rows / self.count, self.rows % self.count);
        let begin = |number: usize| number * height + number.min(higher);
        begin(numbers.start)..begin(numbers.end)
    }
}

/// Packs the rows of a right operand's transpose, `Tile::COLUMNS` or fewer, in `panel[place * COLUMNS + row]`.
#[inline(always)]
pub(super) fn pack<T: Tile, E: Element>(matrix: Matrix<'_, E>, panel: &mut [f32]) {
    if matrix.transposed {
        let rows = 0..matrix.rows;
        pack_columns::<T, E>(matrix, std::iter::once(rows), panel, T::COLUMNS, panel.len());
    } else {
        pack_squares::<T, E>(matrix, panel);
    }
}

/// Packs rows that lie in one piece each in `places[row * ROW_STRIDE + place]`.
#[inline(always)]
pub(super) fn pack_rows<'a, T: Tile, E: Element>(matrix: Matrix<'_, E>, places: &'a mut [f32]) -> Rows<'a> {
    for (row, packed) in (0..matrix.rows).zip(places.chunks_exact_mut(ROW_STRIDE)) {
        let elements = &matrix.values[row * matrix.stride..][..matrix.columns];
        for (elements, places) in elements.chunks(SIDE * T::DEPTH).zip(packed.as_chunks_mut().0) {
            fill_row::<T, E>(places, elements);
        }
    }
    Rows { places, stride: ROW_STRIDE, count: matrix.rows }
}

/// As [`pack`], rows that lie in one piece each: square by square through its transpose.
#[inline(always)]
fn pack_squares<T: Tile, E: Element>(matrix: Matrix<'_, E>, panel: &mut [f32]) {
    let width = T::COLUMNS;
    let (mut square, mut turned) = ([[0f32; SIDE]; SIDE], [0f32; SIDE * SIDE]);
    for first in (0..panel.len() / width).step_by(SIDE) {
        for top in (0..width.min(matrix.rows)).step_by(SIDE) {
            for (row, places) in (top..matrix.rows).zip(&mut square) {
                let elements = &matrix.values[row * matrix.stride..][first * T::DEPTH..matrix.columns];
                fill_row::<T, E>(places, elements);
            }
            let target = &mut panel[first * width + top..];
            if target.len() >= (SIDE - 1) * width + SIDE {
                transpose(square.as_flattened(), SIDE, target, width);
            } else {
                transpose(square.as_flattened(), SIDE, &mut turned, SIDE);
                for (places, column) in target.chunks_mut(width).zip(turned.chunks_exact(SIDE)) {
                    let count = places.len().min(SIDE);
                    places[..count].copy_from_slice(&column[..count]);
                }
            }
        }
    }
}

/// Packs panels of these rows each in `panel[place * width + row]`, `panel_stride` apart, of a matrix whose columns lie in one
/// piece each.
#[inline(always)]
pub(super) fn pack_columns<T: Tile, E: Element>(
    matrix: Matrix<'_, E>,
    rows: impl Iterator<Item = Range<usize>> + Clone,
    panels: &mut [f32],
    width: usize,
    panel_stride: usize,
) {
    assert!(width <= SIDE || width.is_multiple_of(SIDE), "whole vectors would reach into what is written already");
    let (whole, stride) = (matrix.columns / T::DEPTH, matrix.stride);
    for near in steps(whole, NEAR) {
        for k in near.end * T::DEPTH..matrix.columns.min((near.end + NEAR) * T::DEPTH) {
            prefetch(&matrix.values[k * stride..][..matrix.rows]);
        }
        for (rows, panel) in rows.clone().zip(panels.chunks_mut(panel_stride)) {
            for piece in steps(rows.len(), SIDE) {
                let values = &matrix.values[rows.start + piece.start..];
                let pair = |place: usize| {
                    let (first, second) = (place * T::DEPTH, place * T::DEPTH + T::DEPTH - 1);
                    (&values[first * stride..], &values[second * stride..])
                };
                let mut place = near.start;
                while place < near.end {
                    let (first, second) = pair(place);
                    let places = panel[place * width + piece.start..].first_chunk_mut();
                    let (Some(places), Some(first), Some(second)) = (places, first.first_chunk(), second.first_chunk())
                    else {
                        break;
                    };
                    fill_column::<T, E>(places, first, second);
                    place += 1;
                }
                // Near the end of the matrix.
                for place in place..near.end {
                    let (first, second) = pair(place);
                    let places = &mut panel[place * width + piece.start..][..piece.len()];
                    for (place, (&first, &second)) in places.iter_mut().zip(first.iter().zip(second)) {
                        *place = T::place(first, second);
                    }
                }
            }
        }
    }
    if whole * T::DEPTH < matrix.columns {
        let last = &matrix.values[whole * T::DEPTH * stride..][..matrix.rows];
        for (rows, panel) in rows.zip(panels.chunks_mut(panel_stride)) {
            for (place, &element) in panel[whole * width..].iter_mut().zip(&last[rows]) {
                *place = T::place(element, E::default());
            }
        }
    }
}

#[inline(always)]
fn fill_column<T: Tile, E: Element>(places: &mut [f32; SIDE], first: &[E; SIDE], second: &[E; SIDE]) {
    for j in 0..SIDE {
        places[j] = T::place(first[j], second[j]);
    }
}

/// Zeros follow the last element.
#[inline(always)]
fn fill_row<T: Tile, E: Element>(places: &mut [f32; SIDE], elements: &[E]) {
    if T::DEPTH == 1
        && let Some(elements) = elements.first_chunk::<SIDE>()
    {
        fill_column::<T, E>(places, elements, elements);
    } else if T::DEPTH == 2
        && let Some(pairs) = elements.as_chunks::<2>().0.first_chunk::<SIDE>()
    {
        for j in 0..SIDE {
            places[j] = T::place(pairs[j][0], pairs[j][1]);
        }
    } else {
        let element = |k: usize| elements.get(k).copied().unwrap_or_default();
        for (j, place) in places.iter_mut().enumerate() {
            *place = T::place(element(j * T::DEPTH), element(j * T::DEPTH + T::DEPTH - 1));
        }
    }
}
