//! Tiles of a product: as many sums as the registers hold.

use pulp::{Simd, WithSimd};

use crate::Element;

/// The most sums that a tile has.
pub(super) const SUMS: usize = 512;

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

    /// What a place holds of `DEPTH` successive elements; behind the last of K come zeros.
    fn place<E: Element>(elements: &[E]) -> f32;

    /// `sums[i * COLUMNS + j] = sum over places of a[place * ROWS + i] * b[place * COLUMNS + j]`.
    fn sum(self, a: &[f32], b: &[f32], sums: &mut [f32; SUMS]);
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
    fn place<E: Element>(elements: &[E]) -> f32 {
        elements[0].widen()
    }

    #[inline(always)]
    fn sum(self, a: &[f32], b: &[f32], sums: &mut [f32; SUMS]) {
        self.0.vectorize(Sum::<R, V> { a, b, sums });
    }
}

struct Sum<'a, const R: usize, const V: usize> {
    a: &'a [f32],
    b: &'a [f32],
    sums: &'a mut [f32; SUMS],
}

impl<const R: usize, const V: usize> WithSimd for Sum<'_, R, V> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let mut sums = [[simd.splat_f32s(0.0); V]; R];
        let (b, rest) = S::as_simd_f32s(self.b);
        assert!(rest.is_empty());
        for (a, b) in self.a.as_chunks::<R>().0.iter().zip(b.as_chunks::<V>().0) {
            for (sums, &a) in sums.iter_mut().zip(a) {
                let a = simd.splat_f32s(a);
                for (sum, &b) in sums.iter_mut().zip(b) {
                    *sum = simd.mul_add_e_f32s(a, b, *sum);
                }
            }
        }
        let (places, _) = S::as_mut_simd_f32s(self.sums);
        for (place, sum) in places.iter_mut().zip(sums.as_flattened()) {
            *place = *sum;
        }
    }
}
