//! Residual add and root-mean-square norm on CPU slices. Legend: N rows of D; R is the residual stream's element type.

use rayon::prelude::*;

use super::column_sums::{add_partials, rows_of_block, workspace_elements};
use super::schedule::{ForEachTask, rows_per_task};
use super::simd::{total, vectorised};
use crate::Element;

/// Partial sums of a row, the same number for every vector width.
const PARTIAL: usize = 32;

pub(crate) fn forward<R: Element, E: Element>(
    x: &[R],
    weight: &[E],
    epsilon: f32,
    normed: &mut [E],
    inv_rms: &mut [f32],
) {
    let d = weight.len().max(1);
    let rows = rows_per_task(d);
    let pieces = x.par_chunks(rows * d).zip(normed.par_chunks_mut(rows * d)).zip(inv_rms.par_chunks_mut(rows));
    pieces.for_each_task(|((sum, normed), inv_rms)| {
        vectorised(
            #[inline(always)]
            || {
                measure_rows(sum, epsilon, inv_rms);
                normalize_rows(sum, weight, inv_rms, normed);
            },
        );
    });
}

pub(crate) fn forward_add<R: Element, E: Element>(
    x: &[R],
    output: &[R],
    weight: &[E],
    epsilon: f32,
    sum: &mut [R],
    normed: &mut [E],
    inv_rms: &mut [f32],
) {
    let d = weight.len().max(1);
    let rows = rows_per_task(d);
    let inputs = x.par_chunks(rows * d).zip(output.par_chunks(rows * d));
    let outputs = sum.par_chunks_mut(rows * d).zip(normed.par_chunks_mut(rows * d)).zip(inv_rms.par_chunks_mut(rows));
    inputs.zip(outputs).for_each_task(|((x, output), ((sum, normed), inv_rms))| {
        vectorised(
            #[inline(always)]
            || {
                for ((sum, x), output) in sum.iter_mut().zip(x).zip(output) {
                    *sum = R::narrow(x.widen() + output.widen());
                }
                measure_rows(sum, epsilon, inv_rms);
                normalize_rows(sum, weight, inv_rms, normed);
            },
        );
    });
}

pub(crate) fn normalize<E: Element>(sum: &[E], weight: &[E], inv_rms: &[f32], normed: &mut [E]) {
    let d = weight.len().max(1);
    let rows = rows_per_task(d);
    let pieces = sum.par_chunks(rows * d).zip(normed.par_chunks_mut(rows * d)).zip(inv_rms.par_chunks(rows));
    pieces.for_each_task(|((sum, normed), inv_rms)| {
        vectorised(
            #[inline(always)]
            || normalize_rows(sum, weight, inv_rms, normed),
        );
    });
}

/// Values that forward saves for backward.
pub(crate) struct Saved<'a, E> {
    pub(crate) sum: &'a [E],
    pub(crate) weight: &'a [E],
    pub(crate) inv_rms: &'a [f32],
}

pub(crate) fn backward<E: Element>(
    saved: &Saved<'_, E>,
    dnormed: &[E],
    dsum: &mut [E],
    dweight: Option<&mut [f32]>,
    workspace: &mut [f32],
) {
    let &Saved { sum, weight, inv_rms } = saved;
    let (n, d) = (inv_rms.len(), weight.len().max(1));
    let rows = rows_of_block(n);
    let partials = &mut workspace[..workspace_elements(n, weight.len())];
    let inputs = sum.par_chunks(rows * d).zip(inv_rms.par_chunks(rows)).zip(dnormed.par_chunks(rows * d));
    let outputs = dsum.par_chunks_mut(rows * d).zip(partials.par_chunks_mut(d));
    inputs.zip(outputs).for_each_task(|(((sum, inv_rms), dnormed), (dsum, dweight))| {
        let saved = Saved { sum, weight, inv_rms };
        vectorised(
            #[inline(always)]
            || backward_rows(&saved, dnormed, dsum, dweight),
        );
    });
    if let Some(dweight) = dweight {
        add_partials(partials, dweight);
    }
}

#[inline(always)]
fn measure_rows<R: Element>(sum: &[R], epsilon: f32, inv_rms: &mut [f32]) {
    let d = sum.len() / inv_rms.len();
    for (row, inv_rms) in sum.chunks_exact(d).zip(inv_rms) {
        *inv_rms = inv_rms_of(row, epsilon);
    }
}

/// The inverse of a row's root mean square.
#[inline(always)]
pub(super) fn inv_rms_of<E: Element>(row: &[E], epsilon: f32) -> f32 {
    1.0 / (squares(row) / row.len() as f32 + epsilon).sqrt()
}

#[inline(always)]
pub(super) fn normalize_rows<R: Element, E: Element>(sum: &[R], weight: &[E], inv_rms: &[f32], normed: &mut [E]) {
    let d = weight.len();
    for ((sum, normed), &inv_rms) in sum.chunks_exact(d).zip(normed.chunks_exact_mut(d)).zip(inv_rms) {
        for ((normed, sum), weight) in normed.iter_mut().zip(sum).zip(weight) {
            *normed = E::narrow(sum.widen() * inv_rms * weight.widen());
        }
    }
}

/// Adds to `dsum`, and overwrites `dweight` with the rows' sum.
#[inline(always)]
fn backward_rows<E: Element>(saved: &Saved<'_, E>, dnormed: &[E], dsum: &mut [E], dweight: &mut [f32]) {
    let &Saved { sum, weight, inv_rms } = saved;
    let d = weight.len();
    dweight.fill(0.0);
    let rows = sum.chunks_exact(d).zip(dnormed.chunks_exact(d)).zip(inv_rms);
    for (((sum, dnormed), &inv_rms), dsum) in rows.zip(dsum.chunks_exact_mut(d)) {
        let projection = inv_rms * inv_rms * (weighted_dot(sum, dnormed, weight) / d as f32);
        let inputs = sum.iter().zip(dnormed).zip(weight);
        for (((sum, dnormed), weight), (dsum, dweight)) in inputs.zip(dsum.iter_mut().zip(&mut *dweight)) {
            let (sum, dnormed) = (sum.widen(), dnormed.widen());
            *dsum = E::narrow(dsum.widen() + inv_rms * (dnormed * weight.widen() - sum * projection));
            *dweight += dnormed * sum * inv_rms;
        }
    }
}

/// The sum of the squares of a row.
#[inline(always)]
fn squares<E: Element>(row: &[E]) -> f32 {
    let mut partial = [0.0; PARTIAL];
    let whole = row.chunks_exact(PARTIAL);
    let rest = whole.remainder();
    for row in whole.chain([rest]) {
        for (partial, x) in partial.iter_mut().zip(row) {
            *partial += x.widen() * x.widen();
        }
    }
    total(partial)
}

/// The sum of `x * y * weight` over a row.
#[inline(always)]
pub(super) fn weighted_dot<E: Element>(x: &[E], y: &[E], weight: &[E]) -> f32 {
    let mut partial = [0.0; PARTIAL];
    let mut add = |x: &[E], y: &[E], weight: &[E]| {
        for (((partial, x), y), weight) in partial.iter_mut().zip(x).zip(y).zip(weight) {
            *partial += x.widen() * (y.widen() * weight.widen());
        }
    };
    let (x, y, weight) = (x.chunks_exact(PARTIAL), y.chunks_exact(PARTIAL), weight.chunks_exact(PARTIAL));
    let rest = (x.remainder(), y.remainder(), weight.remainder());
    for ((x, y), weight) in x.zip(y).zip(weight) {
        add(x, y, weight);
    }
    add(rest.0, rest.1, rest.2);
    total(partial)
}
