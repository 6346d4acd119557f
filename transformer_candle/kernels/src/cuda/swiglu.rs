//! `SwiGLU` on a GPU. Legend: N rows, I intermediate size.

use super::KernelArg;
use super::launch::{Axis, Launch, variant};

/// See [`crate::swiglu::forward`].
pub(crate) fn forward(gate_up: KernelArg, out: KernelArg, [n, i]: [usize; 2]) -> [Launch; 1] {
    [Launch::kernel("swiglu_forward", variant(out.dtype()), grid(n, i), [gate_up, out, KernelArg::count(i)])]
}

/// See [`crate::swiglu::backward`].
pub(crate) fn backward(gate_up: KernelArg, dout: KernelArg, [n, i]: [usize; 2]) -> [Launch; 1] {
    let values = [gate_up, dout, KernelArg::count(i)];
    [Launch::kernel("swiglu_backward", variant(dout.dtype()), grid(n, i), values)]
}

/// See [`crate::swiglu::backward_recomputing`].
pub(crate) fn backward_recomputing(gate_up: KernelArg, out: KernelArg, [n, i]: [usize; 2]) -> [Launch; 1] {
    let values = [gate_up, out, KernelArg::count(i)];
    [Launch::kernel("swiglu_backward_recomputing", variant(out.dtype()), grid(n, i), values)]
}

fn grid(n: usize, i: usize) -> [Axis; 3] {
    [Axis::Blocks(n), Axis::Elements(i, "BLOCK"), Axis::ONE]
}
