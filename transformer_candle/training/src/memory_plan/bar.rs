//! Draws memory as a bar of letters, beside what is available.

/// Characters of the bar, for the larger one of what is needed and what is available.
const WIDTH: u64 = 60;

/// A category's letter and its bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) letter: char,
    pub(super) bytes: u64,
}

/// Draws `[WWGGGGOOOOOOOOAAA......]`: each category by its letter, `.` for what is left. What does not fit stands
/// behind the bracket.
pub(super) fn bar(segments: &[Segment], available: u64) -> String {
    let total: u64 = segments.iter().map(|segment| segment.bytes).sum();
    let scale = total.max(available).max(1);
    let at = |bytes: u64| (u128::from(bytes) * u128::from(WIDTH) + u128::from(scale) / 2) / u128::from(scale);
    let (mut text, mut end, mut width) = (String::new(), 0, 0);
    let limit = at(available);
    let push = |letter, text: &mut String, width: &mut u128| {
        if *width == limit {
            text.push(']');
        }
        text.push(letter);
        *width += 1;
    };
    for segment in segments {
        end += segment.bytes;
        while width < at(end) {
            push(segment.letter, &mut text, &mut width);
        }
    }
    while width < limit {
        push('.', &mut text, &mut width);
    }
    if !text.contains(']') {
        text.push(']');
    }
    format!("[{text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALVES: [Segment; 2] = [Segment { letter: 'W', bytes: 20 }, Segment { letter: 'A', bytes: 10 }];

    #[test]
    fn what_is_left_is_dots() {
        let (w, a, rest) = ("W".repeat(20), "A".repeat(10), ".".repeat(30));
        assert_eq!(bar(&HALVES, 60), format!("[{w}{a}{rest}]"));
    }

    #[test]
    fn what_does_not_fit_is_behind_the_bracket() {
        let (w, more, a) = ("W".repeat(30), "W".repeat(10), "A".repeat(20));
        assert_eq!(bar(&HALVES, 15), format!("[{w}]{more}{a}"));
    }

    #[test]
    fn nothing_at_all_is_a_bar() {
        assert_eq!(bar(&[], 0), "[]");
        assert_eq!(bar(&HALVES, 30).len(), 62);
    }
}
