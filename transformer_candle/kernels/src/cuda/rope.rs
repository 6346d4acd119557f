//! Rotary position embedding on a GPU.

use super::Value;
use super::request::{Blocks, Request, variant};
use crate::HeadLayout;

/// Head sizes with a kernel of their own.
const EXACT: [usize; 3] = [32, 64, 128];
/// The kernel for all smaller ones counts a head's elements in eights.
const MASKED: usize = 128;
const EIGHT: usize = 8;

/// Where the rows stand, and which way their heads turn.
#[derive(Clone, Copy)]
pub(crate) struct Places {
    pub(crate) rows: usize,
    pub(crate) sequence_length: usize,
    pub(crate) first_position: usize,
    /// 1 forth, -1 back.
    pub(crate) direction: f32,
}

/// See [`crate::rope::forward`].
pub(crate) fn rotate(qkv: Value, layout: &HeadLayout, [cos, sin]: [Value; 2], places: Places) -> [Request; 1] {
    let Places { rows, sequence_length, first_position, direction } = places;
    let &HeadLayout { heads, kv_heads, head_size } = layout;
    let turned = heads + kv_heads;
    let is_masked = !EXACT.contains(&head_size) && head_size < MASKED && head_size.is_multiple_of(EIGHT);
    let size = if is_masked { format!("{MASKED}m") } else { head_size.to_string() };
    let [rows_, length, first, turned_, all, eights] =
        [rows, sequence_length, first_position, turned, turned + kv_heads, head_size / EIGHT].map(Value::count);
    let values = [qkv, cos, sin, rows_, length, first, turned_, all, eights, Value::F32(direction)];
    let grid = [Blocks::Of(rows * turned, "HEADS"), Blocks::ONE, Blocks::ONE];
    [Request::launch("rope_rotate", &format!("{}.e{size}", variant(qkv.dtype())), grid, values)]
}
