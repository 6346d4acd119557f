//! Loops for the widest vectors that the machine at hand has.

use pulp::Arch;

/// Runs a body that was compiled once for each instruction set, as this machine's. Only what is inlined into the body
/// profits: give it plain loops, in a closure marked `#[inline(always)]`.
#[inline(always)]
pub(crate) fn vectorised<R>(body: impl FnOnce() -> R) -> R {
    Arch::new().dispatch(body)
}
