//! The GEMMs of low-rank adapters. Legend: N tokens, I inputs, R rank, O outputs, P width of a row of outputs.

use super::{Matmul, Operand, Workspace};
use crate::packed_outputs::PackedOutputs;
use crate::{Buffer, WriteMode};

/// `z_NR = scale x_NI a_RI^T`; sizes are [N, I, R].
pub(crate) fn project(
    x_NI: &Buffer,
    a_RI: &Buffer,
    scale: f32,
    z_NR: &Buffer,
    [n, i, r]: [usize; 3],
    workspace: &Buffer,
) -> Matmul {
    let (x, a, z) = (Operand::from(x_NI), Operand::from(a_RI), Operand::from(z_NR));
    Matmul { scale, ..Matmul::set(z, [n, r, i], x, a.transposed(), Workspace::from_buffer(workspace)) }
}

/// `y_NP[:, columns] += z_NR b_OR^T`.
pub(crate) fn expand(z_NR: &Buffer, b_OR: &Buffer, y_NP: &Buffer, packed: PackedOutputs, workspace: &Buffer) -> Matmul {
    let PackedOutputs { n, r, o, first_column, .. } = packed;
    let (z, b, y) = (Operand::from(z_NR), Operand::from(b_OR), Operand::from(y_NP).skip_columns(first_column));
    let matmul = Matmul::set(y, [n, o, r], z, b.transposed(), Workspace::from_buffer(workspace));
    Matmul { write_mode: WriteMode::Accumulate, ..matmul }
}

/// `dz_NR = scale dy_NP[:, columns] b_OR`.
pub(crate) fn backward_expand(
    dy_NP: &Buffer,
    b_OR: &Buffer,
    scale: f32,
    dz_NR: &Buffer,
    packed: PackedOutputs,
    workspace: &Buffer,
) -> Matmul {
    let PackedOutputs { n, r, o, first_column, .. } = packed;
    let (dy, b, dz) = (Operand::from(dy_NP).skip_columns(first_column), Operand::from(b_OR), Operand::from(dz_NR));
    Matmul { scale, ..Matmul::set(dz, [n, r, o], dy, b, Workspace::from_buffer(workspace)) }
}

/// `db_OR = dy_NP[:, columns]^T z_NR` or `db_OR += dy_NP[:, columns]^T z_NR` in F32.
pub(crate) fn backward_b(
    dy_NP: &Buffer,
    z_NR: &Buffer,
    db_OR: &Buffer,
    write_mode: WriteMode,
    packed: PackedOutputs,
    workspace: &Buffer,
) -> Matmul {
    let PackedOutputs { n, r, o, first_column, .. } = packed;
    let (dy, z, db) = (Operand::from(dy_NP).skip_columns(first_column), Operand::from(z_NR), Operand::from(db_OR));
    Matmul { write_mode, ..Matmul::set(db, [o, r, n], dy.transposed(), z, Workspace::from_buffer(workspace)) }
}

/// `dx_NI += dz_NR a_RI`; sizes are [N, I, R].
pub(crate) fn backward_input(
    dz_NR: &Buffer,
    a_RI: &Buffer,
    dx_NI: &Buffer,
    [n, i, r]: [usize; 3],
    workspace: &Buffer,
) -> Matmul {
    let (dz, a, dx) = (Operand::from(dz_NR), Operand::from(a_RI), Operand::from(dx_NI));
    let matmul = Matmul::set(dx, [n, i, r], dz, a, Workspace::from_buffer(workspace));
    Matmul { write_mode: WriteMode::Accumulate, ..matmul }
}
