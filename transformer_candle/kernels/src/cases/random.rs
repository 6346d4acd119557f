//! Random numbers of the cases.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::counter_hash::{GOLDEN_GAMMA, mix};

/// A random number generator (`SplitMix64`: Steele, Lea and Flood, 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a seed made of the time and the process id.
    pub fn seed_from_now() -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::new(now.as_nanos() as u64 ^ u64::from(std::process::id()).rotate_left(40)).bits()
    }

    fn bits(&mut self) -> u64 {
        let bits = mix(self.0);
        self.0 = self.0.wrapping_add(GOLDEN_GAMMA);
        bits
    }

    /// Draws an integer from `0..limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    /// Draws `count` roughly normal numbers in -1..1.
    pub fn numbers(&mut self, count: usize) -> Vec<f32> {
        let mut uniform = || (self.bits() >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
        (0..count).map(|_| uniform() + uniform()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_depend_on_the_seed() {
        assert_ne!(Random::new(1).numbers(4), Random::new(2).numbers(4));
        let numbers = Random::new(3).numbers(10_000);
        assert!(numbers.iter().all(|value| (-1.0..1.0).contains(value)));
        assert!((numbers.iter().sum::<f32>() / 10_000.0).abs() < 0.02);
    }
}
