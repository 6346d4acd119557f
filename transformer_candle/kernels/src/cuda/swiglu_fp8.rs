//! `SwiGLU` with results in fp8 on a GPU. Legend: N rows, a multiple of 16, I intermediate size, one of 128.

use super::KernelArg;
use super::fp8::{launch_of_squares, wanted};
use super::launch::Launch;
use crate::fp8::ScaleBlock;

/// See [`crate::swiglu_fp8::forward`].
pub(crate) fn forward(
    gate_up: KernelArg,
    block: ScaleBlock,
    out: [Option<[KernelArg; 2]>; 2],
    sizes: [usize; 2],
) -> Vec<Launch> {
    let Some((outputs, wanted)) = wanted(out) else { return Vec::new() };
    let sizes_and_outputs = [KernelArg::count(sizes[0]), KernelArg::count(sizes[1]), wanted];
    let values = [&[gate_up][..], &outputs, &sizes_and_outputs].concat();
    vec![launch_of_squares("fp8_swiglu", block, &values, sizes)]
}

/// See [`crate::swiglu_fp8::backward`]; values and scales of the gradient, of its transpose and of the output's transpose.
pub(crate) fn backward(
    inputs: [KernelArg; 2],
    block: ScaleBlock,
    [[dvalues, dscales], [dvalues_transposed, dscales_transposed], activated]: [[KernelArg; 2]; 3],
    sizes: [usize; 2],
) -> Vec<Launch> {
    let gradient = [dvalues, dvalues_transposed, dscales, dscales_transposed];
    let values = [&inputs[..], &gradient, &activated, &sizes.map(KernelArg::count)].concat();
    vec![launch_of_squares("fp8_swiglu_backward", block, &values, sizes)]
}
