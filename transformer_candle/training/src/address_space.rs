//! The limit of a process's address space (`ulimit -v`), and what threads reserve of it.

use kernels::arenas::{ARENA_BYTES, share_arenas};
use rustix::process::{Resource, getrlimit};

/// Bytes that a thread's stack reserves.
const STACK_BYTES: u64 = 2 << 20;
/// The arenas of threads may reserve a limited address space divided by this.
const ARENAS_PART: u64 = 8;

/// Returns the process's limit of address space in bytes; None where it has none.
pub(crate) fn limit() -> Option<u64> {
    getrlimit(Resource::As).current
}

/// Has threads share as many of the allocator's arenas as a limited address space has room for. Otherwise threads that
/// begin at the same time reserve it all, each 128 MiB for a moment, and one that finds no room for its signal stack aborts
/// the process.
pub(crate) fn share_what_is_limited() {
    if let Some(limit) = limit() {
        share_arenas(usize::try_from(arenas(limit)).unwrap_or(usize::MAX));
    }
}

/// Returns the bytes of address space that `threads` threads reserve under the limit.
pub(crate) fn reserved(threads: usize, limit: u64) -> u64 {
    let threads = threads as u64;
    threads * STACK_BYTES + threads.min(arenas(limit)) * ARENA_BYTES
}

fn arenas(limit: u64) -> u64 {
    (limit / ARENAS_PART / ARENA_BYTES).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_reserve_a_part_of_the_limit() {
        assert_eq!(reserved(100, 400 << 20), (200 + 64) << 20);
        assert_eq!(reserved(100, 64 << 30), (200 + 6400) << 20);
    }
}
