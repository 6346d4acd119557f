//! Counts on the command line: `2000000`, `2_000_000`, `10k`, `1e3`, `20B`.

use std::fmt::Display;

/// The letters that multiply a count.
const UNITS: [(char, f64); 5] = [('K', 1e3), ('M', 1e6), ('B', 1e9), ('G', 1e9), ('T', 1e12)];
/// Integers up to here are exact in an f64.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

/// Parses a count, at least 0.
///
/// # Errors
/// Says what a count looks like.
pub fn parse_count(text: &str) -> Result<u64, String> {
    let text = text.trim().replace('_', "");
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let unit =
        text.chars().last().and_then(|last| UNITS.into_iter().find(|(name, _)| last.to_ascii_uppercase() == *name));
    let (number, factor) = unit.map_or((text.as_str(), 1.0), |(_, factor)| (&text[..text.len() - 1], factor));
    let has_digits = number.starts_with(|first: char| first.is_ascii_digit() || first == '.');
    match number.trim().parse::<f64>().map(|number| number * factor) {
        Ok(count) if has_digits && (0.0..=MAX_EXACT).contains(&count) && is_integer(count) => Ok(count.round() as u64),
        _ => Err("must be an integer such as 2000000, 10k, 1e3 or 20B".to_owned()),
    }
}

/// Parses a count of at least 1 that `T` holds.
pub(super) fn at_least_one<T: TryFrom<u64, Error: Display>>(text: &str) -> Result<T, String> {
    match parse_count(text)? {
        0 => Err("must be at least 1".to_owned()),
        count => T::try_from(count).map_err(|_| format!("{count} is too large")),
    }
}

/// Whether it is one up to the rounding of its decimal digits: 1.1k is 1100.0000000000002.
fn is_integer(count: f64) -> bool {
    (count - count.round()).abs() <= 1e-9 * count.max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_may_have_a_unit_or_an_exponent() {
        let counts = [
            ("0", 0),
            ("1e3", 1000),
            ("10k", 10_000),
            ("1.5K", 1500),
            ("1.1k", 1100),
            ("20B", 20_000_000_000),
            ("1.5T", 1_500_000_000_000),
            ("2_000_000", 2_000_000),
            ("18446744073709551615", u64::MAX),
        ];
        for (text, count) in counts {
            assert_eq!(parse_count(text), Ok(count), "{text}");
        }
    }

    #[test]
    fn what_is_no_integer_is_refused() {
        for text in ["", "k", "-1", "1.5", "1e-3", "inf", "nan", "1e30", "18446744073709551616", "ten", "1kk", "1 0"] {
            assert!(parse_count(text).is_err(), "{text}");
        }
        assert!(at_least_one::<u32>("0").is_err());
        assert!(at_least_one::<u32>("5B").is_err());
    }
}
