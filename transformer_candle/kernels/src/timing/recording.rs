//! The spans of one thread: scopes, and the operations inside of them.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Open;
use super::pool_tasks::{PoolTasks, Task, Tasks};
use crate::cuda::{Cuda, Event};
use crate::{Device, Result};

/// The kind of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanKind {
    /// A part of the program, such as the forward pass.
    Scope,
    /// An operation on buffers.
    Operation,
}

/// A scope or an operation. Times are since the recording's origin.
#[derive(Clone, Debug)]
pub struct Span {
    /// The name, such as `linear::forward`.
    pub name: &'static str,
    /// The number among several of that name, such as a layer; None without one.
    pub number: Option<usize>,
    /// Whether it is a scope or an operation.
    pub kind: SpanKind,
    /// Index in [`Recording::spans`] of the span that it is inside of; None outside of all.
    pub parent: Option<usize>,
    /// Start and end on the thread that called it; on a GPU that is the time of its launches.
    pub host: Range<Duration>,
    /// Start and end in the GPU's stream, of an operation on a GPU; else None.
    pub device: Option<Range<Duration>>,
}

impl Span {
    /// Returns how long it took where it was computed: in the GPU's stream, or else on the thread that called it.
    pub fn duration(&self) -> Duration {
        let Range { start, end } = self.device.as_ref().unwrap_or(&self.host);
        end.saturating_sub(*start)
    }
}

/// The spans of a thread in the order in which they began, and the tasks of the pool's threads.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    /// Every scope and operation.
    pub spans: Vec<Span>,
    /// The tasks that each thread of the pool ran, by the threads' numbers; empty on a GPU.
    pub tasks: Vec<Vec<Task>>,
}

impl Recording {
    /// The operations among the spans.
    pub fn operations(&self) -> impl Iterator<Item = &Span> {
        self.spans.iter().filter(|span| span.kind == SpanKind::Operation)
    }
}

/// A recording that is under way.
pub(super) struct Recorder {
    origin: Instant,
    /// On a GPU: an event at the start of the recording, and its time since the origin.
    base: Option<(Event, Duration)>,
    spans: Vec<Span>,
    /// Index of the span of each operation on a GPU, and the events around it.
    events: Vec<(usize, (Event, Event))>,
    /// The innermost open span.
    open: Option<usize>,
    /// Whether an operation is running: operations that it calls count as part of it.
    inside: bool,
    tasks: Option<Arc<PoolTasks>>,
}

impl Recorder {
    pub(super) fn new(origin: Instant) -> Self {
        Self { origin, base: None, spans: Vec::new(), events: Vec::new(), open: None, inside: false, tasks: None }
    }

    /// Also records the tasks of the threads of the current pool.
    pub(super) fn with_tasks(self) -> Self {
        Self { tasks: Some(Arc::new(PoolTasks::new(self.origin))), ..self }
    }

    /// Records an event in a GPU's stream, which is idle, to mark when the recording begins.
    pub(super) fn starting_on(self, device: &Device) -> Result<Self> {
        let now = self.origin.elapsed();
        let base = device.as_cuda().map(Cuda::mark).transpose()?.map(|event| (event, now));
        Ok(Self { base, ..self })
    }

    pub(super) fn begin(&mut self, name: &'static str, number: Option<usize>) -> Open {
        self.push(name, number, SpanKind::Scope)
    }

    pub(super) fn begin_operation(&mut self, name: &'static str) -> Option<Open> {
        if self.inside {
            return None;
        }
        self.inside = true;
        Some(self.push(name, None, SpanKind::Operation))
    }

    fn push(&mut self, name: &'static str, number: Option<usize>, kind: SpanKind) -> Open {
        let (span, parent, now) = (self.spans.len(), self.open, self.origin.elapsed());
        self.spans.push(Span { name, number, kind, parent, host: now..now, device: None });
        self.open = Some(span);
        Open { span, parent }
    }

    pub(super) fn set_events(&mut self, span: usize, events: Option<(Event, Event)>) {
        self.events.extend(events.map(|events| (span, events)));
    }

    pub(super) fn end(&mut self, open: &Open) {
        let now = self.origin.elapsed();
        self.open = open.parent;
        // Not there if a recording was ended inside of the span.
        if let Some(span) = self.spans.get_mut(open.span) {
            span.host.end = now;
            self.inside &= span.kind != SpanKind::Operation;
        }
    }

    /// The tasks of the operation that is running.
    pub(super) fn tasks(&self) -> Tasks {
        match (&self.tasks, self.open.filter(|_| self.inside)) {
            (Some(tasks), Some(open)) => Tasks::new(tasks, self.spans[open].name, open),
            _ => Tasks::none(),
        }
    }

    /// The recording, with the times of a GPU's events, all of which have passed.
    pub(super) fn finish(mut self) -> Result<Recording> {
        if let Some((base, begin)) = &self.base {
            for (span, (from, to)) in &self.events {
                self.spans[*span].device = Some(*begin + base.until(from)?..*begin + base.until(to)?);
            }
        }
        let tasks = self.tasks.filter(|_| self.base.is_none());
        Ok(Recording { spans: self.spans, tasks: tasks.map_or_else(Vec::new, |tasks| tasks.take()) })
    }
}
