//! The GEMMs of low-rank adapters. Legend: N tokens, I inputs, R rank, O outputs, P width of a row of outputs.

use rayon::prelude::*;

use super::gemm::{Matrix, multiply, multiply_accumulate};
use super::schedule::ForEachTask;
use crate::buffer::PIECE;
use crate::packed_outputs::PackedOutputs;
use crate::{Element, WriteMode};

pub(crate) fn project<E: Element>(
    x: &[E],
    a: &[E],
    scale: f32,
    z: &mut [E],
    [n, i, r]: [usize; 3],
    workspace: &mut [f32],
) {
    multiply(Matrix::new(x, n, i), Matrix::new(a, r, i).transposed(), z, r, workspace);
    scale_in_place(z, scale);
}

pub(crate) fn expand<E: Element, O: Element>(
    z: &[E],
    b: &[E],
    y: &mut [O],
    packed: PackedOutputs,
    workspace: &mut [f32],
) {
    let PackedOutputs { n, r, o, p, first_column } = packed;
    let (z, b) = (Matrix::new(z, n, r), Matrix::new(b, o, r).transposed());
    let y = y.get_mut(first_column..).unwrap_or_default();
    multiply_accumulate(z, b, y, p, WriteMode::Accumulate, workspace);
}

pub(crate) fn backward_expand<E: Element>(
    dy: &[E],
    b: &[E],
    scale: f32,
    dz: &mut [E],
    packed: PackedOutputs,
    workspace: &mut [f32],
) {
    let PackedOutputs { o, r, .. } = packed;
    multiply(columns(dy, packed), Matrix::new(b, o, r), dz, r, workspace);
    scale_in_place(dz, scale);
}

pub(crate) fn backward_b<E: Element>(
    dy: &[E],
    z: &[E],
    db: &mut [f32],
    write_mode: WriteMode,
    packed: PackedOutputs,
    workspace: &mut [f32],
) {
    let PackedOutputs { n, r, .. } = packed;
    let dy = columns(dy, packed).transposed();
    multiply_accumulate(dy, Matrix::new(z, n, r), db, r, write_mode, workspace);
}

pub(crate) fn backward_input<E: Element>(
    dz: &[E],
    a: &[E],
    dx: &mut [E],
    [n, i, r]: [usize; 3],
    workspace: &mut [f32],
) {
    multiply_accumulate(Matrix::new(dz, n, r), Matrix::new(a, r, i), dx, i, WriteMode::Accumulate, workspace);
}

/// The outputs of the module: its columns of rows of P, as a matrix.
fn columns<E: Element>(y: &[E], PackedOutputs { n, o, p, first_column, .. }: PackedOutputs) -> Matrix<'_, E> {
    Matrix::strided(y.get(first_column..).unwrap_or_default(), n, o, p)
}

fn scale_in_place<E: Element>(values: &mut [E], scale: f32) {
    values.par_chunks_mut(PIECE).for_each_task(|piece| {
        for value in piece {
            *value = E::narrow(scale * value.widen());
        }
    });
}
