//! Random numbers as hashes of counters: any of them can be computed by itself, on any thread.

/// What counters that give independent hashes differ by: 2^64 over the golden ratio.
pub(crate) const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns a 64-bit hash of a counter (`SplitMix64`'s finaliser, Steele, Lea and Flood, 2014).
pub fn mix(counter: u64) -> u64 {
    let mut bits = counter.wrapping_add(GOLDEN_GAMMA);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
