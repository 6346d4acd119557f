//! The operations of a step with the time of each by the roofline: what `plan --operations` prints after the plan.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
};

use serde::Serialize;

use super::{
    MemoryPlan, Speed,
    operation::{Operation, Rate},
    roofline::{BoundBy, Rates, Roofline},
};
use crate::{
    terminal::wrapped,
    units::{grouped, metric},
};

/// Columns of the table and of the lines above it.
const COLUMNS: usize = 80;

/// The operations of a step, each with its time at the highest rates that launches sustain.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepOperations {
    /// FLOPs per second that GEMMs sustain.
    pub gemm_flops_per_second: f64,
    /// FLOPs per second that attention sustains, forward and backward.
    pub attention_flops_per_second: [f64; 2],
    /// Bytes per second of memory that are sustained.
    pub bytes_per_second: f64,
    /// Seconds that a launch takes at least.
    pub launch_seconds: f64,
    /// The step's seconds over those of its roofline: 1 where nothing was timed.
    pub scale: f64,
    /// The operations, forward and backward of the blocks first.
    pub rows: Vec<OperationRow>,
    /// Seconds of the step, which is the sum of the rows.
    pub step_seconds: f64,
    /// Positions per second, as [`Speed::tokens_per_second`] counts them.
    pub tokens_per_second: f64,
    /// Model FLOPs per second over the nominal ones; none on a CPU.
    pub mfu: Option<f64>,
}

/// All launches of one operation in a step of a GPU, or of the processes of a machine's CPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OperationRow {
    /// Its name, such as `qkv dW`.
    pub operation: String,
    /// The part of the step that it belongs to, as [`Speed::parts`] names them.
    pub part: &'static str,
    /// Launches per step.
    pub launches: f64,
    /// FLOPs of a launch; their mean where launches differ.
    pub flops: f64,
    /// Bytes that a launch moves; their mean where launches differ.
    pub bytes: f64,
    /// Seconds of all launches.
    pub seconds: f64,
    /// Their fraction of the step.
    pub share: f64,
    /// What bounds most of these seconds.
    pub bound_by: BoundBy,
}

impl OperationRow {
    /// Sums the launches of the same name.
    fn new(operations: &[&Operation], rates: &Rates, scale: f64) -> Self {
        let mut seconds_by_bound: BTreeMap<BoundBy, f64> = BTreeMap::new();
        let [mut launches, mut flops, mut bytes] = [0.0; 3];
        for operation in operations {
            let (seconds, by) = rates.bound(operation);
            *seconds_by_bound.entry(by).or_default() += scale * seconds;
            launches += operation.count;
            flops += operation.count * operation.flops;
            bytes += operation.count * operation.bytes;
        }
        let longest = seconds_by_bound.iter().max_by(|a, b| a.1.total_cmp(b.1));
        Self {
            operation: operations[0].name(),
            part: operations[0].part().name(),
            launches,
            flops: flops / launches,
            bytes: bytes / launches,
            seconds: seconds_by_bound.values().sum(),
            share: 0.0,
            bound_by: longest.map_or(BoundBy::Launch, |(by, _)| *by),
        }
    }

    /// The exchange between ranks, as far as nothing is computed meanwhile.
    fn of_exchange(bytes: f64, seconds: f64) -> Self {
        Self {
            operation: "exchange between ranks".to_owned(),
            part: "exchange",
            launches: 1.0,
            flops: 0.0,
            bytes,
            seconds,
            share: 0.0,
            bound_by: BoundBy::Network,
        }
    }
}

