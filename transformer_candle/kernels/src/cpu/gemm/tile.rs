//! Tiles of a product: as many sums as the registers hold.

use pulp::{Simd, WithSimd};

use super::places::{Columns, Left};
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
    /// The most rows and the columns of `out` in a tile, and so the widths of the panels of either operand.
    const ROWS: usize;
    const COLUMNS: usize;
    /// Elements of K in one place of a panel.
    const DEPTH: usize;

    fn simd(self) -> Self::Simd;

    /// What a place holds of one element, or of two successive ones.
    fn place<E: Element>(first: E, second: E) -> f32;

    /// The rows that a tile of so many is computed with: as many wherever panels are even, or some more.
    fn height(rows: usize) -> usize;

    /// `sums[i * COLUMNS + j] = sum over so many places of a(place, i) * b(place, j)` for so many rows i, and [`Tile::height`] of them.
    fn sum(self, rows: usize, places: usize, a: impl Left, b: Columns<'_>, sums: &mut [f32; SUMS]);
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

    fn height(rows: usize) -> usize {
        [4, 5, 6, 12, 13].into_iter().find(|&height| (rows..R).contains(&height)).unwrap_or(R)
    }

    #[inline(always)]
    fn sum(self, rows: usize, places: usize, a: impl Left, b: Columns<'_>, sums: &mut [f32; SUMS]) {
        match Self::height(rows) {
            4 => self.0.vectorize(Sum::<_, 4, V> { places, a, b, sums }),
            5 => self.0.vectorize(Sum::<_, 5, V> { places, a, b, sums }),
            6 if R > 6 => self.0.vectorize(Sum::<_, 6, V> { places, a, b, sums }),
            12 if R > 6 => self.0.vectorize(Sum::<_, 12, V> { places, a, b, sums }),
            13 if R > 6 => self.0.vectorize(Sum::<_, 13, V> { places, a, b, sums }),
            _ => self.0.vectorize(Sum::<_, R, V> { places, a, b, sums }),
        }
    }
}

struct Sum<'a, A, const R: usize, const V: usize> {
    places: usize,
    a: A,
    b: Columns<'a>,
    sums: &'a mut [f32; SUMS],
}

impl<A: Left, const R: usize, const V: usize> WithSimd for Sum<'_, A, R, V> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let mut sums = [[simd.splat_f32s(0.0); V]; R];
        let (a, b) = (self.a.reader::<R>(self.places), self.b.pieces(self.places, V * S::F32_LANES));
        for place in 0..self.places {
            let b = S::as_simd_f32s(b(place)).0;
            for (i, sums) in sums.iter_mut().enumerate() {
                let a = simd.splat_f32s(a(place, i));
                for j in 0..V {
                    sums[j] = simd.mul_add_e_f32s(a, b[j], sums[j]);
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
