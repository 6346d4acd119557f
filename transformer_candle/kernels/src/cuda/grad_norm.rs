//! The gradients' norm on a GPU.

use super::KernelArg;
use super::launch::{Axis, Launch, ranges};

/// Gradients whose squares one program adds: the kernel's constant PIECE.
const PIECE: usize = 1 << 15;
/// F32 elements of an F64 partial sum.
const PARTIAL: usize = 2;
const ONE_BLOCK: [Axis; 3] = [Axis::ONE; 3];

/// See [`crate::grad_norm::forward`].
pub(crate) fn forward([grads, norm, partials]: [KernelArg; 3], elements: usize) -> Vec<Launch> {
    let part = |(start, length): (usize, usize)| {
        let values =
            [grads.skip_elements(start), partials.skip_elements(start / PIECE * PARTIAL), KernelArg::count(length)];
        let grid = [Axis::Elements(length, "PIECE"), Axis::ONE, Axis::ONE];
        Launch::kernel("grad_norm_squares", "f32", grid, values)
    };
    let mut launches: Vec<_> = ranges(elements).map(part).collect();
    let values = [partials, norm, KernelArg::count(elements.div_ceil(PIECE))];
    launches.push(Launch::kernel("grad_norm_total", "f32", ONE_BLOCK, values));
    launches
}

/// See [`crate::grad_norm::clip`].
pub(crate) fn clip(norm: KernelArg, max_grad_norm: Option<f32>, scalars: KernelArg) -> [Launch; 1] {
    let limit = KernelArg::F32(max_grad_norm.unwrap_or(f32::INFINITY));
    [Launch::kernel("grad_norm_clip", "f32", ONE_BLOCK, [norm, limit, scalars])]
}

/// Elements of workspace: an F64 sum for each piece.
pub(crate) fn workspace_elements(elements: usize) -> usize {
    elements.div_ceil(PIECE) * PARTIAL
}
