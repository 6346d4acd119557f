//! Embedding lookup and its gradient. Legend: N tokens, V rows of the table, D hidden.

use rayon::prelude::*;

use super::schedule::ForEachTask;
use crate::Element;

/// Rows of the table per task of the backward pass. Every task reads all ids and adds those in its range, so that each
/// row is summed in the order of the tokens.
const ROWS: usize = 256;

pub(crate) fn forward<E: Element, O: Element>(table: &[E], ids: &[u32], out: &mut [O], d: usize) {
    if d == 0 {
        return;
    }
    out.par_chunks_mut(d).zip(ids).for_each_task(|(out, &id)| {
        let row = &table[id as usize * d..][..d];
        out.iter_mut().zip(row).for_each(|(out, value)| *out = O::narrow(value.widen()));
    });
}

pub(crate) fn backward<E: Element>(ids: &[u32], dout: &[E], dtable: &mut [f32], d: usize) {
    if d == 0 {
        return;
    }
    dtable.par_chunks_mut(ROWS * d).enumerate().for_each_task(|(piece, rows)| {
        for (&id, dout) in ids.iter().zip(dout.chunks_exact(d)) {
            if id as usize / ROWS == piece {
                let row = &mut rows[id as usize % ROWS * d..][..d];
                row.iter_mut().zip(dout).for_each(|(sum, &gradient)| *sum += gradient.widen());
            }
        }
    });
}
