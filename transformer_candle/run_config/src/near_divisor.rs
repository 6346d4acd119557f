//! Finds a divisor to suggest in place of a number that does not divide.

/// Returns the divisor of `number` nearest to `wish`.
pub(crate) fn near_divisor(number: usize, wish: usize) -> usize {
    (1..=number)
        .filter(|divisor| number.is_multiple_of(*divisor))
        .min_by_key(|divisor| divisor.abs_diff(wish))
        .unwrap_or(1)
}
