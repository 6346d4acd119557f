//! Element-wise conversions, in pieces of fixed size.

use rayon::prelude::*;

use super::schedule::ForEachTask;
use super::simd::vectorised;
use crate::buffer::PIECE;
use crate::cast::reference::{join as join_one, split as split_one};
use crate::{Element, bf16};

pub(crate) fn narrow(source: &[f32], target: &mut [bf16]) {
    target
        .par_chunks_mut(PIECE)
        .zip(source.par_chunks(PIECE))
        .for_each_task(|(target, source)| narrow_piece(source, target));
}

/// [`narrow`] of one piece, on the calling thread.
pub(crate) fn narrow_piece<E: Element>(source: &[f32], target: &mut [E]) {
    vectorised(
        #[inline(always)]
        || {
            for (target, &value) in target.iter_mut().zip(source) {
                *target = E::narrow(value);
            }
        },
    );
}

pub(crate) fn widen(source: &[bf16], target: &mut [f32]) {
    target.par_chunks_mut(PIECE).zip(source.par_chunks(PIECE)).for_each_task(|(target, source)| {
        vectorised(
            #[inline(always)]
            || {
                for (target, &value) in target.iter_mut().zip(source) {
                    *target = value.widen();
                }
            },
        );
    });
}

pub(crate) fn split(master: &[f32], weight: &mut [bf16], low_bits: &mut [i16]) {
    let halves = weight.par_chunks_mut(PIECE).zip(low_bits.par_chunks_mut(PIECE));
    halves.zip(master.par_chunks(PIECE)).for_each_task(|((weight, low_bits), master)| {
        vectorised(
            #[inline(always)]
            || {
                for ((weight, low_bits), &master) in weight.iter_mut().zip(low_bits.iter_mut()).zip(master) {
                    (*weight, *low_bits) = split_one(master);
                }
            },
        );
    });
}

pub(crate) fn join(weight: &[bf16], low_bits: &[i16], master: &mut [f32]) {
    let halves = weight.par_chunks(PIECE).zip(low_bits.par_chunks(PIECE));
    master.par_chunks_mut(PIECE).zip(halves).for_each_task(|(master, (weight, low_bits))| {
        vectorised(
            #[inline(always)]
            || {
                for ((master, &weight), &low_bits) in master.iter_mut().zip(weight).zip(low_bits) {
                    *master = join_one(weight, low_bits);
                }
            },
        );
    });
}
