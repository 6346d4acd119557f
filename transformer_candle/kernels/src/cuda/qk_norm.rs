//! The norms of query and key heads on a GPU. Legend: N rows of (H + 2K) heads of E.

use super::KernelArg;
use super::accumulate;
use super::launch::{Axis, Launch, of_head_size};
use crate::HeadLayout;

/// Programs of the backward pass, at most, each with a row of partial sums: enough to fill every GPU.
const PROGRAMS: usize = 512;

/// See [`crate::qk_norm::forward`].
pub(crate) fn forward(
    [projected, weight, qkv]: [KernelArg; 3],
    epsilon: f32,
    layout: &HeadLayout,
    rows: usize,
) -> [Launch; 1] {
    let &HeadLayout { heads, kv_heads, head_size } = layout;
    let all = heads + 2 * kv_heads;
    let counts = [rows * all, heads, heads + kv_heads, all, head_size / 8].map(KernelArg::count);
    let values = [vec![projected, weight, qkv], counts.to_vec(), vec![KernelArg::F32(epsilon)]].concat();
    let grid = [Axis::Elements(rows * all, "HEADS"), Axis::ONE, Axis::ONE];
    [Launch::kernel("qk_norm_forward", &of_head_size(qkv.dtype(), head_size), grid, values)]
}

/// See [`crate::qk_norm::backward`].
pub(crate) fn backward(
    [projected, weight, dqkv]: [KernelArg; 3],
    dweight: Option<KernelArg>,
    workspace: KernelArg,
    epsilon: f32,
    layout: &HeadLayout,
    rows: usize,
) -> Vec<Launch> {
    let &HeadLayout { heads, kv_heads, head_size } = layout;
    let normed = heads + kv_heads;
    let counts = [rows * normed, heads, normed, normed + kv_heads, head_size / 8].map(KernelArg::count);
    let values = [vec![projected, weight, dqkv, workspace], counts.to_vec(), vec![KernelArg::F32(epsilon)]].concat();
    let grid = [Axis::Blocks(programs(rows)), Axis::ONE, Axis::ONE];
    let backward = Launch::kernel("qk_norm_backward", &of_head_size(dqkv.dtype(), head_size), grid, values);
    let add = dweight.map(|dweight| accumulate::partial_sums(workspace, dweight, programs(rows), 2 * head_size));
    [backward].into_iter().chain(add).collect()
}

/// Elements of workspace: a row of both norms' gradients for each program.
pub(crate) fn workspace_elements(rows: usize, head_size: usize) -> usize {
    programs(rows) * 2 * head_size
}

fn programs(rows: usize) -> usize {
    rows.min(PROGRAMS)
}
