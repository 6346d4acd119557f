//! Dropout on a GPU. Legend: N rows of I, a multiple of 16.

use super::KernelArg;
use super::launch::{Axis, Launch, variant};
use crate::counter_hash::mix;
use crate::dropout_mask::Dropout;

/// See [`crate::dropout::forward`]; the arguments are x, the key and the output.
pub(crate) fn forward(arguments: [KernelArg; 3], dropout: Dropout, sizes: [usize; 2]) -> [Launch; 1] {
    [launch("dropout_forward", arguments, dropout, sizes)]
}

/// See [`crate::dropout::backward`]; the arguments are the output's gradient, the key and that of x.
pub(crate) fn backward(arguments: [KernelArg; 3], dropout: Dropout, sizes: [usize; 2]) -> [Launch; 1] {
    [launch("dropout_backward", arguments, dropout, sizes)]
}

fn launch(function: &str, [input, key, output]: [KernelArg; 3], dropout: Dropout, [n, i]: [usize; 2]) -> Launch {
    let module = mix(dropout.module);
    let word = |bits: u32| KernelArg::I32(bits.cast_signed());
    let values = [
        input,
        key,
        output,
        word(module as u32),
        word((module >> 32) as u32),
        word(dropout.threshold()),
        KernelArg::F32(dropout.scale()),
        KernelArg::count(i),
    ];
    let grid = [Axis::Blocks(n), Axis::Elements(i, "BLOCK"), Axis::ONE];
    Launch::kernel(function, variant(input.dtype()), grid, values)
}
