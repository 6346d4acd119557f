//! The backward pass of causal attention (`FlashAttention-2`, arXiv:2307.08691, algorithm 2), with query tiles outside.
//! ```text
//! for each query tile: delta = rowsum(dout * out)
//!   for each KV tile up to the causal limit
//!     p   = e^(scale q k - lse)            recomputed from the saved log-sum-exp
//!     dv += p^T dout      dp = dout v^T
//!     ds  = p (dp - delta)
//!     dk += scale ds^T q      dq += scale ds k
//! ```
//! Every query tile adds to dk and dv, so the tiles of a key/value head are divided among at most [`TASKS`] tasks, each
//! with its own f32 accumulators. A head with one task writes them directly; else those of a head's tasks are added in
//! a fixed order afterwards. The division depends on the call's sizes, never on the threads.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::super::amx::{Amx, with_tiles_of};
use super::super::disjoint::Disjoint;
use super::super::exp::exp;
use super::super::schedule::{ForEachTask, run_tasks};
use super::super::simd::{total, vectorised};
use super::operand::{COLUMNS, LeftOperand};
use super::query_tile::{CallShape, KV_TILE, KvRows, QUERY_TILE, QueryTile, scale_and_narrow, take, transpose};
use super::tile_gemm::{Causal, Start, Units, tile_gemm};
use crate::Element;

/// Maximum number of tasks, unless there are more heads, and of threads that scratch is planned for. Each task of a
/// divided head costs f32 accumulators of T x E for dk and for dv, and reading them again to add them up.
const TASKS: usize = 32;

/// Inputs and outputs of the forward pass, and the gradient of its output.
pub(crate) struct Saved<'a, E> {
    pub(crate) qkv: &'a [E],
    pub(crate) documents: Option<&'a [i32]>,
    pub(crate) out: &'a [E],
    pub(crate) lse: &'a [f32],
    pub(crate) dout: &'a [E],
}

/// How the work is divided.
#[derive(Clone, Copy)]
struct Partition {
    /// Parts that the tiles of a (sequence, key/value head) pair are divided into.
    parts: usize,
    /// Tasks: the parts of all pairs.
    tasks: usize,
    /// Elements of a tile's matrices.
    matrices: usize,
    /// Elements of a task's accumulators of dk and dv.
    sums: usize,
}

impl Partition {
    fn new(shape: &CallShape) -> Self {
        let size = shape.layout.head_size;
        let padded = size.next_multiple_of(COLUMNS);
        let parts = (TASKS / shape.pairs().max(1)).clamp(1, shape.tiles().max(1));
        let matrices = 5 * QUERY_TILE * padded + 2 * KV_TILE * QUERY_TILE + 2 * KV_TILE * size + 2 * QUERY_TILE;
        Self { parts, tasks: shape.pairs() * parts, matrices, sums: 2 * shape.length * padded }
    }

    /// Returns the elements of one thread's scratch, of all threads', and of the accumulators of all tasks.
    fn scratch(&self) -> [usize; 3] {
        let (own, partials) = if self.parts == 1 { (self.sums, 0) } else { (0, self.tasks * self.sums) };
        let thread = self.matrices + own;
        [thread, TASKS.min(self.tasks) * thread, partials]
    }
}

/// Elements of workspace for [`backward`].
pub(crate) fn workspace_elements(shape: &CallShape) -> usize {
    let [_, threads, partials] = Partition::new(shape).scratch();
    threads + partials
}

/// Writes all of `dqkv`.
pub(crate) fn backward<E: Element>(saved: &Saved<'_, E>, shape: &CallShape, dqkv: &mut [E], workspace: &mut [f32]) {
    backward_on(super::amx_for::<E>(), saved, shape, dqkv, workspace);
}

pub(super) fn backward_on<E: Element>(
    amx: Option<Amx>,
    saved: &Saved<'_, E>,
    shape: &CallShape,
    dqkv: &mut [E],
    workspace: &mut [f32],
) {
    let partition = Partition::new(shape);
    let [thread, threads, partials] = partition.scratch();
    let (scratch, rest) = workspace.split_at_mut(threads);
    let (partials, dqkv) = (&mut rest[..partials], &Disjoint::new(dqkv));
    let sums_of_tasks = Disjoint::new(partials);
    run_tasks(partition.tasks, 1, 1, scratch, thread, |tasks, scratch| {
        for task in tasks {
            // Part p has tiles p, p + parts, ...: parts differ by one tile at most, and each has early and late tiles.
            let (pair, part) = (task / partition.parts, task % partition.parts);
            let (scratch, own) = scratch.split_at_mut(partition.matrices);
            let sums = if partition.parts == 1 {
                own
            } else {
                // SAFETY: every task has its own accumulators.
                unsafe { sums_of_tasks.part(task * partition.sums, partition.sums) }
            };
            sums.fill(0.0);
            with_tiles_of(amx, || {
                for tile in (part..shape.tiles()).step_by(partition.parts) {
                    let (tile, scratch) = (shape.tile(pair, tile), &mut *scratch);
                    let (dkeys, dvalues) = sums.split_at_mut(partition.sums / 2);
                    Arch::new().dispatch(BackwardTile { tile, amx, saved, dqkv, dkeys, dvalues, scratch });
                }
            });
            if partition.parts == 1 {
                write_dk_and_dv(shape, pair, 0..shape.length, sums, dqkv);
            }
        }
    });
    if partition.parts > 1 {
        let blocks = shape.length.div_ceil(KV_TILE);
        (0..shape.pairs() * blocks).into_par_iter().for_each_task(|task| {
            let (pair, first) = (task / blocks, task % blocks * KV_TILE);
            let sums = &partials[pair * partition.parts * partition.sums..][..partition.parts * partition.sums];
            write_dk_and_dv(shape, pair, first..shape.length.min(first + KV_TILE), sums, dqkv);
        });
    }
}

