//! Sums of two buffers on a GPU.

use super::KernelArg;
use super::launch::{Axis, Launch, ranges};

/// See [`crate::accumulate::forward`].
pub(crate) fn forward([sum, addend]: [KernelArg; 2], elements: usize) -> Vec<Launch> {
    let part = |(start, length): (usize, usize)| {
        let values = [sum.skip_elements(start), addend.skip_elements(start), KernelArg::count(length)];
        let grid = [Axis::Elements(length, "BLOCK"), Axis::ONE, Axis::ONE];
        Launch::kernel("accumulate_forward", "f32", grid, values)
    };
    ranges(elements).map(part).collect()
}
