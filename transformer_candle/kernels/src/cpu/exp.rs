//! The exponential function without branches, so that loops over it vectorise. To be called where the compiler may use fused
//! multiplication, as in `vectorised`: elsewhere each is a call.

/// e^x within 2 units in the last place; 0 below -87.3, infinite above 88.3, NaN for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_359_4; // 355/512: its product with a small integer is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x.mul_add(LOG2_E, SHIFT);
    let power = shifted - SHIFT;
    let r = power.mul_add(-LN2_LOW, power.mul_add(-LN2_HIGH, x)); // |r| <= ln(2) / 2
    // Minimax polynomial of (e^r - 1 - r) / r^2 (Cephes, expf).
    let mut p = 1.987_569_2e-4_f32;
    p = p.mul_add(r, 1.398_199_9e-3);
    p = p.mul_add(r, 8.333_452e-3);
    p = p.mul_add(r, 4.166_579_6e-2);
    p = p.mul_add(r, 1.666_666_5e-1);
    p = p.mul_add(r, 0.5);
    let mantissa = p.mul_add(r * r, r) + 1.0;
    let scale = f32::from_bits((shifted.to_bits().wrapping_add(127)) << 23);
    let value = mantissa * scale;
    let value = if x < -87.3 { 0.0 } else { value };
    if x > 88.3 { f32::INFINITY } else { value }
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for step in -873_000..=883_000 {
            let x = step as f32 * 1e-4;
            let (ours, exact) = (exp(x), f64::from(x).exp());
            let unit = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
            assert!((f64::from(ours) - exact).abs() <= 2.0 * unit, "exp({x}) = {ours}, {exact} expected");
        }
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn exp_keeps_what_is_not_a_number() {
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(-1e30), 0.0);
        assert_eq!(exp(1e30), f32::INFINITY);
    }
}
