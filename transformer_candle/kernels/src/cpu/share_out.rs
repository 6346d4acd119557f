//! Work in pieces of about the same size, shared out among threads.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rayon::prelude::*;

/// Elements of the rows that a task passes over: few, so that threads end together where a model is small.
const ROWS: usize = 1 << 13;

/// How many rows of this width a task passes over, on any number of threads.
pub(super) fn rows_of_piece(width: usize) -> usize {
    (ROWS / width).max(1)
}

/// Parts of the work that threads begin with; where there are more threads, some begin with the same.
const PARTS: usize = 64;

/// Does pieces `0..all`, each thread in `size` elements of `scratch` of its own. No more threads take part than it holds such.
/// `longest`, the most pieces in a row, is a multiple of `unit`: a share is a number of whole units, or a part of one.
pub(crate) fn share_out(
    all: usize,
    unit: usize,
    longest: usize,
    scratch: &mut [f32],
    size: usize,
    body: impl Fn(Range<usize>, &mut [f32]) + Sync,
) {
    assert!(all == 0 || scratch.len() >= size, "nobody has scratch to work in");
    let threads = rayon::current_num_threads();
    let shares = Shares::new(all, unit, longest, threads.min(scratch.len() / size).clamp(1, PARTS));
    let scratch = scratch.par_chunks_exact_mut(size).take(threads);
    scratch.with_max_len(1).enumerate().for_each(|(thread, scratch)| {
        while let Some(share) = shares.take(thread) {
            body(share, scratch);
        }
    });
}

/// Pieces as threads take them: many at a time first, single ones at the end, so that all threads end together. A thread begins
/// with a part of its own, the same whenever there are as many pieces: what it wrote the last time is in its cache.
struct Shares {
    /// How many are taken of each part.
    taken: [AtomicUsize; PARTS],
    parts: usize,
    all: usize,
    unit: usize,
    longest: usize,
}

impl Shares {
    fn new(all: usize, unit: usize, longest: usize, parts: usize) -> Self {
        Self { taken: [const { AtomicUsize::new(0) }; PARTS], parts, all, unit, longest }
    }

    /// From the thread's part, else from the next one that has some left.
    fn take(&self, thread: usize) -> Option<Range<usize>> {
        let begin = |part: usize| self.all * part / self.parts;
        (thread..thread + self.parts).map(|part| part % self.parts).find_map(|part| {
            let size = begin(part + 1) - begin(part);
            let end = |start: usize| {
                let length = ((size - start) / 2).clamp(1, self.longest);
                let within = (begin(part) + start) % self.unit;
                let whole = within == 0 && length > self.unit;
                start + if whole { length - length % self.unit } else { length.min(self.unit - within) }
            };
            let taken = self.taken[part].fetch_update(Relaxed, Relaxed, |start| (start < size).then(|| end(start)));
            taken.ok().map(|start| begin(part) + start..begin(part) + end(start))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn every_piece_is_done_once_and_a_share_has_whole_units_or_a_part_of_one() {
        for (all, unit, units) in [(0, 1, 1), (1, 1, 4), (5, 4, 1), (8, 4, 2), (220, 4, 4), (221, 3, 5), (1000, 1, 1)] {
            let done = Mutex::new(Vec::new());
            share_out(all, unit, units * unit, &mut [0.0; 64], 1, |share, _| done.lock().unwrap().push(share));
            let mut done = done.into_inner().unwrap();
            done.sort_by_key(|share| share.start);
            assert!(done.iter().cloned().flatten().eq(0..all), "{done:?}");
            let whole = |share: &Range<usize>| share.start.is_multiple_of(unit) && share.end.is_multiple_of(unit);
            let part = |share: &Range<usize>| share.start / unit == (share.end - 1) / unit;
            assert!(done.iter().all(|share| part(share) || whole(share) && share.len() <= units * unit), "{done:?}");
        }
    }
}
