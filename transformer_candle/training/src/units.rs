//! Formats numbers for people: bytes, durations, grouped digits.

use std::time::Duration;

/// Formats a number of bytes: `31.25 GB`, in decimal units, in which GPUs and disks are sold.
pub fn bytes(number: u64) -> String {
    match number {
        0..1_000 => format!("{number} bytes"),
        1_000..1_000_000 => format!("{:.1} kB", number as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", number as f64 / 1e6),
        _ => format!("{:.2} GB", number as f64 / 1e9),
    }
}

/// Formats a number with its digits grouped: `1,234,567`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a duration in its two largest units: `15d 7h`, `3m 20s`, `8s`.
pub(crate) fn duration(length: Duration) -> String {
    let seconds = length.as_secs_f64().round() as u64;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match seconds {
        63_072_000.. => format!("{} years", days / 365),
        86_400.. => format!("{days}d {hours}h"),
        3600.. => format!("{hours}h {minutes}m"),
        60.. => format!("{minutes}m {}s", seconds % 60),
        _ => format!("{seconds}s"),
    }
}

/// Rounds a number to three significant digits.
pub(crate) fn rounded(number: f64) -> f64 {
    format!("{number:.2e}").parse().unwrap_or(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_show_their_two_largest_units() {
        let shown = |seconds| duration(Duration::from_secs(seconds));
        assert_eq!(
            [shown(8), shown(200), shown(7260), shown(1_321_200), shown(1 << 32)],
            ["8s", "3m 20s", "2h 1m", "15d 7h", "136 years"]
        );
    }
}
