//! Token embedding on a GPU. Legend: N tokens, V rows of the table, D columns.

use candle_core::DType;

use super::Value;
use super::request::{Blocks, Request, variant};

/// See [`crate::embedding::forward`].
pub(crate) fn forward(table: Value, ids: Value, out: Value, [n, v, d]: [usize; 3]) -> [Request; 1] {
    let values = [table, ids, out, Value::count(v), Value::count(d)];
    [Request::launch("embedding_forward", variant(out.dtype()), grid(n, d), values)]
}

/// See [`crate::embedding::backward`]. The workspace takes, for each token, whether it is the first one of its id, and the next one.
pub(crate) fn backward(
    ids: Value,
    dout: Value,
    dtable: Value,
    workspace: [Value; 2],
    [n, v, d]: [usize; 3],
) -> [Request; 2] {
    let ([first, following], tokens) = (workspace, Value::count(n));
    let blocks = [Blocks::Of(n, "BLOCK"), Blocks::ONE, Blocks::ONE];
    let values = [ids, dout, first, following, dtable, tokens, Value::count(v), Value::count(d)];
    [
        Request::launch("embedding_chain", "u32", blocks, [ids, first, following, tokens]),
        Request::launch("embedding_backward", variant(dout.dtype()), grid(n, d), values),
    ]
}

/// The two halves of the workspace of [`backward`].
pub(crate) fn chains(workspace: &crate::Buffer, n: usize) -> [Value; 2] {
    [0, n].map(|offset| Value::reinterpreted(workspace, offset, DType::I32))
}

/// Two 32-bit integers per token.
pub(crate) fn workspace_elements(n: usize) -> usize {
    2 * n
}

fn grid(n: usize, d: usize) -> [Blocks; 3] {
    [Blocks::Count(n), Blocks::Of(d, "BLOCK"), Blocks::ONE]
}
