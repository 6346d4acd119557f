//! Panels: `width` rows of an operand, in which what a tile takes at a time lies together.
//!
//! `panel[place * width + row]`, where a place holds one element of K or two (`Tile::DEPTH`); rows and elements that the matrix
//! does not have are zero. The other operand's columns are the rows of its transpose.

use super::transpose::{SIDE, transpose};
use super::{Matrix, Tile};
use crate::Element;

/// Packs all rows of a matrix, at most `width`, in a panel.
#[inline(always)]
pub(super) fn pack<T: Tile, E: Element>(matrix: Matrix<'_, E>, panel: &mut [f32], width: usize) {
    if matrix.transposed {
        pack_columns::<T, E>(matrix, panel, width);
    } else {
        pack_rows::<T, E>(matrix, panel, width);
    }
}

/// Of a matrix whose rows lie in one piece each: square by square through its transpose.
#[inline(always)]
fn pack_rows<T: Tile, E: Element>(matrix: Matrix<'_, E>, panel: &mut [f32], width: usize) {
    let mut square = [[0f32; SIDE]; SIDE];
    for first in (0..panel.len() / width).step_by(SIDE) {
        for top in (0..width).step_by(SIDE) {
            let rows = SIDE.min(matrix.rows.saturating_sub(top));
            for (row, places) in square[..rows].iter_mut().enumerate() {
                let elements = &matrix.values[(top + row) * matrix.stride..][first * T::DEPTH..matrix.columns];
                // The compiler knows the length of a whole side, and makes vectors of loops over it.
                if let Some(elements) = elements.get(..SIDE * T::DEPTH) {
                    fill::<T, E>(places, elements);
                } else {
                    fill::<T, E>(places, elements);
                }
            }
            square[rows..].fill([0.0; SIDE]);
            transpose(&mut square);
            // Whole vectors: what reaches into the next place is written again with that one.
            for (place, column) in square.iter().enumerate() {
                let Some(places) = panel.get_mut((first + place) * width + top..) else { break };
                if let Some(places) = places.first_chunk_mut::<SIDE>() {
                    *places = *column;
                } else {
                    places.copy_from_slice(&column[..places.len()]);
                }
            }
        }
    }
}

#[inline(always)]
fn fill<T: Tile, E: Element>(places: &mut [f32; SIDE], elements: &[E]) {
    for (place, elements) in places.iter_mut().zip(elements.chunks(T::DEPTH)) {
        *place = T::place(elements);
    }
}

/// Of a matrix whose columns lie in one piece each.
#[inline(always)]
fn pack_columns<T: Tile, E: Element>(matrix: Matrix<'_, E>, panel: &mut [f32], width: usize) {
    // The compiler knows `width`, and makes vectors of loops over it.
    if matrix.rows == width {
        pack_columns_of::<T, E>(matrix, panel, width, width);
    } else {
        pack_columns_of::<T, E>(matrix, panel, width, matrix.rows);
    }
}

#[inline(always)]
fn pack_columns_of<T: Tile, E: Element>(matrix: Matrix<'_, E>, panel: &mut [f32], width: usize, rows: usize) {
    let column = |k: usize| &matrix.values[k * matrix.stride..][..rows];
    for (place, places) in panel.chunks_exact_mut(width).enumerate() {
        let (places, rest) = places.split_at_mut(rows);
        rest.fill(0.0);
        let k = place * T::DEPTH;
        if T::DEPTH == 2 && k + 1 < matrix.columns {
            for (place, (&first, &second)) in places.iter_mut().zip(column(k).iter().zip(column(k + 1))) {
                *place = T::place(&[first, second]);
            }
        } else {
            for (place, &element) in places.iter_mut().zip(column(k)) {
                *place = T::place(&[element]);
            }
        }
    }
}
