//! The three GEMMs of a linear map. Legend: N tokens, I inputs, O outputs.

use super::gemm::{Matrix, multiply, multiply_accumulate, workspace_for};
use crate::{Element, WriteMode};

/// `y_NO = x_NI w_OI^T`.
pub(crate) fn forward<E: Element, O: Element>(
    x: &[E],
    w: &[E],
    y: &mut [O],
    [n, i, o]: [usize; 3],
    workspace: &mut [f32],
) {
    multiply(Matrix::new(x, n, i), Matrix::new(w, o, i).transposed(), y, o, workspace);
}

/// `dx_NI = dy_NO w_OI`.
pub(crate) fn backward_input<E: Element>(
    dy: &[E],
    w: &[E],
    dx: &mut [E],
    [n, i, o]: [usize; 3],
    workspace: &mut [f32],
) {
    multiply(Matrix::new(dy, n, o), Matrix::new(w, o, i), dx, i, workspace);
}

/// `dw_OI = dy_NO^T x_NI`, overwritten or accumulated.
pub(crate) fn backward_weight<E: Element>(
    dy: &[E],
    x: &[E],
    dw: &mut [f32],
    write_mode: WriteMode,
    [n, i, o]: [usize; 3],
    workspace: &mut [f32],
) {
    let dy = Matrix::new(dy, n, o).transposed();
    multiply_accumulate(dy, Matrix::new(x, n, i), dw, i, write_mode, workspace);
}

/// Elements of workspace that suffice for each of the three.
pub(crate) fn workspace_elements([n, i, o]: [usize; 3]) -> usize {
    workspace_for(n, o, i).max(workspace_for(n, i, o)).max(workspace_for(o, i, n))
}
