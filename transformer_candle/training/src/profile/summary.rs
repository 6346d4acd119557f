//! Where the time of profiled steps goes, beside the roofline of each part.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
    ops::Range,
    time::Duration,
};

use kernels::timing::Span;

use super::ProfiledStep;
use crate::{
    memory_plan::{Bound, Bounds, PeakRates, StepPart},
    units::metric,
};

/// Times of the profiled steps, summed.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    pub(super) steps: u32,
    sequences: usize,
    time: Duration,
    /// Number and total time of the calls of each operation, by part and by [`StepPart::label`].
    operations: BTreeMap<(StepPart, String), (u32, Duration)>,
    /// Total time of what the loop did besides computing, by name.
    spans: BTreeMap<&'static str, Duration>,
    /// Thread time while operations ran: of the threads that were at work on them, and of all threads.
    busy: [Duration; 2],
}

impl Totals {
    pub(super) fn add(&mut self, step: &ProfiledStep) {
        self.steps += 1;
        self.sequences += step.sequences;
        self.time += length(&step.time);
        for (name, time) in &step.spans {
            *self.spans.entry(name).or_default() += length(time);
        }
        let spans = &step.recording.spans;
        for span in step.recording.operations() {
            let scope = span.parent.map(|parent| spans[parent].name);
            let place = (StepPart::from_operation(span.name), StepPart::label(span.name, scope));
            let (calls, time) = self.operations.entry(place).or_default();
            *calls += 1;
            *time += span.duration();
        }
        let tasks = &step.recording.tasks;
        let at_work: Duration = tasks.iter().flatten().map(|task| length(&task.time)).sum();
        let operations: Duration = step.recording.operations().map(Span::duration).sum();
        self.busy[0] += at_work;
        self.busy[1] += operations * tasks.len() as u32;
    }

    /// Sequences of a step, on average.
    pub(super) fn sequences_per_step(&self) -> usize {
        self.sequences.div_ceil(self.steps.max(1) as usize)
    }
}

/// The summary of a profile; `Display` prints it.
pub(super) struct Summary<'a> {
    /// Such as `steps 10 to 12 on cpu with 2 threads`.
    pub(super) title: String,
    /// Sentences below the title.
    pub(super) notes: Vec<String>,
    pub(super) totals: &'a Totals,
    /// The ceilings of the roofline, and what each operation of a step needs.
    pub(super) roofline: Option<(PeakRates, Bounds)>,
}

fn length(time: &Range<Duration>) -> Duration {
    time.end.saturating_sub(time.start)
}

/// A line of a table.
struct Row<'a> {
    name: &'a str,
    calls: Option<f64>,
    /// Seconds per step.
    seconds: f64,
    bound: Option<Bound>,
}

