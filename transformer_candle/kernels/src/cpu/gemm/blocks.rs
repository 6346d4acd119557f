//! The sizes of the blocks of A and B, which follow from the caches. Results do not depend on them.

/// Words of a B block at most, on any processor.
pub(super) const B_BLOCK_WORDS: usize = 1 << 20;
/// Bytes of a core's L2 cache from which on it holds most of a B block, and a larger A block.
const LARGE_L2: usize = 2 << 20;

/// The sizes of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    /// Words of a B block, KC x NC, and of a block of columns that is read in place, at most.
    pub(super) b_words: usize,
    /// The factor by which A blocks are larger than their micro-kernel's.
    pub(super) a_factor: usize,
    /// Panels of B that a panel of A, which stays in L1, is multiplied with before the next one is.
    pub(super) b_panels: usize,
}

impl Blocks {
    /// For an L2 cache of 1 MiB and a fast L3 cache (Zen): a B block of 4 MiB stays in L3 while all rows of A pass.
    pub(super) const IN_L3: Self = Self { b_words: B_BLOCK_WORDS, a_factor: 1, b_panels: 1 };
    /// For an L2 cache of 2 MiB and a slow L3 cache (Intel's servers): half of the B block, read half as often.
    pub(super) const IN_L2: Self = Self { b_words: B_BLOCK_WORDS / 2, a_factor: 2, b_panels: 4 };

    /// Returns the sizes for this processor.
    pub(super) fn of_this_processor() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use std::sync::OnceLock;

            static BLOCKS: OnceLock<Blocks> = OnceLock::new();
            *BLOCKS.get_or_init(|| Self::of_l2(l2_bytes()))
        }
        #[cfg(not(target_arch = "x86_64"))]
        Self::of_l2(None)
    }

    fn of_l2(bytes: Option<usize>) -> Self {
        if bytes.is_some_and(|bytes| bytes >= LARGE_L2) { Self::IN_L2 } else { Self::IN_L3 }
    }
}

/// Returns the bytes of a core's L2 cache, as `cpuid` tells them; `None` where it does not.
#[cfg(target_arch = "x86_64")]
fn l2_bytes() -> Option<usize> {
    use std::arch::x86_64::{__cpuid, __cpuid_count, CpuidResult};

    // The same table: "deterministic cache parameters" of Intel's manual, "cache properties" of AMD's.
    let leaf = [0x8000_001d_u32, 4]
        .into_iter()
        .find(|&leaf| __cpuid(leaf & 0x8000_0000).eax >= leaf && __cpuid_count(leaf, 0).eax & 0x1f != 0)?;
    let caches = (0..8).map(|index| __cpuid_count(leaf, index)).take_while(|cache| cache.eax & 0x1f != 0);
    let bytes = |CpuidResult { ebx, ecx, .. }| {
        let (ways, partitions, line) = (ebx >> 22, ebx >> 12 & 0x3ff, ebx & 0xfff);
        [ways, partitions, line, ecx].into_iter().map(|number| number as usize + 1).product()
    };
    caches.into_iter().find(|cache| cache.eax >> 5 & 7 == 2).map(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_l2_cache_takes_the_blocks() {
        for (bytes, expected) in [(None, Blocks::IN_L3), (Some(1 << 20), Blocks::IN_L3), (Some(2 << 20), Blocks::IN_L2)]
        {
            assert_eq!(Blocks::of_l2(bytes), expected);
        }
    }

    /// The system's own reading of the same table, for any core: they may differ, and the test runs on one of them.
    #[test]
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    fn the_l2_cache_is_as_large_as_the_system_says() {
        use std::fs;
        use std::path::PathBuf;

        let cores = fs::read_dir("/sys/devices/system/cpu").into_iter().flatten().flatten();
        let caches = cores.flat_map(|core| (0..8).map(move |index| core.path().join(format!("cache/index{index}"))));
        let file_text = |file: PathBuf| fs::read_to_string(file).unwrap_or_default().trim().to_owned();
        let l2 = caches.filter(|cache| file_text(cache.join("level")) == "2");
        let size = |cache: PathBuf| Some(file_text(cache.join("size")).strip_suffix('K')?.parse::<usize>().ok()? << 10);
        let sizes: Vec<usize> = l2.filter_map(size).collect();
        assert!(
            sizes.is_empty() || l2_bytes().is_some_and(|bytes| sizes.contains(&bytes)),
            "{:?}, {sizes:?}",
            l2_bytes()
        );
    }
}
