//! Sums on a GPU: of two buffers, and of the partial sums over rows that programs write, whose rows a second launch adds
//! up in a fixed order.

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

/// Adds `parts` rows of `width` partial sums to `sums`; `width` is a multiple of 16.
pub(super) fn partial_sums(partials: KernelArg, sums: KernelArg, parts: usize, width: usize) -> Launch {
    let columns = [Axis::Elements(width, "BLOCK"), Axis::ONE, Axis::ONE];
    let values = [partials, sums, KernelArg::count(parts), KernelArg::count(width)];
    Launch::kernel("add_partial_sums", "f32", columns, values)
}
