//! Rotary position embedding on a GPU.

use super::KernelArg;
use super::launch::{Axis, Launch, of_head_size};
use crate::HeadLayout;

/// The positions of the rows, and the direction of the rotation.
#[derive(Clone, Copy)]
pub(crate) struct Rotation {
    pub(crate) rows: usize,
    pub(crate) sequence_length: usize,
    pub(crate) first_position: usize,
    /// 1 for the forward pass, -1 for the backward pass.
    pub(crate) direction: f32,
}

/// See [`crate::rope::forward`].
pub(crate) fn rotate(
    qkv: KernelArg,
    layout: &HeadLayout,
    [cos, sin]: [KernelArg; 2],
    rotation: Rotation,
) -> [Launch; 1] {
    let Rotation { rows, sequence_length, first_position, direction } = rotation;
    let &HeadLayout { heads, kv_heads, head_size } = layout;
    let rotated = heads + kv_heads;
    let [rows_, length, first, rotated_, all, eights] =
        [rows, sequence_length, first_position, rotated, rotated + kv_heads, head_size / 8].map(KernelArg::count);
    let values = [qkv, cos, sin, rows_, length, first, rotated_, all, eights, KernelArg::F32(direction)];
    let grid = [Axis::Elements(rows * rotated, "HEADS"), Axis::ONE, Axis::ONE];
    [Launch::kernel("rope_rotate", &of_head_size(qkv.dtype(), head_size), grid, values)]
}
