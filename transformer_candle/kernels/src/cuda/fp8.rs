//! Operands of fp8 GEMMs on a GPU. Legend: R rows, C columns, multiples of 16.

use candle_core::DType;

use super::KernelArg;
use super::launch::{Axis, Launch};
use crate::fp8::{ScaleBlock, TILE};

/// See [`crate::fp8::quantize`]; `outputs` are values and scales of the matrix and of its transpose, as far as they are
/// wanted.
pub(crate) fn quantize(
    x: KernelArg,
    block: ScaleBlock,
    outputs: [Option<[KernelArg; 2]>; 2],
    workspace: [KernelArg; 2],
    sizes @ [rows, columns]: [usize; 2],
) -> Vec<Launch> {
    let Some(([values_RC, values_CR, scales_RC, scales_CR], wanted)) = wanted(outputs) else { return Vec::new() };
    let (tiles, [r, c]) = (tiles(sizes), [rows, columns].map(KernelArg::count));
    let launch = |function: &str, values: &[KernelArg]| Launch::kernel(function, "bf16", grid(tiles), values);
    let with_scales = [x, values_RC, values_CR, scales_RC, scales_CR, r, c, wanted];
    match block {
        // Its tiles have a quarter of the rows.
        ScaleBlock::Square32 => {
            vec![Launch::kernel("fp8_quantize_mx", "bf16", grid([4 * tiles[0], tiles[1]]), with_scales)]
        }
        ScaleBlock::Square128 => vec![launch("fp8_quantize_blocks", &with_scales)],
        ScaleBlock::Tensor => {
            let [largest, partials] = workspace;
            let reduction = [partials, largest, scales_RC, scales_CR, KernelArg::count(tiles[0] * tiles[1])];
            vec![
                launch("fp8_largest", &[x, partials, r, c]),
                Launch::kernel("fp8_scale", "bf16", [Axis::ONE; 3], reduction),
                launch("fp8_quantize_tensor", &[x, largest, values_RC, values_CR, r, c, wanted]),
            ]
        }
    }
}

/// Values and scales of a matrix and of its transpose, in the order of the kernels' arguments, and the argument that says
/// which of them are written, whatever stands for the rest; None if there are none.
pub(super) fn wanted(outputs: [Option<[KernelArg; 2]>; 2]) -> Option<([KernelArg; 4], KernelArg)> {
    let [codes_RC, codes_CR] = outputs;
    let bits = i32::from(codes_RC.is_some()) + 2 * i32::from(codes_CR.is_some());
    let either = codes_RC.or(codes_CR)?;
    let [[values_RC, scales_RC], [values_CR, scales_CR]] = outputs.map(|codes| codes.unwrap_or(either));
    Some(([values_RC, values_CR, scales_RC, scales_CR], KernelArg::I32(bits)))
}

/// See [`crate::fp8::transpose`]; values and scales of the matrix and of its transpose.
pub(crate) fn transpose(block: ScaleBlock, codes: [[KernelArg; 2]; 2], sizes: [usize; 2]) -> [Launch; 1] {
    let function = match block {
        ScaleBlock::Tensor => "fp8_transpose_tensor",
        ScaleBlock::Square128 => "fp8_transpose_blocks",
        ScaleBlock::Square32 => "fp8_transpose_mx",
    };
    let values = [codes.as_flattened(), &sizes.map(KernelArg::count)].concat();
    [Launch::kernel(function, "u8", grid(tiles(sizes)), values)]
}

/// See [`crate::fp8::dequantize`].
pub(crate) fn dequantize(block: ScaleBlock, codes: [KernelArg; 2], x: KernelArg, sizes: [usize; 2]) -> [Launch; 1] {
    let function = match block {
        ScaleBlock::Tensor => "fp8_dequantize_tensor",
        ScaleBlock::Square128 => "fp8_dequantize_blocks",
        ScaleBlock::Square32 => "fp8_dequantize_mx",
    };
    let [values, scales] = codes;
    let [rows, columns] = sizes.map(KernelArg::count);
    [Launch::kernel(function, "bf16", grid(tiles(sizes)), [values, scales, x, rows, columns])]
}

/// The launch of a kernel that rounds what it computes, of a matrix of these sizes, with a scale for each square.
pub(super) fn launch_of_squares(function: &str, block: ScaleBlock, values: &[KernelArg], sizes: [usize; 2]) -> Launch {
    let tiles = tiles(sizes);
    let (recipe, tiles) = match block {
        // Its tiles have a quarter of the rows.
        ScaleBlock::Square32 => ("mx", [4 * tiles[0], tiles[1]]),
        ScaleBlock::Square128 | ScaleBlock::Tensor => ("blocks", tiles),
    };
    Launch::kernel(&format!("{function}_{recipe}"), "bf16", grid(tiles), values)
}

fn tiles(sizes: [usize; 2]) -> [usize; 2] {
    sizes.map(|size| size.div_ceil(TILE))
}

fn grid([rows, columns]: [usize; 2]) -> [Axis; 3] {
    [Axis::Blocks(rows), Axis::Blocks(columns), Axis::ONE]
}

/// Elements of workspace with one scale: the largest number of the matrix, and of each tile, as integers.
pub(crate) fn workspace_elements(rows: usize, columns: usize) -> usize {
    FIRST_PARTIAL + rows.div_ceil(TILE) * columns.div_ceil(TILE)
}

/// The element of the workspace at which the tiles' largest numbers begin: a multiple of 16 bytes.
pub(crate) const FIRST_PARTIAL: usize = 4;

/// The type of what the kernels keep in the workspace.
pub(crate) const PARTIAL: DType = DType::I32;
