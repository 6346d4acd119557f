//! The norms of query and key heads on CPU slices. Legend: rows of P = (H + 2K) * E.

use rayon::prelude::*;

use super::add_rms_norm::{inv_rms_of, normalize_rows, weighted_dot};
use super::column_sums::{add_partials, rows_of_block, workspace_elements};
use super::schedule::{ForEachTask, rows_per_task};
use super::simd::vectorised;
use crate::{Element, HeadLayout};

/// The weights of the query heads' norm, then of the key heads', each of E elements, and the norm's epsilon.
#[derive(Clone, Copy)]
pub(crate) struct Norms<'a, E> {
    pub(crate) weight: &'a [E],
    pub(crate) epsilon: f32,
}

pub(crate) fn forward<E: Element>(projected: &[E], norms: Norms<'_, E>, layout: &HeadLayout, qkv: &mut [E]) {
    let width = layout.packed_width();
    let rows = rows_per_task(width);
    qkv.par_chunks_mut(rows * width).zip(projected.par_chunks(rows * width)).for_each_task(|(qkv, projected)| {
        vectorised(
            #[inline(always)]
            || forward_rows(projected, norms, layout, qkv),
        );
    });
}

pub(crate) fn backward<E: Element>(
    projected: &[E],
    norms: Norms<'_, E>,
    layout: &HeadLayout,
    dqkv: &mut [E],
    dweight: Option<&mut [f32]>,
    workspace: &mut [f32],
) {
    let width = layout.packed_width();
    let n = projected.len() / width;
    let rows = rows_of_block(n);
    let partials = &mut workspace[..workspace_elements(n, norms.weight.len())];
    let pieces = projected.par_chunks(rows * width).zip(dqkv.par_chunks_mut(rows * width));
    pieces.zip(partials.par_chunks_mut(norms.weight.len())).for_each_task(|((projected, dqkv), dweight)| {
        vectorised(
            #[inline(always)]
            || backward_rows(projected, norms, layout, dqkv, dweight),
        );
    });
    if let Some(dweight) = dweight {
        add_partials(partials, dweight);
    }
}

#[inline(always)]
fn forward_rows<E: Element>(projected: &[E], norms: Norms<'_, E>, layout: &HeadLayout, qkv: &mut [E]) {
    let &HeadLayout { heads, kv_heads, head_size } = layout;
    let width = layout.packed_width();
    for (projected, qkv) in projected.chunks_exact(width).zip(qkv.chunks_exact_mut(width)) {
        let inputs = projected.chunks_exact(head_size).zip(qkv.chunks_exact_mut(head_size));
        for (head, (x, normed)) in inputs.enumerate() {
            if head < heads + kv_heads {
                let weight = &norms.weight[usize::from(head >= heads) * head_size..][..head_size];
                normalize_rows(x, weight, &[inv_rms_of(x, norms.epsilon)], normed);
            } else {
                normed.copy_from_slice(x);
            }
        }
    }
}

/// Turns the gradients of the normed heads into those of the projected ones, and overwrites `dweight` with the rows'
/// sum.
#[inline(always)]
fn backward_rows<E: Element>(
    projected: &[E],
    norms: Norms<'_, E>,
    layout: &HeadLayout,
    dqkv: &mut [E],
    dweight: &mut [f32],
) {
    let &HeadLayout { heads, kv_heads, head_size } = layout;
    let width = layout.packed_width();
    dweight.fill(0.0);
    for (projected, dqkv) in projected.chunks_exact(width).zip(dqkv.chunks_exact_mut(width)) {
        let normed_heads = projected.chunks_exact(head_size).zip(dqkv.chunks_exact_mut(head_size));
        for (head, (x, dx)) in normed_heads.take(heads + kv_heads).enumerate() {
            let first = usize::from(head >= heads) * head_size;
            let (weight, dweight) = (&norms.weight[first..][..head_size], &mut dweight[first..][..head_size]);
            let inv_rms = inv_rms_of(x, norms.epsilon);
            let projection = inv_rms * inv_rms * (weighted_dot(x, dx, weight) / head_size as f32);
            for ((dx, dweight), (x, weight)) in dx.iter_mut().zip(dweight).zip(x.iter().zip(weight)) {
                let (value, dnormed) = (x.widen(), dx.widen());
                *dx = E::narrow(inv_rms * (dnormed * weight.widen() - value * projection));
                *dweight += dnormed * value * inv_rms;
            }
        }
    }
}
