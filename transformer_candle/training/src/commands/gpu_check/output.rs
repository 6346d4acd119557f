//! What `gpu-check` prints: rows as they are made, and a verdict; or with `--json` a line per part, and the rows to stderr.

use super::report::{heading, verdict};
use super::{CheckReport, Progress};
use crate::Result;
use crate::commands::output::{print, print_json};

/// Prints while checks are made, of which a reader that goes away stops none.
pub(super) struct Output {
    json: bool,
    begun: bool,
    /// The first failure to print.
    failure: Result<()>,
}

impl Output {
    pub(super) fn new(json: bool) -> Self {
        Self { json, begun: false, failure: Ok(()) }
    }

    pub(super) fn show(&mut self, progress: Progress<'_>) {
        let printed = match progress {
            Progress::Row(row) => {
                let head = if self.begun { String::new() } else { format!("{}\n", heading()) };
                self.begun = true;
                self.line(&format!("{head}{row}\n"))
            }
            Progress::Part(report) => {
                let speeds = report.speed.iter().try_for_each(|row| self.line(&format!("{row}\n")));
                if self.json { speeds.and_then(|()| print_json(report)) } else { speeds }
            }
        };
        if self.failure.is_ok() {
            self.failure = printed;
        }
    }

    /// The verdict, for people.
    pub(super) fn end(self, reports: &[CheckReport]) -> Result<()> {
        self.failure?;
        if self.json { Ok(()) } else { print(&format!("{}\n", verdict(reports))) }
    }

    fn line(&self, text: &str) -> Result<()> {
        if self.json {
            eprint!("{text}");
            return Ok(());
        }
        print(text)
    }
}
