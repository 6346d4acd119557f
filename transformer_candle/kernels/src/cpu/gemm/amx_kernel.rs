//! The micro-kernel of AMX (`cpu/amx.rs`): a tile of 32 x 32 in four of the eight tile registers.
//!
//! ```text
//! tmm0 tmm1   += tmm4   tmm6 tmm7      rows  0..16 of A, columns 0..16 and 16..32 of B
//! tmm2 tmm3      tmm5                  rows 16..32
//! ```
//! A step of 32 elements of K loads four tiles and multiplies four times. A panel of B, 32 KiB, stays in L1 while
//! those of an A block pass from L2. A row of A is read where it lies, or packed as a row.

use std::arch::asm;

use pulp::x86::V4;

use super::micro_kernel::{MAX_TILE, MicroKernel};
use super::operand::{AOperand, PanelOperand, Strided};
use crate::Element;
use crate::cpu::amx::{Amx, TILE_ROWS, TILE_WORDS};
use crate::cpu::simd::bf16_pair;

const MR: usize = 2 * TILE_ROWS;
const NR: usize = 2 * TILE_WORDS;

#[derive(Clone, Copy)]
pub(super) struct AmxKernel(pub(super) Amx);

impl MicroKernel for AmxKernel {
    type Simd = V4;
    const MR: usize = MR;
    const NR: usize = NR;
    const KR: usize = 2;
    const KC_WORDS: usize = 256;
    const WORD_STEP: usize = TILE_WORDS;
    const ROW_STEP: usize = TILE_ROWS;
    const A_BLOCK_PANELS: usize = 8;
    const READS_ROWS: bool = true;

    fn simd(self) -> V4 {
        self.0.simd()
    }

    #[inline(always)]
    fn run(self, loops: impl FnOnce()) {
        self.0.with_tiles(loops);
    }

    #[inline(always)]
    fn pack<E: Element>(first: E, second: E) -> f32 {
        bf16_pair(first, second)
    }

    fn height(rows: usize) -> usize {
        rows.next_multiple_of(TILE_ROWS)
    }

    #[inline(always)]
    fn multiply(self, rows: usize, words: usize, a: impl AOperand, b: PanelOperand<'_>, tile: &mut [f32; MAX_TILE]) {
        let (a, height) = (a.strided(), Self::height(rows));
        assert!(a.word_step == 1 && words > 0 && words.is_multiple_of(TILE_WORDS) && height <= MR);
        assert!(a.holds(height, words) && (words - 1) * b.stride + NR <= b.words.len());
        // A tile of 16 rows is computed twice: rows of their own for the lower half may not be there.
        let lower = if height == MR { TILE_ROWS * a.row_step } else { 0 };
        // SAFETY: the operands hold the rows and words, as asserted, and `tile` 32 rows; `run` has configured the tiles.
        unsafe { multiply(words / TILE_WORDS, a, lower, b, tile) };
    }
}

/// Computes two times 16 rows of 32 columns over this many steps of K; the second rows begin at word `lower` of A.
///
/// # Safety
/// The operands hold the rows, 32 columns and the steps; the tiles are configured.
#[inline(always)]
unsafe fn multiply(steps: usize, a: Strided<'_>, lower: usize, b: PanelOperand<'_>, tile: &mut [f32; MAX_TILE]) {
    // SAFETY: as promised by the caller.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm6, [{b} + {b_stride}*1]",
            "tileloadd tmm4, [{a} + {a_stride}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {b_stride}*1 + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{lower} + {a_stride}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 64",
            "add {lower}, 64",
            "add {b}, {b_step}",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{tile} + {tile_stride}*1], tmm0",
            "tilestored [{tile} + {tile_stride}*1 + 64], tmm1",
            "tilestored [{tile} + {tile_stride}*1 + 2048], tmm2",
            "tilestored [{tile} + {tile_stride}*1 + 2112], tmm3",
            a = inout(reg) a.words.as_ptr() => _,
            lower = inout(reg) a.words.as_ptr().add(lower) => _,
            a_stride = in(reg) a.row_step * size_of::<f32>(),
            b = inout(reg) b.words.as_ptr() => _,
            b_stride = in(reg) b.stride * size_of::<f32>(),
            b_step = in(reg) b.stride * size_of::<f32>() * TILE_WORDS,
            steps = inout(reg) steps => _,
            tile = in(reg) tile.as_mut_ptr(),
            tile_stride = in(reg) NR * size_of::<f32>(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
