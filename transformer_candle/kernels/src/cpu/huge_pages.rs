//! Transparent huge pages: GEMMs read operands row by row, and with 4 KiB pages every long row costs a TLB entry.

/// Bytes of a huge page on x86-64, and by default on AArch64.
const HUGE_PAGE: usize = 2 << 20;

/// Advises the kernel to back this memory, which must not have been written to yet, with huge pages. Without effect where there are
/// none or they are disabled.
#[cfg(target_os = "linux")]
pub(crate) fn advise(address: usize, bytes: usize) {
    use rustix::mm::{Advice, madvise};

    let (first, end) = (address.next_multiple_of(HUGE_PAGE), (address + bytes) / HUGE_PAGE * HUGE_PAGE);
    if first < end {
        // SAFETY: advice changes no contents, and the range is inside of the caller's memory.
        let _ = unsafe { madvise(std::ptr::with_exposed_provenance_mut(first), end - first, Advice::LinuxHugepage) };
    }
}

/// Without effect on other systems.
#[cfg(not(target_os = "linux"))]
pub(crate) fn advise(_: usize, _: usize) {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::HUGE_PAGE;
    use crate::memory::{Category, Plan};
    use crate::testing::zeros;
    use crate::{DType, Device, bf16};

    /// Whether the kernel was asked to back the mapping that holds an address with huge pages.
    fn is_advised(address: usize) -> bool {
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in smaps.lines() {
            let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
            let ends = range.map(|(first, end)| [first, end].map(|end| usize::from_str_radix(end, 16)));
            if let Some([Ok(first), Ok(end)]) = ends {
                inside = (first..end).contains(&address);
            } else if let Some(flags) = line.strip_prefix("VmFlags:")
                && inside
            {
                return flags.split(' ').any(|flag| flag == "hg");
            }
        }
        panic!("no mapping holds {address:x}");
    }

    #[test]
    fn large_buffers_of_zeros_lie_in_huge_pages_where_there_are_any() {
        for dtype in [DType::F32, DType::BF16] {
            let buffer = zeros(&[8 * HUGE_PAGE / dtype.size_in_bytes()], dtype);
            let middle = buffer.address() + 4 * HUGE_PAGE;
            assert_eq!(is_advised(middle), Path::new("/sys/kernel/mm/transparent_hugepage").exists());
            assert!(buffer.read_f32().unwrap().iter().all(|&zero| zero == 0.0));
        }
        assert_eq!(zeros(&[3], DType::BF16).read::<bf16>().unwrap(), [bf16::ZERO; 3]);
    }

    #[test]
    fn small_buffers_of_a_plan_lie_in_huge_pages_together() {
        let mut plan = Plan::new();
        let add = |_| plan.add("", Category::SavedActivations, DType::F32, &[HUGE_PAGE / 64]);
        let ids: Vec<_> = (0..64).map(add).collect();
        let middle = plan.allocate(&Device::Cpu).unwrap().buffer(ids[32]);
        assert_eq!(is_advised(middle.address()), Path::new("/sys/kernel/mm/transparent_hugepage").exists());
    }
}
