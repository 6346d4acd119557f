//! The arenas of glibc's allocator: each thread that allocates may reserve one.

/// Address space that an arena reserves, hardly any of which it uses.
pub const ARENA_BYTES: u64 = 64 << 20;

/// Limits the allocator to `most` arenas, at least 1, which threads share from here on. Without effect with other
/// allocators.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn share_arenas(most: usize) {
    let most = libc::c_int::try_from(most.max(1)).unwrap_or(libc::c_int::MAX);
    // SAFETY: it sets a parameter of the allocator under the allocator's lock, and touches no memory of ours.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, most) };
}

/// Does nothing with other allocators.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn share_arenas(_: usize) {}
