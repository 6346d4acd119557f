//! The f32 micro-kernel for processors whose panels of B come from L2: AVX-512 in assembly, with a prefetch.
//!
//! It computes what [`F32Kernel`] does, bit for bit. Rows of A lie `row_step` apart and words of K `word_step`, so that
//! one loop reads a packed panel as well as rows in place. The compiler has a pointer for each of 14 rows, more than
//! there are registers: here two pointers and three multiples of the distance reach them all.

use std::arch::asm;

use pulp::x86::V4;

use super::micro_kernel::{F32Kernel, MAX_TILE, MicroKernel};
use super::operand::{AOperand, PanelOperand, Strided};
use crate::Element;

/// Computes the same tiles, and those whose operand ends before their last row.
type Compiled = F32Kernel<V4, 14, 2>;

/// Words of K, 128 bytes of B each, between a prefetch and its use: those of some 200 cycles.
const WORDS_AHEAD: usize = 16;

/// Tiles of 14 x 32, as [`F32Kernel`] has with AVX-512.
#[derive(Clone, Copy)]
pub(super) struct Avx512Kernel(pub(super) V4);

impl MicroKernel for Avx512Kernel {
    type Simd = V4;
    const MR: usize = Compiled::MR;
    const NR: usize = Compiled::NR;
    const KR: usize = Compiled::KR;

    fn simd(self) -> V4 {
        self.0
    }

    #[inline(always)]
    fn pack<E: Element>(first: E, second: E) -> f32 {
        Compiled::pack(first, second)
    }

    fn height(rows: usize) -> usize {
        Compiled::height(rows)
    }

    #[inline(always)]
    fn multiply(self, rows: usize, words: usize, a: impl AOperand, b: PanelOperand<'_>, tile: &mut [f32; MAX_TILE]) {
        let strided = a.strided();
        if !strided.holds(Self::height(rows), words) {
            return F32Kernel::<V4, 14, 2>(self.0).multiply(rows, words, a, b, tile);
        }
        assert!(words > 0 && (words - 1) * b.stride + Self::NR <= b.words.len());
        // SAFETY: the operands hold the rows, columns and words, and the CPU has AVX-512, or there would be no `V4`.
        unsafe {
            match Self::height(rows) {
                4 => multiply_4(words, strided, b, tile),
                5 => multiply_5(words, strided, b, tile),
                6 => multiply_6(words, strided, b, tile),
                12 => multiply_12(words, strided, b, tile),
                13 => multiply_13(words, strided, b, tile),
                _ => multiply_14(words, strided, b, tile),
            }
        }
    }
}

/// Defines a function that computes a tile of these rows, each with its two accumulators and its address in A.
///
/// The functions are unsafe: the operands must hold the rows, 32 columns and this many words, at least one.
macro_rules! tile_of_rows {
    ($name:ident, $(($first:literal, $second:literal, $address:literal))*) => {
        #[target_feature(enable = "avx512f")]
        unsafe fn $name(words: usize, a: Strided<'_>, b: PanelOperand<'_>, tile: &mut [f32; MAX_TILE]) {
            let b_step = b.stride * size_of::<f32>();
            // SAFETY: as promised by the caller; prefetches may be of any address.
            unsafe {
                asm!(
                    "lea {row3}, [{row} + 2*{row}]",
                    "lea {row5}, [{row} + 4*{row}]",
                    "lea {seventh}, [{a} + 4*{row}]",
                    "add {seventh}, {row3}",
                    $(
                        concat!("vpxord zmm", $first, ", zmm", $first, ", zmm", $first),
                        concat!("vpxord zmm", $second, ", zmm", $second, ", zmm", $second),
                    )*
                    "2:",
                    "prefetcht0 [{b} + {ahead}]",
                    "prefetcht0 [{b} + {ahead} + 64]",
                    "vmovups zmm28, [{b}]",
                    "vmovups zmm29, [{b} + 64]",
                    $(
                        concat!("vbroadcastss zmm30, dword ptr [", $address, "]"),
                        concat!("vfmadd231ps zmm", $first, ", zmm28, zmm30"),
                        concat!("vfmadd231ps zmm", $second, ", zmm29, zmm30"),
                    )*
                    "add {a}, {word}",
                    "add {seventh}, {word}",
                    "add {b}, {b_step}",
                    "dec {words}",
                    "jnz 2b",
                    $(
                        concat!("vmovups [{tile} + 64*", $first, "], zmm", $first),
                        concat!("vmovups [{tile} + 64*", $second, "], zmm", $second),
                    )*
                    a = inout(reg) a.words.as_ptr() => _,
                    row = in(reg) a.row_step * size_of::<f32>(),
                    word = in(reg) a.word_step * size_of::<f32>(),
                    b = inout(reg) b.words.as_ptr() => _,
                    b_step = in(reg) b_step,
                    ahead = in(reg) WORDS_AHEAD * b_step,
                    words = inout(reg) words => _,
                    tile = in(reg) tile.as_mut_ptr(),
                    row3 = out(reg) _, row5 = out(reg) _, seventh = out(reg) _,
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
                    out("zmm6") _, out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
                    out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _, out("zmm16") _, out("zmm17") _,
                    out("zmm18") _, out("zmm19") _, out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _,
                    out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm28") _, out("zmm29") _,
                    out("zmm30") _,
                    options(nostack),
                );
            }
        }
    };
}

/// Defines the functions named behind a row, of all rows up to it.
macro_rules! tiles_up_to {
    ([$($rows:tt)*]) => {};
    ([$($rows:tt)*] $row:tt, $($rest:tt)*) => { tiles_up_to!([$($rows)* $row] $($rest)*); };
    ([$($rows:tt)*] $row:tt => $name:ident, $($rest:tt)*) => {
        tile_of_rows!($name, $($rows)* $row);
        tiles_up_to!([$($rows)* $row] $($rest)*);
    };
}

tiles_up_to! { []
    (0, 1, "{a}"),
    (2, 3, "{a} + {row}"),
    (4, 5, "{a} + 2*{row}"),
    (6, 7, "{a} + {row3}") => multiply_4,
    (8, 9, "{a} + 4*{row}") => multiply_5,
    (10, 11, "{a} + {row5}") => multiply_6,
    (12, 13, "{a} + 2*{row3}"),
    (14, 15, "{seventh}"),
    (16, 17, "{seventh} + {row}"),
    (18, 19, "{seventh} + 2*{row}"),
    (20, 21, "{seventh} + {row3}"),
    (22, 23, "{seventh} + 4*{row}") => multiply_12,
    (24, 25, "{seventh} + {row5}") => multiply_13,
    (26, 27, "{seventh} + 2*{row3}") => multiply_14,
}
