//! `SwiGLU` on a GPU. Legend: N rows, I intermediate size.

use super::Value;
use super::request::{Blocks, Request, variant};

/// See [`crate::swiglu::forward`].
pub(crate) fn forward(gate_up: Value, out: Value, [n, i]: [usize; 2]) -> [Request; 1] {
    [Request::launch("swiglu_forward", variant(out.dtype()), grid(n, i), [gate_up, out, Value::count(i)])]
}

/// See [`crate::swiglu::backward`].
pub(crate) fn backward(gate_up: Value, dout: Value, [n, i]: [usize; 2]) -> [Request; 1] {
    let values = [gate_up, dout, Value::count(i)];
    [Request::launch("swiglu_backward", variant(dout.dtype()), grid(n, i), values)]
}

/// See [`crate::swiglu::backward_recomputing`].
pub(crate) fn backward_recomputing(gate_up: Value, out: Value, [n, i]: [usize; 2]) -> [Request; 1] {
    let values = [gate_up, out, Value::count(i)];
    [Request::launch("swiglu_backward_recomputing", variant(out.dtype()), grid(n, i), values)]
}

fn grid(n: usize, i: usize) -> [Blocks; 3] {
    [Blocks::Count(n), Blocks::Of(i, "BLOCK"), Blocks::ONE]
}
