//! The report: one row per check, printed as soon as it is complete, and a verdict.

use std::fmt;

use serde::Serialize;

use super::part::Part;

/// The result of one check.
#[derive(Clone, Debug, Serialize)]
pub struct CheckRow {
    /// What was compared or measured.
    pub check: String,
    /// The sizes of its arguments or of the model, such as `513 x 1536`.
    pub sizes: String,
    /// The relative error, if one was computed.
    pub error: Option<f64>,
    /// The largest error that passes.
    pub bound: Option<f64>,
    /// Why it failed; `None` if it passed.
    pub failure: Option<String>,
    /// A figure printed beside the verdict.
    pub note: Option<String>,
    /// Why it was not made; `None` if it was.
    pub skipped: Option<String>,
}

impl CheckRow {
    /// Creates the row of a check that has passed so far.
    pub(super) fn new(check: impl Into<String>, sizes: impl Into<String>) -> Self {
        Self {
            check: check.into(),
            sizes: sizes.into(),
            error: None,
            bound: None,
            failure: None,
            note: None,
            skipped: None,
        }
    }

    /// Creates the row of a check that this device cannot make.
    pub(super) fn skipped(check: impl Into<String>, sizes: impl Into<String>, reason: &str) -> Self {
        Self { skipped: Some(reason.to_owned()), ..Self::new(check, sizes) }
    }

    /// Adds an error and its bound, which it must not exceed. NaN exceeds every bound.
    pub(super) fn within(mut self, error: f64, bound: f64) -> Self {
        (self.error, self.bound) = (Some(error), Some(bound));
        let passes = error <= bound;
        self.require(passes, || format!("{error:.1e} is more than {bound:.1e}"))
    }

    /// Adds a condition. The first that does not hold is the reported failure.
    pub(super) fn require(mut self, condition: bool, problem: impl FnOnce() -> String) -> Self {
        if !condition && self.failure.is_none() {
            self.failure = Some(problem());
        }
        self
    }

    pub(super) fn note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }
}

impl fmt::Display for CheckRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |value: Option<f64>| match value {
            None => String::new(),
            Some(0.0) => "0".to_owned(),
            Some(value) => format!("{value:.1e}"),
        };
        let verdict = match (&self.failure, &self.skipped) {
            (Some(problem), _) => format!("FAILED: {problem}"),
            (None, Some(reason)) => format!("skipped: {reason}"),
            (None, None) => "ok".to_owned(),
        };
        write!(
            f,
            "{:<41} {:<36} {:>8} {:>8}  {verdict}",
            self.check,
            self.sizes,
            number(self.error),
            number(self.bound)
        )?;
        self.note.as_ref().map_or(Ok(()), |note| write!(f, " ({note})"))
    }
}

/// Returns the header of a table of [`CheckRow`]s.
pub fn heading() -> String {
    format!("{:<41} {:<36} {:>8} {:>8}  verdict", "check", "sizes", "error", "bound")
}

/// Speed of an operation in a step of the largest model, without a verdict.
#[derive(Clone, Debug, Serialize)]
pub struct SpeedRow {
    /// The operation, such as `linear::forward`.
    pub operation: &'static str,
    /// Milliseconds per optimizer step.
    pub milliseconds: f64,
    /// TFLOP/s of its GEMMs, if it has any.
    pub teraflops_per_second: Option<f64>,
    /// TFLOP/s as a fraction of the GPU's nominal peak.
    pub share_of_peak: Option<f64>,
    /// TB/s of the bytes it must read and write.
    pub terabytes_per_second: Option<f64>,
}

impl fmt::Display for SpeedRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<41} {:>9.2} ms", self.operation, self.milliseconds)?;
        if let Some(reached) = self.teraflops_per_second {
            write!(f, "  {reached:>6.0} TFLOP/s")?;
        }
        if let Some(share) = self.share_of_peak {
            write!(f, " ({:.0} % of nominal)", 100.0 * share)?;
        }
        self.terabytes_per_second.map_or(Ok(()), |reached| write!(f, "  {reached:>5.2} TB/s"))
    }
}