impl Summary<'_> {
    fn step_seconds(&self) -> f64 {
        self.per_step(self.totals.time)
    }

    fn per_step(&self, time: Duration) -> f64 {
        time.as_secs_f64() / f64::from(self.totals.steps.max(1))
    }

    fn part(&self, part: StepPart) -> Row<'static> {
        let of_part = self.totals.operations.iter().filter(|((of, _), _)| *of == part);
        let seconds = of_part.map(|(_, (_, time))| self.per_step(*time)).sum();
        let bound = self.roofline.as_ref().map(|(_, bounds)| {
            bounds.iter().filter(|((of, _), _)| *of == part).fold(Bound::default(), |sum, (_, bound)| sum + *bound)
        });
        Row { name: part.name(), calls: None, seconds, bound }
    }

    fn bound(&self, part: StepPart, label: &str) -> Option<Bound> {
        let (_, bounds) = self.roofline.as_ref()?;
        bounds.get(&(part, label.to_owned())).copied()
    }

    /// Returns a row for each part, for each span of the loop, for the rest of the step and for the whole step.
    fn parts(&self) -> Vec<Row<'_>> {
        let spans = self.totals.spans.iter();
        let spans = spans.map(|(name, time)| Row { name, calls: None, seconds: self.per_step(*time), bound: None });
        let mut rows: Vec<_> = StepPart::ALL.into_iter().map(|part| self.part(part)).chain(spans).collect();
        rows.retain(|row| row.seconds > 0.0);
        rows.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
        let listed_seconds: f64 = rows.iter().map(|row| row.seconds).sum();
        rows.push(Row { name: "other", calls: None, seconds: self.step_seconds() - listed_seconds, bound: None });
        rows.push(Row { name: "step", calls: None, seconds: self.step_seconds(), bound: None });
        rows
    }

    /// Returns a row for each operation, the longest first.
    fn operations(&self) -> Vec<Row<'_>> {
        let steps = f64::from(self.totals.steps.max(1));
        let rows = self.totals.operations.iter().map(|((part, label), (calls, time))| Row {
            name: label,
            calls: Some(f64::from(*calls) / steps),
            seconds: self.per_step(*time),
            bound: self.bound(*part, label),
        });
        let mut rows: Vec<_> = rows.collect();
        rows.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
        rows
    }

    fn table(&self, text: &mut String, head: &str, rows: &[Row<'_>]) -> fmt::Result {
        let has_calls = rows.iter().any(|row| row.calls.is_some());
        let calls_head = if has_calls { "calls" } else { "" };
        write!(text, "{head:<26} {calls_head:>5} {:>9} {:>6}", "ms", "share")?;
        let is_bounded = self.roofline.is_some();
        writeln!(text, "{}", if is_bounded { " roofline ms  reached  bound by" } else { "" })?;
        for Row { name, calls, seconds, bound } in rows {
            let calls = calls.map_or_else(String::new, |calls| format!("{calls:.0}"));
            let share = 100.0 * seconds / self.step_seconds();
            write!(text, "{name:<26} {calls:>5} {:>9.3} {share:>5.1}%", seconds * 1e3)?;
            match (bound, &self.roofline) {
                (Some(bound), Some((peak, _))) if bound.seconds > 0.0 => {
                    let reached = 100.0 * bound.seconds / seconds;
                    let compute = bound.flops / peak.flops() > bound.bytes / peak.bytes_per_second();
                    let by = if compute { "compute" } else { "memory" };
                    writeln!(text, " {:>11.3} {reached:>7.0}%  {by}", bound.seconds * 1e3)?;
                }
                _ => writeln!(text)?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        writeln!(text, "profile of {}", self.title)?;
        self.notes.iter().try_for_each(|note| writeln!(text, "{note}"))?;
        let [at_work, threads] = self.totals.busy.map(|time| time.as_secs_f64());
        if threads > 0.0 {
            writeln!(text, "threads are at work for {:.0}% of the operations' time", 100.0 * at_work / threads)?;
        }
        if let Some((peak, _)) = &self.roofline {
            writeln!(
                text,
                "roofline: {}FLOP/s and {}B/s, {}; above 100% is what stays in caches",
                metric(peak.flops()),
                metric(peak.bytes_per_second()),
                peak.origin
            )?;
        }
        writeln!(text)?;
        self.table(&mut text, "part, per step", &self.parts())?;
        writeln!(text)?;
        self.table(&mut text, "operation, per step", &self.operations())?;
        for line in text.lines() {
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kernels::timing::{Recording, SpanKind, Task};

    use super::*;

    fn time(milliseconds: Range<u64>) -> Range<Duration> {
        Duration::from_millis(milliseconds.start)..Duration::from_millis(milliseconds.end)
    }

    fn span(name: &'static str, kind: SpanKind, parent: Option<usize>, milliseconds: Range<u64>) -> Span {
        Span { name, number: None, kind, parent, host: time(milliseconds), device: None }
    }

    /// A step of 100 ms: 10 of waiting, 60 of operations, 20 of saving.
    fn step() -> ProfiledStep {
        let spans = vec![
            span("qkv", SpanKind::Scope, None, 10..60),
            span("linear::forward", SpanKind::Operation, Some(0), 10..40),
            span("linear::backward_input", SpanKind::Operation, Some(0), 40..50),
            span("adamw::step", SpanKind::Operation, None, 50..70),
        ];
        let task = |milliseconds| vec![Task { name: "linear::forward", span: 1, time: time(milliseconds) }];
        let recording = Recording { spans, tasks: vec![task(10..40), task(10..25)] };
        let spans = vec![("data_wait", time(0..10)), ("save", time(75..95))];
        ProfiledStep { number: 7, time: time(0..100), spans, sequences: 4, recording }
    }

    #[test]
    fn parts_and_other_add_up_to_the_step() {
        let mut totals = Totals::default();
        totals.add(&step());
        totals.add(&step());
        let summary = Summary { title: "two steps".to_owned(), notes: Vec::new(), totals: &totals, roofline: None };
        let names = |rows: Vec<Row<'_>>| -> Vec<(String, u64)> {
            rows.iter().map(|row| (row.name.to_owned(), (row.seconds * 1e3).round() as u64)).collect()
        };
        let expected = [("gemm", 40), ("optimizer", 20), ("save", 20), ("data_wait", 10), ("other", 10), ("step", 100)];
        assert_eq!(names(summary.parts()), expected.map(|(name, time)| (name.to_owned(), time)));
        let expected = [("qkv forward", 30), ("adamw step", 20), ("qkv backward", 10)];
        assert_eq!(names(summary.operations()), expected.map(|(name, time)| (name.to_owned(), time)));
        assert_eq!(totals.sequences_per_step(), 4);
    }

    #[test]
    fn a_summary_reads_well() {
        let mut totals = Totals::default();
        totals.add(&step());
        let notes = vec!["a note".to_owned()];
        let summary = Summary { title: "step 7".to_owned(), notes, totals: &totals, roofline: None };
        insta::assert_snapshot!(summary, @r"
        profile of step 7
        a note
        threads are at work for 38% of the operations' time

        part, per step                          ms  share
        gemm                                40.000  40.0%
        optimizer                           20.000  20.0%
        save                                20.000  20.0%
        data_wait                           10.000  10.0%
        other                               10.000  10.0%
        step                               100.000 100.0%

        operation, per step        calls        ms  share
        qkv forward                    1    30.000  30.0%
        adamw step                     1    20.000  20.0%
        qkv backward                   1    10.000  10.0%
        ");
    }
}
