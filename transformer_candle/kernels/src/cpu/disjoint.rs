//! A slice of which several tasks write disjoint parts.

use std::marker::PhantomData;

/// A mutable slice shared by tasks that each write their own elements.
pub(crate) struct Disjoint<'a, T> {
    first: *mut T,
    length: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: a shared reference only offers `part`, whose callers guarantee that live parts do not overlap.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { first: slice.as_mut_ptr(), length: slice.len(), slice: PhantomData }
    }

    /// Returns the `count` elements from `start` on.
    ///
    /// # Safety
    /// While the part lives, no other part that overlaps it does.
    #[allow(clippy::mut_from_ref)] // what the safety condition is about
    pub(crate) unsafe fn part(&self, start: usize, count: usize) -> &mut [T] {
        // SAFETY: inside of the slice, which is borrowed mutably as long as `self` lives; unshared as the caller
        // promises.
        unsafe { std::slice::from_raw_parts_mut(self.address(start, count), count) }
    }

    /// The address of element `start`, with at least `count` elements from there on.
    pub(crate) fn address(&self, start: usize, count: usize) -> *mut T {
        assert!(start <= self.length && count <= self.length - start, "a task reaches past the end");
        // SAFETY: inside of the slice.
        unsafe { self.first.add(start) }
    }
}
