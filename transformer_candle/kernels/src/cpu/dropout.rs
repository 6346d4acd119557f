//! Dropout on CPU slices. Legend: rows of I.

use rayon::prelude::*;

use super::schedule::{ForEachTask, rows_per_task};
use super::simd::vectorised;
use crate::Element;
use crate::counter_hash::mix;
use crate::dropout_mask::{Dropout, Key};

pub(crate) fn forward<E: Element>(x: &[E], key: Key, dropout: Dropout, out: &mut [E], i: usize) {
    if i == 0 {
        return;
    }
    let (masks, rows) = (Masks::new(key, dropout), rows_per_task(i));
    let pieces = out.par_chunks_mut(rows * i).zip(x.par_chunks(rows * i)).enumerate();
    pieces.for_each_task(|(piece, (out, x))| {
        for (row, (out, x)) in out.chunks_exact_mut(i).zip(x.chunks_exact(i)).enumerate() {
            let mask = masks.of_row(piece * rows + row);
            vectorised(
                #[inline(always)]
                || {
                    for (column, (out, x)) in out.iter_mut().zip(x).enumerate() {
                        *out = E::narrow(mask.factor(column as u32) * x.widen());
                    }
                },
            );
        }
    });
}

pub(crate) fn backward<E: Element>(dout: &[E], key: Key, dropout: Dropout, dx: &mut [E], i: usize) {
    if i == 0 {
        return;
    }
    let (masks, rows) = (Masks::new(key, dropout), rows_per_task(i));
    let pieces = dx.par_chunks_mut(rows * i).zip(dout.par_chunks(rows * i)).enumerate();
    pieces.for_each_task(|(piece, (dx, dout))| {
        for (row, (dx, dout)) in dx.chunks_exact_mut(i).zip(dout.chunks_exact(i)).enumerate() {
            let mask = masks.of_row(piece * rows + row);
            vectorised(
                #[inline(always)]
                || {
                    for (column, (dx, dout)) in dx.iter_mut().zip(dout).enumerate() {
                        *dx = E::narrow(dx.widen() + mask.factor(column as u32) * dout.widen());
                    }
                },
            );
        }
    });
}

/// The masks of one module in one pass.
struct Masks {
    key: u64,
    first_row: u64,
    /// Elements whose hash is below it are dropped.
    threshold: u32,
    /// Factor of the elements that are kept.
    scale: f32,
}

/// The mask of a row.
#[derive(Clone, Copy)]
struct Mask {
    low: u32,
    high: u32,
    threshold: u32,
    scale: f32,
}

impl Masks {
    fn new(Key { seed, first_row, enabled }: Key, dropout: Dropout) -> Self {
        let dropout = if enabled { dropout } else { Dropout { probability: 0.0, ..dropout } };
        let (threshold, scale) = (dropout.threshold(), dropout.scale());
        Self { key: mix(seed ^ mix(dropout.module)), first_row, threshold, scale }
    }

    fn of_row(&self, row: usize) -> Mask {
        let &Self { key, first_row, threshold, scale } = self;
        let hash = mix(key ^ first_row.wrapping_add(row as u64));
        Mask { low: hash as u32, high: (hash >> 32) as u32, threshold, scale }
    }
}

impl Mask {
    /// Returns the factor of the element in a column: the scale, or 0 where it is dropped.
    #[inline(always)]
    fn factor(self, column: u32) -> f32 {
        let Self { low, high, threshold, scale } = self;
        let hash = mix32(mix32(column ^ low) ^ high);
        if hash >= threshold { scale } else { 0.0 }
    }
}

/// Returns a 32-bit hash of 32 bits (`lowbias32`, Wellons, 2018): SIMD instructions multiply 32-bit integers, not
/// 64-bit ones.
#[inline(always)]
fn mix32(bits: u32) -> u32 {
    let bits = (bits ^ (bits >> 16)).wrapping_mul(0x7feb_352d);
    let bits = (bits ^ (bits >> 15)).wrapping_mul(0x846c_a68b);
    bits ^ (bits >> 16)
}
