//! Threads take turns at a GPU.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

/// Held by one thread at a time, as often as it likes. An operation is several launches on shared scratch memory, and a recording
/// takes whatever reaches the stream: another thread must not come between.
#[derive(Default)]
pub(super) struct Turn {
    holder: Mutex<Holder>,
    free: Condvar,
}

#[derive(Default)]
struct Holder {
    thread: Option<ThreadId>,
    depth: usize,
}

/// Ends the turn.
pub(crate) struct Taken<'a>(&'a Turn);

impl Turn {
    /// Waits until no other thread holds it.
    pub(super) fn take(&self) -> Taken<'_> {
        let this = std::thread::current().id();
        let mut holder = self.lock();
        while holder.thread.is_some_and(|thread| thread != this) {
            holder = self.free.wait(holder).unwrap_or_else(PoisonError::into_inner);
        }
        holder.thread = Some(this);
        holder.depth += 1;
        Taken(self)
    }

    /// Both fields are always consistent, so that a thread that panicked elsewhere leaves nothing broken.
    fn lock(&self) -> MutexGuard<'_, Holder> {
        self.holder.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut holder = self.0.lock();
        holder.depth -= 1;
        if holder.depth == 0 {
            holder.thread = None;
            self.0.free.notify_one();
        }
    }
}
