//! Micro-kernels: an MR x NR tile of `out`, accumulated in registers over KC words.
//!
//! With AVX-512, 14 x 2 vectors of 16 f32 are 28 accumulators; two registers hold the words of B and one, broadcast,
//! that of A: 31 of 32. Each step loads 2 vectors and 14 scalars for 28 multiply-adds, so that the multiply-add ports
//! are the limit. With 16 registers (AVX2) 6 x 2 are 12 + 2 + 1.

use pulp::{Simd, WithSimd};

use super::operand::{AOperand, PanelOperand};
use crate::Element;

/// Elements that the largest tile may have, 32 x 32.
pub(super) const MAX_TILE: usize = 1024;

/// Multiplies a panel of A and a panel of B into a tile.
pub(super) trait MicroKernel: Copy + Send + Sync {
    /// The instruction set of the loops around it.
    type Simd: Simd;
    /// Rows of a tile at most: those of a panel of A.
    const MR: usize;
    /// Columns of a tile: those of a panel of B.
    const NR: usize;
    /// Elements of K in one packed word.
    const KR: usize;
    /// KC: words of K in a panel at most. A panel of B, KC x 32 words, is 128 KiB and comes from L2; longer ones would
    /// leave it.
    const KC_WORDS: usize = 1024;
    /// Words of K that are multiplied at a time: zeros complete the last ones of a panel.
    const WORD_STEP: usize = 1;
    /// Rows that are multiplied at a time: all panels of A but the last are a multiple of it.
    const ROW_STEP: usize = 1;
    /// Panels of an A block at most, MC / MR, times [`Blocks::a_factor`](super::blocks::Blocks::a_factor): the rows of
    /// more would be in more pages than Zen's L1 TLB has entries (64).
    const A_BLOCK_PANELS: usize = 4;
    /// Words of an A block, MC x KC, times the same: 256 or 512 KiB, which stay in a core's L2 cache while all panels of
    /// B pass.
    const A_BLOCK_WORDS: usize = 1 << 16;
    /// Whether a row of A must have its words side by side.
    const READS_ROWS: bool = false;
    /// Words from row to row of packed rows: at a power of two apart all rows would map to the same cache sets.
    const ROW_STRIDE: usize = Self::KC_WORDS + 16;

    fn simd(self) -> Self::Simd;

    /// Runs loops over tiles, with the processor set up for them.
    #[inline(always)]
    fn run(self, loops: impl FnOnce()) {
        loops();
    }

    /// Packs an element, or two successive ones of K, into a word.
    fn pack<E: Element>(first: E, second: E) -> f32;

    /// Returns the rows that a tile of this many is computed with: those of a compiled variant, at least as many.
    fn height(rows: usize) -> usize;

    /// `tile[i * NR + j]` = sum over `words` of `a(word, i) * b(word, j)`, for [`MicroKernel::height`] of `rows` rows
    /// i.
    fn multiply(self, rows: usize, words: usize, a: impl AOperand, b: PanelOperand<'_>, tile: &mut [f32; MAX_TILE]);
}

/// The f32 micro-kernel: tiles of R rows of V vectors.
#[derive(Clone, Copy)]
pub(super) struct F32Kernel<S, const R: usize, const V: usize>(pub(super) S);

impl<S: Simd, const R: usize, const V: usize> MicroKernel for F32Kernel<S, R, V> {
    type Simd = S;
    const MR: usize = R;
    const NR: usize = V * S::F32_LANES;
    const KR: usize = 1;

    fn simd(self) -> S {
        self.0
    }

    #[inline(always)]
    fn pack<E: Element>(first: E, _: E) -> f32 {
        first.widen()
    }

    /// Returns a height with a compiled variant: full panels, those one or two rows lower that dividing M evenly gives,
    /// and a few low ones.
    fn height(rows: usize) -> usize {
        [4, 5, 6, 12, 13].into_iter().find(|&height| (rows..R).contains(&height)).unwrap_or(R)
    }

    #[inline(always)]
    fn multiply(self, rows: usize, words: usize, a: impl AOperand, b: PanelOperand<'_>, tile: &mut [f32; MAX_TILE]) {
        match Self::height(rows) {
            4 => self.0.vectorize(F32Tile::<_, 4, V> { words, a, b, tile }),
            5 => self.0.vectorize(F32Tile::<_, 5, V> { words, a, b, tile }),
            6 if R > 6 => self.0.vectorize(F32Tile::<_, 6, V> { words, a, b, tile }),
            12 if R > 6 => self.0.vectorize(F32Tile::<_, 12, V> { words, a, b, tile }),
            13 if R > 6 => self.0.vectorize(F32Tile::<_, 13, V> { words, a, b, tile }),
            _ => self.0.vectorize(F32Tile::<_, R, V> { words, a, b, tile }),
        }
    }
}

/// The computation of one tile of exactly R rows.
struct F32Tile<'a, A, const R: usize, const V: usize> {
    words: usize,
    a: A,
    b: PanelOperand<'a>,
    tile: &'a mut [f32; MAX_TILE],
}

impl<A: AOperand, const R: usize, const V: usize> WithSimd for F32Tile<'_, A, R, V> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let mut accumulators = [[simd.splat_f32s(0.0); V]; R];
        let (a, b) = (self.a.reader::<R>(self.words), self.b.reader_of(self.words, V * S::F32_LANES));
        for word in 0..self.words {
            let b = S::as_simd_f32s(b(word)).0;
            for (i, accumulators) in accumulators.iter_mut().enumerate() {
                let a = simd.splat_f32s(a(word, i));
                for j in 0..V {
                    accumulators[j] = simd.mul_add_e_f32s(a, b[j], accumulators[j]);
                }
            }
        }
        // Loops over constant bounds are unrolled: only then does the compiler keep the accumulators in registers until
        // here.
        let rows: &mut [[S::f32s; V]; R] =
            S::as_mut_simd_f32s(self.tile).0.as_chunks_mut().0.first_chunk_mut().expect("there is room for a tile");
        for i in 0..R {
            for j in 0..V {
                rows[i][j] = accumulators[i][j];
            }
        }
    }
}
