//! The reports of a run: plain data, and for each report the one list of the numbers that are logged.
//!
//! A metric is added as a field of [`StepReport`] or [`EvaluationReport`] and a line of its `scalars`: every metrics
//! sink, the Python API and `--json` read that list.

mod data;
mod evaluation;
mod ranks;
mod remark;
mod scalar;
mod stage;
mod step;
mod utilization;

pub use data::DataReport;
pub use evaluation::{ComponentEvaluation, EvaluationReport, SampleReport};
pub use ranks::{RankTimes, RankUsage};
pub use remark::{AdviceReport, EndReport};
pub use scalar::{ComponentRecord, Number, Record, Scalar, Series, ShownText, Text};
pub use stage::StageReport;
pub(crate) use step::LogInterval;
pub use step::StepReport;
pub use utilization::{GpuUtilization, RanksUtilization, UtilizationReport};
