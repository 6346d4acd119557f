//! Edits of a template's source at places of its tokens.

use std::ops::Range;

/// Texts that replace parts of a source.
#[derive(Default)]
pub(super) struct Edits(Vec<(Range<usize>, String)>);

impl Edits {
    pub(super) fn insert(&mut self, at: usize, text: impl Into<String>) {
        self.replace(at..at, text);
    }

    pub(super) fn replace(&mut self, part: Range<usize>, text: impl Into<String>) {
        self.0.push((part, text.into()));
    }

    /// Returns the edited source. Insertions at one place keep their order.
    pub(super) fn apply(mut self, source: &str) -> String {
        self.0.sort_by_key(|(part, _)| part.start);
        let (mut output, mut position) = (String::with_capacity(source.len()), 0);
        for (part, text) in self.0 {
            output.push_str(&source[position..part.start]);
            output.push_str(&text);
            position = part.end;
        }
        output.push_str(&source[position..]);
        output
    }
}
