//! The exponential function without branches, so that loops over it vectorise. Call it inside `vectorised`, where the
//! compiler may use FMA instructions: elsewhere every `mul_add` is a function call.

/// e^x within 2 units in the last place; 0 below -87.7, infinite above 88.4, NaN for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // 1.5 * 2^23 plus the exponent bias: adding it rounds to an integer, biased, in the low bits of the mantissa.
    const SHIFT: f32 = 12_582_912.0 + 127.0;
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_359_4; // 355/512: exact when multiplied by a small integer
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Beyond these the power of two is 0 or infinite.
    const LEAST: f32 = -88.0;
    const MOST: f32 = 89.0;
    let x = if x < LEAST { LEAST } else { x };
    let x = if x > MOST { MOST } else { x };
    let shifted = x.mul_add(LOG2_E, SHIFT);
    let power = shifted - SHIFT;
    let r = power.mul_add(-LN2_LOW, power.mul_add(-LN2_HIGH, x)); // |r| <= ln(2) / 2
    // 1 + r + r^2 p(r) with the least relative error, 3e-9.
    let mut p = 1.381_446_7e-3_f32;
    p = p.mul_add(r, 8.368_781e-3);
    p = p.mul_add(r, 4.166_839_3e-2);
    p = p.mul_add(r, 1.666_652e-1);
    p = p.mul_add(r, 0.499_999_94);
    p = p.mul_add(r, 1.0);
    p.mul_add(r, 1.0) * f32::from_bits(shifted.to_bits() << 23)
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn exp_is_within_two_ulps() {
        for step in -873_000..=883_000 {
            let x = step as f32 * 1e-4;
            let (ours, exact) = (exp(x), f64::from(x).exp());
            let unit = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
            assert!((f64::from(ours) - exact).abs() <= 2.0 * unit, "exp({x}) = {ours}, {exact} expected");
        }
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn exp_handles_nan_overflow_and_underflow() {
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!([-87.7, -88.0, -1e30].map(exp), [0.0; 3]);
        assert_eq!([88.4, 89.0, 1e30].map(exp), [f32::INFINITY; 3]);
    }
}
