//! Residual add and norm on a GPU. Legend: N rows of D.

use candle_core::DType;

use super::KernelArg;
use super::launch::{Axis, Launch, variant};
use super::{accumulate, fp8};
use crate::fp8::ScaleBlock;

/// Row lengths that kernels are compiled for; each takes shorter rows too.
const WIDTHS: [usize; 4] = [1024, 2048, 4096, 8192];
/// Programs of the backward pass, at most, each with a row of partial sums: enough to fill every GPU, and their sums
/// fit the L2 cache.
const PROGRAMS: usize = 512;

/// See [`crate::add_rms_norm::forward`].
pub(crate) fn forward(
    x: KernelArg,
    weight: KernelArg,
    epsilon: f32,
    [normed, inv_rms]: [KernelArg; 2],
    [n, d]: [usize; 2],
) -> [Launch; 1] {
    let values = [x, weight, normed, inv_rms, KernelArg::count(d), KernelArg::F32(epsilon)];
    [Launch::kernel("add_rms_norm_forward", &wide(x.dtype(), d), rows(n), values)]
}

/// See [`crate::add_rms_norm::forward_add`]; outputs are the sum, its norm and the inverse of its root mean square.
pub(crate) fn forward_add(
    [x, output]: [KernelArg; 2],
    weight: KernelArg,
    epsilon: f32,
    [sum, normed, inv_rms]: [KernelArg; 3],
    [n, d]: [usize; 2],
) -> [Launch; 1] {
    let values = [x, output, weight, sum, normed, inv_rms, KernelArg::count(d), KernelArg::F32(epsilon)];
    [Launch::kernel("add_rms_norm_forward_add", &wide(x.dtype(), d), rows(n), values)]
}

/// See [`crate::add_rms_norm::normalize`].
pub(crate) fn normalize([sum, weight, inv_rms]: [KernelArg; 3], normed: KernelArg, [n, d]: [usize; 2]) -> [Launch; 1] {
    let grid = [Axis::Blocks(n), Axis::Elements(d, "BLOCK"), Axis::ONE];
    let values = [sum, weight, inv_rms, normed, KernelArg::count(d)];
    [Launch::kernel("add_rms_norm_normalize", variant(sum.dtype()), grid, values)]
}

/// See [`crate::add_rms_norm_fp8::normalize`].
pub(crate) fn normalize_fp8(
    inputs: [KernelArg; 3],
    block: ScaleBlock,
    out: [Option<[KernelArg; 2]>; 2],
    sizes: [usize; 2],
) -> Vec<Launch> {
    let Some((outputs, wanted)) = fp8::wanted(out) else { return Vec::new() };
    let sizes_and_outputs = [KernelArg::count(sizes[0]), KernelArg::count(sizes[1]), wanted];
    let values = [&inputs[..], &outputs, &sizes_and_outputs].concat();
    vec![fp8::launch_of_squares("fp8_normalize", block, &values, sizes)]
}

/// See [`crate::add_rms_norm::backward`]; saved are the sum, the weight and `inv_rms`.
pub(crate) fn backward(
    [sum, weight, inv_rms]: [KernelArg; 3],
    dnormed: KernelArg,
    (dsum, dweight): (KernelArg, Option<KernelArg>),
    workspace: KernelArg,
    [n, d]: [usize; 2],
) -> Vec<Launch> {
    let values = [sum, weight, inv_rms, dnormed, dsum, workspace, KernelArg::count(n), KernelArg::count(d)];
    let backward = Launch::kernel("add_rms_norm_backward", &wide(sum.dtype(), d), rows(programs(n)), values);
    let add = dweight.map(|dweight| accumulate::partial_sums(workspace, dweight, programs(n), d));
    [backward].into_iter().chain(add).collect()
}

/// Elements of workspace: a row of the weight's gradient for each program.
pub(crate) fn workspace_elements(n: usize, d: usize) -> usize {
    programs(n) * d
}

fn programs(n: usize) -> usize {
    n.min(PROGRAMS)
}

/// The name of the variant for rows of D.
fn wide(dtype: DType, d: usize) -> String {
    let width = WIDTHS.into_iter().find(|&width| d <= width).unwrap_or(d);
    format!("{}.h{width}", variant(dtype))
}

fn rows(n: usize) -> [Axis; 3] {
    [Axis::Blocks(n), Axis::ONE, Axis::ONE]
}
