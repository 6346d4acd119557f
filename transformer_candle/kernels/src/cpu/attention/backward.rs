//! The gradient of causal attention. Probabilities are computed again from the saved log-sum-exp.
//!
//! With p = e^(scale * q k - lse), o = p v: `dv = p^T do`, `dp = do v^T`, `ds = p * (dp - rowsum(do * o))`,
//! `dq = scale * ds k`, `dk = scale * ds^T q`.
//!
//! The tiles of one key/value head are dealt out to as many parts as give [`TASKS`] tasks or fewer in all. A task goes
//! through its tiles in order, writes their dq, and sums dk and dv in f32. Where a head is one part its sums are written
//! right away; else every task has accumulators of its own, and afterwards those of a head's parts are added in order. The
//! parts follow from the call's sizes, never from the threads.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::super::disjoint::Disjoint;
use super::super::exp::exp;
use super::super::share_out::share_out;
use super::super::simd::{total, vectorised};
use super::product::{COLUMNS, Causal, Left, Start, product};
use super::tiles::{KEYS, LANES, Rows, Shape, Tile, narrow_times, take, transpose};
use crate::Element;

/// Parts of all heads where there are no more heads than that, and threads that take part, at most.
const TASKS: usize = 32;

/// What forward read and left, and the gradient that comes back.
pub(crate) struct Saved<'a, E> {
    pub(crate) qkv: &'a [E],
    pub(crate) documents: Option<&'a [i32]>,
    pub(crate) out: &'a [E],
    pub(crate) lse: &'a [f32],
    pub(crate) dout: &'a [E],
}

/// How the work is cut.
#[derive(Clone, Copy)]
struct Cut {
    /// Parts of the tiles of one pair of sequence and key/value head.
    parts: usize,
    /// Tasks: the parts of all pairs.
    tasks: usize,
    /// Elements of a tile's matrices.
    matrices: usize,
    /// Elements of a task's sums of dk and of dv.
    sums: usize,
}

impl Cut {
    fn of(shape: &Shape) -> Self {
        let size = shape.layout.head_size;
        let padded = size.next_multiple_of(COLUMNS);
        let parts = (TASKS / shape.pairs().max(1)).clamp(1, shape.tiles().max(1));
        let matrices = 5 * LANES * padded + 2 * KEYS * LANES + 2 * KEYS * size + 2 * LANES;
        Self { parts, tasks: shape.pairs() * parts, matrices, sums: 2 * shape.length * padded }
    }

    /// Elements of scratch: of a thread's, of all threads', and of sums that wait for those of other parts.
    fn scratch(&self) -> [usize; 3] {
        let (own, waiting) = if self.parts == 1 { (self.sums, 0) } else { (0, self.tasks * self.sums) };
        let thread = self.matrices + own;
        [thread, TASKS.min(self.tasks) * thread, waiting]
    }
}

/// Elements of workspace for [`backward`].
pub(crate) fn workspace_elements(shape: &Shape) -> usize {
    let [_, threads, waiting] = Cut::of(shape).scratch();
    threads + waiting
}

/// Writes all of `dqkv`.
pub(crate) fn backward<E: Element>(saved: &Saved<'_, E>, shape: &Shape, dqkv: &mut [E], workspace: &mut [f32]) {
    let cut = Cut::of(shape);
    let [thread, threads, waiting] = cut.scratch();
    let (scratch, rest) = workspace.split_at_mut(threads);
    let (waiting, dqkv) = (&mut rest[..waiting], &Disjoint::new(dqkv));
    let sums_of_tasks = Disjoint::new(waiting);
    share_out(cut.tasks, 1, 1, scratch, thread, |tasks, scratch| {
        for task in tasks {
            // A later part of a head is longer, by a tile at most.
            let (pair, part) = (task / cut.parts, task % cut.parts);
            let (space, own) = scratch.split_at_mut(cut.matrices);
            // SAFETY: a task's own.
            let sums = if cut.parts == 1 { own } else { unsafe { sums_of_tasks.part(task * cut.sums, cut.sums) } };
            sums.fill(0.0);
            for tile in (part..shape.tiles()).step_by(cut.parts) {
                let (tile, space) = (shape.tile(pair, tile), &mut *space);
                let (dkeys, dvalues) = sums.split_at_mut(cut.sums / 2);
                Arch::new().dispatch(Backward { tile, saved, dqkv, dkeys, dvalues, space });
            }
            if cut.parts == 1 {
                write_keys(shape, pair, 0..shape.length, sums, dqkv);
            }
        }
    });
    if cut.parts > 1 {
        let blocks = shape.length.div_ceil(KEYS);
        (0..shape.pairs() * blocks).into_par_iter().for_each(|task| {
            let (pair, first) = (task / blocks, task % blocks * KEYS);
            let sums = &waiting[pair * cut.parts * cut.sums..][..cut.parts * cut.sums];
            write_keys(shape, pair, first..shape.length.min(first + KEYS), sums, dqkv);
        });
    }
}

/// Adds up the sums of a pair's parts, and writes dk and dv at some positions.
fn write_keys<E: Element>(shape: &Shape, pair: usize, positions: Range<usize>, sums: &[f32], dqkv: &Disjoint<'_, E>) {
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
                    // SAFETY: a position of a pair is written once, and `Backward` writes query heads only.
                    let target = unsafe { dqkv.part(token + (head + kv_head) * size, size) };
                    add_up(&sums.chunks_exact(2 * all).map(|part| &part[row..][..padded]), target);
                }
            }
        },
    );
}

