//! Runs loops in the widest SIMD vectors of the CPU.

use pulp::{Arch, Simd, WithSimd};

#[cfg(target_arch = "x86_64")]
use crate::Element;

/// Runs `body`, compiled once per instruction set, in the version for this CPU. Only code inlined into `body` is
/// vectorised: pass a closure of plain loops marked `#[inline(always)]`.
#[inline(always)]
pub(crate) fn vectorised<R>(body: impl FnMut() -> R) -> R {
    Arch::new().dispatch(Body(body))
}

/// A closure compiled for an instruction set. `FnMut`, because `FnOnce` is called through a separate function, compiled
/// for the baseline instruction set.
pub(crate) struct Body<F>(pub(crate) F);

impl<R, F: FnMut() -> R> WithSimd for Body<F> {
    type Output = R;

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _: S) -> R {
        (self.0)()
    }
}

/// Adds up partial sums, whose number is a power of two, in a fixed order: repeatedly the upper half to the lower half.
#[inline(always)]
pub(crate) fn total<const L: usize>(mut partial: [f32; L]) -> f32 {
    let mut half = L / 2;
    while half > 0 {
        for j in 0..half {
            partial[j] += partial[j + half];
        }
        half /= 2;
    }
    partial[0]
}

/// A word of two bf16, the first in the lower half, as x86's bf16 instructions read them.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn bf16_pair<E: Element>(first: E, second: E) -> f32 {
    let bits = |element: E| u32::from(element.to_bf16().to_bits());
    f32::from_bits(bits(second) << 16 | bits(first))
}

/// Prefetches the cache lines of `count` elements that are going to be written.
#[inline(always)]
pub(crate) fn prefetch_to_write<T>(first: *const T, count: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..count * size_of::<T>()).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        // SAFETY: a hint that reads nothing, of an address inside of what the caller owns.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(first.byte_add(offset).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (first, count);
}

/// Prefetches the cache lines of a slice: for strides that the hardware prefetcher does not detect.
#[inline(always)]
pub(crate) fn prefetch<T>(slice: &[T]) {
    prefetch_beyond::<T, 0>(slice);
}

/// Prefetches the cache lines BYTES beyond those of a slice, whatever lies there.
#[inline(always)]
pub(crate) fn prefetch_beyond<T, const BYTES: usize>(slice: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..size_of_val(slice)).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint that reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(slice.as_ptr().wrapping_byte_add(BYTES + offset).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = slice;
}
