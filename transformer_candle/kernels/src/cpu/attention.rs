//! Causal attention on CPU slices: `FlashAttention` (Dao et al., arXiv:2205.14135) in f32.
//! ```text
//! for each (sequence, key/value head) and tile of 64 query rows     one task: q, out, scores stay in L1 and L2
//!   for each KV tile of 64 keys up to the causal limit
//!     scores  = K Q^T                                               tile GEMM; scale is in Q already
//!     row_max = max(row_max, scores)     rescale = e^(old row_max - row_max)
//!     p       = e^(scores - row_max)     row_sum = rescale row_sum + sum of p
//!     out     = rescale out + V^T p                                 tile GEMM
//!   out /= row_sum     lse = row_max + ln(row_sum)
//! ```
//! A tile's matrices are transposed, with query rows as columns: `scores_CL` for C keys and L query rows. Maxima and
//! sums then run down columns: full vectors at a time, without shuffles, and in the same order for every vector width.
//!
//! Threads take tiles one after the other, each with its own scratch; a tile's result does not depend on the thread.

#[cfg(target_arch = "x86_64")]
mod amx_tile_gemm;
mod backward;
mod operand;
mod query_tile;
mod tile_gemm;

use pulp::{Arch, Simd, WithSimd};

pub(crate) use backward::{Saved, backward, workspace_elements as backward_workspace_elements};
use operand::COLUMNS;
pub(crate) use query_tile::CallShape;
use query_tile::{KV_TILE, KvRows, QUERY_TILE, QueryTile, take, transpose};
use tile_gemm::{Causal, Start, Units, tile_gemm};

use super::amx::{Amx, with_tiles_of};
use super::disjoint::Disjoint;
use super::exp::exp;
use super::schedule::run_tasks;
use crate::{DType, Element};

/// Maximum number of threads that scratch is planned for; further ones wait.
const MAX_THREADS: usize = 64;

/// Computes attention within packed rows; `shape.past` is 0.
pub(crate) fn forward<E: Element>(
    qkv: &[E],
    documents: Option<&[i32]>,
    shape: &CallShape,
    out: &mut [E],
    lse: &mut [f32],
    workspace: &mut [f32],
) {
    forward_on(amx_for::<E>(), qkv, documents, shape, (out, lse), workspace);
}

/// AMX, where it multiplies this element type.
fn amx_for<E: Element>() -> Option<Amx> {
    Amx::if_available().filter(|_| E::DTYPE == DType::BF16)
}

fn forward_on<E: Element>(
    amx: Option<Amx>,
    qkv: &[E],
    documents: Option<&[i32]>,
    shape: &CallShape,
    (out, lse): (&mut [E], &mut [f32]),
    workspace: &mut [f32],
) {
    let keys_and_values = |pair| KvRows::packed(qkv, shape, pair);
    attend((qkv, documents), (shape, amx), keys_and_values, (out, Some(lse)), workspace);
}

/// Appends the keys and values of one sequence's packed rows to the caches, then attends to everything in them. In f32
/// even on AMX: few query rows do not repay packing the keys.
pub(crate) fn decode<E: Element>(
    qkv: &[E],
    shape: &CallShape,
    keys: &mut [E],
    values: &mut [E],
    out: &mut [E],
    workspace: &mut [f32],
) {
    let (query_width, width) = (shape.layout.query_width(), shape.layout.key_width());
    for (token, qkv) in qkv.chunks_exact(shape.layout.packed_width()).enumerate() {
        let cache_row = (shape.past + token) * width..(shape.past + token + 1) * width;
        keys[cache_row.clone()].copy_from_slice(&qkv[query_width..][..width]);
        values[cache_row].copy_from_slice(&qkv[query_width + width..]);
    }
    let (keys, values) = (&*keys, &*values);
    let cached = |kv_head: usize| {
        let first = kv_head * shape.layout.head_size;
        [keys, values].map(|values| KvRows { values, first, stride: width })
    };
    attend((qkv, None), (shape, None), cached, (out, None), workspace);
}

/// Elements of workspace for [`forward`] and [`decode`].
pub(crate) fn workspace_elements(shape: &CallShape) -> usize {
    threads(shape) * thread_elements(shape)
}

fn threads(shape: &CallShape) -> usize {
    MAX_THREADS.min(shape.pairs() * shape.tiles())
}

/// Elements of one thread's scratch: a tile's queries and outputs, scores, f32 copies of keys and values, and three
/// statistics per row.
fn thread_elements(shape: &CallShape) -> usize {
    let size = shape.layout.head_size;
    2 * QUERY_TILE * size.next_multiple_of(COLUMNS) + KV_TILE * QUERY_TILE + 2 * KV_TILE * size + 3 * QUERY_TILE
}

