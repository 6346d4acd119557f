//! The gradient of causal attention. Probabilities are computed again from the saved log-sum-exp.
//!
//! With p = e^(scale * q k - lse), o = p v: `dv = p^T do`, `dp = do v^T`, `ds = p * (dp - rowsum(do * o))`,
//! `dq = scale * ds k`, `dk = scale * ds^T q`.
//!
//! The tiles of one key/value head are dealt out to as many parts as give [`TASKS`] tasks or fewer in all. A task goes
//! through its tiles in order, writes their dq, and sums dk and dv in an f32 accumulator of its own; afterwards the
//! accumulators of a head's parts are added in order. The parts follow from the call's sizes, never from the threads.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::super::exp::exp;
use super::product::{COLUMNS, Left, Start, product};
use super::tiles::{ALIGNMENT, Disjoint, KEYS, LANES, Rows, Shape, Tile, aligned, take, transpose};
use crate::Element;

/// Tasks that run at the same time, and pieces of scratch, at most.
const TASKS: usize = 32;

/// What forward read and left, and the gradient that comes back.
pub(crate) struct Saved<'a, E> {
    pub(crate) qkv: &'a [E],
    pub(crate) out: &'a [E],
    pub(crate) lse: &'a [f32],
    pub(crate) dout: &'a [E],
}

/// How the work is cut.
#[derive(Clone, Copy)]
struct Cut {
    /// Parts of the tiles of one pair of sequence and key/value head.
    parts: usize,
    /// Pairs worked on at a time.
    pairs: usize,
    /// Elements of a task's scratch: a tile's matrices, then the accumulators of dk and dv.
    space: usize,
    /// Elements of one accumulator.
    accumulator: usize,
}

impl Cut {
    fn of(shape: &Shape) -> Self {
        let size = shape.layout.head_size;
        let padded = size.next_multiple_of(COLUMNS);
        let parts = (TASKS / shape.pairs().max(1)).clamp(1, shape.tiles().max(1));
        let rounds = shape.pairs().div_ceil(TASKS).max(1);
        let tile = LANES * (2 * padded + 3 * size) + 2 * KEYS * LANES + 2 * KEYS * size + 2 * LANES;
        let accumulator = shape.length * padded;
        Self { parts, pairs: shape.pairs().div_ceil(rounds), space: tile + 2 * accumulator, accumulator }
    }
}

/// Elements of workspace for [`backward`].
pub(crate) fn workspace_elements(shape: &Shape) -> usize {
    let cut = Cut::of(shape);
    ALIGNMENT + cut.pairs * cut.parts * cut.space
}

/// Writes all of `dqkv`.
pub(crate) fn backward<E: Element>(saved: &Saved<'_, E>, shape: &Shape, dqkv: &mut [E], workspace: &mut [f32]) {
    let cut = Cut::of(shape);
    let space = &mut aligned(workspace)[..cut.pairs * cut.parts * cut.space];
    let dqkv = &Disjoint::new(dqkv);
    let all: usize = shape.pairs();
    for first in (0..all).step_by(cut.pairs.max(1)) {
        let pairs = cut.pairs.min(all - first);
        let tasks = space.par_chunks_exact_mut(cut.space).with_max_len(1).take(pairs * cut.parts).enumerate();
        tasks.for_each(|(task, space)| {
            // A later part of a head is longer, by a tile at most.
            let (pair, part) = (first + task / cut.parts, task % cut.parts);
            let (space, accumulators) = space.split_at_mut(cut.space - 2 * cut.accumulator);
            accumulators.fill(0.0);
            let (dkeys, dvalues) = accumulators.split_at_mut(cut.accumulator);
            for tile in (part..shape.tiles()).step_by(cut.parts) {
                let (tile, space) = (shape.tile(pair, tile), &mut *space);
                Arch::new().dispatch(Backward { tile, saved, dqkv, dkeys, dvalues, space });
            }
        });
        collect(shape, &cut, first..first + pairs, space, dqkv);
    }
}

