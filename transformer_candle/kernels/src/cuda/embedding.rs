//! Token embedding on a GPU. Legend: N tokens, V rows of the table, D columns.

use candle_core::DType;

use super::KernelArg;
use super::launch::{Axis, Launch, variant};

/// See [`crate::embedding::forward`].
pub(crate) fn forward(table: KernelArg, ids: KernelArg, out: KernelArg, [n, v, d]: [usize; 3]) -> [Launch; 1] {
    let values = [table, ids, out, KernelArg::count(v), KernelArg::count(d)];
    [Launch::kernel("embedding_forward", variant(out.dtype()), grid(n, d), values)]
}

/// See [`crate::embedding::backward`]. The workspace holds, for each token, whether it is the first one of its id, and
/// the index of the next one.
pub(crate) fn backward(
    ids: KernelArg,
    dout: KernelArg,
    dtable: KernelArg,
    workspace: [KernelArg; 2],
    [n, v, d]: [usize; 3],
) -> [Launch; 2] {
    let ([first, following], tokens) = (workspace, KernelArg::count(n));
    let blocks = [Axis::Elements(n, "BLOCK"), Axis::ONE, Axis::ONE];
    let values = [ids, dout, first, following, dtable, tokens, KernelArg::count(v), KernelArg::count(d)];
    [
        Launch::kernel("embedding_chain", "u32", blocks, [ids, first, following, tokens]),
        Launch::kernel("embedding_backward", variant(dout.dtype()), grid(n, d), values),
    ]
}

/// The two halves of the workspace of [`backward`].
pub(crate) fn chains(workspace: &crate::Buffer, n: usize) -> [KernelArg; 2] {
    [0, n].map(|offset| KernelArg::reinterpreted(workspace, offset, DType::I32))
}

/// Elements of workspace: two 32-bit integers per token.
pub(crate) fn workspace_elements(n: usize) -> usize {
    2 * n
}

fn grid(n: usize, d: usize) -> [Axis; 3] {
    [Axis::Blocks(n), Axis::Elements(d, "BLOCK"), Axis::ONE]
}
