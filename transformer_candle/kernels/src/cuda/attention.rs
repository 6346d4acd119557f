//! Attention on a GPU. Legend as in `attention.rs`.

use candle_core::DType;

use super::KernelArg;
use super::launch::{Axis, Launch, variant};
use crate::HeadLayout;
use crate::heads::AttentionShape;

/// Columns of the kernels' tiles, of which a head takes the fewest that it fits in.
const COLUMNS: [usize; 3] = [32, 64, 128];
/// Kernels count a head's elements in eights.
const EIGHT: usize = 8;
/// Rows of a block of the kernels `attention_decode*`, their `BLOCK_M`.
pub(super) const DECODE_ROWS: usize = 16;
/// Blocks that keep a GPU busy while it decodes: about two for each of 132 to 170 multiprocessors. Not measured.
const DECODE_BLOCKS: usize = 256;
/// Keys below which a block of its own is not worth its launch and its part in the reduction. Not measured.
const KEYS_WORTH_A_SPLIT: usize = 64;
/// The constant `SPLITS` of the kernel `attention_decode_reduce`.
pub(super) const MOST_SPLITS: usize = 64;

/// The inputs of [`backward`]: those of [`forward`], its outputs, and the gradient of its output.
#[derive(Clone, Copy)]
pub(crate) struct Saved {
    pub(crate) qkv: KernelArg,
    pub(crate) documents: Option<KernelArg>,
    pub(crate) out: KernelArg,
    pub(crate) lse: KernelArg,
    pub(crate) dout: KernelArg,
}

/// The key/value cache that [`decode`] appends to.
#[derive(Clone, Copy)]
pub(crate) struct Cache {
    pub(crate) keys: KernelArg,
    pub(crate) values: KernelArg,
    /// Tokens that the cache holds already.
    pub(crate) past: usize,
}

/// See [`crate::attention::forward`].
pub(crate) fn forward(
    qkv: KernelArg,
    documents: Option<KernelArg>,
    [out, lse]: [KernelArg; 2],
    shape: &AttentionShape,
) -> [Launch; 1] {
    let values = [qkv, or_null(documents), out, lse];
    let grid = grid(shape, shape.heads.heads, "BLOCK_M");
    [Launch::kernel("attention_forward", &whole_variant(shape, qkv, documents), grid, behind(&values, shape))]
}

/// See [`crate::attention::backward`]. `statistics` are 2 * B * H * T elements of workspace: of every row, the sum of
/// `dout * out` and the log-sum-exp in base 2.
pub(crate) fn backward(saved: &Saved, dqkv: KernelArg, statistics: KernelArg, shape: &AttentionShape) -> [Launch; 2] {
    let &Saved { qkv, documents, out, lse, dout } = saved;
    let kernel = whole_variant(shape, qkv, documents);
    let documents = or_null(documents);
    let queries = behind(&[qkv, documents, out, lse, dout, dqkv, statistics], shape);
    let keys = behind(&[qkv, documents, dout, dqkv, statistics], shape);
    let HeadLayout { heads, kv_heads, .. } = shape.heads;
    [
        Launch::kernel("attention_backward_queries", &kernel, grid(shape, heads, "BLOCK_M"), queries),
        Launch::kernel("attention_backward_keys", &kernel, grid(shape, kv_heads, "BLOCK_L"), keys),
    ]
}

/// See [`crate::attention::decode`]; `new` is S. `workspace` has [`decode_workspace_elements`].
pub(crate) fn decode(
    qkv: KernelArg,
    cache: Cache,
    [out, workspace]: [KernelArg; 2],
    layout: &HeadLayout,
    new: usize,
) -> Vec<Launch> {
    let Cache { keys, values, past } = cache;
    let splits = splits(layout, new, past + new);
    let ([count, past], [heads, kv_heads, eights]) = ([new, past].map(KernelArg::count), counts(layout));
    let append = [qkv, keys, values, past, heads, kv_heads, eights];
    let numbers = [count, past, heads, kv_heads, eights, scale(layout)];
    let tiles = Axis::Elements(new * layout.group_size(), "BLOCK_M");
    let dtype = variant(qkv.dtype());
    let kernel = format!("{dtype}.{}", columns(layout.head_size, false));
    let append = Launch::kernel("attention_append", dtype, [Axis::Blocks(new), Axis::ONE, Axis::ONE], append);
    if splits == 1 {
        let grid = [Axis::Blocks(layout.kv_heads), tiles, Axis::ONE];
        let attend = [&[qkv, keys, values, out], &numbers[..]].concat();
        return vec![append, Launch::kernel("attention_decode", &kernel, grid, attend)];
    }
    let rows = new * layout.heads;
    let row_max = workspace.skip_elements(splits * rows * layout.head_size);
    let partial = [workspace, row_max, row_max.skip_elements(splits * rows)];
    let grid = [Axis::Blocks(layout.kv_heads), tiles, Axis::Blocks(splits)];
    let split = [&[qkv, keys, values], &partial[..], &numbers].concat();
    let reduce = [&partial[..], &[out, KernelArg::count(splits), eights]].concat();
    let reduced = format!("{dtype}.{}", columns(layout.head_size, false).trim_end_matches('m'));
    vec![
        append,
        Launch::kernel("attention_decode_split", &kernel, grid, split),
        Launch::kernel("attention_decode_reduce", &reduced, [Axis::Blocks(rows), Axis::ONE, Axis::ONE], reduce),
    ]
}

