//! Tiles of a product: as many sums as the registers hold.

use pulp::{Simd, WithSimd};

use crate::Element;

/// The most sums that a tile has.
pub(super) const SUMS: usize = 512;

/// The most places of a panel.
pub(super) const PLACES: usize = 1024;
/// From row to row of a panel whose rows lie one behind the other: rows would share the lines of a cache if they lay a power of
/// two apart.
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

    /// `sums[i * COLUMNS + j] = sum over places of a_i_place * b[place * COLUMNS + j]`, where `a_i_place` is
    /// `a[i * ROW_STRIDE + place]` if the left panel lies in `IN_ROWS`, else `a[place * ROWS + i]`.
    fn sum<const IN_ROWS: bool>(self, a: &[f32], b: &[f32], sums: &mut [f32; SUMS]);
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
    fn sum<const IN_ROWS: bool>(self, a: &[f32], b: &[f32], sums: &mut [f32; SUMS]) {
        self.0.vectorize(Sum::<IN_ROWS, R, V> { a, b, sums });
    }
}

struct Sum<'a, const IN_ROWS: bool, const R: usize, const V: usize> {
    a: &'a [f32],
    b: &'a [f32],
    sums: &'a mut [f32; SUMS],
}

impl<const IN_ROWS: bool, const R: usize, const V: usize> WithSimd for Sum<'_, IN_ROWS, R, V> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let mut sums = [[simd.splat_f32s(0.0); V]; R];
        let (b, rest) = S::as_simd_f32s(self.b);
        assert!(rest.is_empty());
        let b = b.as_chunks::<V>().0;
        if IN_ROWS {
            let rows: &[[f32; ROW_STRIDE]; R] =
                self.a.as_chunks().0.first_chunk().expect("a panel has all rows of a tile");
            for (place, b) in b.iter().take(PLACES).enumerate() {
                let b = *b;
                for i in 0..R {
                    let a = simd.splat_f32s(rows[i][place]);
                    for j in 0..V {
                        sums[i][j] = simd.mul_add_e_f32s(a, b[j], sums[i][j]);
                    }
                }
            }
        } else {
            for (a, b) in self.a.as_chunks::<R>().0.iter().zip(b) {
                let b = *b;
                for i in 0..R {
                    let a = simd.splat_f32s(a[i]);
                    for j in 0..V {
                        sums[i][j] = simd.mul_add_e_f32s(a, b[j], sums[i][j]);
                    }
                }
            }
        }
        let (places, _) = S::as_mut_simd_f32s(self.sums);
        for (place, sum) in places.iter_mut().zip(sums.as_flattened()) {
            *place = *sum;
        }
    }
}
