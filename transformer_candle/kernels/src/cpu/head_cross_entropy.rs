//! Head and cross-entropy over chunks of rows. Legend: N tokens, D hidden, V padded vocabulary, C rows of a chunk, W
//! elements from row to row of logits.

use rayon::prelude::*;

use super::exp::exp;
use super::gemm::{Matrix, multiply, multiply_accumulate, workspace_for};
use super::partials::{load, store};
use super::schedule::ForEachTask;
use super::simd::vectorised;
use crate::head_cross_entropy::{HeadSizes, IGNORED_TARGET};
use crate::{Element, WriteMode};

/// The inputs of forward and backward.
pub(crate) struct Inputs<'a, E> {
    pub(crate) hidden: &'a [E],
    pub(crate) weight: &'a [E],
    pub(crate) targets: &'a [i32],
    pub(crate) sizes: HeadSizes,
}

/// The gradients' buffers; `write_mode` is `dweight`'s, `z_loss` the coefficient of lse^2.
pub(crate) struct Gradients<'a, E> {
    pub(crate) dhidden: &'a mut [E],
    pub(crate) dweight: Option<&'a mut [f32]>,
    pub(crate) write_mode: WriteMode,
    pub(crate) z_loss: f32,
}

/// Writes the gradients times `scale` and returns the sum of the losses.
pub(crate) fn forward_backward<E: Element>(
    inputs: &Inputs<'_, E>,
    scale: f32,
    gradients: Gradients<'_, E>,
    logits: &mut [f32],
    workspace: &mut [f32],
) -> f64 {
    let &Inputs { hidden, weight, targets, sizes: HeadSizes { d, vocab_size, c, w, .. } } = inputs;
    let Gradients { dhidden, dweight, mut write_mode, z_loss } = gradients;
    let (losses, workspace) = workspace.split_at_mut(2 * c);
    let weight = Matrix::new(&weight[..vocab_size * d], vocab_size, d);
    let mut dweight = dweight.map(|dweight| {
        let (dweight, padding) = dweight.split_at_mut(vocab_size * d);
        if write_mode == WriteMode::Overwrite {
            padding.fill(0.0);
        }
        dweight
    });
    let mut total = 0.0;
    let chunks = hidden.chunks(c * d).zip(dhidden.chunks_mut(c * d)).zip(targets.chunks(c));
    for ((hidden, dhidden), targets) in chunks {
        let (rows, hidden) = (targets.len(), Matrix::new(hidden, targets.len(), d));
        multiply(hidden, weight.transposed(), logits, w, workspace);
        let each = logits.par_chunks_mut(w).zip(losses.par_chunks_mut(2)).zip(targets);
        each.for_each_task(|((logits, loss), &target)| {
            let logits = &mut logits[..vocab_size];
            let ignored = target == IGNORED_TARGET;
            store(loss, if ignored { ignore(logits) } else { gradient(logits, target as usize, [scale, z_loss]) });
        });
        total += losses[..2 * rows].chunks(2).map(load).sum::<f64>();
        let dlogits = Matrix::strided(logits, rows, vocab_size, w);
        multiply(dlogits, weight, dhidden, d, workspace);
        if let Some(dweight) = &mut dweight {
            multiply_accumulate(dlogits.transposed(), hidden, dweight, d, write_mode, workspace);
        }
        write_mode = WriteMode::Accumulate;
    }
    total
}

pub(crate) fn forward<E: Element>(
    inputs: &Inputs<'_, E>,
    losses: &mut [f32],
    logits: &mut [f32],
    workspace: &mut [f32],
) {
    let &Inputs { hidden, weight, targets, sizes: HeadSizes { d, vocab_size, c, w, .. } } = inputs;
    let weight = Matrix::new(&weight[..vocab_size * d], vocab_size, d);
    for ((hidden, losses), targets) in hidden.chunks(c * d).zip(losses.chunks_mut(c)).zip(targets.chunks(c)) {
        multiply(Matrix::new(hidden, targets.len(), d), weight.transposed(), logits, w, workspace);
        let each = logits.par_chunks_mut(w).zip(losses).zip(targets);
        each.for_each_task(|((logits, loss), &target)| {
            let logits = &mut logits[..vocab_size];
            *loss = if target == IGNORED_TARGET { 0.0 } else { exponentials(logits, target as usize).0 as f32 };
        });
    }
}

pub(crate) fn workspace_elements(c: usize, d: usize, v: usize) -> usize {
    let gemms = [(c, v, d), (c, d, v), (v, d, c)].map(|(m, n, k)| workspace_for(m, n, k));
    2 * c + gemms.into_iter().fold(0, usize::max)
}

fn ignore(logits: &mut [f32]) -> f64 {
    logits.fill(0.0);
    0.0
}

/// Overwrites a row's logits with their gradient and returns its loss.
fn gradient(logits: &mut [f32], target: usize, [scale, z_loss]: [f32; 2]) -> f64 {
    let target_logit = f64::from(logits[target]);
    let (loss, sum) = exponentials(logits, target);
    // The softmax's factor: of the cross-entropy, and of the z-loss by the row's log-sum-exp.
    let z_factor = 1.0 + 2.0 * f64::from(z_loss) * (loss + target_logit);
    let scale_over_sum = (f64::from(scale) * z_factor / sum) as f32;
    vectorised(
        #[inline(always)]
        || {
            for value in logits.iter_mut() {
                *value *= scale_over_sum;
            }
        },
    );
    logits[target] -= scale;
    loss
}

/// Overwrites logits with `exp(logit - row_max)`; returns the target's loss and the sum of the exponentials.
fn exponentials(logits: &mut [f32], target: usize) -> (f64, f64) {
    let row_max = vectorised(
        #[inline(always)]
        || maximum(logits),
    );
    let target = f64::from(logits[target]) - f64::from(row_max);
    let sum = vectorised(
        #[inline(always)]
        || exponentiate(logits, row_max),
    );
    (sum.ln() - target, sum)
}

const LANES: usize = 16;
/// Number of values that are summed in f32, without much loss of precision, before they are added to an f64 sum.
const F32_SUM: usize = 32 * LANES;

#[inline(always)]
fn exponentiate(logits: &mut [f32], row_max: f32) -> f64 {
    let mut sum = 0.0;
    for values in logits.chunks_mut(F32_SUM) {
        let mut lanes = [0f32; LANES];
        let (whole, rest) = values.as_chunks_mut::<LANES>();
        for chunk in whole {
            for (lane, value) in lanes.iter_mut().zip(chunk) {
                *value = exp(*value - row_max);
                *lane += *value;
            }
        }
        for (lane, value) in lanes.iter_mut().zip(rest) {
            *value = exp(*value - row_max);
            *lane += *value;
        }
        for lane in lanes {
            sum += f64::from(lane);
        }
    }
    sum
}

/// The maximum, NaN if any value is: the loss of a diverged row is then NaN.
#[inline(always)]
fn maximum(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = values.as_chunks::<LANES>();
    for chunk in whole {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, value);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, value);
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, larger)
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b || a.is_nan() { a } else { b }
}