/// Number of splits of the keys where `new` tokens attend to `length`, themselves included: as many as give the GPU
/// [`DECODE_BLOCKS`], and limited by the number of keys per split. It follows from the sizes alone, so that every GPU
/// adds in the same order.
fn splits(layout: &HeadLayout, new: usize, length: usize) -> usize {
    let blocks = layout.kv_heads * (new * layout.group_size()).div_ceil(DECODE_ROWS);
    let splits_of_blocks = DECODE_BLOCKS / blocks.max(1);
    splits_of_blocks.min(length / KEYS_WORTH_A_SPLIT).clamp(1, MOST_SPLITS)
}

/// Elements of F32 workspace for [`decode`] of at most `new` tokens: of every row in every split its sums, its
/// `row_max` and its `row_sum`, where there is more than one split. Then there are at most [`DECODE_BLOCKS`] blocks of
/// [`DECODE_ROWS`] rows.
pub(crate) fn decode_workspace_elements(layout: &HeadLayout, new: usize) -> usize {
    let rows = (DECODE_BLOCKS * DECODE_ROWS).min(MOST_SPLITS * new * layout.heads);
    rows * (layout.head_size + 2)
}

/// The name of the variant of a kernel over whole sequences.
fn whole_variant(shape: &AttentionShape, qkv: KernelArg, documents: Option<KernelArg>) -> String {
    let columns = columns(shape.heads.head_size, qkv.dtype() == DType::BF16);
    let documents = if documents.is_some() { ".documents" } else { "" };
    format!("{}.{columns}{documents}", variant(qkv.dtype()))
}

/// A grid with every head of every sequence along x, tiles of positions along y.
fn grid(shape: &AttentionShape, heads: usize, tile: &'static str) -> [Axis; 3] {
    [Axis::Blocks(shape.batch * heads), Axis::Elements(shape.sequence_length, tile), Axis::ONE]
}

/// The arguments of a kernel: the buffers, followed by the sizes.
fn behind(buffers: &[KernelArg], shape: &AttentionShape) -> Vec<KernelArg> {
    [buffers, &[KernelArg::count(shape.sequence_length)], &counts(&shape.heads), &[scale(&shape.heads)]].concat()
}

fn counts(layout: &HeadLayout) -> [KernelArg; 3] {
    [layout.heads, layout.kv_heads, layout.head_size / EIGHT].map(KernelArg::count)
}

fn scale(layout: &HeadLayout) -> KernelArg {
    KernelArg::F32((1.0 / (layout.head_size as f64).sqrt()) as f32)
}

/// The documents, or a null pointer for kernels without documents, which do not read it.
fn or_null(documents: Option<KernelArg>) -> KernelArg {
    documents.unwrap_or(KernelArg::Pointer { address: 0, dtype: DType::I32 })
}

/// The part of kernels' names that stands for a head size: the columns of the tiles it fits in, and whether some are
/// masked. Except for the smallest, tiles without masks are there only where `exact` says so. A size that no tile takes
/// gets a name that no kernel has.
fn columns(head_size: usize, exact: bool) -> String {
    let fitting = COLUMNS.into_iter().find(|&columns| head_size <= columns);
    match fitting {
        Some(columns) if head_size == columns && (exact || columns == COLUMNS[0]) => format!("e{columns}"),
        Some(columns) if head_size > COLUMNS[0] && head_size.is_multiple_of(EIGHT) => format!("e{columns}m"),
        _ => format!("e{head_size}_none"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A layout of 32 query heads and this many key/value heads.
    fn layout(kv_heads: usize) -> HeadLayout {
        HeadLayout { heads: 32, kv_heads, head_size: 64 }
    }

    #[test]
    fn keys_are_split_until_the_gpu_is_busy() {
        let lengths = [1, 100, 128, 1000, 2048, 100_000];
        assert_eq!(lengths.map(|length| splits(&layout(8), 1, length)), [1, 1, 2, 15, 32, 32]);
        assert_eq!(lengths.map(|length| splits(&layout(1), 1, length)), [1, 1, 2, 15, 32, 64]);
        assert_eq!([1, 16, 64, 128].map(|new| splits(&layout(8), new, 2048)), [32, 8, 2, 1]);
    }

    #[test]
    fn the_workspace_holds_every_split_of_fewer_tokens() {
        for kv_heads in [1, 2, 8, 32] {
            let layout = layout(kv_heads);
            for new in 1..=130 {
                let splits = splits(&layout, new, 1 << 20);
                let elements = if splits > 1 { splits * new * layout.heads * (layout.head_size + 2) } else { 0 };
                assert!(
                    (new..=130).all(|most| elements <= decode_workspace_elements(&layout, most)),
                    "{kv_heads} {new}"
                );
            }
        }
        assert!(decode_workspace_elements(&HeadLayout { head_size: 128, ..layout(8) }, 128) * 4 <= 32 << 20);
    }

    #[test]
    fn head_sizes_go_to_the_next_larger_tile() {
        let names = |exact| [32, 40, 64, 72, 128].map(|size| columns(size, exact));
        assert_eq!(names(true), ["e32", "e64m", "e64", "e128m", "e128"]);
        assert_eq!(names(false), ["e32", "e64m", "e64m", "e128m", "e128m"]);
        assert_eq!([16, 36, 136].map(|size| columns(size, true)), ["e16_none", "e36_none", "e136_none"]);
    }
}
