//! `SwiGLU` on CPU slices. Legend: I intermediate size, rows `[gate | up]` of 2I.

use rayon::prelude::*;

use super::exp::exp;
use super::schedule::{ForEachTask, rows_per_task};
use super::simd::vectorised;
use crate::Element;

pub(crate) fn forward<E: Element>(gate_up: &[E], out: &mut [E], i: usize) {
    if i == 0 {
        return;
    }
    let rows = rows_per_task(2 * i);
    let pieces = out.par_chunks_mut(rows * i).zip(gate_up.par_chunks(rows * 2 * i));
    pieces.for_each_task(|(out, gate_up)| {
        vectorised(
            #[inline(always)]
            || forward_rows(gate_up, out, i),
        );
    });
}

pub(crate) fn backward<E: Element>(gate_up: &mut [E], dout: &[E], i: usize) {
    if i == 0 {
        return;
    }
    let rows = rows_per_task(2 * i);
    let pieces = gate_up.par_chunks_mut(rows * 2 * i).zip(dout.par_chunks(rows * i));
    pieces.for_each_task(|(gate_up, dout)| {
        vectorised(
            #[inline(always)]
            || backward_rows(gate_up, dout, i),
        );
    });
}

/// [`backward`] with the output's gradient in `out`, which is then overwritten by the output.
pub(crate) fn backward_recomputing<E: Element>(gate_up: &mut [E], out: &mut [E], i: usize) {
    if i == 0 {
        return;
    }
    let rows = rows_per_task(2 * i);
    let pieces = gate_up.par_chunks_mut(rows * 2 * i).zip(out.par_chunks_mut(rows * i));
    pieces.for_each_task(|(gate_up, out)| {
        vectorised(
            #[inline(always)]
            || recompute_rows(gate_up, out, i),
        );
    });
}

#[inline(always)]
fn forward_rows<E: Element>(gate_up: &[E], out: &mut [E], i: usize) {
    for (gate_up, out) in gate_up.chunks_exact(2 * i).zip(out.chunks_exact_mut(i)) {
        let (gate, up) = gate_up.split_at(i);
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            let gate = gate.widen();
            *out = E::narrow(gate * sigmoid(gate) * up.widen());
        }
    }
}

#[inline(always)]
fn backward_rows<E: Element>(gate_up: &mut [E], dout: &[E], i: usize) {
    for (gate_up, dout) in gate_up.chunks_exact_mut(2 * i).zip(dout.chunks_exact(i)) {
        let (gate, up) = gate_up.split_at_mut(i);
        // The compiler does not vectorise a loop over zipped slices here.
        for j in 0..i {
            let gradient = Gradient::new(gate[j].widen(), up[j].widen(), dout[j].widen());
            (gate[j], up[j]) = (E::narrow(gradient.gate), E::narrow(gradient.up));
        }
    }
}

#[inline(always)]
fn recompute_rows<E: Element>(gate_up: &mut [E], out: &mut [E], i: usize) {
    for (gate_up, out) in gate_up.chunks_exact_mut(2 * i).zip(out.chunks_exact_mut(i)) {
        let (gate, up) = gate_up.split_at_mut(i);
        for j in 0..i {
            let gradient = Gradient::new(gate[j].widen(), up[j].widen(), out[j].widen());
            (gate[j], up[j]) = (E::narrow(gradient.gate), E::narrow(gradient.up));
            out[j] = E::narrow(gradient.out);
        }
    }
}

/// The gradients of one gate and one up value, and their output.
struct Gradient {
    gate: f32,
    up: f32,
    out: f32,
}

impl Gradient {
    #[inline(always)]
    fn new(gate: f32, up: f32, dout: f32) -> Self {
        let s = sigmoid(gate);
        Self { gate: dout * up * s * (1.0 + gate * (1.0 - s)), up: dout * gate * s, out: gate * s * up }
    }
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}
