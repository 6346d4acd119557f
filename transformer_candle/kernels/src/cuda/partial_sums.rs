//! Sums over rows on a GPU in a fixed order: programs write partial sums, whose rows a second launch adds up.

use super::KernelArg;
use super::launch::{Axis, Launch};

/// Adds `parts` rows of `width` partial sums to `sums`; `width` is a multiple of 16.
pub(super) fn add(partials: KernelArg, sums: KernelArg, parts: usize, width: usize) -> Launch {
    let columns = [Axis::Elements(width, "BLOCK"), Axis::ONE, Axis::ONE];
    let values = [partials, sums, KernelArg::count(parts), KernelArg::count(width)];
    Launch::kernel("add_partial_sums", "f32", columns, values)
}
