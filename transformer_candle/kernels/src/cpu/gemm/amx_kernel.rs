//! The micro-kernel of Intel's AMX: eight tile registers of 16 rows of 64 bytes, and an instruction that multiplies two
//! tiles of bf16 and adds the result to one of f32: 16,384 FLOPs in 16 cycles, 16 times those of AVX-512's `vdpbf16ps`.
//!
//! ```text
//! tmm0 tmm1   += tmm4   tmm6 tmm7      rows  0..16 of A, columns 0..16 and 16..32 of B
//! tmm2 tmm3      tmm5                  rows 16..32
//! ```
//! A step of 32 elements of K loads four tiles and multiplies four times. A panel of B, 32 KiB, stays in L1 while
//! those of an A block pass from L2. A row of A is read where it lies, or packed as a row; a word of B holds two elements
//! of K, as for `vdpbf16ps`.
//!
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18; Linux,
//! `Documentation/arch/x86/xstate.rst`.

use std::arch::asm;

use pulp::x86::V4;

use super::bf16_kernel::pack_pair;
use super::micro_kernel::{MAX_TILE, MicroKernel};
use super::operand::{AOperand, PanelOperand, RowOperand};
use crate::Element;

/// Rows of a tile register.
const TILE_ROWS: usize = 16;
/// Words in a row of a tile register, and so words of K in a step.
const TILE_WORDS: usize = 16;
const MR: usize = 2 * TILE_ROWS;
const NR: usize = 2 * TILE_WORDS;

/// The micro-kernel of AMX. Needs AVX-512, which every processor with AMX has, for the loops around it.
#[derive(Clone, Copy)]
pub(super) struct AmxKernel(V4);

impl AmxKernel {
    /// Returns the kernel if the processor has the instructions and the system lets this process use them.
    pub(super) fn if_available() -> Option<Self> {
        V4::try_new().filter(|_| permission::has_amx()).map(Self)
    }

    /// Returns the kernel for a processor without AMX, on which a handler of SIGILL executes the instructions.
    #[cfg(test)]
    pub(super) fn emulated() -> Option<Self> {
        V4::try_new().map(Self)
    }
}

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
        self.0
    }

    /// Configures this thread's tile registers, and releases them: what is in use is saved at every switch of threads.
    #[inline(always)]
    fn run(self, loops: impl FnOnce()) {
        // SAFETY: there would be no `AmxKernel` where the instructions cannot be executed.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const WHOLE_TILES, options(nostack, preserves_flags)) };
        loops();
        // SAFETY: as above.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
    }

    #[inline(always)]
    fn pack<E: Element>(first: E, second: E) -> f32 {
        pack_pair(first, second)
    }

    fn height(rows: usize) -> usize {
        rows.next_multiple_of(TILE_ROWS)
    }

    #[inline(always)]
    fn multiply(self, rows: usize, words: usize, a: impl AOperand, b: PanelOperand<'_>, tile: &mut [f32; MAX_TILE]) {
        let a = a.as_rows().expect("`READS_ROWS`");
        let height = Self::height(rows);
        assert!(words > 0 && words.is_multiple_of(TILE_WORDS) && height <= MR);
        assert!((height - 1) * a.stride + words <= a.words.len() && (words - 1) * b.stride + NR <= b.words.len());
        // SAFETY: the operands hold the rows and words, as asserted, and `tile` 32 rows; `run` has configured the tiles.
        unsafe {
            if height == MR {
                multiply_tall(words / TILE_WORDS, a, b, tile);
            } else {
                multiply_low(words / TILE_WORDS, a, b, tile);
            }
        }
    }
}

/// What `ldtilecfg` reads: palette 1, eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static WHOLE_TILES: TileConfig = {
    let (mut row_bytes, mut rows, mut tile) = ([0; 16], [0; 16], 0);
    while tile < 8 {
        (row_bytes[tile], rows[tile]) = (4 * TILE_WORDS as u16, TILE_ROWS as u8);
        tile += 1;
    }
    TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
};

/// Computes 32 rows of 32 columns over this many steps of K.
///
/// # Safety
/// The operands hold 32 rows, 32 columns and the steps; the tiles are configured as [`WHOLE_TILES`].
#[inline(always)]
unsafe fn multiply_tall(steps: usize, a: RowOperand<'_>, b: PanelOperand<'_>, tile: &mut [f32; MAX_TILE]) {
    let a_stride = a.stride * size_of::<f32>();
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
            lower = inout(reg) a.words.as_ptr().add(TILE_ROWS * a.stride) => _,
            a_stride = in(reg) a_stride,
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

/// Computes 16 rows of 32 columns over this many steps of K.
///
/// # Safety
/// As for [`multiply_tall`], with 16 rows.
#[inline(always)]
unsafe fn multiply_low(steps: usize, a: RowOperand<'_>, b: PanelOperand<'_>, tile: &mut [f32; MAX_TILE]) {
    // SAFETY: as promised by the caller.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "2:",
            "tileloadd tmm4, [{a} + {a_stride}*1]",
            "tileloadd tmm6, [{b} + {b_stride}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {b_stride}*1 + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "add {a}, 64",
            "add {b}, {b_step}",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{tile} + {tile_stride}*1], tmm0",
            "tilestored [{tile} + {tile_stride}*1 + 64], tmm1",
            a = inout(reg) a.words.as_ptr() => _,
            a_stride = in(reg) a.stride * size_of::<f32>(),
            b = inout(reg) b.words.as_ptr() => _,
            b_stride = in(reg) b.stride * size_of::<f32>(),
            b_step = in(reg) b.stride * size_of::<f32>() * TILE_WORDS,
            steps = inout(reg) steps => _,
            tile = in(reg) tile.as_mut_ptr(),
            tile_stride = in(reg) NR * size_of::<f32>(),
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Whether this process may use AMX.
mod permission {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    use std::sync::OnceLock;

    /// Bits of `cpuid` leaf 7 in EDX: AMX with bf16, and AMX itself.
    const AMX: u32 = 1 << 22 | 1 << 24;
    /// State components of the tiles' configuration and data.
    const TILE_STATES: u64 = 1 << 17 | 1 << 18;
    const TILE_DATA: libc::c_int = 18;
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;

    /// Whether the processor has AMX and the system saves its registers; asks Linux for permission, for all threads.
    pub(super) fn has_amx() -> bool {
        static HAS_AMX: OnceLock<bool> = OnceLock::new();
        *HAS_AMX.get_or_init(|| is_there() && is_granted())
    }

    fn is_there() -> bool {
        let has_leaf = __cpuid(0).eax >= 7;
        // SAFETY: `xgetbv` is there where the system has enabled it.
        has_leaf
            && __cpuid_count(7, 0).edx & AMX == AMX
            && is_x86_feature_detected!("xsave")
            && unsafe { _xgetbv(0) } & TILE_STATES == TILE_STATES
    }

    #[cfg(target_os = "linux")]
    fn is_granted() -> bool {
        // SAFETY: asks for a permission, and touches no memory.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
    }

    #[cfg(not(target_os = "linux"))]
    fn is_granted() -> bool {
        false
    }
}