/// Writes the sum of rows that are whole vectors.
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
        narrow_times(&sum, 1.0, target);
    }
}

struct Backward<'a, E> {
    tile: Tile,
    saved: &'a Saved<'a, E>,
    dqkv: &'a Disjoint<'a, E>,
    dkeys: &'a mut [f32],
    dvalues: &'a mut [f32],
    space: &'a mut [f32],
}

impl<E: Element> WithSimd for Backward<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { tile, saved, mut space, .. } = self;
        let layout = tile.shape.layout;
        let (size, token) = (layout.head_size, layout.packed_width());
        let (keys_CE, values_CE) = (take(&mut space, KEYS * size), take(&mut space, KEYS * size));
        let mut matrices = Matrices::carve(&tile, space);
        matrices.load(&tile, saved);
        let [keys, values] = Rows::packed(saved.qkv, &tile.shape, tile.pair());
        for first in (tile.first_key(saved.documents)..tile.keys()).step_by(KEYS) {
            let count = KEYS.min(tile.keys() - first);
            let keys = keys.left(first, &mut keys_CE[..count * size], size);
            let values = values.left(first, &mut values_CE[..count * size], size);
            let met = first..first + count;
            let sums = [&mut *self.dkeys, &mut *self.dvalues];
            matrices.meet(simd, &tile, saved.documents, met, [keys, values], sums);
        }
        let scale = tile.shape.scale();
        // SAFETY: a row belongs to one tile, and a tile to one task.
        unsafe { tile.scatter(matrices.dq_EL, |_| scale, self.dqkv, token) };
    }
}

/// A task's scratch: L query rows, C keys, E head size (beside L padded to whole vectors).
struct Matrices<'a> {
    q_LE: &'a mut [f32],
    q_EL: &'a mut [f32],
    dout_LE: &'a mut [f32],
    dout_EL: &'a mut [f32],
    lse_L: &'a mut [f32],
    /// Of every row, the sum of `dout * out`.
    delta_L: &'a mut [f32],
    p_CL: &'a mut [f32],
    ds_CL: &'a mut [f32],
    dq_EL: &'a mut [f32],
}

impl<'a> Matrices<'a> {
    fn carve(tile: &Tile, mut space: &'a mut [f32]) -> Self {
        let (size, width) = (tile.shape.layout.head_size, tile.width());
        let padded = size.next_multiple_of(COLUMNS);
        let mut part = |count| take(&mut space, count);
        Self {
            q_LE: part(width * padded),
            q_EL: part(padded * width),
            dout_LE: part(width * padded),
            dout_EL: part(padded * width),
            lse_L: part(width),
            delta_L: part(width),
            p_CL: part(KEYS * width),
            ds_CL: part(KEYS * width),
            dq_EL: part(padded * width),
        }
    }

    /// Takes in what belongs to the query rows. The queries are scaled, which serves the scores and dk alike.
    #[inline(always)]
    fn load<E: Element>(&mut self, tile: &Tile, saved: &Saved<'_, E>) {
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
        for (lane, place) in tile.places().enumerate() {
            let out = &saved.out[place.offset(query_width)..][..size];
            self.lse_L[lane] = saved.lse[place.statistic()];
            self.delta_L[lane] = dot(&self.dout_LE[lane * padded..][..size], out);
        }
    }

    /// Adds what the rows and some positions' keys and values give each other.
    #[inline(always)]
    fn meet<S: Simd>(
        &mut self,
        simd: S,
        tile: &Tile,
        documents: Option<&[i32]>,
        met: Range<usize>,
        [keys, values]: [Left<'_>; 2],
        [dkeys, dvalues]: [&mut [f32]; 2],
    ) {
        let (size, width) = (tile.shape.layout.head_size, tile.width());
        let (padded, first, count) = (size.next_multiple_of(COLUMNS), met.start, met.len());
        let (p_CL, ds_CL) = (&mut self.p_CL[..count * width], &mut self.ds_CL[..count * width]);
        let (by_key, edge) = ([count, width, size], tile.edge(first));
        product(simd, by_key, keys, self.q_EL, p_CL, Start::Zero, Causal::Target(edge));
        product(simd, by_key, values, self.dout_EL, ds_CL, Start::Zero, Causal::Target(edge));
        let rows = p_CL.chunks_exact_mut(width).zip(ds_CL.chunks_exact_mut(width));
        for (row, (p_L, ds_L)) in rows.enumerate() {
            let statistics = self.lse_L.iter().zip(&*self.delta_L);
            for ((p, ds), (lse, delta)) in p_L.iter_mut().zip(&mut *ds_L).zip(statistics) {
                *p = exp(*p - lse);
                *ds = *p * (*ds - delta);
            }
            let (blind, begun) = (tile.blind(first + row), tile.begun(first + row, documents));
            for values_L in [p_L, ds_L] {
                values_L[..blind].fill(0.0);
                values_L[begun..].fill(0.0);
            }
        }
        let (p, ds) = (Left::rows(p_CL, width), Left::rows(ds_CL, width));
        let (dkeys, dvalues) = (&mut dkeys[first * padded..], &mut dvalues[first * padded..]);
        let by_row = [count, padded, width];
        product(simd, by_row, p, self.dout_LE, dvalues, Start::Kept, Causal::Left(edge));
        product(simd, by_row, ds, self.q_LE, dkeys, Start::Kept, Causal::Left(edge));
        product(simd, [size, width, count], keys.transposed(), ds_CL, self.dq_EL, Start::Kept, Causal::Right(edge));
    }
}

/// The sum of products, in partial sums of a fixed number.
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
