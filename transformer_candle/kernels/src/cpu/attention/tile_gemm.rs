//! The GEMMs of attention tiles, at most 64 x 128 x 128: f32, one thread, operands in L1 and unpacked.
//!
//! ```text
//! for two vectors of columns (one at the end)
//!   for 8 rows (4 with 16 registers, 1 at the end)
//!     2 x 8 accumulators in registers += 2 vectors of the right operand times 8 scalars of the left one, K times
//! ```
//! 16 accumulators, 2 vectors and a broadcast scalar are 19 of AVX-512's 32 registers, and enough independent sums to
//! hide the latency of a multiply-add. Parts above the causal mask are skipped: half of the work of a tile on the
//! diagonal.

use std::ops::Range;

use pulp::{Simd, WithSimd};

#[cfg(target_arch = "x86_64")]
use super::amx_tile_gemm;
use super::operand::{COLUMNS, LeftOperand};
use super::query_tile::CausalMask;
use crate::cpu::amx::Amx;

/// The initial value of the output, to which the result is added.
#[derive(Clone, Copy)]
pub(super) enum Start<'a> {
    /// Nothing: the output is overwritten.
    Zero,
    /// The output's values.
    Output,
    /// The output's values, each column times its factor.
    Scaled(&'a [f32]),
}

/// Which matrix of the GEMM has keys as rows and query rows as columns, and so a causal mask. What the mask excludes is
/// skipped, except within register tiles that it cuts through.
#[derive(Clone, Copy)]
pub(super) enum Causal {
    /// The output: masked elements are left as they were.
    Output(CausalMask),
    /// The left operand: masked elements are zero.
    Left(CausalMask),
    /// The right operand: masked elements are zero.
    Right(CausalMask),
}

/// What computes a tile GEMM: vectors of f32, or AMX between operands rounded to bf16, its tiles configured.
#[derive(Clone, Copy)]
pub(super) struct Units<S> {
    pub(super) simd: S,
    pub(super) amx: Option<Amx>,
}

/// `out_MN = start + left_MK right_KN` for `[m, n, k]`, n a multiple of [`COLUMNS`]. In vectors every element is one sum
/// over k in ascending order, for every width.
#[inline(always)]
pub(super) fn tile_gemm<S: Simd>(
    units: Units<S>,
    sizes: [usize; 3],
    left: LeftOperand<'_>,
    right: &[f32],
    target: &mut [f32],
    start: Start<'_>,
    causal: Causal,
) {
    let gemm = TileGemm { sizes, left, right, target, start, causal };
    #[cfg(target_arch = "x86_64")]
    if let Some(amx) = units.amx {
        return amx_tile_gemm::multiply(amx, gemm);
    }
    units.simd.vectorize(gemm);
}

pub(super) struct TileGemm<'a> {
    pub(super) sizes: [usize; 3],
    pub(super) left: LeftOperand<'a>,
    pub(super) right: &'a [f32],
    pub(super) target: &'a mut [f32],
    pub(super) start: Start<'a>,
    pub(super) causal: Causal,
}

impl WithSimd for TileGemm<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let ([m, n, k], lanes) = (self.sizes, S::F32_LANES);
        if m == 0 || n == 0 || k == 0 {
            return;
        }
        let LeftOperand { values, row_stride, depth_stride } = self.left;
        assert!(
            (m - 1) * row_stride + (k - 1) * depth_stride < values.len(),
            "the left operand is smaller than its sizes"
        );
        assert!(k * n <= self.right.len() && m * n <= self.target.len(), "a matrix is smaller than its sizes");
        assert!(n.is_multiple_of(COLUMNS) && COLUMNS.is_multiple_of(lanes), "columns do not fill whole vectors");
        assert!(!matches!(self.start, Start::Scaled(factors) if factors.len() < n), "a factor is missing");
        let mut column = 0;
        while column + 2 * lanes <= n {
            // SAFETY: the slices hold the sizes, as asserted, and the columns are below n.
            unsafe { self.column_block::<S, 2>(simd, column) };
            column += 2 * lanes;
        }
        while column < n {
            // SAFETY: as above; n is a multiple of `lanes`.
            unsafe { self.column_block::<S, 1>(simd, column) };
            column += lanes;
        }
    }
}

