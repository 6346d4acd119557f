//! Attention on a card. Legend as in `attention.rs`.

use candle_core::DType;

use super::Value;
use super::request::{Blocks, Request, variant};
use crate::HeadLayout;

/// Columns of the kernels' tiles.
const COLUMNS: [usize; 3] = [32, 64, 128];
/// Kernels count a head's elements in eights.
const EIGHT: usize = 8;

/// The sizes of a call.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) layout: HeadLayout,
    /// B, the number of sequences.
    pub(crate) batch: usize,
    /// T, the positions of a sequence.
    pub(crate) length: usize,
}

/// What [`backward`] reads.
#[derive(Clone, Copy)]
pub(crate) struct Saved {
    pub(crate) qkv: Value,
    pub(crate) documents: Option<Value>,
    pub(crate) out: Value,
    pub(crate) lse: Value,
    pub(crate) dout: Value,
}

/// Where [`decode`] appends.
#[derive(Clone, Copy)]
pub(crate) struct Cache {
    pub(crate) keys: Value,
    pub(crate) values: Value,
    /// Tokens that are there.
    pub(crate) past: usize,
}

/// See [`crate::attention::forward`].
pub(crate) fn forward(qkv: Value, documents: Option<Value>, [out, lse]: [Value; 2], sizes: &Sizes) -> [Request; 1] {
    let values = [qkv, or_null(documents), out, lse];
    let grid = sizes.grid(sizes.layout.heads, "BLOCK_M");
    [Request::launch("attention_forward", &sizes.variant(qkv, documents), grid, sizes.behind(&values))]
}

/// See [`crate::attention::backward`]. `statistics` are 2 * B * H * T elements of workspace: of every row, the sum of `dout * out`
/// and the log-sum-exp in base 2.
pub(crate) fn backward(saved: &Saved, dqkv: Value, statistics: Value, sizes: &Sizes) -> [Request; 2] {
    let &Saved { qkv, documents, out, lse, dout } = saved;
    let kernel = sizes.variant(qkv, documents);
    let documents = or_null(documents);
    let queries = sizes.behind(&[qkv, documents, out, lse, dout, dqkv, statistics]);
    let keys = sizes.behind(&[qkv, documents, dout, dqkv, statistics]);
    let HeadLayout { heads, kv_heads, .. } = sizes.layout;
    [
        Request::launch("attention_backward_queries", &kernel, sizes.grid(heads, "BLOCK_M"), queries),
        Request::launch("attention_backward_keys", &kernel, sizes.grid(kv_heads, "BLOCK_L"), keys),
    ]
}

/// See [`crate::attention::decode`]; `new` is S.
pub(crate) fn decode(qkv: Value, cache: Cache, out: Value, layout: &HeadLayout, new: usize) -> [Request; 2] {
    let Cache { keys, values, past } = cache;
    let ([count, past], [heads, kv_heads, eights]) = ([new, past].map(Value::count), counts(layout));
    let append = [qkv, keys, values, past, heads, kv_heads, eights];
    let attend = [qkv, keys, values, out, count, past, heads, kv_heads, eights, scale(layout)];
    let tiles = [Blocks::Count(layout.kv_heads), Blocks::Of(new * layout.group_size(), "BLOCK_M"), Blocks::ONE];
    let dtype = variant(qkv.dtype());
    let kernel = format!("{dtype}.{}", columns(layout.head_size, false));
    [
        Request::launch("attention_append", dtype, [Blocks::Count(new), Blocks::ONE, Blocks::ONE], append),
        Request::launch("attention_decode", &kernel, tiles, attend),
    ]
}

impl Sizes {
    fn variant(&self, qkv: Value, documents: Option<Value>) -> String {
        let columns = columns(self.layout.head_size, qkv.dtype() == DType::BF16);
        let documents = if documents.is_some() { ".documents" } else { "" };
        format!("{}.{columns}{documents}", variant(qkv.dtype()))
    }

    /// Every head of every sequence along x, tiles of positions along y.
    fn grid(&self, heads: usize, tile: &'static str) -> [Blocks; 3] {
        [Blocks::Count(self.batch * heads), Blocks::Of(self.length, tile), Blocks::ONE]
    }

    /// The buffers, and behind them the sizes.
    fn behind(&self, buffers: &[Value]) -> Vec<Value> {
        [buffers, &[Value::count(self.length)], &counts(&self.layout), &[scale(&self.layout)]].concat()
    }
}

fn counts(layout: &HeadLayout) -> [Value; 3] {
    [layout.heads, layout.kv_heads, layout.head_size / EIGHT].map(Value::count)
}

fn scale(layout: &HeadLayout) -> Value {
    Value::F32((1.0 / (layout.head_size as f64).sqrt()) as f32)
}

/// Kernels without documents do not look at theirs.
fn or_null(documents: Option<Value>) -> Value {
    documents.unwrap_or(Value::Pointer { address: 0, dtype: DType::I32 })
}

/// How kernels' names call a head size: the columns of the tiles it fits in, and whether some are masked. Beside the smallest, tiles
/// without masks are there only where `exact` says so. A size that no tile takes gets a name that no kernel has.
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

    #[test]
    fn head_sizes_go_to_the_next_larger_tile() {
        let names = |exact| [32, 40, 64, 72, 128].map(|size| columns(size, exact));
        assert_eq!(names(true), ["e32", "e64m", "e64", "e128m", "e128"]);
        assert_eq!(names(false), ["e32", "e64m", "e64m", "e128m", "e128m"]);
        assert_eq!([16, 36, 136].map(|size| columns(size, true)), ["e16_none", "e36_none", "e136_none"]);
    }
}
