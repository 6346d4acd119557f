//! Element-wise conversions, in pieces of fixed size.

use rayon::prelude::*;

use super::simd::vectorised;
use crate::buffer::PIECE;
use crate::cast::reference::{join as join_one, split as split_one};
use crate::{Element, bf16};

pub(crate) fn narrow(source: &[f32], target: &mut [bf16]) {
    target
        .par_chunks_mut(PIECE)
        .zip(source.par_chunks(PIECE))
        .for_each(|(target, source)| narrow_piece(source, target));
}

/// One thread's part of [`narrow`].
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
    target.par_chunks_mut(PIECE).zip(source.par_chunks(PIECE)).for_each(|(target, source)| {
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

pub(crate) fn split(master: &[f32], weight: &mut [bf16], remainder: &mut [i16]) {
    let halves = weight.par_chunks_mut(PIECE).zip(remainder.par_chunks_mut(PIECE));
    halves.zip(master.par_chunks(PIECE)).for_each(|((weight, remainder), master)| {
        vectorised(
            #[inline(always)]
            || {
                for ((weight, remainder), &master) in weight.iter_mut().zip(remainder.iter_mut()).zip(master) {
                    (*weight, *remainder) = split_one(master);
                }
            },
        );
    });
}

pub(crate) fn join(weight: &[bf16], remainder: &[i16], master: &mut [f32]) {
    let halves = weight.par_chunks(PIECE).zip(remainder.par_chunks(PIECE));
    master.par_chunks_mut(PIECE).zip(halves).for_each(|(master, (weight, remainder))| {
        vectorised(
            #[inline(always)]
            || {
                for ((master, &weight), &remainder) in master.iter_mut().zip(weight).zip(remainder) {
                    *master = join_one(weight, remainder);
                }
            },
        );
    });
}
