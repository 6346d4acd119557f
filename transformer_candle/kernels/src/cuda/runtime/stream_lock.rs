//! The lock of the compute stream.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

/// A reentrant mutex. An operation is several launches that share scratch memory, and a capture takes every launch on
/// the stream: no other thread may launch in between.
#[derive(Default)]
pub(super) struct StreamLock {
    holder: Mutex<Holder>,
    free: Condvar,
}

#[derive(Default)]
struct Holder {
    thread: Option<ThreadId>,
    depth: usize,
}

/// Releases the lock when dropped.
pub(crate) struct StreamGuard<'a>(&'a StreamLock);

impl StreamLock {
    /// Waits until no other thread holds it.
    pub(super) fn acquire(&self) -> StreamGuard<'_> {
        let this = std::thread::current().id();
        let mut holder = self.lock();
        while holder.thread.is_some_and(|thread| thread != this) {
            holder = self.free.wait(holder).unwrap_or_else(PoisonError::into_inner);
        }
        holder.thread = Some(this);
        holder.depth += 1;
        StreamGuard(self)
    }

    /// Locks the fields, which are always consistent, also after a panic of another thread.
    fn lock(&self) -> MutexGuard<'_, Holder> {
        self.holder.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for StreamGuard<'_> {
    fn drop(&mut self) {
        let mut holder = self.0.lock();
        holder.depth -= 1;
        if holder.depth == 0 {
            holder.thread = None;
            self.0.free.notify_one();
        }
    }
}
