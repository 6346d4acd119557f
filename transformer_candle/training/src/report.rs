//! What a run reports: plain data, and for each report the one list of the numbers that are logged.
//!
//! A metric is added as a field of [`StepReport`] or [`EvaluationReport`] and a line of its `scalars`: every metrics
//! sink, the Python API and `--json` read that list.

mod evaluation;
mod interval;
mod scalar;
mod step;

pub use evaluation::{ComponentEvaluation, EvaluationReport};
pub(crate) use interval::LogInterval;
pub use scalar::{ComponentRecord, Number, Record, Scalar};
pub use step::StepReport;
