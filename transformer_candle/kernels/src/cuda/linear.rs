//! The linear map's three GEMMs. Legend: N tokens, I inputs, O outputs; sizes are [N, I, O].

use super::{Matmul, Operand, Workspace};
use crate::{Buffer, WriteMode};

/// `y_NO = x_NI w_OI^T`.
pub(crate) fn forward(
    x_NI: &Buffer,
    w_OI: &Buffer,
    y_NO: &Buffer,
    [n, i, o]: [usize; 3],
    workspace: &Buffer,
) -> Matmul {
    let (x, w, y) = (Operand::from(x_NI), Operand::from(w_OI), Operand::from(y_NO));
    Matmul::set(y, [n, o, i], x, w.transposed(), Workspace::from_buffer(workspace))
}

/// `dx_NI = dy_NO w_OI`.
pub(crate) fn backward_input(
    dy_NO: &Buffer,
    w_OI: &Buffer,
    dx_NI: &Buffer,
    [n, i, o]: [usize; 3],
    workspace: &Buffer,
) -> Matmul {
    let (dy, w, dx) = (Operand::from(dy_NO), Operand::from(w_OI), Operand::from(dx_NI));
    Matmul::set(dx, [n, i, o], dy, w, Workspace::from_buffer(workspace))
}

/// `dw_OI = dy_NO^T x_NI` or `dw_OI += dy_NO^T x_NI` in F32.
pub(crate) fn backward_weight(
    dy_NO: &Buffer,
    x_NI: &Buffer,
    dw_OI: &Buffer,
    write_mode: WriteMode,
    [n, i, o]: [usize; 3],
    workspace: &Buffer,
) -> Matmul {
    let (dy, x, dw) = (Operand::from(dy_NO), Operand::from(x_NI), Operand::from(dw_OI));
    let matmul = Matmul::set(dw, [o, i, n], dy.transposed(), x, Workspace::from_buffer(workspace));
    Matmul { write_mode, ..matmul }
}