/// Adds the accumulators of a pair's parts, and writes dk and dv at these positions.
fn write_dk_and_dv<E: Element>(
    shape: &CallShape,
    pair: usize,
    positions: Range<usize>,
    sums: &[f32],
    dqkv: &Disjoint<'_, E>,
) {
    let (layout, size) = (shape.layout, shape.layout.head_size);
    let (padded, sequence, kv_head) = (size.next_multiple_of(COLUMNS), pair / layout.kv_heads, pair % layout.kv_heads);
    let all = shape.length * padded;
    vectorised(
        #[inline(always)]
        || {
            for position in positions.clone() {
                let token = (sequence * shape.length + position) * layout.packed_width();
                for (gradient, head) in [layout.heads, layout.heads + layout.kv_heads].into_iter().enumerate() {
                    let row = gradient * all + position * padded;
                    // SAFETY: every position of a pair is written once, and `BackwardTile` writes query heads only.
                    let target = unsafe { dqkv.part(token + (head + kv_head) * size, size) };
                    add_up(&sums.chunks_exact(2 * all).map(|part| &part[row..][..padded]), target);
                }
            }
        },
    );
}

/// Writes the sum of rows, which are padded to full vectors.
#[inline(always)]
fn add_up<'a, E: Element>(rows: &(impl Iterator<Item = &'a [f32]> + Clone), target: &mut [E]) {
    for (at, target) in target.chunks_mut(COLUMNS).enumerate() {
        let mut sum = [0.0; COLUMNS];
        for row in rows.clone() {
            let values = &row.as_chunks::<COLUMNS>().0[at];
            for j in 0..COLUMNS {
                sum[j] += values[j];
            }
        }
        scale_and_narrow(&sum, 1.0, target);
    }
}

struct BackwardTile<'a, E> {
    tile: QueryTile,
    amx: Option<Amx>,
    saved: &'a Saved<'a, E>,
    dqkv: &'a Disjoint<'a, E>,
    dkeys: &'a mut [f32],
    dvalues: &'a mut [f32],
    scratch: &'a mut [f32],
}

impl<E: Element> WithSimd for BackwardTile<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { tile, saved, mut scratch, .. } = self;
        let units = Units { simd, amx: self.amx };
        let layout = tile.shape.layout;
        let (size, token) = (layout.head_size, layout.packed_width());
        let (keys_CE, values_CE) = (take(&mut scratch, KV_TILE * size), take(&mut scratch, KV_TILE * size));
        let mut matrices = TileMatrices::allocate(&tile, scratch);
        matrices.load(&tile, saved);
        let [keys, values] = KvRows::packed(saved.qkv, &tile.shape, tile.pair());
        for first in (tile.first_key(saved.documents)..tile.keys()).step_by(KV_TILE) {
            let count = KV_TILE.min(tile.keys() - first);
            let keys = keys.operand(first, &mut keys_CE[..count * size], size);
            let values = values.operand(first, &mut values_CE[..count * size], size);
            let range = first..first + count;
            let sums = [&mut *self.dkeys, &mut *self.dvalues];
            matrices.accumulate(units, &tile, saved.documents, range, [keys, values], sums);
        }
        let scale = tile.shape.scale();
        // SAFETY: every row belongs to one tile, and every tile to one task.
        unsafe { tile.scatter(matrices.dq_EL, |_| scale, self.dqkv, token) };
    }
}

/// The matrices of a tile: L query rows, C keys, E head size (padded to full vectors beside L).
struct TileMatrices<'a> {
    q_LE: &'a mut [f32],
    q_EL: &'a mut [f32],
    dout_LE: &'a mut [f32],
    dout_EL: &'a mut [f32],
    lse_L: &'a mut [f32],
    /// `rowsum(dout * out)`.
    delta_L: &'a mut [f32],
    p_CL: &'a mut [f32],
    ds_CL: &'a mut [f32],
    dq_EL: &'a mut [f32],
}

