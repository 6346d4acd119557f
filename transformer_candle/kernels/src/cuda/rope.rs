//! Rotary position embedding on a GPU.

use super::KernelArg;
use super::launch::{Axis, Launch, variant};
use crate::HeadLayout;

/// Head sizes with their own kernel.
const EXACT: [usize; 3] = [32, 64, 128];
/// The masked kernel for other sizes up to this, in groups of eight elements.
const MASKED: usize = 128;
const EIGHT: usize = 8;

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
    let is_masked = !EXACT.contains(&head_size) && head_size < MASKED && head_size.is_multiple_of(EIGHT);
    let size = if is_masked { format!("{MASKED}m") } else { head_size.to_string() };
    let [rows_, length, first, rotated_, all, eights] =
        [rows, sequence_length, first_position, rotated, rotated + kv_heads, head_size / EIGHT].map(KernelArg::count);
    let values = [qkv, cos, sin, rows_, length, first, rotated_, all, eights, KernelArg::F32(direction)];
    let grid = [Axis::Elements(rows * rotated, "HEADS"), Axis::ONE, Axis::ONE];
    [Launch::kernel("rope_rotate", &format!("{}.e{size}", variant(qkv.dtype())), grid, values)]
}
