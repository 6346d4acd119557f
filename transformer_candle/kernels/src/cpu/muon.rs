//! Muon on CPU slices. Legend: a matrix [M, N], S = min(M, N).

use rayon::prelude::*;

use super::gemm::{Matrix, multiply, workspace_for};
use super::grad_norm::sum_of_squares;
use super::partials::{load, store};
use super::schedule::ForEachTask;
use super::simd::vectorised;
use crate::buffer::PIECE;
use crate::cast::reference::{join, split};
use crate::optimizer_settings::{Muon, Polynomials};
use crate::{Element, bf16};

pub(crate) fn accumulate_momentum<E: Element>(
    (momentum, grad): (&mut [f32], &[f32]),
    update: &mut [E],
    clip_scale: f32,
    settings: &Muon,
) {
    let (mu, rest) = (settings.momentum as f32, (1.0 - settings.momentum) as f32);
    let pieces = momentum.par_chunks_mut(PIECE).zip(grad.par_chunks(PIECE)).zip(update.par_chunks_mut(PIECE));
    pieces.for_each_task(|((momentum, grad), update)| {
        vectorised(
            #[inline(always)]
            || {
                for ((momentum, &gradient), update) in momentum.iter_mut().zip(grad).zip(update.iter_mut()) {
                    let increment = rest * (clip_scale * gradient);
                    *momentum = mu * *momentum + increment;
                    *update = E::narrow(mu * *momentum + increment);
                }
            },
        );
    });
}

/// Elements of workspace that [`orthogonalize`] needs for a batch [B, M, N].
pub(crate) fn workspace_elements([_, m, n]: [usize; 3]) -> usize {
    let (short, long) = (m.min(n), m.max(n));
    let gemm = [(short, short, long), (short, short, short), (m, n, short)].map(|(m, n, k)| workspace_for(m, n, k));
    gemm.into_iter().max().unwrap_or(0).max(2 * (m * n).div_ceil(PIECE))
}

/// Orthogonalises every matrix of `update`. The matrices are `update` and `other` [B, M, N], `gram` and `polynomial`
/// [B, S, S].
pub(crate) fn orthogonalize<E: Element>(
    [update, other, gram, polynomial]: [&mut [E]; 4],
    workspace: &mut [f32],
    [_, m, n]: [usize; 3],
    polynomials: Polynomials,
) {
    let short = m.min(n);
    if short == 0 {
        return;
    }
    let wide = update.chunks_exact_mut(m * n).zip(other.chunks_exact_mut(m * n));
    let square = gram.chunks_exact_mut(short * short).zip(polynomial.chunks_exact_mut(short * short));
    for ((update, other), (gram, polynomial)) in wide.zip(square) {
        // An odd number of iterations from `other` on ends in `update`.
        normalize(update, other, workspace);
        let (mut x, mut next) = (other, update);
        for coefficients in polynomials.coefficients() {
            {
                let x = Matrix::new(x, m, n);
                let (left, right) = if m <= n { (x, x.transposed()) } else { (x.transposed(), x) };
                multiply(left, right, gram, short, workspace);
            }
            let a = Matrix::new(gram, short, short);
            // A is symmetric: with its transpose both factors are read along their rows.
            multiply(a, a.transposed(), polynomial, short, workspace);
            evaluate(gram, polynomial, short, coefficients);
            let (x_MN, p_SS) = (Matrix::new(x, m, n), Matrix::new(polynomial, short, short));
            let (left, right) = if m <= n { (p_SS, x_MN) } else { (x_MN, p_SS) };
            multiply(left, right, next, n, workspace);
            std::mem::swap(&mut x, &mut next);
        }
    }
}

/// `target = source / max(|source|, 1e-7)`.
fn normalize<E: Element>(source: &[E], target: &mut [E], partials: &mut [f32]) {
    let partials = &mut partials[..2 * source.len().div_ceil(PIECE)];
    partials.par_chunks_mut(2).zip(source.par_chunks(PIECE)).for_each_task(|(partial, piece)| {
        let sum = vectorised(
            #[inline(always)]
            || sum_of_squares(piece),
        );
        store(partial, sum);
    });
    let norm = partials.chunks(2).map(load).sum::<f64>().sqrt();
    let scale = norm.max(1e-7).recip() as f32;
    target.par_chunks_mut(PIECE).zip(source.par_chunks(PIECE)).for_each_task(|(target, source)| {
        vectorised(
            #[inline(always)]
            || {
                for (target, source) in target.iter_mut().zip(source) {
                    *target = E::narrow(scale * source.widen());
                }
            },
        );
    });
}

/// `polynomial = a I + b gram + c polynomial`, where `polynomial` is the square of `gram`.
fn evaluate<E: Element>(gram: &[E], polynomial: &mut [E], size: usize, [a, b, c]: [f32; 3]) {
    let rows =
        polynomial.par_chunks_exact_mut(size).zip(gram.par_chunks_exact(size)).with_min_len(PIECE.div_ceil(size));
    rows.enumerate().for_each_task(|(row, (polynomial, gram))| {
        vectorised(
            #[inline(always)]
            || {
                let diagonal = a + b * gram[row].widen() + c * polynomial[row].widen();
                for (square, gram) in polynomial.iter_mut().zip(gram) {
                    *square = E::narrow(b * gram.widen() + c * square.widen());
                }
                polynomial[row] = E::narrow(diagonal);
            },
        );
    });
}

pub(crate) fn step(weight: &mut [f32], update: &[f32], decay: f32, rate: f32) {
    weight.par_chunks_mut(PIECE).zip(update.par_chunks(PIECE)).for_each_task(|(weight, update)| {
        vectorised(
            #[inline(always)]
            || {
                for (weight, &x) in weight.iter_mut().zip(update) {
                    *weight = decay * *weight - rate * x;
                }
            },
        );
    });
}

pub(crate) fn step_split((weight, low_bits): (&mut [bf16], &mut [i16]), update: &[bf16], decay: f32, rate: f32) {
    let master = weight.par_chunks_mut(PIECE).zip(low_bits.par_chunks_mut(PIECE));
    master.zip(update.par_chunks(PIECE)).for_each_task(|((weight, low_bits), update)| {
        vectorised(
            #[inline(always)]
            || {
                for ((weight, low_bits), x) in weight.iter_mut().zip(low_bits.iter_mut()).zip(update) {
                    let value = decay * join(*weight, *low_bits) - rate * x.widen();
                    (*weight, *low_bits) = split(value);
                }
            },
        );
    });
}
