//! Buffers are in transparent huge pages where Linux has them.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use kernels::memory::{Arena, Category, allocate};
use kernels::{Buffer, DType, Device, Error, bf16};

const HUGE_PAGE: usize = 2 << 20;

fn zeros(shape: &[usize], dtype: DType) -> Buffer {
    Buffer::zeros(shape, dtype, &Device::Cpu).unwrap()
}

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
fn large_buffers_are_in_huge_pages() {
    for dtype in [DType::F32, DType::BF16] {
        let buffer = zeros(&[8 * HUGE_PAGE / dtype.size_in_bytes()], dtype);
        let middle = buffer.address() + 4 * HUGE_PAGE;
        assert_eq!(is_advised(middle), Path::new("/sys/kernel/mm/transparent_hugepage").exists());
        assert!(buffer.read_f32().unwrap().iter().all(|&zero| zero == 0.0));
    }
    assert_eq!(zeros(&[3], DType::BF16).read::<bf16>().unwrap(), [bf16::ZERO; 3]);
}

#[test]
fn small_buffers_of_a_plan_share_huge_pages() {
    let take = |arena: &mut Arena| {
        let take = |_| arena.take("", Category::SavedActivations, DType::F32, &[HUGE_PAGE / 64]);
        Ok::<Vec<Buffer>, Error>((0..64).map(take).collect())
    };
    let middle = allocate(&Device::Cpu, take).unwrap().swap_remove(32);
    assert_eq!(is_advised(middle.address()), Path::new("/sys/kernel/mm/transparent_hugepage").exists());
}