impl TileGemm<'_> {
    /// Computes all rows of V vectors of columns.
    ///
    /// # Safety
    /// The slices hold the sizes, and the columns from `column` on are below n.
    #[inline(always)]
    unsafe fn column_block<S: Simd, const V: usize>(&mut self, simd: S, column: usize) {
        let (m, mut row) = (self.rows(column + V * S::F32_LANES), 0);
        // SAFETY: the rows of every register tile are below m; the rest is this function's own condition.
        unsafe {
            while S::REGISTER_COUNT >= 32 && row + 8 <= m {
                self.register_tile::<S, 8, V>(simd, row, column);
                row += 8;
            }
            while row + 4 <= m {
                self.register_tile::<S, 4, V>(simd, row, column);
                row += 4;
            }
            while row < m {
                self.register_tile::<S, 1, V>(simd, row, column);
                row += 1;
            }
        }
    }

    /// The number of rows that the mask leaves in the columns before `end`.
    #[inline(always)]
    fn rows(&self, end: usize) -> usize {
        let m = self.sizes[0];
        if let Causal::Output(mask) = self.causal { m.min(mask.visible_keys(end - 1)) } else { m }
    }

    /// The range of k that the mask leaves for rows from `row` on and columns before `end`.
    #[inline(always)]
    fn depth(&self, row: usize, end: usize) -> Range<usize> {
        let k = self.sizes[2];
        match self.causal {
            Causal::Left(mask) => mask.masked_rows(row).min(k)..k,
            Causal::Right(mask) => 0..k.min(mask.visible_keys(end - 1)),
            Causal::Output(_) => 0..k,
        }
    }

    /// Computes R rows of V vectors of columns, accumulated in registers over all of K.
    ///
    /// # Safety
    /// As for `column_block`, and the rows from `row` on are below m.
    #[inline(always)]
    unsafe fn register_tile<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, row: usize, column: usize) {
        let ([_, n, _], LeftOperand { values, row_stride, depth_stride }) = (self.sizes, self.left);
        let mut sums = [[simd.splat_f32s(0.0); V]; R];
        // SAFETY: every offset is below the sizes, which the slices hold; loads and stores are unaligned.
        unsafe {
            let left = values.as_ptr().add(row * row_stride);
            let right = self.right.as_ptr().add(column);
            let target = self.target.as_mut_ptr().add(row * n + column);
            match self.start {
                Start::Zero => {}
                Start::Output => each(&mut sums, |i, v, sum| {
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

/// Calls `body` with the row, the vector and the accumulator of each; unrolled, since R and V are constants.
#[inline(always)]
fn each<T, const R: usize, const V: usize>(sums: &mut [[T; V]; R], mut body: impl FnMut(usize, usize, &mut T)) {
    for (i, row) in sums.iter_mut().enumerate() {
        for (v, sum) in row.iter_mut().enumerate() {
            body(i, v, sum);
        }
    }
}

/// # Safety
/// `source` points to a full vector of elements.
#[inline(always)]
unsafe fn load<V: Copy>(source: *const f32) -> V {
    // SAFETY: this function's own condition.
    unsafe { source.cast::<V>().read_unaligned() }
}

#[cfg(test)]
mod tests {
    use pulp::{Arch, Scalar};

    use super::super::query_tile::{CallShape, QueryTile};
    use super::*;
    use crate::HeadLayout;

    /// Runs a GEMM with AVX2, where the CPU has it: half the registers of AVX-512, half as wide.
    fn narrow(gemm: TileGemm<'_>) {
        #[cfg(target_arch = "x86_64")]
        if let Some(simd) = pulp::x86::V3::try_new() {
            return Simd::vectorize(simd, gemm);
        }
        Arch::new().dispatch(gemm);
    }

    /// Runs a GEMM on AMX, or on its emulator.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    fn on_amx(gemm: TileGemm<'_>) {
        let Some(amx) = Amx::or_emulated() else { return Arch::new().dispatch(gemm) };
        amx.with_tiles(|| amx_tile_gemm::multiply(amx, gemm));
    }

    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    fn on_amx(gemm: TileGemm<'_>) {
        Arch::new().dispatch(gemm);
    }

    enum Machine {
        Scalar,
        Narrow,
        Widest,
        Amx,
    }

    /// Small integers, which bf16 holds, so that every order of summing gives the same f32.
    fn integers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7 + seed * 13) % 17) as f32 - 8.0).collect()
    }

    /// The mask of a tile of `group` query heads, with `past` keys before its first query.
    fn causal_mask(rows: usize, group: usize, past: usize) -> CausalMask {
        let layout = HeadLayout { heads: group, kv_heads: 1, head_size: 1 };
        let shape = CallShape { layout, batch: 1, length: rows.div_ceil(group), past };
        QueryTile { shape, sequence: 0, kv_head: 0, first: 0, rows }.causal_mask(0)
    }

    /// Compares every vector width with the plain loop, over operands that are zero where the mask excludes them.
    fn check([m, n, k]: [usize; 3], start: Start<'_>, transposed: bool, (group, past): (usize, usize), causal: Causal) {
        let (mut a, mut b, before) = (integers(m * k, 1), integers(k * n, 2), integers(m * n, 3));
        let is_visible = |key: usize, row: usize| key <= past + row / group;
        let at = |i: usize, d: usize| if transposed { d * m + i } else { i * k + d };
        match causal {
            Causal::Output(_) => {}
            Causal::Left(_) => (0..m * k).filter(|i| !is_visible(i / k, i % k)).for_each(|i| a[at(i / k, i % k)] = 0.0),
            Causal::Right(_) => (0..k * n).filter(|i| !is_visible(i / n, i % n)).for_each(|i| b[i] = 0.0),
        }
        let expected = |i: usize, j: usize| {
            let first = match start {
                Start::Zero => 0.0,
                Start::Output => before[i * n + j],
                Start::Scaled(factors) => before[i * n + j] * factors[j],
            };
            first + (0..k).map(|d| a[at(i, d)] * b[d * n + j]).sum::<f32>()
        };
        let left = if transposed { LeftOperand::rows(&a, m).transposed() } else { LeftOperand::rows(&a, k) };
        for machine in [Machine::Scalar, Machine::Narrow, Machine::Widest, Machine::Amx] {
            let mut target = before.clone();
            let gemm = TileGemm { sizes: [m, n, k], left, right: &b, target: &mut target, start, causal };
            match machine {
                Machine::Scalar => gemm.with_simd(Scalar),
                Machine::Narrow => narrow(gemm),
                Machine::Widest => Arch::new().dispatch(gemm),
                Machine::Amx => on_amx(gemm),
            }
            let computed_indices =
                (0..m * n).filter(|i| !matches!(causal, Causal::Output(_)) || is_visible(i / n, i % n));
            computed_indices.for_each(|i| {
                assert_eq!(target[i], expected(i / n, i % n), "{m} {n} {k}, group {group}, past {past}: {i}");
            });
        }
    }

    #[test]
    fn every_size_start_layout_and_mask_equals_the_plain_loop() {
        let factors = integers(80, 4);
        for sizes in [[1, 16, 1], [3, 16, 5], [8, 32, 3], [13, 48, 7], [64, 64, 64], [9, 80, 1], [5, 64, 131]] {
            for start in [Start::Zero, Start::Output, Start::Scaled(&factors)] {
                for transposed in [false, true] {
                    for (group, past) in [(1, 0), (4, 0), (3, 2), (1, 1000)] {
                        let [by_n, by_k] = [sizes[1], sizes[2]].map(|rows| causal_mask(rows, group, past));
                        for causal in [Causal::Output(by_n), Causal::Left(by_k), Causal::Right(by_n)] {
                            check(sizes, start, transposed, (group, past), causal);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn masked_scores_are_not_computed() {
        let mut target = [7.0; 32 * 64];
        let (left, right) = ([1.0; 32], [1.0; 64]);
        let gemm = TileGemm {
            sizes: [32, 64, 1],
            left: LeftOperand::rows(&left, 1),
            right: &right,
            target: &mut target,
            start: Start::Zero,
            causal: Causal::Output(causal_mask(64, 2, 0)),
        };
        Arch::new().dispatch(gemm);
        let last_key = &target[31 * 64..];
        assert_eq!((last_key[..32].iter().all(|&score| score == 7.0), last_key[63]), (true, 1.0));
    }
}
