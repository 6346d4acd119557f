//! Formats numbers for people: bytes, durations, grouped digits.

use std::time::Duration;

pub(crate) use run_config::grouped;

/// Formats a number of bytes: `31.25 GB`, in decimal units, in which GPUs and disks are sold.
pub fn bytes(number: u64) -> String {
    match number {
        0..1_000 => format!("{number} bytes"),
        1_000..1_000_000 => format!("{:.1} kB", number as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", number as f64 / 1e6),
        _ => format!("{:.2} GB", number as f64 / 1e9),
    }
}

/// Formats a number with grouped digits and `decimals` digits after the point: `3,251.56`.
pub(crate) fn grouped_decimal(number: f64, decimals: usize) -> String {
    let text = format!("{number:.decimals$}");
    match text.split_once('.').and_then(|(whole, rest)| Some((whole.parse().ok()?, rest))) {
        Some((whole, rest)) => format!("{}.{rest}", grouped(whole)),
        None => text, // infinite, or larger than anyone reads
    }
}

/// Formats a number of things: `1 thread`, `3 threads`.
pub(crate) fn counted(number: u64, unit: &str) -> String {
    format!("{} {unit}{}", grouped(number), if number == 1 { "" } else { "s" })
}

/// Formats a duration in its two largest units: `15 d 7 h`, `3 min 20 s`, `8 s`.
pub(crate) fn duration(length: Duration) -> String {
    let seconds = length.as_secs_f64().round() as u64;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match seconds {
        63_072_000.. => format!("{} years", days / 365),
        86_400.. => format!("{days} d {hours} h"),
        3600.. => format!("{hours} h {minutes} min"),
        60.. => format!("{minutes} min {} s", seconds % 60),
        _ => format!("{seconds} s"),
    }
}

/// Formats the seconds that a run takes; `forever` for more than there are.
pub fn time(seconds: f64) -> String {
    Duration::try_from_secs_f64(seconds).map_or_else(|_| "forever".to_owned(), duration)
}

/// Formats the seconds that a step takes: `6.56 s`, `41 ms`, `21 h 47 min`.
pub(crate) fn step_time(seconds: f64) -> String {
    match seconds {
        600.0.. => time(seconds),
        10.0.. => format!("{seconds:.1} s"),
        1.0.. => format!("{seconds:.2} s"),
        0.01.. => format!("{:.0} ms", seconds * 1e3),
        _ => format!("{:.1} ms", seconds * 1e3),
    }
}

/// Formats a number of FLOPs: `8.416 GFLOP`.
pub(crate) fn flops(number: f64) -> String {
    match number {
        1e12.. => format!("{:.1} TFLOP", number / 1e12),
        1e9.. => format!("{:.3} GFLOP", number / 1e9),
        1e6.. => format!("{:.3} MFLOP", number / 1e6),
        _ => format!("{} FLOP", grouped(number.round() as u64)),
    }
}

/// Formats a rate: `209.5 T`, `21.3 G`.
pub(crate) fn metric(number: f64) -> String {
    let (number, prefix) = if number < 1e12 { (number / 1e9, "G") } else { (number / 1e12, "T") };
    if number < 10.0 { format!("{number:.2} {prefix}") } else { format!("{number:.1} {prefix}") }
}

/// Rounds a number to three significant digits.
pub(crate) fn rounded(number: f64) -> f64 {
    format!("{number:.2e}").parse().unwrap_or(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_are_grouped_before_the_point() {
        let texts = [7.389, 3251.561, 1e30, f64::INFINITY].map(|number| grouped_decimal(number, 2));
        assert_eq!(texts, ["7.39", "3,251.56", "1000000000000000019884624838656.00", "inf"]);
    }

    #[test]
    fn durations_show_their_two_largest_units() {
        let text_of = |seconds| duration(Duration::from_secs(seconds));
        assert_eq!(
            [text_of(8), text_of(200), text_of(7260), text_of(1_321_200), text_of(1 << 32)],
            ["8 s", "3 min 20 s", "2 h 1 min", "15 d 7 h", "136 years"]
        );
    }

    #[test]
    fn rates_have_the_prefix_that_suits_them() {
        assert_eq!([2.095e14, 1.792e12, 2.1e10, 5e8].map(metric), ["209.5 T", "1.79 T", "21.0 G", "0.50 G"]);
    }
}
