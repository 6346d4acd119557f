//! Operands of fp8 GEMMs on a GPU. Legend: R rows, C columns, multiples of 16.

use candle_core::DType;

use super::KernelArg;
use super::launch::{Axis, Launch};
use crate::fp8::{ScaleBlock, TILE};

/// See [`crate::fp8::quantize`]; `outputs` are values and scales of the matrix and of its transpose.
pub(crate) fn quantize(
    x: KernelArg,
    block: ScaleBlock,
    outputs: [[KernelArg; 2]; 2],
    workspace: [KernelArg; 2],
    [rows, columns]: [usize; 2],
) -> Vec<Launch> {
    let [[values_RC, scales_RC], [values_CR, scales_CR]] = outputs;
    let tiles = [rows.div_ceil(TILE), columns.div_ceil(TILE)];
    let sizes = [KernelArg::count(rows), KernelArg::count(columns)];
    // The kernel for squares of 32 has tiles of a quarter of the rows.
    let grid = |per_tile: usize| [Axis::Blocks(per_tile * tiles[0]), Axis::Blocks(tiles[1]), Axis::ONE];
    let launch = |function: &str, values: &[KernelArg]| Launch::kernel(function, "bf16", grid(1), values);
    let with_scales = [x, values_RC, values_CR, scales_RC, scales_CR, sizes[0], sizes[1]];
    match block {
        ScaleBlock::Square32 => vec![Launch::kernel("fp8_quantize_mx", "bf16", grid(4), with_scales)],
        ScaleBlock::Square128 => vec![launch("fp8_quantize_blocks", &with_scales)],
        ScaleBlock::Tensor => {
            let [largest, partials] = workspace;
            let reduction = [partials, largest, scales_RC, scales_CR, KernelArg::count(tiles[0] * tiles[1])];
            vec![
                launch("fp8_largest", &[x, partials, sizes[0], sizes[1]]),
                Launch::kernel("fp8_scale", "bf16", [Axis::ONE; 3], reduction),
                launch("fp8_quantize_tensor", &[x, largest, values_RC, values_CR, sizes[0], sizes[1]]),
            ]
        }
    }
}

/// Elements of workspace with one scale: the largest number of the matrix, and of each tile, as integers.
pub(crate) fn workspace_elements(rows: usize, columns: usize) -> usize {
    FIRST_PARTIAL + rows.div_ceil(TILE) * columns.div_ceil(TILE)
}

/// The element of the workspace at which the tiles' largest numbers begin: a multiple of 16 bytes.
pub(crate) const FIRST_PARTIAL: usize = 4;

/// The type of what the kernels keep in the workspace.
pub(crate) const PARTIAL: DType = DType::I32;
