//! The GEMMs of attention tiles on AMX, for bf16: operands are rounded to bf16, as on a GPU, and sums are f32.
//!
//! ```text
//! for 64 columns: the right operand as words of two elements of K         64 words x 64 columns
//!   for 128 elements of K
//!     for 16 rows: the left operand's words by row                        16 rows x 64 words
//!       tmm0..tmm3 (16 x 64) += tmm4 tmm5 (16 rows x 32 K, 32 K x 16 columns), for 32 elements of K at a time
//! ```
//! Packing takes longer than multiplying: 64 x 64 x 64 are 512 cycles of `tdpbf16ps`, and 8,192 of f32 multiply-adds.

use std::arch::asm;
use std::ops::Range;

use pulp::Simd;

use super::operand::LeftOperand;
use super::tile_gemm::{Causal, Start, TileGemm};
use crate::cpu::amx::{Amx, TILE_ROWS, TILE_WORDS};
use crate::cpu::simd::{Body, bf16_pair};
use crate::cpu::transpose::{SIDE, transpose};

/// Columns of a block.
const COLUMNS: usize = 64;
/// Words of K in a block, two elements each.
const WORDS: usize = 64;

/// The right operand's words of a block, `[word][column]`.
#[repr(align(64))]
struct Right([[f32; COLUMNS]; WORDS]);

/// The left operand's words of 16 rows.
#[repr(align(64))]
struct Left([[f32; WORDS]; TILE_ROWS]);

/// Sums of 16 rows.
#[repr(align(64))]
struct Sums([[f32; COLUMNS]; TILE_ROWS]);

/// [`super::tile_gemm::tile_gemm`] on AMX, between operands rounded to bf16. The tiles are configured.
pub(super) fn multiply(amx: Amx, mut gemm: TileGemm<'_>) {
    let vectorised = Body(
        #[inline(always)]
        || multiply_vectorised(&mut gemm),
    );
    Simd::vectorize(amx.simd(), vectorised);
}

#[inline(always)]
fn multiply_vectorised(gemm: &mut TileGemm<'_>) {
    let TileGemm { sizes: [m, n, k], left, right, ref mut target, start, causal } = *gemm;
    let (mut packed_right, mut packed_left) = (Right([[0.0; COLUMNS]; WORDS]), Left([[0.0; WORDS]; TILE_ROWS]));
    let mut sums = Sums([[0.0; COLUMNS]; TILE_ROWS]);
    for column in (0..n).step_by(COLUMNS) {
        let columns = COLUMNS.min(n - column);
        // What the mask excludes of the output is skipped by rows of tiles; masked elements of an operand are zero.
        let rows = if let Causal::Output(mask) = causal { m.min(mask.visible_keys(column + columns - 1)) } else { m };
        for depth in (0..k).step_by(2 * WORDS) {
            let elements = (2 * WORDS).min(k - depth);
            let steps = elements.div_ceil(2 * TILE_WORDS);
            pack_right(&right[depth * n + column..], n, columns, elements, steps, &mut packed_right);
            for row in (0..rows).step_by(TILE_ROWS) {
                let height = TILE_ROWS.min(m - row);
                pack_left(left, row, height, depth..depth + elements, steps, &mut packed_left);
                let target = &mut target[row * n + column..];
                let block = target.chunks_mut(n).zip(&mut sums.0).take(height);
                block.for_each(|(target, sums)| match (depth, start) {
                    (0, Start::Zero) => sums[..columns].fill(0.0),
                    (0, Start::Scaled(factors)) => {
                        let values = target[..columns].iter().zip(&factors[column..]);
                        sums.iter_mut().zip(values).for_each(|(sum, (value, factor))| *sum = value * factor);
                    }
                    _ => sums[..columns].copy_from_slice(&target[..columns]),
                });
                // SAFETY: the buffers hold `steps` tiles, and this function's caller has configured the tiles.
                unsafe { add_products(steps, &packed_left, &packed_right, &mut sums) };
                let block = target.chunks_mut(n).zip(&sums.0).take(height);
                block.for_each(|(target, sums)| target[..columns].copy_from_slice(&sums[..columns]));
            }
        }
    }
}

