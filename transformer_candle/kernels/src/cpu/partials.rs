//! f64 partial sums in an f32 workspace, two elements each.

/// Stores a partial sum, bit for bit.
pub(crate) fn store(words: &mut [f32], sum: f64) {
    let bits = sum.to_bits();
    words[0] = f32::from_bits((bits >> 32) as u32);
    words[1] = f32::from_bits(bits as u32);
}

/// Loads a stored partial sum.
pub(crate) fn load(words: &[f32]) -> f64 {
    f64::from_bits(u64::from(words[0].to_bits()) << 32 | u64::from(words[1].to_bits()))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_partial_sum_comes_back_bit_for_bit() {
        let mut words = [0f32; 2];
        for sum in
            [0.0, -0.0, 1.5, 1e300, f64::MIN_POSITIVE, f64::INFINITY, 1.0 / 3.0, f64::from_bits(0x7ff1_2345_7fa0_0001)]
        {
            super::store(&mut words, sum);
            assert_eq!(super::load(&words).to_bits(), sum.to_bits());
        }
    }
}
