//! `AdamW` on CPU slices: one fused pass in pieces of fixed size.

use rayon::prelude::*;

use super::schedule::ForEachTask;
use super::simd::vectorised;
use crate::bf16;
use crate::buffer::PIECE;
use crate::cast::reference::{join, split};
use crate::optimizer_settings::{AdamW, BIAS_CORRECTION1, BIAS_CORRECTION2, CLIP_SCALE, LEARNING_RATE};

/// The constants of one step.
pub(crate) struct Update {
    clip_scale: f32,
    beta1: f32,
    beta2: f32,
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    /// 1 / sqrt(1 - beta2^t).
    second_scale: f32,
    epsilon: f32,
    /// 1 - rate * decay.
    decay: f32,
    /// rate / (1 - beta1^t).
    rate: f32,
}

impl Update {
    pub(crate) fn new(scalars: &[f32], settings: &AdamW, weight_decay: f32) -> Self {
        let [rate, correction1, correction2] =
            [LEARNING_RATE, BIAS_CORRECTION1, BIAS_CORRECTION2].map(|index| f64::from(scalars[index]));
        Self {
            clip_scale: scalars[CLIP_SCALE],
            beta1: settings.beta1 as f32,
            beta2: settings.beta2 as f32,
            one_minus_beta1: (1.0 - settings.beta1) as f32,
            one_minus_beta2: (1.0 - settings.beta2) as f32,
            second_scale: correction2.sqrt().recip() as f32,
            epsilon: settings.epsilon as f32,
            decay: (1.0 - rate * f64::from(weight_decay)) as f32,
            rate: (rate / correction1) as f32,
        }
    }

    #[inline(always)]
    fn apply(&self, weight: f32, gradient: f32, first: &mut f32, second: &mut f32) -> f32 {
        let gradient = self.clip_scale * gradient;
        *first = self.beta1 * *first + self.one_minus_beta1 * gradient;
        *second = self.beta2 * *second + self.one_minus_beta2 * gradient * gradient;
        let denominator = second.sqrt() * self.second_scale + self.epsilon;
        self.decay * weight - self.rate * *first / denominator
    }
}

type Moments<'a> = (&'a mut [f32], &'a mut [f32]);

pub(crate) fn step(weight: &mut [f32], grad: &[f32], moments: Moments<'_>, update: &Update) {
    weight.par_chunks_mut(PIECE).zip(pieces(grad, moments)).for_each_task(|(weight, (grad, (first, second)))| {
        vectorised(
            #[inline(always)]
            || {
                let moments = first.iter_mut().zip(second.iter_mut());
                for ((weight, &gradient), (first, second)) in weight.iter_mut().zip(grad).zip(moments) {
                    *weight = update.apply(*weight, gradient, first, second);
                }
            },
        );
    });
}

pub(crate) fn step_split(
    (weight, low_bits): (&mut [bf16], &mut [i16]),
    grad: &[f32],
    moments: Moments<'_>,
    update: &Update,
) {
    let master = weight.par_chunks_mut(PIECE).zip(low_bits.par_chunks_mut(PIECE));
    master.zip(pieces(grad, moments)).for_each_task(|((weight, low_bits), (grad, (first, second)))| {
        vectorised(
            #[inline(always)]
            || {
                let (master, moments) =
                    (weight.iter_mut().zip(low_bits.iter_mut()), first.iter_mut().zip(second.iter_mut()));
                for (((weight, low_bits), &gradient), (first, second)) in master.zip(grad).zip(moments) {
                    let value = update.apply(join(*weight, *low_bits), gradient, first, second);
                    (*weight, *low_bits) = split(value);
                }
            },
        );
    });
}

/// Returns the pieces of the gradient and of its moments.
fn pieces<'a>(
    grad: &'a [f32],
    (first, second): Moments<'a>,
) -> impl IndexedParallelIterator<Item = (&'a [f32], Moments<'a>)> {
    grad.par_chunks(PIECE).zip(first.par_chunks_mut(PIECE).zip(second.par_chunks_mut(PIECE)))
}