impl<'a> TileMatrices<'a> {
    fn allocate(tile: &QueryTile, mut scratch: &'a mut [f32]) -> Self {
        let (size, width) = (tile.shape.layout.head_size, tile.width());
        let padded = size.next_multiple_of(COLUMNS);
        let mut part = |count| take(&mut scratch, count);
        Self {
            q_LE: part(width * padded),
            q_EL: part(padded * width),
            dout_LE: part(width * padded),
            dout_EL: part(padded * width),
            lse_L: part(width),
            delta_L: part(width),
            p_CL: part(KV_TILE * width),
            ds_CL: part(KV_TILE * width),
            dq_EL: part(padded * width),
        }
    }

    /// Loads what belongs to the query rows. Queries are scaled, for the scores and for dk.
    #[inline(always)]
    fn load<E: Element>(&mut self, tile: &QueryTile, saved: &Saved<'_, E>) {
        let layout = tile.shape.layout;
        let (size, query_width) = (layout.head_size, layout.query_width());
        let padded = size.next_multiple_of(COLUMNS);
        let scale = tile.shape.scale();
        tile.gather(saved.qkv, layout.packed_width(), scale, self.q_LE, padded);
        transpose(self.q_LE, padded, self.q_EL);
        tile.gather(saved.dout, query_width, 1.0, self.dout_LE, padded);
        transpose(self.dout_LE, padded, self.dout_EL);
        self.dq_EL.fill(0.0);
        self.lse_L.fill(0.0);
        self.delta_L.fill(0.0);
        for (row, query_row) in tile.query_rows().enumerate() {
            let out = &saved.out[query_row.offset(query_width)..][..size];
            self.lse_L[row] = saved.lse[query_row.lse_index()];
            self.delta_L[row] = dot(&self.dout_LE[row * padded..][..size], out);
        }
    }

    /// Adds the contributions of a KV tile to dq, dk and dv.
    #[inline(always)]
    fn accumulate<S: Simd>(
        &mut self,
        units: Units<S>,
        tile: &QueryTile,
        documents: Option<&[i32]>,
        range: Range<usize>,
        [keys, values]: [LeftOperand<'_>; 2],
        [dkeys, dvalues]: [&mut [f32]; 2],
    ) {
        let (size, width) = (tile.shape.layout.head_size, tile.width());
        let (padded, first, count) = (size.next_multiple_of(COLUMNS), range.start, range.len());
        let (p_CL, ds_CL) = (&mut self.p_CL[..count * width], &mut self.ds_CL[..count * width]);
        let (by_key, mask) = ([count, width, size], tile.causal_mask(first));
        tile_gemm(units, by_key, keys, self.q_EL, p_CL, Start::Zero, Causal::Output(mask));
        tile_gemm(units, by_key, values, self.dout_EL, ds_CL, Start::Zero, Causal::Output(mask));
        let rows = p_CL.chunks_exact_mut(width).zip(ds_CL.chunks_exact_mut(width));
        for (row, (p_L, ds_L)) in rows.enumerate() {
            let statistics = self.lse_L.iter().zip(&*self.delta_L);
            for ((p, ds), (lse, delta)) in p_L.iter_mut().zip(&mut *ds_L).zip(statistics) {
                *p = exp(*p - lse);
                *ds = *p * (*ds - delta);
            }
            let (masked_rows, document_end) =
                (tile.masked_rows(first + row), tile.document_end(first + row, documents));
            for values_L in [p_L, ds_L] {
                values_L[..masked_rows].fill(0.0);
                values_L[document_end..].fill(0.0);
            }
        }
        let (p, ds) = (LeftOperand::rows(p_CL, width), LeftOperand::rows(ds_CL, width));
        let (dkeys, dvalues) = (&mut dkeys[first * padded..], &mut dvalues[first * padded..]);
        let by_row = [count, padded, width];
        tile_gemm(units, by_row, p, self.dout_LE, dvalues, Start::Output, Causal::Left(mask));
        tile_gemm(units, by_row, ds, self.q_LE, dkeys, Start::Output, Causal::Left(mask));
        tile_gemm(
            units,
            [size, width, count],
            keys.transposed(),
            ds_CL,
            self.dq_EL,
            Start::Output,
            Causal::Right(mask),
        );
    }
}

/// The dot product, in 16 partial sums.
#[inline(always)]
fn dot<E: Element>(a: &[f32], b: &[E]) -> f32 {
    let mut partial = [0.0; COLUMNS];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<COLUMNS>(), b.as_chunks::<COLUMNS>());
    for (a, b) in a.iter().zip(b) {
        for j in 0..COLUMNS {
            partial[j] += a[j] * b[j].widen();
        }
    }
    for (j, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        partial[j] += a * b.widen();
    }
    total(partial)
}
