//! Loops for the widest vectors that the machine at hand has.

use pulp::{Arch, Simd, WithSimd};

/// Runs a body that was compiled once for each instruction set, as this machine's. Only what is inlined into the body
/// profits: give it plain loops, in a closure marked `#[inline(always)]`.
#[inline(always)]
pub(crate) fn vectorised<R>(body: impl FnMut() -> R) -> R {
    Arch::new().dispatch(Body(body))
}

/// A closure to be compiled for an instruction set. `FnMut` because a closure that is called as `FnOnce` is called through a
/// function of its own, which keeps to the instructions that every machine has.
pub(crate) struct Body<F>(pub(crate) F);

impl<R, F: FnMut() -> R> WithSimd for Body<F> {
    type Output = R;

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _: S) -> R {
        (self.0)()
    }
}

/// The sum of a power of two of partial sums, always in the same order: halves are added to each other.
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

/// Asks for the cache lines of a slice, which is read soon. Whoever reads with a stride that the processor does not foresee gains.
#[inline(always)]
pub(crate) fn prefetch<T>(slice: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..size_of_val(slice)).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint that reads nothing, of an address inside of the slice.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(slice.as_ptr().byte_add(offset).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = slice;
}
