//! A bias on CPU slices. Legend: N rows of O.

use rayon::prelude::*;

use super::column_sums::{add_partials, rows_of_block, workspace_elements};
use super::schedule::{ForEachTask, rows_per_task};
use super::simd::vectorised;
use crate::Element;

pub(crate) fn forward<E: Element>(y: &mut [E], bias: &[E]) {
    let o = bias.len().max(1);
    y.par_chunks_mut(rows_per_task(o) * o).for_each_task(|y| {
        vectorised(
            #[inline(always)]
            || add_to_rows(y, bias),
        );
    });
}

pub(crate) fn backward<E: Element>(dy: &[E], dbias: &mut [f32], workspace: &mut [f32]) {
    let o = dbias.len().max(1);
    let rows = rows_of_block(dy.len() / o);
    let partials = &mut workspace[..workspace_elements(dy.len() / o, dbias.len())];
    partials.par_chunks_mut(o).zip(dy.par_chunks(rows * o)).for_each_task(|(partial, dy)| {
        vectorised(
            #[inline(always)]
            || sum_of_rows(dy, partial),
        );
    });
    add_partials(partials, dbias);
}

#[inline(always)]
fn add_to_rows<E: Element>(y: &mut [E], bias: &[E]) {
    for y in y.chunks_exact_mut(bias.len()) {
        for (y, bias) in y.iter_mut().zip(bias) {
            *y = E::narrow(y.widen() + bias.widen());
        }
    }
}

#[inline(always)]
fn sum_of_rows<E: Element>(rows: &[E], sum: &mut [f32]) {
    sum.fill(0.0);
    for row in rows.chunks_exact(sum.len()) {
        for (sum, row) in sum.iter_mut().zip(row) {
            *sum += row.widen();
        }
    }
}
