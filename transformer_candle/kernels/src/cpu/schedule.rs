//! Dynamic scheduling of equal tasks on threads.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rayon::prelude::*;

use crate::timing;

/// Elements of the rows of a task: few, so that threads finish together on small models.
const ROWS: usize = 1 << 13;

/// Returns the rows of this width per task, for any number of threads.
pub(super) fn rows_per_task(width: usize) -> usize {
    (ROWS / width).max(1)
}

/// Parts that the tasks are divided into, one per thread; further threads share parts.
const PARTS: usize = 64;

/// `for_each` whose tasks appear in a profile, on the threads that run them.
pub(crate) trait ForEachTask: ParallelIterator {
    /// Runs `body` for every item, in parallel.
    fn for_each_task(self, body: impl Fn(Self::Item) + Sync + Send) {
        let tasks = timing::tasks();
        self.for_each(|item| tasks.time(|| body(item)));
    }
}

impl<I: ParallelIterator> ForEachTask for I {}

/// Runs tasks `0..all`, each thread with its own `size` elements of `scratch`; no more threads are used than it has
/// room for. Threads take ranges of at most `longest` tasks, a multiple of `unit`: a range is a number of full units,
/// or a part of one.
pub(crate) fn run_tasks(
    all: usize,
    unit: usize,
    longest: usize,
    scratch: &mut [f32],
    size: usize,
    body: impl Fn(Range<usize>, &mut [f32]) + Sync,
) {
    assert!(all == 0 || scratch.len() >= size, "the scratch is too small for one thread");
    let threads = rayon::current_num_threads();
    let queue = Queue::new(all, unit, longest, threads.min(scratch.len() / size).clamp(1, PARTS));
    let scratch = scratch.par_chunks_exact_mut(size).take(threads);
    scratch.with_max_len(1).enumerate().for_each_task(|(thread, scratch)| {
        while let Some(range) = queue.take(thread) {
            body(range, scratch);
        }
    });
}

/// The ranges that threads take: long ones first, single tasks at the end, so that all threads finish together. A
/// thread starts with its own part, the same for the same number of tasks: what it wrote in the previous call is in its
/// cache.
struct Queue {
    /// Tasks taken of each part so far.
    next_tasks: [AtomicUsize; PARTS],
    parts: usize,
    all: usize,
    unit: usize,
    longest: usize,
}

impl Queue {
    fn new(all: usize, unit: usize, longest: usize, parts: usize) -> Self {
        Self { next_tasks: [const { AtomicUsize::new(0) }; PARTS], parts, all, unit, longest }
    }

    /// Takes the next range of the thread's part, or else of the next part that has tasks left.
    fn take(&self, thread: usize) -> Option<Range<usize>> {
        let begin = |part: usize| self.all * part / self.parts;
        (thread..thread + self.parts).map(|part| part % self.parts).find_map(|part| {
            let size = begin(part + 1) - begin(part);
            let end = |start: usize| {
                let length = ((size - start) / 2).clamp(1, self.longest);
                let offset = (begin(part) + start) % self.unit;
                let whole = offset == 0 && length > self.unit;
                start + if whole { length - length % self.unit } else { length.min(self.unit - offset) }
            };
            let start =
                self.next_tasks[part].fetch_update(Relaxed, Relaxed, |start| (start < size).then(|| end(start)));
            start.ok().map(|start| begin(part) + start..begin(part) + end(start))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn every_task_runs_once_in_full_units_or_parts_of_one() {
        for (all, unit, units) in [(0, 1, 1), (1, 1, 4), (5, 4, 1), (8, 4, 2), (220, 4, 4), (221, 3, 5), (1000, 1, 1)] {
            let ranges = Mutex::new(Vec::new());
            run_tasks(all, unit, units * unit, &mut [0.0; 64], 1, |range, _| ranges.lock().unwrap().push(range));
            let mut ranges = ranges.into_inner().unwrap();
            ranges.sort_by_key(|range| range.start);
            assert!(ranges.iter().cloned().flatten().eq(0..all), "{ranges:?}");
            let whole = |range: &Range<usize>| range.start.is_multiple_of(unit) && range.end.is_multiple_of(unit);
            let part = |range: &Range<usize>| range.start / unit == (range.end - 1) / unit;
            assert!(
                ranges.iter().all(|range| part(range) || whole(range) && range.len() <= units * unit),
                "{ranges:?}"
            );
        }
    }
}
