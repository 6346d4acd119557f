//! Terminal output: control characters are escaped, and a failing write does not stop the program.

use std::borrow::Cow;
use std::env;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::path::Path;

use rustix::termios::tcgetwinsize;
use textwrap::{Options, WordSplitter};

/// Escapes terminal control characters in text, such as ESC as `\u{1b}`.
pub fn escaped(text: &str) -> Cow<'_, str> {
    replaced(text, is_control, |text, character| write!(text, "{}", character.escape_unicode()))
}

/// Replaces terminal control characters and all non-ASCII ones in JSON by JSON escapes: the same value in any encoding.
pub fn escaped_json(json: &str) -> Cow<'_, str> {
    let is_escaped = |character: char| is_control(character) || !character.is_ascii();
    replaced(json, is_escaped, |text, character| {
        character.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| write!(text, "\\u{unit:04x}"))
    })
}

/// Prints a line on stdout. A closed pipe does not stop the program.
pub fn print_line(line: &str) {
    let mut stdout = io::stdout().lock();
    let _ = writeln!(stdout, "{}", escaped(line)).and_then(|()| stdout.flush());
}

/// Returns the columns of the terminal that stdout is; None where it is none, or does not say.
pub(crate) fn columns() -> Option<usize> {
    let stdout = io::stdout();
    let size = stdout.is_terminal().then(|| tcgetwinsize(&stdout).ok()).flatten()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

/// Breaks lines to fit into `columns`. What continues a line stands below the text behind its label, which two spaces or
/// more end.
pub(crate) fn wrapped(text: &str, columns: usize) -> String {
    let broken = text.split('\n').map(|line| {
        let label = line.find("  ").unwrap_or(0);
        let spaces = line[label..].len() - line[label..].trim_start_matches(' ').len();
        let (label, rest) = line.split_at(if spaces < 2 { 0 } else { label + spaces });
        let below = " ".repeat(label.chars().count());
        let options = Options::new(columns).initial_indent(label).subsequent_indent(&below).break_words(false);
        // No line begins with a percent sign.
        let rest = rest.replace(" %", "\u{a0}%");
        textwrap::fill(&rest, options.word_splitter(WordSplitter::NoHyphenation)).replace("\u{a0}%", " %")
    });
    broken.collect::<Vec<_>>().join("\n")
}

/// Formats a path as it is typed in a shell in the current folder.
pub(crate) fn typed(path: &Path) -> String {
    let here = env::current_dir().ok();
    let relative = here.and_then(|here| path.strip_prefix(here).ok()).filter(|path| !path.as_os_str().is_empty());
    let text = relative.unwrap_or(path).display().to_string();
    let is_plain = |character: char| character.is_alphanumeric() || "/._-+=:,@%".contains(character);
    if text.chars().all(is_plain) && !text.starts_with('-') {
        text
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// Whether a character controls the terminal: control characters other than newline and tab, line and paragraph
/// separators, bidirectional overrides. `python/orchestrator/terminal.py` has the same list.
fn is_control(character: char) -> bool {
    matches!(
        character,
        '\0'..='\u{8}' | '\u{b}'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{61c}' | '\u{200e}' | '\u{200f}'
            | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    )
}

fn replaced(
    text: &str,
    is_replaced: impl Fn(char) -> bool,
    write: impl Fn(&mut String, char) -> std::fmt::Result,
) -> Cow<'_, str> {
    if !text.contains(&is_replaced) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        if is_replaced(character) {
            let _ = write(&mut safe, character);
        } else {
            safe.push(character);
        }
    }
    Cow::Owned(safe)
}

/// A writer of logs to stderr: each event is escaped, and write errors are ignored.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let _ = io::stderr().write_all(escaped(&String::from_utf8_lossy(event)).as_bytes());
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "a\u{1b}]0;x\u{7}\r\u{9b}2J\u{7f}\u{202e}\u{2066}\u{2028}\u{61c}";

    #[test]
    fn control_characters_are_escaped() {
        let escaped_text = escaped(HOSTILE);
        assert_eq!(escaped_text, "a\\u{1b}]0;x\\u{7}\\u{d}\\u{9b}2J\\u{7f}\\u{202e}\\u{2066}\\u{2028}\\u{61c}");
        assert_eq!(escaped(&escaped_text), escaped_text, "twice is once");
    }

    #[test]
    fn lines_are_broken_below_their_text() {
        let plan =
            "step       1,024 tokens: 16 sequences of 64\n           gemm 37 %, attention 17 %\n\nIt does not fit in";
        let narrow = "step       1,024 tokens:\n           16 sequences\n           of 64\n           gemm 37 %,\n           \
                      attention 17 %\n\nIt does not fit in";
        assert_eq!(wrapped(plan, 25), narrow);
        assert_eq!(wrapped(plan, 80), plan);
        assert_eq!(wrapped("a /very/long/path", 5), "a\n/very/long/path");
        assert_eq!(wrapped("gemm 41 %", 8), "gemm\n41 %");
    }

    #[test]
    fn paths_can_be_typed() {
        let here = env::current_dir().unwrap();
        assert_eq!(typed(&here.join("runs/my-run_1")), "runs/my-run_1");
        assert_eq!(typed(Path::new("/data/a book's")), r"'/data/a book'\''s'");
    }

    #[test]
    fn ordinary_text_is_unchanged() {
        let text = "zwei\n\tUmlaute \u{fc}, \u{4e2d}\u{6587}, \u{1f469}\u{200d}\u{1f467}, a\u{a0}b, \\u{1b}";
        assert_eq!(escaped(text), text);
    }

    #[test]
    fn escaped_json_keeps_its_value() {
        let text = format!("{HOSTILE}\u{fc}\u{1f469}");
        let json = serde_json::to_string(&text).unwrap();
        let safe = escaped_json(&json);
        assert!(safe.is_ascii() && !safe.contains(is_control), "{safe}");
        assert_eq!(serde_json::from_str::<String>(&safe).unwrap(), text);
    }
}
