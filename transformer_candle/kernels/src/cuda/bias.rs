//! A bias on a GPU. Legend: N rows of O, a multiple of 16.

use super::KernelArg;
use super::accumulate;
use super::launch::{Axis, Launch, variant};

/// Maximum number of rows of partial sums, each of which some programs write: with the columns enough to fill every
/// GPU.
const PARTS: usize = 128;

/// See [`crate::bias::forward`].
pub(crate) fn forward(y: KernelArg, bias: KernelArg, [n, o]: [usize; 2]) -> [Launch; 1] {
    let grid = [Axis::Blocks(n), Axis::Elements(o, "BLOCK"), Axis::ONE];
    [Launch::kernel("bias_forward", variant(y.dtype()), grid, [y, bias, KernelArg::count(o)])]
}

/// See [`crate::bias::backward`].
pub(crate) fn backward(dy: KernelArg, dbias: KernelArg, workspace: KernelArg, [n, o]: [usize; 2]) -> [Launch; 2] {
    let grid = [Axis::Blocks(parts(n)), Axis::Elements(o, "BLOCK"), Axis::ONE];
    let values = [dy, workspace, KernelArg::count(n), KernelArg::count(o)];
    [
        Launch::kernel("bias_backward", variant(dy.dtype()), grid, values),
        accumulate::partial_sums(workspace, dbias, parts(n), o),
    ]
}

/// Elements of workspace: a row of sums for each part.
pub(crate) fn workspace_elements(n: usize, o: usize) -> usize {
    parts(n) * o
}

fn parts(n: usize) -> usize {
    n.min(PARTS)
}
