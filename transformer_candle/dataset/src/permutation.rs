//! Permutations as pure functions of a key: the same key gives the same permutation on every machine, in every release.
//!
//! A key is the first eight bytes of SHA-256 over the purpose, numbers such as seed and epoch, and a name. Draw `i` of
//! a key is output `i` of `SplitMix64` with the key as its state (Steele, Lea, Flood, "Fast splittable pseudorandom
//! number generators", 2014), so there is no state to save. Permutations are Fisher-Yates shuffles over these draws.
//! The golden values below pin all of it.

use sha2::{Digest, Sha256};

/// The purpose of a key: what is permuted or drawn with it. Two purposes never share a key.
#[derive(Clone, Copy)]
pub(crate) struct Purpose(&'static str);

impl Purpose {
    pub(crate) const SHARDS: Self = Self("files");
    pub(crate) const ROW_GROUPS: Self = Self("groups");
    pub(crate) const DOCUMENTS: Self = Self("documents");
    pub(crate) const SEQUENCES: Self = Self("sequences");
    pub(crate) const HELD_OUT: Self = Self("held-out");
}

/// Computes the key of `purpose` for these numbers and this name.
pub(crate) fn key(purpose: Purpose, numbers: &[u64], name: &str) -> u64 {
    let mut hash = Sha256::new();
    hash.update(purpose.0.as_bytes());
    hash.update([0]);
    hash.update((numbers.len() as u64).to_le_bytes());
    for number in numbers {
        hash.update(number.to_le_bytes());
    }
    hash.update(name.as_bytes());
    let digest = hash.finalize();
    u64::from_le_bytes(std::array::from_fn(|i| digest[i]))
}

/// Counter-based `SplitMix64`.
struct SplitMix64 {
    key: u64,
    counter: u64,
}

impl SplitMix64 {
    fn next_u64(&mut self) -> u64 {
        self.counter += 1;
        let mut z = self.key.wrapping_add(self.counter.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Draws a number below `bound`, without bias (Lemire, "Fast random integer generation in an interval", 2019).
    fn uniform_below(&mut self, bound: u64) -> u64 {
        let rejection_threshold = bound.wrapping_neg() % bound;
        loop {
            let product = u128::from(self.next_u64()) * u128::from(bound);
            if product as u64 >= rejection_threshold {
                return (product >> 64) as u64;
            }
        }
    }
}

/// Permutes `items` by `key`.
pub(crate) fn shuffle<T>(items: &mut [T], key: u64) {
    let mut random = SplitMix64 { key, counter: 0 };
    for i in (1..items.len()).rev() {
        items.swap(i, random.uniform_below(i as u64 + 1) as usize);
    }
}

/// Returns the permutation of `0..length` by `key`.
pub(crate) fn permutation(length: usize, key: u64) -> Vec<u32> {
    let mut items: Vec<u32> = (0..length as u32).collect();
    shuffle(&mut items, key);
    items
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_permutations_match_golden_values() {
        // Computed by a second implementation of this definition, in Python.
        assert_eq!(key(Purpose::SHARDS, &[7, 0], ""), 14_219_502_180_332_172_431);
        assert_eq!(key(Purpose::HELD_OUT, &[3], "data/a.parquet"), 7_902_058_483_561_176_475);
        assert_eq!(permutation(12, 42), [9, 7, 11, 5, 4, 10, 6, 0, 3, 2, 1, 8]);
        assert_eq!(permutation(5, key(Purpose::SEQUENCES, &[1, 2, 3], "")), [2, 4, 1, 3, 0]);
    }

    #[test]
    fn draws_match_the_splitmix64_reference() {
        // The first outputs of the reference implementation for seed 1234567.
        let mut random = SplitMix64 { key: 1_234_567, counter: 0 };
        assert_eq!([random.next_u64(), random.next_u64()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
    }

    #[test]
    fn permutations_of_four_items_are_uniform() {
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..24_000 {
            *counts.entry(permutation(4, key(Purpose::ROW_GROUPS, &[seed], "f"))).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 24);
        assert!(counts.values().all(|count| (850..1150).contains(count)), "{counts:?}");
    }

    proptest::proptest! {
        #[test]
        fn shuffle_keeps_every_item_once(length in 0_usize..500, key: u64) {
            let mut items = permutation(length, key);
            items.sort_unstable();
            proptest::prop_assert_eq!(items, (0..length as u32).collect::<Vec<_>>());
        }
    }
}
