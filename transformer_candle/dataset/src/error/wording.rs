//! Parts of the messages: what was found instead, and the way out.

use std::fmt;

use run_config::grouped;

use crate::SkippedRows;

/// A file without the text column, or whose text column does not hold strings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingColumn {
    /// The file, as listed.
    pub file: String,
    /// The column looked for.
    pub column: String,
    /// What the column holds instead of strings, such as "integers"; `None` if there is no such column.
    pub value_type: Option<&'static str>,
    /// The columns that hold strings.
    pub available: Vec<String>,
}

impl fmt::Display for MissingColumn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, column, value_type, available } = self;
        match value_type {
            None => write!(f, "{file} has no text column `{column}`")?,
            Some(value_type) => write!(f, "the column `{column}` of {file} holds {value_type}, not strings")?,
        }
        if available.is_empty() {
            f.write_str("; no other column holds strings: choose other files")
        } else {
            let available = available.join(", ");
            write!(f, "; its text columns are {available}: choose one with --text-column (data.text_column)")
        }
    }
}

pub(super) fn describe_skipped(skipped: &SkippedRows) -> String {
    if skipped.total() == 0 { "none skipped".to_owned() } else { format!("skipped: {skipped}") }
}

pub(super) fn describe_columns(columns: &[String]) -> String {
    if columns.is_empty() {
        return String::new();
    }
    format!("; its columns are {}: rename them, or train on a text column (data.format: text)", columns.join(", "))
}

pub(super) fn describe_first(problem: Option<&str>) -> String {
    problem.map_or_else(String::new, |problem| format!("; for example: {problem}"))
}

pub(super) fn nothing_held_out(name: &str, skipped: &SkippedRows, is_whole: bool) -> String {
    match skipped.total() {
        rows if is_whole => {
            let why = if rows == 0 {
                "it is empty".to_owned()
            } else {
                format!("all {} rows were skipped: {skipped}", grouped(rows))
            };
            format!("{name} has no text to evaluate on, as {why}; name other files{}", encoding_hint(skipped))
        }
        0 => format!(
            "{name} is too small to hold out a part for evaluation: set data.validation_shards, or provide more than \
             one document"
        ),
        rows => format!(
            "all {} rows of {name} that are held out were skipped: {skipped}; set data.validation_shards, or raise \
             data.held_out_fraction",
            grouped(rows)
        ),
    }
}

pub(super) fn encoding_hint(skipped: &SkippedRows) -> &'static str {
    if skipped.not_utf8 > 0 { "; convert text to UTF-8, as with `iconv -f WINDOWS-1252 -t UTF-8`" } else { "" }
}

/// Returns the way out where there are no documents to train on: the held-out part is to blame only if no row that was
/// read was skipped.
pub(super) fn no_documents_hint(skipped: &SkippedRows, held_out: bool) -> &'static str {
    if skipped.template > 0 {
        "; choose a template that takes these conversations by --chat-template (data.chat_template), such as `chatml`, or \
         other rows"
    } else if held_out && skipped.total() == 0 {
        "; the rest is held out: lower data.held_out_fraction or set data.validation_shards"
    } else {
        ""
    }
}