/// Adds up the parts' accumulators of these pairs and writes dk and dv.
fn collect<E: Element>(
    shape: &Shape,
    cut: &Cut,
    pairs: std::ops::Range<usize>,
    space: &[f32],
    dqkv: &Disjoint<'_, E>,
) {
    let (layout, size) = (shape.layout, shape.layout.head_size);
    let padded = size.next_multiple_of(COLUMNS);
    let blocks = shape.length.div_ceil(KEYS);
    (0..pairs.len() * blocks).into_par_iter().for_each(|task| {
        let (pair, first) = (task / blocks, task % blocks * KEYS);
        let spaces = &space[pair * cut.parts * cut.space..][..cut.parts * cut.space];
        let (sequence, kv_head) = ((pairs.start + pair) / layout.kv_heads, (pairs.start + pair) % layout.kv_heads);
        for position in first..shape.length.min(first + KEYS) {
            let token = (sequence * shape.length + position) * layout.packed_width();
            for (gradient, head) in [layout.heads + kv_head, layout.heads + layout.kv_heads + kv_head].iter().enumerate() {
                let row = cut.space - (2 - gradient) * cut.accumulator + position * padded;
                // SAFETY: a position of a pair belongs to one task, and tasks of `Backward` write none but query heads.
                let target = unsafe { dqkv.part(token + head * size, size) };
                for (j, target) in target.iter_mut().enumerate() {
                    *target = E::narrow(spaces.chunks_exact(cut.space).map(|part| part[row + j]).sum());
                }
            }
        }
    });
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
        let (layout, scale) = (tile.shape.layout, tile.shape.scale());
        let (size, width, token) = (layout.head_size, tile.width(), layout.packed_width());
        let padded = size.next_multiple_of(COLUMNS);
        let (q_LE, q_EL) = (take(&mut space, width * padded), take(&mut space, size * width));
        let (dout_LE, dout_EL) = (take(&mut space, width * padded), take(&mut space, size * width));
        let (p_CL, ds_CL) = (take(&mut space, KEYS * width), take(&mut space, KEYS * width));
        let (keys_CE, values_CE) = (take(&mut space, KEYS * size), take(&mut space, KEYS * size));
        let (dq_EL, lse_L, delta_L) = (take(&mut space, size * width), take(&mut space, width), take(&mut space, width));

        tile.gather(saved.qkv, token, scale, q_LE, padded);
        transpose(q_LE, padded, size, q_EL);
        tile.gather(saved.dout, layout.query_width(), 1.0, dout_LE, padded);
        transpose(dout_LE, padded, size, dout_EL);
        lse_L.fill(0.0);
        delta_L.fill(0.0);
        for lane in 0..tile.rows {
            lse_L[lane] = saved.lse[tile.statistic(lane)];
            let out = &saved.out[tile.offset(lane, layout.query_width())..][..size];
            delta_L[lane] = dot(&dout_LE[lane * padded..][..size], out);
        }
        dq_EL.fill(0.0);

        let sequence = tile.sequence * tile.shape.length * token;
        let first_key = sequence + (layout.heads + tile.kv_head) * size;
        let keys = Rows { values: saved.qkv, first: first_key, stride: token };
        let values = Rows { first: first_key + layout.key_width(), ..keys };
        for first in (0..tile.keys()).step_by(KEYS) {
            let count = KEYS.min(tile.keys() - first);
            let (p_CL, ds_CL) = (&mut p_CL[..count * width], &mut ds_CL[..count * width]);
            let (keys_CE, values_CE) = (&mut keys_CE[..count * size], &mut values_CE[..count * size]);
            keys.widen(first, keys_CE, size);
            values.widen(first, values_CE, size);
            product(simd, [count, width, size], Left::rows(keys_CE, size), q_EL, p_CL, Start::Zero);
            product(simd, [count, width, size], Left::rows(values_CE, size), dout_EL, ds_CL, Start::Zero);
            for (row, (p_L, ds_L)) in p_CL.chunks_exact_mut(width).zip(ds_CL.chunks_exact_mut(width)).enumerate() {
                for (((p, ds), lse), delta) in p_L.iter_mut().zip(&mut *ds_L).zip(&*lse_L).zip(&*delta_L) {
                    *p = exp(*p - lse);
                    *ds = *p * (*ds - delta);
                }
                let blind = tile.blind(first + row);
                p_L[..blind].fill(0.0);
                ds_L[..blind].fill(0.0);
            }
            let (dkeys, dvalues) = (&mut self.dkeys[first * padded..], &mut self.dvalues[first * padded..]);
            product(simd, [count, padded, width], Left::rows(p_CL, width), dout_LE, dvalues, Start::Kept);
            product(simd, [count, padded, width], Left::rows(ds_CL, width), q_LE, dkeys, Start::Kept);
            product(simd, [size, width, count], Left::transposed(keys_CE, size), ds_CL, dq_EL, Start::Kept);
        }
        for lane in 0..tile.rows {
            // SAFETY: a row belongs to one tile, and a tile to one task.
            let dq = unsafe { self.dqkv.part(tile.offset(lane, token), size) };
            for (dq, column_L) in dq.iter_mut().zip(dq_EL.chunks_exact(width)) {
                *dq = E::narrow(column_L[lane] * scale);
            }
        }
    }
}

/// The sum of products, in partial sums of a fixed number.
#[inline(always)]
fn dot<E: Element>(a: &[f32], b: &[E]) -> f32 {
    let mut partial = [0.0; COLUMNS];
    for (a, b) in a.chunks(COLUMNS).zip(b.chunks(COLUMNS)) {
        for ((partial, a), b) in partial.iter_mut().zip(a).zip(b) {
            *partial += a * b.widen();
        }
    }
    partial.iter().sum()
}
