//! Small matrix products in f32, one thread, in memory that the first-level cache holds.

use pulp::{Simd, WithSimd};

/// Columns come in multiples of this: a whole number of any machine's vectors.
pub(super) const COLUMNS: usize = 16;

/// What the sums begin with.
#[derive(Clone, Copy)]
pub(super) enum Start<'a> {
    /// Nothing: the target is overwritten.
    Zero,
    /// The target's values.
    Kept,
    /// The target's values, each column times its factor.
    Scaled(&'a [f32]),
}

/// The left factor: element (i, k) lies at `i * row_stride + k * depth_stride`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub(super) values: &'a [f32],
    pub(super) row_stride: usize,
    pub(super) depth_stride: usize,
}

impl<'a> Left<'a> {
    /// Row-major values of so many columns.
    pub(super) fn rows(values: &'a [f32], columns: usize) -> Self {
        Self { values, row_stride: columns, depth_stride: 1 }
    }

    /// The transpose of row-major values of so many columns.
    pub(super) fn transposed(values: &'a [f32], columns: usize) -> Self {
        Self { values, row_stride: 1, depth_stride: columns }
    }
}

/// `target_MN = start + left_MK right_KN` for `[m, n, k]`, n a multiple of [`COLUMNS`]. Each element is summed over k in
/// ascending order, whatever the machine.
#[inline(always)]
pub(super) fn product<S: Simd>(
    simd: S,
    sizes: [usize; 3],
    left: Left<'_>,
    right: &[f32],
    target: &mut [f32],
    start: Start<'_>,
) {
    simd.vectorize(Product { sizes, left, right, target, start });
}

struct Product<'a> {
    sizes: [usize; 3],
    left: Left<'a>,
    right: &'a [f32],
    target: &'a mut [f32],
    start: Start<'a>,
}

impl WithSimd for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let ([m, n, k], lanes) = (self.sizes, S::F32_LANES);
        if m == 0 || n == 0 || k == 0 {
            return;
        }
        let Left { values, row_stride, depth_stride } = self.left;
        assert!(
            (m - 1) * row_stride + (k - 1) * depth_stride < values.len(),
            "the left factor is smaller than its sizes"
        );
        assert!(k * n <= self.right.len() && m * n <= self.target.len(), "a matrix is smaller than its sizes");
        assert!(n.is_multiple_of(COLUMNS) && COLUMNS.is_multiple_of(lanes), "columns do not fill whole vectors");
        assert!(!matches!(self.start, Start::Scaled(factors) if factors.len() < n), "a factor is missing");
        let mut column = 0;
        while column + 2 * lanes <= n {
            // SAFETY: the assertions are what `strip` asks for, and the columns lie below n.
            unsafe { self.strip::<S, 2>(simd, column) };
            column += 2 * lanes;
        }
        while column < n {
            // SAFETY: as above; n is a multiple of `lanes`.
            unsafe { self.strip::<S, 1>(simd, column) };
            column += lanes;
        }
    }
}

