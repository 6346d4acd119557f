//! Intel's AMX: eight tile registers of 16 rows of 64 bytes, and `tdpbf16ps`, which multiplies two tiles of bf16 and adds
//! the result to one of f32: 16,384 FLOPs in 16 cycles, 16 times those of `vdpbf16ps` in AVX-512.
//!
//! A tile of the right operand holds words of two elements of K, like the operands of `vdpbf16ps`.
//!
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18; Linux,
//! `Documentation/arch/x86/xstate.rst`.

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod emulator;

#[cfg(not(target_arch = "x86_64"))]
pub(crate) use absent::Amx;
#[cfg(target_arch = "x86_64")]
pub(crate) use present::{Amx, TILE_ROWS, TILE_WORDS};

/// Runs loops with the tile registers configured, where there are any.
pub(crate) fn with_tiles_of(amx: Option<Amx>, loops: impl FnOnce()) {
    match amx {
        Some(amx) => amx.with_tiles(loops),
        None => loops(),
    }
}

#[cfg(target_arch = "x86_64")]
mod present {
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    use std::sync::OnceLock;

    use pulp::x86::V4;

    /// Rows of a tile register.
    pub(crate) const TILE_ROWS: usize = 16;
    /// Words of four bytes in a row of a tile register.
    pub(crate) const TILE_WORDS: usize = 16;

    /// Bits of `cpuid` leaf 7 in EDX: AMX with bf16, and AMX itself.
    const AMX: u32 = 1 << 22 | 1 << 24;
    /// State components of the tiles' configuration and data.
    const TILE_STATES: u64 = 1 << 17 | 1 << 18;

    /// The right to use AMX's instructions, and AVX-512, which every processor with AMX has.
    #[derive(Clone, Copy)]
    pub(crate) struct Amx(V4);

    impl Amx {
        /// Returns the right if the processor has the instructions and the system lets this process use them.
        pub(crate) fn if_available() -> Option<Self> {
            static HAS_AMX: OnceLock<bool> = OnceLock::new();
            let has_amx = *HAS_AMX.get_or_init(|| is_there() && is_granted());
            V4::try_new().filter(|_| has_amx).map(Self)
        }

        /// Returns the right on a processor with AVX-512: without AMX a handler of SIGILL executes the instructions.
        #[cfg(all(test, target_os = "linux"))]
        pub(crate) fn or_emulated() -> Option<Self> {
            Self::if_available().or_else(|| {
                super::emulator::install();
                V4::try_new().map(Self)
            })
        }

        pub(crate) fn simd(self) -> V4 {
            self.0
        }

        /// Runs loops with all tile registers of this thread configured as whole tiles. Afterwards they are released:
        /// what is in use is saved at every switch of threads.
        #[expect(clippy::unused_self, reason = "whoever has it may")]
        #[inline(always)]
        pub(crate) fn with_tiles(self, loops: impl FnOnce()) {
            // SAFETY: there would be no `Amx` where the instructions cannot be executed.
            unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const WHOLE_TILES, options(nostack, preserves_flags)) };
            loops();
            // SAFETY: as above.
            unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
        }
    }

    /// What `ldtilecfg` reads.
    #[repr(C, align(64))]
    struct TileConfig {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    /// Palette 1: eight tiles of 16 rows of 64 bytes.
    static WHOLE_TILES: TileConfig = {
        let (mut row_bytes, mut rows, mut tile) = ([0; 16], [0; 16], 0);
        while tile < 8 {
            (row_bytes[tile], rows[tile]) = (4 * TILE_WORDS as u16, TILE_ROWS as u8);
            tile += 1;
        }
        TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    };

    /// Whether the processor has AMX and the system saves its registers.
    fn is_there() -> bool {
        let is_known = __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & AMX == AMX && is_x86_feature_detected!("xsave");
        // SAFETY: the system has enabled `xgetbv`.
        is_known && unsafe { _xgetbv(0) } & TILE_STATES == TILE_STATES
    }

    /// Asks the system for the tiles' state, for all threads of this process.
    #[cfg(target_os = "linux")]
    fn is_granted() -> bool {
        const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
        const TILE_DATA: libc::c_int = 18;
        // SAFETY: asks for a permission, and touches no memory.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
    }

    #[cfg(not(target_os = "linux"))]
    fn is_granted() -> bool {
        false
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod absent {
    /// Never there.
    #[derive(Clone, Copy)]
    pub(crate) enum Amx {}

    impl Amx {
        pub(crate) fn if_available() -> Option<Self> {
            None
        }

        pub(crate) fn with_tiles(self, _loops: impl FnOnce()) {
            match self {}
        }
    }
}
