//! Writes profiled steps as a trace that Perfetto (<https://ui.perfetto.dev>), `chrome://tracing` and speedscope open.
//!
//! The format is Google's Trace Event Format: one JSON object whose `traceEvents` are complete events (`"ph": "X"`) with
//! microseconds, and metadata events (`"ph": "M"`) with the names of processes and threads. The steps of a profile are
//! appended one after the other, so that one step at a time is in memory.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    ops::Range,
    path::{Path, PathBuf},
    time::Duration,
};

use kernels::timing::{Recording, Span, SpanKind};
use serde::Serialize;
use serde_json::{Value, json};

use super::ProfiledStep;
use crate::{atomic_file, memory_plan::StepPart};

/// Process id of the trainer, and in it the thread id of the training loop; the threads of the pool follow.
const TRAINER: u32 = 1;
const LOOP: u32 = 1;
/// Process id that stands for the GPU, and in it the thread id of the stream.
const GPU: u32 = 2;
const STREAM: u32 = 1;

/// A complete event.
#[derive(Serialize)]
struct Event<'a> {
    name: String,
    cat: &'a str,
    ph: &'a str,
    ts: f64,
    dur: f64,
    pid: u32,
    tid: u32,
    #[serde(skip_serializing_if = "Value::is_null")]
    args: Value,
}

/// A trace that is being written to a staging file beside its final path.
pub(super) struct Trace {
    path: PathBuf,
    staging: PathBuf,
    writer: BufWriter<File>,
    is_first: bool,
}

impl Trace {
    /// Begins a trace: `device` names the GPU, or is None on a CPU with `threads` threads. `metadata` is for people.
    pub(super) fn create(path: &Path, device: Option<&str>, threads: usize, metadata: &Value) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let staging = atomic_file::staging_path(path);
        let writer = BufWriter::new(File::create(&staging)?);
        let mut trace = Self { path: path.to_owned(), staging, writer, is_first: true };
        write!(trace.writer, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{metadata},\"traceEvents\":[")?;
        trace.name("process_name", TRAINER, LOOP, "trainer")?;
        trace.name("thread_name", TRAINER, LOOP, "training loop")?;
        match device {
            Some(device) => {
                trace.name("process_name", GPU, STREAM, device)?;
                trace.name("thread_name", GPU, STREAM, "compute stream")?;
            }
            None => {
                for thread in 0..threads {
                    trace.name("thread_name", TRAINER, thread_id(thread), &format!("trainer-{thread}"))?;
                }
            }
        }
        Ok(trace)
    }

    /// Appends a step.
    pub(super) fn append(&mut self, step: &ProfiledStep) -> io::Result<()> {
        let ProfiledStep { number, time, spans, recording, .. } = step;
        self.event((TRAINER, LOOP), "step", format!("step {number}"), time, Value::Null)?;
        for (name, time) in spans {
            self.event((TRAINER, LOOP), "loop", (*name).to_owned(), time, Value::Null)?;
        }
        for span in &recording.spans {
            self.event((TRAINER, LOOP), category(span), name(span), &span.host, arguments(span))?;
        }
        for (span, time) in recording.spans.iter().zip(device_times(recording)) {
            if let Some(time) = time {
                self.event((GPU, STREAM), category(span), name(span), &time, arguments(span))?;
            }
        }
        for (thread, tasks) in recording.tasks.iter().enumerate() {
            for task in tasks {
                let place = (TRAINER, thread_id(thread));
                self.event(place, "task", task.name.to_owned(), &task.time, Value::Null)?;
            }
        }
        Ok(())
    }

    /// Completes the trace and renames it to its final path.
    pub(super) fn finish(mut self) -> io::Result<()> {
        self.writer.write_all(b"\n]}\n")?;
        self.writer.flush()?;
        self.writer.get_ref().sync_all()?;
        fs::rename(&self.staging, &self.path)
    }

    /// Removes the staging file.
    pub(super) fn discard(self) {
        let _ = fs::remove_file(&self.staging);
    }

    fn event(
        &mut self,
        (pid, tid): (u32, u32),
        cat: &str,
        name: String,
        time: &Range<Duration>,
        args: Value,
    ) -> io::Result<()> {
        let ts = microseconds(time.start);
        let dur = microseconds(time.end.max(time.start)) - ts;
        self.line(&Event { name, cat, ph: "X", ts, dur, pid, tid, args })
    }

    fn name(&mut self, kind: &str, pid: u32, tid: u32, name: &str) -> io::Result<()> {
        self.line(&json!({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}))
    }

    fn line(&mut self, event: &impl Serialize) -> io::Result<()> {
        self.writer.write_all(if self.is_first { b"\n" } else { b",\n" })?;
        self.is_first = false;
        Ok(serde_json::to_writer(&mut self.writer, event)?)
    }
}

