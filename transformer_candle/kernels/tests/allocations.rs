//! A training step allocates nothing: the operations write into given buffers and take their scratch from the
//! workspace.

// A global allocator that counts needs `unsafe`.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use kernels::cases::{self, Inputs, Random, Size};
use kernels::{DType, Device};

/// The largest allocation since it was last set to zero.
static LARGEST: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps `dealloc`'s contract, and the pointer came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The list of a call's arguments, and rayon's queues.
const ALLOWED_BYTES: usize = 4096;

#[test]
fn operations_allocate_nothing() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build();
    pool.unwrap().install(|| {
        for dtype in [DType::F32, DType::BF16] {
            let mut inputs = Inputs { random: Random::new(1), dtype };
            for make in cases::list(Size::Medium, dtype) {
                let case = make(&mut inputs).unwrap();
                let mut arguments = case.allocate(&Device::Cpu, false).unwrap();
                case.run(&mut arguments).unwrap();
                LARGEST.store(0, Ordering::Relaxed);
                case.run(&mut arguments).unwrap();
                let bytes = LARGEST.load(Ordering::Relaxed);
                assert!(bytes <= ALLOWED_BYTES, "{} {} allocates {bytes} bytes", case.name, case.sizes);
            }
        }
    });
}
