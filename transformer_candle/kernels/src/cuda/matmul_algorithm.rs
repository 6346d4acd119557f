//! Which algorithm computes a GEMM, and how that is written down.

/// The library's description of an algorithm, to be kept for the same GPU and the same version of the library.
pub(crate) type Algorithm = [u64; 8];

/// Writes an algorithm as hexadecimal digits, followed by the GPU and library that it was chosen on.
pub(crate) fn write(algorithm: &Algorithm, origin: &str) -> String {
    let words = algorithm.map(|word| format!("{word:016x}"));
    format!("{} {origin}", words.concat())
}

/// Reads what `write` wrote; None if it was chosen on another GPU or library, or is no algorithm.
pub(crate) fn read(text: &str, origin: &str) -> Option<Algorithm> {
    let (digits, from) = text.split_once(' ')?;
    let mut algorithm = Algorithm::default();
    let plain = digits.len() == algorithm.len() * 16 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    if from != origin || !plain {
        return None;
    }
    for (at, word) in algorithm.iter_mut().enumerate() {
        *word = u64::from_str_radix(&digits[at * 16..at * 16 + 16], 16).ok()?;
    }
    Some(algorithm)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_algorithm_is_read_back_where_it_was_chosen(algorithm: [u64; 8]) {
            let text = write(&algorithm, "NVIDIA H200, cuBLASLt 130100");
            prop_assert_eq!(read(&text, "NVIDIA H200, cuBLASLt 130100"), Some(algorithm));
            prop_assert_eq!(read(&text, "NVIDIA H200, cuBLASLt 130200"), None);
            prop_assert_eq!(read(&text[1..], "NVIDIA H200, cuBLASLt 130100"), None);
        }
    }

    #[test]
    fn what_is_no_algorithm_is_refused() {
        let digits = |digit: &str| format!("{} here", digit.repeat(128));
        assert_eq!(read(&digits("0"), "here"), Some([0; 8]));
        for wrong in [digits("g"), digits("+"), "here".to_owned(), String::new(), format!("{} here", "é".repeat(64))] {
            assert_eq!(read(&wrong, "here"), None, "{wrong}");
        }
    }
}