/// Returns the thread id of a thread of the pool: these come after the loop.
fn thread_id(thread: usize) -> u32 {
    LOOP + 1 + thread as u32
}

/// Converts to microseconds, in eighths, which are exact in binary: readers convert to nanoseconds, and a slice that
/// ended a nanosecond behind the one around it would be dropped.
fn microseconds(time: Duration) -> f64 {
    (time.as_nanos() / 125) as f64 / 8.0
}

fn name(span: &Span) -> String {
    span.number.map_or_else(|| span.name.to_owned(), |number| format!("{} {number}", span.name))
}

fn category(span: &Span) -> &'static str {
    match span.kind {
        SpanKind::Scope => "scope",
        SpanKind::Operation => "operation",
    }
}

fn arguments(span: &Span) -> Value {
    match span.kind {
        SpanKind::Scope => Value::Null,
        SpanKind::Operation => json!({"part": StepPart::from_operation(span.name).name()}),
    }
}

/// Returns when the GPU was at work on each span: on a scope from its first operation to its last.
fn device_times(recording: &Recording) -> Vec<Option<Range<Duration>>> {
    let mut times: Vec<Option<Range<Duration>>> = recording.spans.iter().map(|span| span.device.clone()).collect();
    // A span comes before what is inside of it.
    for (index, span) in recording.spans.iter().enumerate().rev() {
        let (Some(parent), Some(time)) = (span.parent, times[index].clone()) else { continue };
        let around = times[parent].get_or_insert(time.clone());
        *around = around.start.min(time.start)..around.end.max(time.end);
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(name: &'static str, parent: Option<usize>, device: Option<Range<u64>>) -> Span {
        let device = device.map(|time| Duration::from_micros(time.start)..Duration::from_micros(time.end));
        let kind = if device.is_some() { SpanKind::Operation } else { SpanKind::Scope };
        Span { name, number: None, kind, parent, host: Duration::ZERO..Duration::ZERO, device }
    }

    #[test]
    fn a_scope_lasts_on_the_gpu_while_its_operations_do() {
        let spans = vec![
            span("forward", None, None),
            span("mlp", Some(0), None),
            span("swiglu::forward", Some(1), Some(5..7)),
            span("linear::forward", Some(1), Some(8..9)),
            span("head", None, None),
        ];
        let times = device_times(&Recording { spans, tasks: Vec::new() });
        let micros = |from, to| Some(Duration::from_micros(from)..Duration::from_micros(to));
        assert_eq!(times, [micros(5, 9), micros(5, 9), micros(5, 7), micros(8, 9), None]);
    }

    #[test]
    fn a_trace_that_is_not_finished_takes_no_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile/trace.json");
        let trace = Trace::create(&path, None, 2, &Value::Null).unwrap();
        assert!(!path.exists());
        trace.discard();
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
    }

    #[test]
    fn microseconds_are_exact_in_binary() {
        for nanoseconds in [0_u64, 1, 124, 125, 999, 123_456_789] {
            let time = microseconds(Duration::from_nanos(nanoseconds));
            assert!((time * 8.0).fract().abs() < f64::EPSILON && time * 1e3 <= nanoseconds as f64);
        }
    }
}
