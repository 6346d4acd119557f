//! The tasks of each operation that the threads of the pool run.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Tasks of one operation on one thread with less than this between them are shown as one.
const MERGED_GAP: Duration = Duration::from_micros(10);

/// Tasks of an operation that a thread took one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// The operation's name.
    pub name: &'static str,
    /// Index of the operation in [`super::Recording::spans`].
    pub span: usize,
    /// Start and end, since the recording's origin.
    pub time: Range<Duration>,
}

/// The tasks of each thread of a pool.
pub(super) struct PoolTasks {
    origin: Instant,
    threads: Vec<Mutex<Vec<Task>>>,
}

impl PoolTasks {
    /// An empty list of tasks for each thread of the current pool.
    pub(super) fn new(origin: Instant) -> Self {
        let threads = (0..rayon::current_num_threads()).map(|_| Mutex::default()).collect();
        Self { origin, threads }
    }

    fn add(&self, task: Task) {
        let Some(thread) = rayon::current_thread_index().and_then(|index| self.threads.get(index)) else { return };
        let mut tasks = thread.lock().unwrap_or_else(PoisonError::into_inner);
        match tasks.last_mut().filter(|last| last.span == task.span && task.time.start < last.time.end + MERGED_GAP) {
            Some(last) => last.time.end = task.time.end,
            None => tasks.push(task),
        }
    }

    /// Takes the tasks that were collected so far, by thread.
    pub(super) fn take(&self) -> Vec<Vec<Task>> {
        let take =
            |thread: &Mutex<Vec<Task>>| std::mem::take(&mut *thread.lock().unwrap_or_else(PoisonError::into_inner));
        self.threads.iter().map(take).collect()
    }
}

/// Times the tasks of one operation. Outside of a recording it does nothing.
pub(crate) struct Tasks(Option<Operation>);

struct Operation {
    tasks: Arc<PoolTasks>,
    name: &'static str,
    span: usize,
}

impl Tasks {
    pub(super) fn none() -> Self {
        Self(None)
    }

    pub(super) fn new(tasks: &Arc<PoolTasks>, name: &'static str, span: usize) -> Self {
        Self(Some(Operation { tasks: Arc::clone(tasks), name, span }))
    }

    /// Runs a task of the operation on a thread of the pool.
    pub(crate) fn time(&self, task: impl FnOnce()) {
        let from = self.0.as_ref().map(|Operation { tasks, .. }| tasks.origin.elapsed());
        task();
        if let (Some(Operation { tasks, name, span }), Some(from)) = (&self.0, from) {
            tasks.add(Task { name, span: *span, time: from..tasks.origin.elapsed() });
        }
    }
}
