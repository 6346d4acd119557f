//! Casts on a GPU.

use super::Value;
use super::request::{Blocks, Request, ranges};

/// From F32 to BF16.
pub(crate) fn narrow(source: Value, target: Value, elements: usize) -> Vec<Request> {
    flat("cast_narrow", "bf16", [source, target], elements)
}

/// From BF16 to F32.
pub(crate) fn widen(source: Value, target: Value, elements: usize) -> Vec<Request> {
    flat("cast_widen", "f32", [source, target], elements)
}

/// See [`crate::cast::split_master`], whose order the buffers have.
pub(crate) fn split(buffers: [Value; 3], elements: usize) -> Vec<Request> {
    flat("cast_split", "bf16", buffers, elements)
}

/// See [`crate::cast::join_master`], whose order the buffers have.
pub(crate) fn join(buffers: [Value; 3], elements: usize) -> Vec<Request> {
    flat("cast_join", "f32", buffers, elements)
}

/// One kernel over buffers of one length.
fn flat<const N: usize>(function: &str, variant: &str, buffers: [Value; N], elements: usize) -> Vec<Request> {
    let part = |(start, length): (usize, usize)| {
        let mut values = buffers.map(|buffer| buffer.skip_elements(start)).to_vec();
        values.push(Value::count(length));
        Request::launch(function, variant, [Blocks::Of(length, "BLOCK"), Blocks::ONE, Blocks::ONE], values)
    };
    ranges(elements).map(part).collect()
}
