//! The micro-kernel of bf16 operands: AVX-512's dot product of two bf16 pairs per lane, twice the FLOPs of an f32
//! multiply-add.

use std::arch::x86_64::{
    __m512, __m512bh, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
};

use pulp::x86::V4;

use super::micro_kernel::{MAX_TILE, MicroKernel};
use super::operand::{AOperand, PanelOperand};
use crate::Element;
use crate::cpu::simd::bf16_pair;

/// Rows of a tile: with two vectors each, 28 of the 32 registers are accumulators, as in the f32 kernel.
const MR: usize = 14;
const VECTORS: usize = 2;
/// Words of a vector.
const LANES: usize = 16;

/// The bf16 micro-kernel. Words hold two elements of K, the first in the lower half, as the instruction reads them.
#[derive(Clone, Copy)]
pub(super) struct Bf16Kernel(V4);

impl Bf16Kernel {
    pub(super) fn if_available() -> Option<Self> {
        V4::try_new().filter(|_| is_x86_feature_detected!("avx512bf16")).map(Self)
    }
}

impl MicroKernel for Bf16Kernel {
    type Simd = V4;
    const MR: usize = MR;
    const NR: usize = VECTORS * LANES;
    const KR: usize = 2;

    fn simd(self) -> V4 {
        self.0
    }

    #[inline(always)]
    fn pack<E: Element>(first: E, second: E) -> f32 {
        bf16_pair(first, second)
    }

    fn height(rows: usize) -> usize {
        match rows {
            ..=4 => 4,
            5..=12 => 12,
            _ => rows.min(MR),
        }
    }

    #[inline(always)]
    fn multiply(self, rows: usize, words: usize, a: impl AOperand, b: PanelOperand<'_>, tile: &mut [f32; MAX_TILE]) {
        // SAFETY: the CPU has the instructions, or there would be no `Bf16Kernel`.
        unsafe {
            match Self::height(rows) {
                4 => multiply::<4>(words, a, b, tile),
                12 => multiply::<12>(words, a, b, tile),
                13 => multiply::<13>(words, a, b, tile),
                _ => multiply::<MR>(words, a, b, tile),
            }
        }
    }
}

/// Computes one tile of exactly R rows.
#[target_feature(enable = "avx512f,avx512bf16")]
fn multiply<const R: usize>(count: usize, a: impl AOperand, b: PanelOperand<'_>, tile: &mut [f32; MAX_TILE]) {
    let mut accumulators = [[_mm512_setzero_ps(); VECTORS]; R];
    let (a, b) = (a.reader::<R>(count), b.reader_of(count, VECTORS * LANES));
    for word in 0..count {
        let b = vectors(b(word));
        for (i, accumulators) in accumulators.iter_mut().enumerate() {
            add(accumulators, a(word, i), b);
        }
    }
    let (vectors, _) = tile.as_chunks_mut::<LANES>();
    // Rows of constant length: only then does the compiler keep the accumulators in registers until here.
    for (row, accumulators) in vectors.as_chunks_mut::<VECTORS>().0.iter_mut().zip(&accumulators) {
        for (vector, &accumulator) in row.iter_mut().zip(accumulators) {
            // SAFETY: `vector` is 16 f32.
            unsafe { _mm512_storeu_ps(vector.as_mut_ptr(), accumulator) };
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn vectors(words: &[f32]) -> [__m512bh; VECTORS] {
    let (first, second) = (words[..LANES].as_ptr(), words[LANES..].as_ptr());
    // SAFETY: both slices have 16 words.
    unsafe { [pairs(_mm512_loadu_ps(first)), pairs(_mm512_loadu_ps(second))] }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn add(accumulators: &mut [__m512; VECTORS], a: f32, b: [__m512bh; VECTORS]) {
    let a = pairs(_mm512_set1_ps(a));
    accumulators[0] = _mm512_dpbf16_ps(accumulators[0], a, b[0]);
    accumulators[1] = _mm512_dpbf16_ps(accumulators[1], a, b[1]);
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn pairs(bits: __m512) -> __m512bh {
    // SAFETY: both types are 512 plain bits.
    unsafe { std::mem::transmute(bits) }
}