/// Packs `elements` rows of the right operand, `stride` apart; zeros follow up to whole tiles.
#[inline(always)]
fn pack_right(right: &[f32], stride: usize, columns: usize, elements: usize, steps: usize, packed: &mut Right) {
    const ZEROS: [f32; COLUMNS] = [0.0; COLUMNS];
    for (word, words) in packed.0[..steps * TILE_WORDS].iter_mut().enumerate() {
        let row = |k: usize| if k < elements { &right[k * stride..][..columns] } else { &ZEROS[..columns] };
        let pairs = row(2 * word).iter().zip(row(2 * word + 1));
        words.iter_mut().zip(pairs).for_each(|(word, (&first, &second))| *word = bf16_pair(first, second));
    }
}

/// Packs 16 rows of the left operand, or `height`; zeros follow up to whole tiles.
#[inline(always)]
fn pack_left(left: LeftOperand<'_>, row: usize, height: usize, depth: Range<usize>, steps: usize, packed: &mut Left) {
    let LeftOperand { values, row_stride, depth_stride } = left;
    let values = &values[row * row_stride + depth.start * depth_stride..];
    if depth_stride == 1 {
        for (row, words) in packed.0[..height].iter_mut().enumerate() {
            let (pairs, odd) = values[row * row_stride..][..depth.len()].as_chunks::<2>();
            words[pairs.len()..steps * TILE_WORDS].fill(0.0);
            words.iter_mut().zip(pairs).for_each(|(word, pair)| *word = bf16_pair(pair[0], pair[1]));
            if let &[last] = odd {
                words[pairs.len()] = bf16_pair(last, 0.0);
            }
        }
        return;
    }
    // Rows side by side: words of 16 rows at a time, transposed.
    let mut square = [[0.0; SIDE]; SIDE];
    for first in (0..steps * TILE_WORDS).step_by(SIDE) {
        for (word, words) in square.iter_mut().enumerate() {
            let element = |k: usize, row: usize| {
                if k < depth.len() { values[k * depth_stride + row * row_stride] } else { 0.0 }
            };
            let k = 2 * (first + word);
            for (row, word) in words[..height].iter_mut().enumerate() {
                *word = bf16_pair(element(k, row), element(k + 1, row));
            }
        }
        transpose(square.as_flattened(), SIDE, &mut packed.0.as_flattened_mut()[first..], WORDS);
    }
}

/// `sums += left right` over steps of 32 elements of K.
///
/// # Safety
/// The tiles are configured as whole ones, and there are 1 to 4 steps.
#[inline(always)]
unsafe fn add_products(steps: usize, left: &Left, right: &Right, sums: &mut Sums) {
    const STRIDE: usize = COLUMNS * size_of::<f32>();
    debug_assert!((1..=WORDS / TILE_WORDS).contains(&steps));
    // SAFETY: every address is inside of the buffers, whose rows are all `STRIDE` bytes apart.
    unsafe {
        asm!(
            "tileloadd tmm0, [{sums} + {stride}*1]",
            "tileloadd tmm1, [{sums} + {stride}*1 + 64]",
            "tileloadd tmm2, [{sums} + {stride}*1 + 128]",
            "tileloadd tmm3, [{sums} + {stride}*1 + 192]",
            "2:",
            "tileloadd tmm4, [{left} + {stride}*1]",
            "tileloadd tmm5, [{right} + {stride}*1]",
            "tdpbf16ps tmm0, tmm4, tmm5",
            "tileloadd tmm6, [{right} + {stride}*1 + 64]",
            "tdpbf16ps tmm1, tmm4, tmm6",
            "tileloadd tmm5, [{right} + {stride}*1 + 128]",
            "tdpbf16ps tmm2, tmm4, tmm5",
            "tileloadd tmm6, [{right} + {stride}*1 + 192]",
            "tdpbf16ps tmm3, tmm4, tmm6",
            "add {left}, 64",
            "add {right}, 4096",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{sums} + {stride}*1], tmm0",
            "tilestored [{sums} + {stride}*1 + 64], tmm1",
            "tilestored [{sums} + {stride}*1 + 128], tmm2",
            "tilestored [{sums} + {stride}*1 + 192], tmm3",
            sums = in(reg) sums.0.as_mut_ptr(),
            left = inout(reg) left.0.as_ptr() => _,
            right = inout(reg) right.0.as_ptr() => _,
            stride = in(reg) STRIDE,
            steps = inout(reg) steps => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
            options(nostack),
        );
    }
}
