//! Where a tile finds the places of its operands: packed, or as an operand lies in memory where that is as good.
//!
//! What a tile has beyond the last row or column of an operand is multiplied as well, with anything, and never read.

use std::ops::Range;

use super::Matrix;
use super::tile::Tile;
use crate::Element;

/// The largest block of columns that is read in place: 4 MiB, a part of a third-level cache.
const NEAR: usize = 1 << 20;
/// Caches have at least as many ways, of at least so many bytes.
const FIRST_LEVEL: Cache = Cache { ways: 8, bytes: 1 << 12 };
const SECOND_LEVEL: Cache = Cache { ways: 16, bytes: 1 << 16 };

/// What lies a multiple of a way's bytes apart shares a line of each way.
struct Cache {
    ways: usize,
    bytes: usize,
}

impl Cache {
    /// Whether a line of each of so many stored rows finds a place at the same time: those that lie a power of two apart share few.
    fn holds<E>(&self, matrix: &Matrix<'_, E>, rows: usize) -> bool {
        let apart = 1 << (matrix.stride * size_of::<E>()).trailing_zeros();
        rows <= self.ways * (self.bytes / apart).max(1)
    }
}

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
    /// Of a matrix whose elements are places as they are, if a cache holds a line of every row of a panel.
    pub(super) fn of<T: Tile, E: Element>(matrix: Matrix<'a, E>) -> Option<Self> {
        let whole = |elements: usize| elements.is_multiple_of(T::DEPTH);
        let places = places_of::<T, E>(matrix).filter(|_| whole(matrix.columns) && whole(matrix.stride))?;
        let held = FIRST_LEVEL.holds(&matrix, matrix.rows.min(T::ROWS));
        (!matrix.transposed && held).then_some(Self { places, stride: matrix.stride / T::DEPTH, count: matrix.rows })
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
    /// Of a transposed matrix whose elements are places as they are, if caches can hold it. Its panels have to be whole.
    pub(super) fn of<T: Tile, E: Element>(matrix: Matrix<'a, E>) -> Option<Self> {
        let places = places_of::<T, E>(matrix).filter(|_| T::DEPTH == 1 && matrix.transposed)?;
        let stride = matrix.stride;
        let near = matrix.columns * stride <= NEAR && SECOND_LEVEL.holds(&matrix, matrix.columns);
        near.then_some(Self { places, stride })
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

/// The elements of a matrix as places, if that is what they are: each holds `T::DEPTH` of them.
fn places_of<T: Tile, E: Element>(matrix: Matrix<'_, E>) -> Option<&[f32]> {
    if size_of::<E>() * T::DEPTH != size_of::<f32>() {
        return None;
    }
    // SAFETY: elements are plain numbers: so many of them have the bits of an f32, whatever these are.
    let (before, places, _) = unsafe { matrix.values.align_to() };
    before.is_empty().then_some(places)
}
