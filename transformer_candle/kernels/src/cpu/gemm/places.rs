//! Where a tile finds the places of its operands: packed, or as an operand lies in memory where that is as good.
//!
//! What a tile has beyond the last row or column of an operand is multiplied as well, with anything, and never read.

use std::ops::Range;

use super::Matrix;
use super::tile::Tile;
use crate::Element;

/// The largest block of columns that is read in place: 4 MiB, a part of a third-level cache.
const NEAR: usize = 1 << 20;
/// First-level caches keep what lies a multiple of so many bytes apart in the same lines, 8 or 12 of them: fewer than a panel has rows.
const LINES: usize = 1 << 12;
/// Second-level caches have at least as many ways, of at least so many bytes. Columns that lie a power of two apart share few
/// of the lines of a way.
const WAYS: usize = 16;
const WAY: usize = 1 << 16;

/// What a tile reads of the left operand.
pub(super) trait Left: Copy {
    /// A reader of so many places of `R` rows: `(place, row)`.
    fn reader<const R: usize>(self, places: usize) -> impl Fn(usize, usize) -> f32;
}

/// Rows of places, each in one piece.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) places: &'a [f32],
    /// Places from row to row.
    pub(super) stride: usize,
    pub(super) count: usize,
}

impl<'a> Rows<'a> {
    /// Of a matrix whose elements are places as they are, if a panel's rows do not share the lines of a cache.
    pub(super) fn of<T: Tile, E: Element>(matrix: Matrix<'a, E>) -> Option<Self> {
        let whole = |elements: usize| elements.is_multiple_of(T::DEPTH);
        let places = places_of::<T, E>(matrix).filter(|_| whole(matrix.columns) && whole(matrix.stride))?;
        let spread = matrix.rows == 1 || apart(&matrix) < LINES;
        (!matrix.transposed && spread).then_some(Self { places, stride: matrix.stride / T::DEPTH, count: matrix.rows })
    }

    pub(super) fn part(self, rows: Range<usize>) -> Self {
        Self { places: &self.places[rows.start * self.stride..], count: rows.len(), ..self }
    }
}

impl Left for Rows<'_> {
    /// The last row stands in for those beyond it.
    #[inline(always)]
    fn reader<const R: usize>(self, places: usize) -> impl Fn(usize, usize) -> f32 {
        let last = (self.count - 1).min(R - 1);
        assert!(last * self.stride + places <= self.places.len());
        // SAFETY: no row lies behind the last, which ends inside of the slice.
        let row =
            |row: usize| unsafe { self.places.get_unchecked(row.min(last) * self.stride..).get_unchecked(..places) };
        let rows: [&[f32]; R] = std::array::from_fn(row);
        #[inline(always)]
        move |place, row| rows[row][place]
    }
}

/// What several rows or columns of an operand hold of one place lies together.
#[derive(Clone, Copy)]
pub(super) struct Columns<'a> {
    pub(super) places: &'a [f32],
    /// From place to place.
    pub(super) stride: usize,
}

impl<'a> Columns<'a> {
    /// Of a transposed matrix whose elements are places as they are, if it has whole panels of `width` rows and caches can hold it.
    pub(super) fn of<T: Tile, E: Element>(matrix: Matrix<'a, E>, width: usize) -> Option<Self> {
        let places = places_of::<T, E>(matrix).filter(|_| T::DEPTH == 1 && matrix.transposed)?;
        let stride = matrix.stride;
        let near = matrix.columns * stride <= NEAR && matrix.columns <= WAYS * (WAY / apart(&matrix));
        (near && matrix.rows.is_multiple_of(width)).then_some(Self { places, stride })
    }

    pub(super) fn from(self, first: usize) -> Self {
        Self { places: &self.places[first..], ..self }
    }

    /// A reader of what `width` of the columns hold of so many places.
    #[inline(always)]
    pub(super) fn pieces(self, places: usize, width: usize) -> impl Fn(usize) -> &'a [f32] {
        assert!(places > 0 && (places - 1) * self.stride + width <= self.places.len());
        #[inline(always)]
        move |place| {
            assert!(place < places);
            // SAFETY: the last piece ends inside of the slice.
            unsafe { self.places.get_unchecked(place * self.stride..place * self.stride + width) }
        }
    }
}

impl Left for Columns<'_> {
    #[inline(always)]
    fn reader<const R: usize>(self, places: usize) -> impl Fn(usize, usize) -> f32 {
        let pieces = self.pieces(places, R);
        #[inline(always)]
        move |place, row| pieces(place)[row]
    }
}

/// The largest power of two that the bytes from row to row are a multiple of.
fn apart<E>(matrix: &Matrix<'_, E>) -> usize {
    1 << (matrix.stride * size_of::<E>()).trailing_zeros()
}

/// The elements of a matrix as places, if that is what they are: each holds `T::DEPTH` of them.
fn places_of<T: Tile, E: Element>(matrix: Matrix<'_, E>) -> Option<&[f32]> {
    if size_of::<E>() * T::DEPTH != size_of::<f32>() {
        return None;
    }
    // SAFETY: elements are plain numbers: so many of them have the bits of an f32, whatever these are.
    let (before, places, _) = unsafe { matrix.values.align_to() };
    before.is_empty().then_some(places)
}
