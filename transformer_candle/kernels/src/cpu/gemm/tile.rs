//! Tiles of a product: as many sums as the registers hold.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use crate::Element;

/// The most sums that a tile has.
pub(super) const SUMS: usize = 512;

/// The most places of a panel.
pub(super) const PLACES: usize = 1024;
/// From row to row of packed rows: they would share the lines of a cache if they lay a power of two apart.
pub(super) const ROW_STRIDE: usize = PLACES + 16;

/// How one tile is multiplied.
pub(super) trait Tile: Copy + Send + Sync {
    /// The vectors of everything around the sums.
    type Simd: Simd;
    /// Rows and columns of `out` in a tile, and so the widths of the panels of either operand.
    const ROWS: usize;
    const COLUMNS: usize;
    /// Elements of K in one place of a panel.
    const DEPTH: usize;

    fn simd(self) -> Self::Simd;

    /// What a place holds of one element, or of two successive ones.
    fn place<E: Element>(first: E, second: E) -> f32;

    /// `sums[i * COLUMNS + j] = sum over places of a(place, i) * b[place * COLUMNS + j]`.
    fn sum(self, a: impl Left, b: &[f32], sums: &mut [f32; SUMS]);
}

/// What a tile reads of the left operand.
pub(super) trait Left: Copy {
    /// A reader of so many places of `R` rows: `(place, row)`.
    fn reader<const R: usize>(self, places: usize) -> impl Fn(usize, usize) -> f32;
}

/// Panels in which the rows of a place lie together.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a>(pub(super) &'a [f32]);

impl Left for Panel<'_> {
    #[inline(always)]
    fn reader<const R: usize>(self, places: usize) -> impl Fn(usize, usize) -> f32 {
        let rows = &self.0.as_chunks::<R>().0[..places];
        #[inline(always)]
        move |place, row| rows[place][row]
    }
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
    /// Some of them.
    pub(super) fn part(self, rows: Range<usize>) -> Self {
        Self { places: &self.places[rows.start * self.stride..], count: rows.len(), ..self }
    }

}

impl Left for Rows<'_> {
    /// The last row stands in for those that a tile has beyond it, whose sums nobody wants.
    #[inline(always)]
    fn reader<const R: usize>(self, places: usize) -> impl Fn(usize, usize) -> f32 {
        let last = (self.count - 1).min(R - 1);
        assert!(last * self.stride + places <= self.places.len());
        // SAFETY: no row lies behind the last, which ends inside of the slice.
        let row = |row: usize| unsafe { self.places.get_unchecked(row.min(last) * self.stride..).get_unchecked(..places) };
        let rows: [&[f32]; R] = std::array::from_fn(row);
        #[inline(always)]
        move |place, row| rows[row][place]
    }
}

/// R rows of V vectors of f32.
#[derive(Clone, Copy)]
pub(super) struct Vectors<S, const R: usize, const V: usize>(pub(super) S);

impl<S: Simd, const R: usize, const V: usize> Tile for Vectors<S, R, V> {
    type Simd = S;
    const ROWS: usize = R;
    const COLUMNS: usize = V * S::F32_LANES;
    const DEPTH: usize = 1;

    fn simd(self) -> S {
        self.0
    }

    #[inline(always)]
    fn place<E: Element>(first: E, _: E) -> f32 {
        first.widen()
    }

    #[inline(always)]
    fn sum(self, a: impl Left, b: &[f32], sums: &mut [f32; SUMS]) {
        self.0.vectorize(Sum::<_, R, V> { a, b, sums });
    }
}

struct Sum<'a, A, const R: usize, const V: usize> {
    a: A,
    b: &'a [f32],
    sums: &'a mut [f32; SUMS],
}

impl<A: Left, const R: usize, const V: usize> WithSimd for Sum<'_, A, R, V> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let mut sums = [[simd.splat_f32s(0.0); V]; R];
        let (b, rest) = S::as_simd_f32s(self.b);
        assert!(rest.is_empty());
        let b = b.as_chunks::<V>().0;
        let a = self.a.reader::<R>(b.len());
        for place in 0..b.len() {
            let b = b[place];
            for i in 0..R {
                let a = simd.splat_f32s(a(place, i));
                for j in 0..V {
                    sums[i][j] = simd.mul_add_e_f32s(a, b[j], sums[i][j]);
                }
            }
        }
        // Plain loops over constant lengths, so that the sums stay in registers until here.
        let rows: &mut [[S::f32s; V]; R] =
            S::as_mut_simd_f32s(self.sums).0.as_chunks_mut().0.first_chunk_mut().expect("there is room for a tile");
        for i in 0..R {
            for j in 0..V {
                rows[i][j] = sums[i][j];
            }
        }
    }
}