/// The report of one part: every row, and whether all passed.
#[derive(Clone, Debug, Serialize)]
pub struct CheckReport {
    /// The part that was checked.
    pub part: Part,
    /// The device and what its results depend on: GPU, driver, library.
    pub device: String,
    /// The seed of the random inputs; `--seed` repeats them.
    pub seed: u64,
    /// Whether every check passed.
    pub passed: bool,
    /// The checks, in the order they were made.
    pub rows: Vec<CheckRow>,
    /// The speed of the operations, at full size.
    pub speed: Vec<SpeedRow>,
    /// Wall time in seconds.
    pub seconds: f64,
}

/// Returns the last line of the output, the verdict on all parts.
pub fn verdict(reports: &[CheckReport]) -> String {
    let Some(CheckReport { device, seed, .. }) = reports.first() else { return String::new() };
    let rows = || reports.iter().flat_map(|report| &report.rows);
    let (checks, failed) =
        (rows().filter(|row| row.skipped.is_none()).count(), rows().filter(|row| row.failure.is_some()).count());
    let seconds: f64 = reports.iter().map(|report| report.seconds).sum();
    let summary = if failed == 0 { format!("PASSED: {checks}") } else { format!("FAILED: {failed} of {checks}") };
    format!("{summary} checks on {device} in {seconds:.0} s, seed {seed}")
}

/// The rows so far, and the callback that each is passed to.
pub(super) struct Findings<'a> {
    pub(super) rows: Vec<CheckRow>,
    on_row: &'a mut dyn FnMut(&CheckRow),
}

impl<'a> Findings<'a> {
    pub(super) fn new(on_row: &'a mut dyn FnMut(&CheckRow)) -> Self {
        Self { rows: Vec::new(), on_row }
    }

    pub(super) fn add(&mut self, row: CheckRow) {
        (self.on_row)(&row);
        self.rows.push(row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failed_condition_is_reported() {
        assert!(CheckRow::new("a", "b").within(1e-3, 1e-3).failure.is_none());
        let row = CheckRow::new("a", "b").within(f64::NAN, 1e-3).require(false, || "later".to_owned());
        assert_eq!(row.failure.as_deref(), Some("NaN is more than 1.0e-3"));
    }

    #[test]
    fn a_skipped_check_is_neither_ok_nor_counted() {
        let rows = vec![CheckRow::skipped("a", "b", "no such matmuls"), CheckRow::new("c", "d")];
        assert!(rows[0].to_string().ends_with("skipped: no such matmuls"), "{}", rows[0]);
        let (part, device) = (Part::Operations, "cuda:0".to_owned());
        let report = CheckReport { part, device, seed: 1, passed: true, rows, speed: Vec::new(), seconds: 1.0 };
        assert_eq!(verdict(&[report]), "PASSED: 1 checks on cuda:0 in 1 s, seed 1");
    }

    #[test]
    fn rows_and_the_verdict_print_as_lines() {
        let row = CheckRow::new("swiglu::forward bf16", "37 x 80").within(5e-2, 4e-3).note("3 TB/s");
        let speed = SpeedRow {
            operation: "linear::forward",
            milliseconds: 12.345,
            teraflops_per_second: Some(700.0),
            share_of_peak: Some(0.708),
            terabytes_per_second: Some(1.25),
        };
        let report = CheckReport {
            part: Part::Operations,
            device: "cuda:0 (a GPU)".into(),
            seed: 7,
            passed: false,
            rows: vec![row.clone(), CheckRow::new("x", "")],
            speed: vec![speed.clone()],
            seconds: 3.2,
        };
        let memory = CheckReport { part: Part::Memory, passed: true, rows: Vec::new(), seconds: 1.0, ..report.clone() };
        insta::assert_snapshot!(format!("{}\n{row}\n{speed}\n{}", heading(), verdict(&[report, memory])));
    }
}