fn attend<'a, E: Element>(
    (qkv, documents): (&[E], Option<&[i32]>),
    (shape, amx): (&CallShape, Option<Amx>),
    keys_and_values: impl Fn(usize) -> [KvRows<'a, E>; 2] + Sync,
    (out, lse): (&mut [E], Option<&mut [f32]>),
    workspace: &mut [f32],
) {
    let (tiles, scratch) = (shape.tiles(), thread_elements(shape));
    let (out, lse) = (&Disjoint::new(out), lse.map(Disjoint::new));
    let threads = &mut workspace[..threads(shape) * scratch];
    run_tasks(shape.pairs() * tiles, 1, 1, threads, scratch, |tasks, scratch| {
        with_tiles_of(amx, || {
            for task in tasks {
                // Later tiles attend to more keys. The longest first, so that threads finish together.
                let (pair, tile) = (task / tiles, tiles - 1 - task % tiles);
                let [keys, values] = keys_and_values(pair);
                let (tile, lse, scratch) = (shape.tile(pair, tile), lse.as_ref(), &mut *scratch);
                Arch::new().dispatch(ForwardTile { tile, amx, qkv, documents, keys, values, out, lse, scratch });
            }
        });
    });
}

struct ForwardTile<'a, E> {
    tile: QueryTile,
    amx: Option<Amx>,
    qkv: &'a [E],
    documents: Option<&'a [i32]>,
    keys: KvRows<'a, E>,
    values: KvRows<'a, E>,
    out: &'a Disjoint<'a, E>,
    lse: Option<&'a Disjoint<'a, f32>>,
    scratch: &'a mut [f32],
}

impl<E: Element> WithSimd for ForwardTile<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { tile, mut scratch, .. } = self;
        let units = Units { simd, amx: self.amx };
        let (layout, width) = (tile.shape.layout, tile.width());
        let (size, token) = (layout.head_size, layout.packed_width());
        let padded = size.next_multiple_of(COLUMNS);
        let mut part = |count| take(&mut scratch, count);
        let (q_EL, rows_LE, scores_CL) = (part(padded * width), part(width * padded), part(KV_TILE * width));
        let (keys_CE, values_CE) = (part(KV_TILE * size), part(KV_TILE * size));
        let mut softmax = Softmax { row_max: part(width), row_sum: part(width), rescale: part(width) };

        tile.gather(self.qkv, token, tile.shape.scale(), rows_LE, padded);
        transpose(rows_LE, padded, q_EL);
        // The gathered rows are no longer needed: their memory becomes the output.
        let out_EL = rows_LE;
        out_EL.fill(0.0);
        // The least number and not -inf: for a row whose first KV tiles are all masked, e^(-inf - row_max) has to be 0,
        // not NaN.
        softmax.row_max.fill(f32::MIN);
        softmax.row_sum.fill(0.0);
        for first in (tile.first_key(self.documents)..tile.keys()).step_by(KV_TILE) {
            let count = KV_TILE.min(tile.keys() - first);
            let keys = self.keys.operand(first, &mut keys_CE[..count * size], size);
            let values_EC = self.values.operand(first, &mut values_CE[..count * size], size).transposed();
            let scores_CL = &mut scores_CL[..count * width];
            let mask = tile.causal_mask(first);
            tile_gemm(units, [count, width, size], keys, q_EL, scores_CL, Start::Zero, Causal::Output(mask));
            // Register tiles that the causal mask cuts through are computed whole.
            for (row, scores_L) in scores_CL.chunks_exact_mut(width).enumerate() {
                scores_L[..tile.masked_rows(first + row)].fill(f32::NEG_INFINITY);
                scores_L[tile.document_end(first + row, self.documents)..].fill(f32::NEG_INFINITY);
            }
            softmax.update(scores_CL);
            let start = Start::Scaled(softmax.rescale);
            tile_gemm(units, [size, width, count], values_EC, scores_CL, out_EL, start, Causal::Right(mask));
        }
        // SAFETY: every row belongs to one tile, and every tile to one task.
        unsafe { tile.scatter(out_EL, |row| 1.0 / softmax.row_sum[row], self.out, layout.query_width()) };
        let Some(lse) = self.lse else { return };
        for ((query_row, row_max), row_sum) in tile.query_rows().zip(&*softmax.row_max).zip(&*softmax.row_sum) {
            // SAFETY: as above.
            let lse = unsafe { lse.part(query_row.lse_index(), 1) };
            lse[0] = row_max + row_sum.ln();
        }
    }
}

