//! Residual add and norm on a GPU. Legend: N rows of D.

use candle_core::DType;

use super::Value;
use super::request::{Blocks, Request, variant};

/// Row lengths that kernels are compiled for; each takes shorter rows too.
const WIDTHS: [usize; 4] = [1024, 2048, 4096, 8192];
/// Programs of the backward pass, at most, each with a row of partial sums: enough to fill every GPU, and their sums fit the L2 cache.
const PROGRAMS: usize = 512;

/// See [`crate::add_rms_norm::forward`].
pub(crate) fn forward(
    x: Value,
    weight: Value,
    epsilon: f32,
    [normed, inv_rms]: [Value; 2],
    [n, d]: [usize; 2],
) -> [Request; 1] {
    let values = [x, weight, normed, inv_rms, Value::count(d), Value::F32(epsilon)];
    [Request::launch("add_rms_norm_forward", &wide(x.dtype(), d), rows(n), values)]
}

/// See [`crate::add_rms_norm::forward_add`]; outputs are the sum, its norm and the inverse of its root mean square.
pub(crate) fn forward_add(
    [x, branch]: [Value; 2],
    weight: Value,
    epsilon: f32,
    [sum, normed, inv_rms]: [Value; 3],
    [n, d]: [usize; 2],
) -> [Request; 1] {
    let values = [x, branch, weight, sum, normed, inv_rms, Value::count(d), Value::F32(epsilon)];
    [Request::launch("add_rms_norm_forward_add", &wide(x.dtype(), d), rows(n), values)]
}

/// See [`crate::add_rms_norm::normalize`].
pub(crate) fn normalize([sum, weight, inv_rms]: [Value; 3], normed: Value, [n, d]: [usize; 2]) -> [Request; 1] {
    let grid = [Blocks::Count(n), Blocks::Of(d, "BLOCK"), Blocks::ONE];
    let values = [sum, weight, inv_rms, normed, Value::count(d)];
    [Request::launch("add_rms_norm_normalize", variant(sum.dtype()), grid, values)]
}

/// See [`crate::add_rms_norm::backward`]; saved are the sum, the weight and `inv_rms`.
pub(crate) fn backward(
    [sum, weight, inv_rms]: [Value; 3],
    dnormed: Value,
    [dsum, dweight]: [Value; 2],
    workspace: Value,
    [n, d]: [usize; 2],
) -> [Request; 2] {
    let (programs, width) = (programs(n), Value::count(d));
    let values = [sum, weight, inv_rms, dnormed, dsum, workspace, Value::count(n), width];
    let columns = [Blocks::Of(d, "BLOCK"), Blocks::ONE, Blocks::ONE];
    let partials = [workspace, dweight, Value::count(programs), width];
    [
        Request::launch("add_rms_norm_backward", &wide(sum.dtype(), d), rows(programs), values),
        Request::launch("add_rms_norm_weight", "f32", columns, partials),
    ]
}

/// A row of the weight's gradient for each program.
pub(crate) fn workspace_elements(n: usize, d: usize) -> usize {
    programs(n) * d
}

fn programs(n: usize) -> usize {
    n.min(PROGRAMS)
}

/// The variant for rows of D.
fn wide(dtype: DType, d: usize) -> String {
    let width = WIDTHS.into_iter().find(|&width| d <= width).unwrap_or(d);
    format!("{}.h{width}", variant(dtype))
}

fn rows(n: usize) -> [Blocks; 3] {
    [Blocks::Count(n), Blocks::ONE, Blocks::ONE]
}