impl Product<'_> {
    /// All rows of V vectors of columns.
    ///
    /// # Safety
    /// The slices hold the sizes, and the columns from `column` on lie below n.
    #[inline(always)]
    unsafe fn strip<S: Simd, const V: usize>(&mut self, simd: S, column: usize) {
        let (m, mut row) = (self.sizes[0], 0);
        // SAFETY: the rows of every block lie below m; the rest is this function's own condition.
        unsafe {
            while S::REGISTER_COUNT >= 32 && row + 8 <= m {
                self.block::<S, 8, V>(simd, row, column);
                row += 8;
            }
            while row + 4 <= m {
                self.block::<S, 4, V>(simd, row, column);
                row += 4;
            }
            while row < m {
                self.block::<S, 1, V>(simd, row, column);
                row += 1;
            }
        }
    }

    /// R rows of V vectors of columns, held in registers over the whole depth.
    ///
    /// # Safety
    /// As for `strip`, and the rows from `row` on lie below m.
    #[inline(always)]
    unsafe fn block<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, row: usize, column: usize) {
        let ([_, n, k], Left { values, row_stride, depth_stride }) = (self.sizes, self.left);
        let mut sums = [[simd.splat_f32s(0.0); V]; R];
        // SAFETY: every offset is that of an element below the sizes, which the slices hold; vectors are read and written
        // without a demand on their alignment.
        unsafe {
            let left = values.as_ptr().add(row * row_stride);
            let right = self.right.as_ptr().add(column);
            let target = self.target.as_mut_ptr().add(row * n + column);
            match self.start {
                Start::Zero => {}
                Start::Kept => each(&mut sums, |i, v, sum| {
                    *sum = load(target.add(i * n + v * S::F32_LANES));
                }),
                Start::Scaled(factors) => each(&mut sums, |i, v, sum| {
                    let factor = load(factors.as_ptr().add(column + v * S::F32_LANES));
                    *sum = simd.mul_f32s(load(target.add(i * n + v * S::F32_LANES)), factor);
                }),
            }
            for depth in 0..k {
                let mut vectors = [simd.splat_f32s(0.0); V];
                for (v, vector) in vectors.iter_mut().enumerate() {
                    *vector = load(right.add(depth * n + v * S::F32_LANES));
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let value = simd.splat_f32s(*left.add(i * row_stride + depth * depth_stride));
                    for (sum, &vector) in sums.iter_mut().zip(&vectors) {
                        *sum = simd.mul_add_e_f32s(value, vector, *sum);
                    }
                }
            }
            each(&mut sums, |i, v, sum| {
                target.add(i * n + v * S::F32_LANES).cast::<S::f32s>().write_unaligned(*sum);
            });
        }
    }
}

#[inline(always)]
fn each<T, const R: usize, const V: usize>(sums: &mut [[T; V]; R], mut body: impl FnMut(usize, usize, &mut T)) {
    for (i, row) in sums.iter_mut().enumerate() {
        for (v, sum) in row.iter_mut().enumerate() {
            body(i, v, sum);
        }
    }
}

/// # Safety
/// A whole vector of elements lies at `source`.
#[inline(always)]
unsafe fn load<V: Copy>(source: *const f32) -> V {
    // SAFETY: this function's own condition.
    unsafe { source.cast::<V>().read_unaligned() }
}

#[cfg(test)]
mod tests {
    use pulp::{Arch, Scalar};

    use super::*;

    /// With AVX2, half the registers of AVX-512 and half their width, where the machine has it.
    fn narrow(product: Product<'_>) {
        #[cfg(target_arch = "x86_64")]
        if let Some(simd) = pulp::x86::V3::try_new() {
            return Simd::vectorize(simd, product);
        }
        Arch::new().dispatch(product);
    }

    /// Small integers, so that every order of summing gives the same f32.
    fn integers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7 + seed * 13) % 17) as f32 - 8.0).collect()
    }

    #[test]
    fn products_of_every_size_start_and_layout_equal_the_plain_loop() {
        let factors = integers(48, 4);
        for [m, n, k] in [[1, 16, 1], [3, 16, 5], [8, 32, 3], [13, 48, 7], [64, 64, 64], [9, 80, 1]] {
            let factors: Vec<f32> = factors.iter().copied().cycle().take(n).collect();
            let (a, b, before) = (integers(m * k, 1), integers(k * n, 2), integers(m * n, 3));
            for start in [Start::Zero, Start::Kept, Start::Scaled(&factors)] {
                for left in [Left::rows(&a, k), Left::transposed(&a, m)] {
                    let expected: Vec<f32> = (0..m * n)
                        .map(|at| {
                            let (i, j) = (at / n, at % n);
                            let first = match start {
                                Start::Zero => 0.0,
                                Start::Kept => before[at],
                                Start::Scaled(factors) => before[at] * factors[j],
                            };
                            let term = |d| left.values[i * left.row_stride + d * left.depth_stride] * b[d * n + j];
                            first + (0..k).map(term).sum::<f32>()
                        })
                        .collect();
                    for machine in 0..3 {
                        let mut target = before.clone();
                        let product = Product { sizes: [m, n, k], left, right: &b, target: &mut target, start };
                        match machine {
                            0 => product.with_simd(Scalar),
                            1 => narrow(product),
                            _ => Arch::new().dispatch(product),
                        }
                        assert_eq!(target, expected, "{m} {n} {k}");
                    }
                }
            }
        }
    }
}