/// The online softmax: statistics per query row.
struct Softmax<'a> {
    /// The largest score so far.
    row_max: &'a mut [f32],
    /// The sum of `e^(score - row_max)`.
    row_sum: &'a mut [f32],
    /// Factor of sums made with the previous `row_max`: `e^(old row_max - row_max)`.
    rescale: &'a mut [f32],
}

impl Softmax<'_> {
    /// Updates the statistics with the scores of a KV tile, and replaces the scores by `e^(score - row_max)`.
    #[inline(always)]
    fn update(&mut self, scores_CL: &mut [f32]) {
        if self.row_max.len() == QUERY_TILE {
            return self.update_columns::<QUERY_TILE>(scores_CL, 0);
        }
        for first in (0..self.row_max.len()).step_by(COLUMNS) {
            self.update_columns::<COLUMNS>(scores_CL, first);
        }
    }

    /// [`Self::update`] of W rows, whose statistics stay in registers.
    #[inline(always)]
    fn update_columns<const W: usize>(&mut self, scores_CL: &mut [f32], first: usize) {
        let width = self.row_max.len();
        let statistics = [&mut *self.row_max, &mut *self.row_sum, &mut *self.rescale];
        let [row_maxes, row_sums, rescales] =
            statistics.map(|row| row[first..].first_chunk_mut::<W>().expect("width is a multiple of W"));
        let (old_max, mut row_max, mut row_sum) = (*row_maxes, *row_maxes, *row_sums);
        for scores in scores_CL.chunks_exact(width) {
            let scores: &[f32; W] = scores[first..].first_chunk().expect("width is a multiple of W");
            for j in 0..W {
                row_max[j] = if scores[j] > row_max[j] { scores[j] } else { row_max[j] };
            }
        }
        for j in 0..W {
            rescales[j] = exp(old_max[j] - row_max[j]);
            row_sum[j] *= rescales[j];
        }
        for scores in scores_CL.chunks_exact_mut(width) {
            let scores: &mut [f32; W] = scores[first..].first_chunk_mut().expect("width is a multiple of W");
            for j in 0..W {
                scores[j] = exp(scores[j] - row_max[j]);
                row_sum[j] += scores[j];
            }
        }
        (*row_maxes, *row_sums) = (row_max, row_sum);
    }
}

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use super::backward::backward_on;
    use super::*;
    use crate::testing::{numbers, relative_error, to_f32};
    use crate::{HeadLayout, bf16};

    fn bf16s(seed: u64, count: usize) -> Vec<bf16> {
        to_f32(&numbers(seed, count)).into_iter().map(bf16::narrow).collect()
    }

    /// On AMX, or on its emulator.
    #[test]
    fn tiles_of_bf16_attend_as_vectors_of_f32_do() {
        let Some(amx) = Amx::or_emulated() else { return };
        let layout = HeadLayout { heads: 4, kv_heads: 2, head_size: 48 };
        let shape = CallShape { layout, batch: 1, length: 83, past: 0 };
        let (packed, width) = (shape.length * layout.packed_width(), shape.length * layout.query_width());
        let (qkv, dout) = (bf16s(1, packed), bf16s(2, width));
        let documents: Vec<i32> = (0..83).map(|position| if position < 30 { 0 } else { 30 }).collect();
        for documents in [None, Some(&*documents)] {
            let [vectors, tiles] = [None, Some(amx)].map(|amx| {
                let (mut out, mut lse) = (vec![bf16::ZERO; width], vec![0.0; shape.length * layout.heads]);
                let mut workspace = vec![f32::NAN; workspace_elements(&shape)];
                forward_on(amx, &qkv, documents, &shape, (&mut out, &mut lse), &mut workspace);
                let mut dqkv = vec![bf16::ZERO; packed];
                let mut workspace = vec![f32::NAN; backward_workspace_elements(&shape)];
                let saved = Saved { qkv: &qkv, documents, out: &out, lse: &lse, dout: &dout };
                backward_on(amx, &saved, &shape, &mut dqkv, &mut workspace);
                [out, dqkv].map(|values| values.into_iter().map(bf16::to_f64).collect::<Vec<_>>())
            });
            for (vectors, tiles) in vectors.iter().zip(&tiles) {
                let error = relative_error(&to_f32(tiles), vectors);
                assert!(error > 0.0 && error < 4e-3, "{error}");
            }
        }
    }
}