impl StepOperations {
    /// The operations of a step of this speed; `rates` are its optimistic ones, and `scale` what the roofline's seconds
    /// are multiplied with.
    pub(super) fn new(roofline: &Roofline, rates: &Rates, scale: f64, speed: &Speed) -> Self {
        let mut by_name: Vec<(String, Vec<&Operation>)> = Vec::new();
        for operation in &roofline.operations {
            let name = operation.name();
            match by_name.iter_mut().find(|(other, _)| *other == name) {
                Some((_, operations)) => operations.push(operation),
                None => by_name.push((name, vec![operation])),
            }
        }
        let rows = by_name.iter().map(|(_, operations)| OperationRow::new(operations, rates, scale));
        let exchange = speed.exchange.as_ref();
        let exchange =
            exchange.map(|exchange| OperationRow::of_exchange(exchange.bytes_per_rank, exchange.exposed_seconds[1]));
        let mut rows: Vec<OperationRow> = rows.chain(exchange).collect();
        let step_seconds = speed.step_seconds[1];
        for row in &mut rows {
            row.share = row.seconds / step_seconds;
        }
        let [forward, backward] = [Rate::AttentionForward, Rate::AttentionBackward];
        Self {
            gemm_flops_per_second: rates.sustained_flops(Rate::Gemm),
            attention_flops_per_second: [forward, backward].map(|rate| rates.sustained_flops(rate)),
            bytes_per_second: rates.bytes_per_second * rates.fractions.memory,
            launch_seconds: rates.launch_seconds,
            scale,
            rows,
            step_seconds,
            tokens_per_second: speed.tokens_per_second[1],
            mfu: speed.mfu.map(|[_, high]| high),
        }
    }

    /// The rates, and what the columns count.
    fn rates(&self) -> String {
        let [forward, backward] = self.attention_flops_per_second.map(metric);
        let scale = if (self.scale - 1.0).abs() < f64::EPSILON {
            String::new()
        } else {
            format!(" The roofline's times are multiplied by {:.2}.", self.scale)
        };
        format!(
            "GEMMs {}FLOP/s, attention {forward}FLOP/s forward and {backward}FLOP/s backward, memory {}B/s, a launch \
             at least {:.0} µs.{scale} GFLOP and MB are of one launch.",
            metric(self.gemm_flops_per_second),
            metric(self.bytes_per_second),
            self.launch_seconds * 1e6
        )
    }
}

impl fmt::Display for OperationRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, launches, flops, bytes, seconds, share, bound_by, .. } = self;
        let launches = if launches.fract() == 0.0 { grouped(*launches as u64) } else { format!("{launches:.1}") };
        let (gigaflops, megabytes, milliseconds) = (flops / 1e9, bytes / 1e6, seconds * 1e3);
        let share = 100.0 * share;
        let by = match bound_by {
            BoundBy::Flops => "FLOPs",
            BoundBy::Memory => "memory",
            BoundBy::Launch => "launch",
            BoundBy::Network => "network",
        };
        write!(
            f,
            "{operation:<25} {launches:>8} {gigaflops:>8.1} {megabytes:>9.1} {milliseconds:>8.1} {share:>5.1} %  {by}"
        )
    }
}

impl MemoryPlan {
    /// Formats the operations of a step, which a plan has where [`super::PlanRequest::lists_operations`] is set.
    pub fn operations_table(&self) -> Option<String> {
        let (operations, speed) = (self.operations.as_ref()?, self.speed.as_ref()?);
        let each = match (self.ranks, self.device.memory_bytes) {
            (None, _) => "",
            (Some(_), Some(_)) => " on each GPU",
            (Some(_), None) => " on each machine",
        };
        let stage = if self.stages.is_empty() { "" } else { " of the stage that needs the most memory" };
        let origin = &speed.origin;
        let rates = operations.rates();
        let title =
            format!("The operations of a step{stage}{each} at the optimistic end of its speed, {origin}: {rates}");
        let mut text = wrapped(&title, COLUMNS);
        let milliseconds = operations.step_seconds * 1e3;
        let [operation, launches, flops, bytes, time] = ["operation", "launches", "GFLOP", "MB", "ms"];
        let unit = if self.conversations { "positions" } else { "tokens" };
        let rate = grouped(operations.tokens_per_second.round() as u64);
        let mfu = operations.mfu.map(|mfu| format!(", MFU {:.1} %", 100.0 * mfu)).unwrap_or_default();
        let head = format!("{operation:<25} {launches:>8} {flops:>8} {bytes:>9} {time:>8} {:>7}  bound by", "share");
        let lines = operations.rows.iter().map(ToString::to_string);
        let sum = format!("{:<25} {:>8} {:>8} {:>9} {milliseconds:>8.1} {:>5.1} %", "step", "", "", "", 100.0);
        for line in [String::new(), head].into_iter().chain(lines).chain([sum, format!("{rate} {unit}/s{mfu}")]) {
            let _ = write!(text, "\n{line}");
        }
        Some(text)
    }
}
