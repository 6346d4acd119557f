//! Work in pieces of about the same size, shared out among threads.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rayon::prelude::*;

/// Parts of the work that threads begin with; where there are more threads, some begin with the same.
const PARTS: usize = 64;

/// Does pieces `0..all`, at most `longest` in a row, each thread in `size` elements of `scratch` of its own. No more threads take
/// part than it holds such.
pub(crate) fn share_out(
    all: usize,
    longest: usize,
    scratch: &mut [f32],
    size: usize,
    body: impl Fn(Range<usize>, &mut [f32]) + Sync,
) {
    assert!(all == 0 || scratch.len() >= size, "nobody has scratch to work in");
    let threads = rayon::current_num_threads();
    let shares = Shares::new(all, longest, threads.min(scratch.len() / size).clamp(1, PARTS));
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
    longest: usize,
}

impl Shares {
    fn new(all: usize, longest: usize, parts: usize) -> Self {
        Self { taken: [const { AtomicUsize::new(0) }; PARTS], parts, all, longest }
    }

    /// From the thread's part, else from the next one that has some left.
    fn take(&self, thread: usize) -> Option<Range<usize>> {
        let begin = |part: usize| self.all * part / self.parts;
        (thread..thread + self.parts).map(|part| part % self.parts).find_map(|part| {
            let size = begin(part + 1) - begin(part);
            let end = |start: usize| start + ((size - start) / 2).clamp(1, self.longest);
            let taken = self.taken[part].fetch_update(Relaxed, Relaxed, |start| (start < size).then(|| end(start)));
            taken.ok().map(|start| begin(part) + start..begin(part) + end(start))
        })
    }
}
