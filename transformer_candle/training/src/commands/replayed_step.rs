//! The batch of a step, made again: which rows each of its sequences was made of, and their text.

use std::fmt;

use dataset::{ReplayedBatch, SequenceRows, SourceRow, Tokenizer};
use serde::Serialize;

use crate::Result;
use crate::units::grouped;

/// Columns of a line for people.
const LINE: usize = 80;
/// Lines of a sequence's text for people at most; JSON has all of it.
const TEXT_LINES: usize = 12;

/// The batch of a step, made again, that is identical to the one it was trained on.
#[derive(Debug, Clone, Serialize)]
pub struct ReplayedStep {
    /// The step.
    pub step: u64,
    /// Its sequences, in their order in the batch.
    pub sequences: Vec<ReplayedSequence>,
}

/// A sequence of a batch.
#[derive(Debug, Clone, Serialize)]
pub struct ReplayedSequence {
    /// Where its documents come from.
    #[serde(flatten)]
    pub origin: SequenceRows,
    /// Its text, with special tokens as they are spelled.
    pub text: String,
}

impl ReplayedStep {
    pub(super) fn new(step: u64, replayed: &ReplayedBatch, tokenizer: &Tokenizer) -> Result<Self> {
        let sequence = |(index, origin): (usize, &SequenceRows)| {
            Ok(ReplayedSequence { origin: origin.clone(), text: replayed.text(index, tokenizer)? })
        };
        let sequences = replayed.sequences.iter().enumerate().map(sequence).collect::<Result<_>>()?;
        Ok(Self { step, sequences })
    }
}

impl fmt::Display for ReplayedStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, sequences } = self;
        writeln!(f, "step {}: its batch was rebuilt and is identical", grouped(*step))?;
        let is_mixture = sequences.windows(2).any(|pair| pair[0].origin.source != pair[1].origin.source);
        for (index, ReplayedSequence { origin: SequenceRows { source, rows }, text }) in sequences.iter().enumerate() {
            let from = if is_mixture { format!(", from {source}") } else { String::new() };
            let (number, all) = (grouped(index as u64 + 1), grouped(sequences.len() as u64));
            lines(&format!("sequence {number} of {all}{from}"), "  ", usize::MAX, f)?;
            rows.chunk_by(|one, next| (&one.file, one.row_group) == (&next.file, next.row_group))
                .try_for_each(|rows| lines(&named(rows), "    ", usize::MAX, f))?;
            lines(text, "    | ", TEXT_LINES, f)?;
        }
        Ok(())
    }
}

/// Names consecutive rows of one row group.
fn named(rows: &[SourceRow]) -> String {
    let numbers: Vec<String> = rows.iter().map(|row| row.row.to_string()).collect();
    let noun = if rows.len() == 1 { "row" } else { "rows" };
    let SourceRow { file, row_group, .. } = &rows[0];
    format!("{file}, row group {row_group}, {noun} {}", numbers.join(", "))
}

/// Writes a text in lines that begin with `indent`, and says how many it leaves out.
fn lines(text: &str, indent: &str, most: usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let options = textwrap::Options::new(LINE).initial_indent(indent).subsequent_indent(indent);
    let options = options.word_splitter(textwrap::WordSplitter::NoHyphenation);
    let lines: Vec<_> = text.lines().flat_map(|line| textwrap::wrap(line, &options)).collect();
    lines.iter().take(most).try_for_each(|line| writeln!(f, "{}", line.trim_end()))?;
    match lines.len().saturating_sub(most) {
        0 => Ok(()),
        1 => writeln!(f, "{indent}... and 1 more line (--json has it)"),
        more => writeln!(f, "{indent}... and {more} more lines (--json has them)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(file: &str, row_group: u64, row: u64) -> SourceRow {
        SourceRow { file: file.to_owned(), row_group, row }
    }

    #[test]
    fn a_step_is_readable_on_a_narrow_terminal() {
        let rows = vec![row("a.parquet", 3, 17), row("a.parquet", 3, 4), row("b.parquet", 0, 999)];
        let of = |source: &str, rows, text| {
            let origin = SequenceRows { source: source.to_owned(), rows };
            ReplayedSequence { origin, text }
        };
        let long = format!("<|endoftext|>It was {}.\n\nThe end.", "a very long sentence ".repeat(60));
        let word = format!("{}\u{4e2d}", "w".repeat(100));
        let step = ReplayedStep {
            step: 1004,
            sequences: vec![of("books", rows, long), of("web", vec![row("c.txt", 0, 1)], word)],
        };
        insta::assert_snapshot!(step.to_string());
        assert!(step.to_string().lines().all(|line| textwrap::core::display_width(line) <= LINE));
    }
}
