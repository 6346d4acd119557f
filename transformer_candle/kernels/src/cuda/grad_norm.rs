//! The gradients' norm on a GPU.

use super::Value;
use super::request::{Blocks, Request, ranges};

/// Gradients whose squares one program adds: the kernel's constant PIECE.
const PIECE: usize = 1 << 15;
/// F32 elements of an F64 partial sum.
const PARTIAL: usize = 2;
const ONE_BLOCK: [Blocks; 3] = [Blocks::ONE; 3];

/// See [`crate::grad_norm::forward`].
pub(crate) fn forward([grads, norm, partials]: [Value; 3], elements: usize) -> Vec<Request> {
    let part = |(start, length): (usize, usize)| {
        let values =
            [grads.skip_elements(start), partials.skip_elements(start / PIECE * PARTIAL), Value::count(length)];
        let grid = [Blocks::Of(length, "PIECE"), Blocks::ONE, Blocks::ONE];
        Request::launch("grad_norm_squares", "f32", grid, values)
    };
    let mut requests: Vec<_> = ranges(elements).map(part).collect();
    let values = [partials, norm, Value::count(elements.div_ceil(PIECE))];
    requests.push(Request::launch("grad_norm_total", "f32", ONE_BLOCK, values));
    requests
}

/// See [`crate::grad_norm::clip`].
pub(crate) fn clip(norm: Value, max_grad_norm: Option<f32>, scalars: Value) -> [Request; 1] {
    let limit = Value::F32(max_grad_norm.unwrap_or(f32::INFINITY));
    [Request::launch("grad_norm_clip", "f32", ONE_BLOCK, [norm, limit, scalars])]
}

/// An F64 sum for each piece.
pub(crate) fn workspace_elements(elements: usize) -> usize {
    elements.div_ceil(PIECE) * PARTIAL
}
