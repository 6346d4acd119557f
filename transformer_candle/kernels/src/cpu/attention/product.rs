//! Small matrix products in f32, one thread, in memory that the first-level cache holds.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::tiles::Edge;

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
    /// Rows that lie so many elements apart.
    pub(super) fn rows(values: &'a [f32], stride: usize) -> Self {
        Self { values, row_stride: stride, depth_stride: 1 }
    }

    pub(super) fn transposed(self) -> Self {
        Self { row_stride: self.depth_stride, depth_stride: self.row_stride, ..self }
    }
}

/// A matrix of keys (rows) and lanes (columns) that has nothing where they do not meet. What is not needed is not computed, but for
/// the rest of a block that is.
#[derive(Clone, Copy)]
pub(super) enum Causal {
    /// The target: what lies behind the edge may stay as it was.
    Target(Edge),
    /// The left factor: zeros behind the edge.
    Left(Edge),
    /// The right factor, likewise.
    Right(Edge),
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
    causal: Causal,
) {
    simd.vectorize(Product { sizes, left, right, target, start, causal });
}

struct Product<'a> {
    sizes: [usize; 3],
    left: Left<'a>,
    right: &'a [f32],
    target: &'a mut [f32],
    start: Start<'a>,
    causal: Causal,
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
        let (m, mut row) = (self.rows(column + V * S::F32_LANES), 0);
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

    /// Rows of the columns before `end` that are needed.
    #[inline(always)]
    fn rows(&self, end: usize) -> usize {
        let m = self.sizes[0];
        if let Causal::Target(edge) = self.causal { m.min(edge.keys(end - 1)) } else { m }
    }

    /// The terms of the sums in rows from `row` on and columns before `end` that are not all zero.
    #[inline(always)]
    fn depth(&self, row: usize, end: usize) -> Range<usize> {
        let k = self.sizes[2];
        match self.causal {
            Causal::Left(edge) => edge.lanes(row).min(k)..k,
            Causal::Right(edge) => 0..k.min(edge.keys(end - 1)),
            Causal::Target(_) => 0..k,
        }
    }

    /// R rows of V vectors of columns, held in registers over the whole depth.
    ///
    /// # Safety
    /// As for `strip`, and the rows from `row` on lie below m.
    #[inline(always)]
    unsafe fn block<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, row: usize, column: usize) {
        let ([_, n, _], Left { values, row_stride, depth_stride }) = (self.sizes, self.left);
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
            for depth in self.depth(row, column + V * S::F32_LANES) {
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

    use super::super::tiles::{Shape, Tile};
    use super::*;
    use crate::HeadLayout;

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

    /// Where lanes of `group` query heads stop to attend to keys, with `past` of them before the first that a lane adds.
    fn edge(lanes: usize, group: usize, past: usize) -> Edge {
        let layout = HeadLayout { heads: group, kv_heads: 1, head_size: 1 };
        let shape = Shape { layout, batch: 1, length: lanes.div_ceil(group), past };
        Tile { shape, sequence: 0, kv_head: 0, first: 0, rows: lanes }.edge(0)
    }

    /// A product on every machine equals the plain loop, over factors that have nothing behind the edge.
    fn check([m, n, k]: [usize; 3], start: Start<'_>, transposed: bool, (group, past): (usize, usize), causal: Causal) {
        let (mut a, mut b, before) = (integers(m * k, 1), integers(k * n, 2), integers(m * n, 3));
        let meets = |key: usize, lane: usize| key <= past + lane / group;
        let at = |i: usize, d: usize| if transposed { d * m + i } else { i * k + d };
        match causal {
            Causal::Target(_) => {}
            Causal::Left(_) => (0..m * k).filter(|i| !meets(i / k, i % k)).for_each(|i| a[at(i / k, i % k)] = 0.0),
            Causal::Right(_) => (0..k * n).filter(|i| !meets(i / n, i % n)).for_each(|i| b[i] = 0.0),
        }
        let expected = |i: usize, j: usize| {
            let first = match start {
                Start::Zero => 0.0,
                Start::Kept => before[i * n + j],
                Start::Scaled(factors) => before[i * n + j] * factors[j],
            };
            first + (0..k).map(|d| a[at(i, d)] * b[d * n + j]).sum::<f32>()
        };
        let left = if transposed { Left::rows(&a, m).transposed() } else { Left::rows(&a, k) };
        for machine in 0..3 {
            let mut target = before.clone();
            let product = Product { sizes: [m, n, k], left, right: &b, target: &mut target, start, causal };
            match machine {
                0 => product.with_simd(Scalar),
                1 => narrow(product),
                _ => Arch::new().dispatch(product),
            }
            let needed = (0..m * n).filter(|i| !matches!(causal, Causal::Target(_)) || meets(i / n, i % n));
            needed.for_each(|i| {
                assert_eq!(target[i], expected(i / n, i % n), "{m} {n} {k}, group {group}, past {past}: {i}");
            });
        }
    }

    #[test]
    fn products_of_every_size_start_layout_and_edge_equal_the_plain_loop() {
        let factors = integers(80, 4);
        for sizes in [[1, 16, 1], [3, 16, 5], [8, 32, 3], [13, 48, 7], [64, 64, 64], [9, 80, 1]] {
            for start in [Start::Zero, Start::Kept, Start::Scaled(&factors)] {
                for transposed in [false, true] {
                    for (group, past) in [(1, 0), (4, 0), (3, 2), (1, 1000)] {
                        let [by_n, by_k] = [sizes[1], sizes[2]].map(|lanes| edge(lanes, group, past));
                        for causal in [Causal::Target(by_n), Causal::Left(by_k), Causal::Right(by_n)] {
                            check(sizes, start, transposed, (group, past), causal);
                        }
                    }
                }
            }
        }
    }

    /// How much is left out shows in what stays as it was.
    #[test]
    fn scores_behind_the_edge_are_not_computed() {
        let mut target = [7.0; 32 * 64];
        let (left, right) = ([1.0; 32], [1.0; 64]);
        let product = Product {
            sizes: [32, 64, 1],
            left: Left::rows(&left, 1),
            right: &right,
            target: &mut target,
            start: Start::Zero,
            causal: Causal::Target(edge(64, 2, 0)),
        };
        Arch::new().dispatch(product);
        let last_key = &target[31 * 64..];
        assert_eq!((last_key[..32].iter().all(|&score| score == 7.0), last_key[63]), (true, 1.0));
    }
}
