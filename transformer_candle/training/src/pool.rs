//! Where operations on a CPU start without delay.

/// Runs a body on a thread of the current rayon pool. From outside, each operation would hand its work to one of the pool's
/// threads and wait for it to wake up.
pub(crate) fn in_pool<R: Send>(body: impl FnOnce() -> R + Send) -> R {
    rayon::scope(|_| body())
}
