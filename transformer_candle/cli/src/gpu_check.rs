//! `gpu-check` on the command line: rows as they are made, and a verdict; or with `--json` a line per part, and the
//! rows to stderr.

use clap::Args;
use gpu_check::{CheckProgress, CheckReport, Part, Size, heading, verdict};
use training::Result;
use training::commands::Output;

/// What `gpu-check` takes.
#[derive(Debug, Clone, Args)]
pub(super) struct GpuCheckOptions {
    /// The GPU to check: cuda or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value = "cuda")]
    device: run_config::Device,
    /// How large the checks are.
    #[arg(long, value_enum, default_value_t = Size::Full)]
    size: Size,
    /// Make only these checks. Repeatable. [default: all, in this order]
    #[arg(long, value_enum, value_name = "PART")]
    only: Vec<Part>,
    /// Of the random inputs, as a run printed it. [default: another one each time]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Print one JSON object per part as soon as it ends, and the rows to stderr.
    #[arg(long)]
    json: bool,
}

pub(super) fn main(options: &GpuCheckOptions, output: &mut dyn Output) -> Result<u8> {
    let &GpuCheckOptions { device, size, ref only, seed, json } = options;
    let mut printer = Printer { output, json, has_printed: false, failure: Ok(()) };
    let reports = gpu_check::run(device, size, only, seed, &mut |progress| printer.show(progress))?;
    printer.end(&reports)?;
    Ok(u8::from(!reports.iter().all(|report| report.passed)))
}

/// Prints each row as it is checked. A closed pipe does not stop the checks.
struct Printer<'a> {
    output: &'a mut dyn Output,
    json: bool,
    has_printed: bool,
    /// The first error of printing.
    failure: Result<()>,
}

impl Printer<'_> {
    fn show(&mut self, progress: CheckProgress<'_>) {
        let outcome = match progress {
            CheckProgress::Row(row) => {
                let head = if self.has_printed { String::new() } else { format!("{}\n", heading()) };
                self.has_printed = true;
                self.line(&format!("{head}{row}\n"))
            }
            CheckProgress::Part(report) => {
                let speeds = report.speed.iter().try_for_each(|row| self.line(&format!("{row}\n")));
                if self.json { speeds.and_then(|()| self.output.print_json(report)) } else { speeds }
            }
        };
        if self.failure.is_ok() {
            self.failure = outcome;
        }
    }

    /// Prints the verdict, unless the output is JSON; fails if a row could not be printed.
    fn end(self, reports: &[CheckReport]) -> Result<()> {
        self.failure?;
        if self.json { Ok(()) } else { self.output.print(&format!("{}\n", verdict(reports))) }
    }

    fn line(&mut self, text: &str) -> Result<()> {
        if self.json {
            eprint!("{text}");
            return Ok(());
        }
        self.output.print(text)
    }
}
