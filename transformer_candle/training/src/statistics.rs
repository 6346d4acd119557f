//! Statistics of measured times.

/// Returns the median; of an even count, the mean of the two middle numbers. There is at least one.
pub(crate) fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let half = numbers.len() / 2;
    if numbers.len().is_multiple_of(2) { f64::midpoint(numbers[half - 1], numbers[half]) } else { numbers[half] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_between_the_middle_ones() {
        let near = |numbers: &[f64], expected: f64| assert!((median(numbers.to_vec()) - expected).abs() < 1e-12);
        near(&[3.0, 1.0, 2.0], 2.0);
        near(&[4.0, 1.0, 2.0, 9.0], 3.0);
        near(&[7.0], 7.0);
    }
}
