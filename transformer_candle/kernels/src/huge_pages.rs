//! Transparent huge pages: GEMMs read operands row by row, and with 4 KiB pages every long row costs a TLB entry.

/// Bytes of a huge page on x86-64, and by default on ARM.
const HUGE_PAGE: usize = 2 << 20;

/// Advises the kernel to back this memory, which must not have been written to yet, with huge pages. Without effect
/// where there are none or they are disabled.
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
