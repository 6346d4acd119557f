//! Which units of the processor multiply bf16 matrices.

/// The units that multiply bf16 matrices. Each rounds sums in its own way, so that bits depend on the choice, which
/// therefore follows from the processor alone, never from timing. f32 matrices have the same bits on all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bf16Units {
    /// Multiply-adds in f32, of any width: operands are widened.
    F32,
    /// AVX-512's dot products of bf16 pairs, `vdpbf16ps`.
    Avx512,
    /// AMX's products of bf16 tiles, `tdpbf16ps`.
    Amx,
}

impl Bf16Units {
    /// Returns the fastest units of this processor: AMX; else `vdpbf16ps`, but not on Intel's, where its throughput is
    /// half of AMD's and f32 multiply-adds are faster.
    pub fn of_this_processor() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use std::sync::OnceLock;

            use super::bf16_kernel::Bf16Kernel;
            use crate::cpu::amx::Amx;

            static UNITS: OnceLock<Bf16Units> = OnceLock::new();
            *UNITS.get_or_init(|| {
                let (amx, avx512) = (Amx::if_available().is_some(), Bf16Kernel::if_available().is_some());
                Self::choose(amx, avx512, &vendor())
            })
        }
        #[cfg(not(target_arch = "x86_64"))]
        Self::F32
    }

    #[cfg(any(test, target_arch = "x86_64"))]
    fn choose(has_amx: bool, has_avx512: bool, vendor: &[u8]) -> Self {
        match (has_amx, has_avx512) {
            (true, _) => Self::Amx,
            (false, true) if vendor != b"GenuineIntel" => Self::Avx512,
            _ => Self::F32,
        }
    }

    /// Returns the name that files record.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Avx512 => "avx512_bf16",
            Self::Amx => "amx_bf16",
        }
    }
}

/// The processor's maker, as `cpuid` spells it.
#[cfg(target_arch = "x86_64")]
fn vendor() -> Vec<u8> {
    let leaf = std::arch::x86_64::__cpuid(0);
    [leaf.ebx, leaf.edx, leaf.ecx].into_iter().flat_map(u32::to_le_bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_decides() {
        for (has_amx, has_avx512, vendor, expected) in [
            (true, true, b"GenuineIntel", Bf16Units::Amx),
            (false, true, b"GenuineIntel", Bf16Units::F32),
            (false, true, b"AuthenticAMD", Bf16Units::Avx512),
            (false, false, b"AuthenticAMD", Bf16Units::F32),
        ] {
            assert_eq!(Bf16Units::choose(has_amx, has_avx512, vendor), expected);
        }
    }
}
