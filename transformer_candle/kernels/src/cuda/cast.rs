//! Casts on a GPU.

use super::KernelArg;
use super::launch::{Axis, Launch, ranges};

/// Casts F32 to BF16.
pub(crate) fn narrow(source: KernelArg, target: KernelArg, elements: usize) -> Vec<Launch> {
    flat("cast_narrow", "bf16", [source, target], elements)
}

/// Casts BF16 to F32.
pub(crate) fn widen(source: KernelArg, target: KernelArg, elements: usize) -> Vec<Launch> {
    flat("cast_widen", "f32", [source, target], elements)
}

/// See [`crate::cast::split_master`]; the buffers are in the order of its arguments.
pub(crate) fn split(buffers: [KernelArg; 3], elements: usize) -> Vec<Launch> {
    flat("cast_split", "bf16", buffers, elements)
}

/// See [`crate::cast::join_master`]; the buffers are in the order of its arguments.
pub(crate) fn join(buffers: [KernelArg; 3], elements: usize) -> Vec<Launch> {
    flat("cast_join", "f32", buffers, elements)
}

/// Launches of one kernel over buffers of one length.
fn flat<const N: usize>(function: &str, variant: &str, buffers: [KernelArg; N], elements: usize) -> Vec<Launch> {
    let part = |(start, length): (usize, usize)| {
        let mut values = buffers.map(|buffer| buffer.skip_elements(start)).to_vec();
        values.push(KernelArg::count(length));
        Launch::kernel(function, variant, [Axis::Elements(length, "BLOCK"), Axis::ONE, Axis::ONE], values)
    };
    ranges(elements).map(part).collect()
}
