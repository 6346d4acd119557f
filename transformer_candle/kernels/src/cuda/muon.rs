//! Muon on a GPU. Legend: a batch of matrices [B, M, N], S = min(M, N).

use candle_core::DType;

use super::launch::{Axis, Launch, ranges, variant};
use super::{KernelArg, Matmul, Operand, WORKSPACE_ELEMENTS, Workspace};
use crate::optimizer_settings::{Muon, Polynomials};

/// Elements of a matrix whose squares one program adds: the kernels' constant PIECE.
const PIECE: usize = 1 << 15;
/// F32 elements of an F64 partial sum.
const PARTIAL: usize = 2;

/// See [`crate::muon::accumulate_momentum`]. Values: momentum, gradient, update, scalars.
pub(crate) fn accumulate_momentum(values: [KernelArg; 4], settings: &Muon, elements: usize) -> Vec<Launch> {
    let [momentum, grad, update, scalars] = values;
    let constants = [settings.momentum, 1.0 - settings.momentum].map(|number| KernelArg::F32(number as f32));
    let part = |(start, length): (usize, usize)| {
        let mut values = [momentum, grad, update].map(|value| value.skip_elements(start)).to_vec();
        values.push(scalars);
        values.extend(constants);
        values.push(KernelArg::count(length));
        Launch::kernel("muon_momentum", variant(update.dtype()), over(length, "BLOCK", 1), values)
    };
    ranges(elements).map(part).collect()
}

/// The buffers of [`orthogonalize`].
#[derive(Clone, Copy)]
pub(crate) struct Matrices {
    /// The updates, orthogonalised in place, [B, M, N].
    pub(crate) update: Operand,
    /// Scratch for every second iterate, [B, M, N].
    pub(crate) other: Operand,
    /// Gram matrices A, [B, S, S].
    pub(crate) gram: Operand,
    /// A^2, then the polynomial of A, [B, S, S].
    pub(crate) polynomial: Operand,
    pub(crate) workspace: Workspace,
}

/// See [`crate::muon::orthogonalize`].
pub(crate) fn orthogonalize(matrices: &Matrices, sizes: [usize; 3], polynomials: Polynomials) -> Vec<Launch> {
    let &Matrices { update, other, gram, polynomial, workspace } = matrices;
    let [batch, m, n] = sizes;
    let (short, elements) = (m.min(n), m * n);
    if batch * short == 0 {
        return Vec::new();
    }
    let dtype = variant(update.dtype);
    let multiply = |c: Operand, sizes, a: Operand, b: Operand| {
        Launch::Gemm(Matmul { batch, ..Matmul::set(c, sizes, a, b, workspace) })
    };
    let mut launches = normalize(matrices, batch, elements);
    // An odd number of iterations from `other` on ends in `update`.
    let (mut x, mut next) = (other, update);
    for coefficients in polynomials.coefficients() {
        // A = X X^T of a wide matrix, X^T X of a tall one: [S, S] either way.
        let (left, right) = if m <= n { (x, x.transposed()) } else { (x.transposed(), x) };
        launches.push(multiply(gram, [short, short, m.max(n)], left, right));
        launches.push(multiply(polynomial, [short; 3], gram, gram));
        let mut values = vec![pointer(gram), pointer(polynomial), KernelArg::count(short)];
        values.extend(coefficients.map(KernelArg::F32));
        values.push(KernelArg::count(short * short));
        launches.push(Launch::kernel("muon_polynomial", dtype, over(short * short, "BLOCK", batch), values));
        let (left, right) = if m <= n { (polynomial, x) } else { (x, polynomial) };
        launches.push(multiply(next, [m, n, short], left, right));
        std::mem::swap(&mut x, &mut next);
    }
    launches
}

/// `other = update / max(|update|, 1e-7)` of every matrix.
fn normalize(matrices: &Matrices, batch: usize, elements: usize) -> Vec<Launch> {
    let &Matrices { update, other, workspace, .. } = matrices;
    let (dtype, grid, count) = (variant(update.dtype), over(elements, "PIECE", batch), KernelArg::count(elements));
    let partials = KernelArg::Pointer { address: workspace.address, dtype: DType::F32 };
    let [update, other] = [update, other].map(pointer);
    vec![
        Launch::kernel("muon_squares", dtype, grid, [update, partials, count]),
        Launch::kernel("muon_normalize", dtype, grid, [update, other, partials, count]),
    ]
}

fn pointer(operand: Operand) -> KernelArg {
    KernelArg::Pointer { address: operand.address, dtype: operand.dtype }
}

/// Elements of F32 workspace: a GEMM's, or before the first GEMM the partial sums of the norms.
pub(crate) fn workspace_elements([batch, m, n]: [usize; 3]) -> usize {
    WORKSPACE_ELEMENTS.max(Workspace::elements_for(batch * (m * n).div_ceil(PIECE) * PARTIAL))
}

/// The buffers that [`step`] reads and writes.
#[derive(Clone, Copy)]
pub(crate) struct State {
    pub(crate) weight: KernelArg,
    pub(crate) low_bits: Option<KernelArg>,
    pub(crate) update: KernelArg,
    pub(crate) scalars: KernelArg,
}

/// See [`crate::muon::step`]. The update is multiplied by `scale` and the learning rate.
pub(crate) fn step(state: &State, scale: f32, weight_decay: f32, elements: usize) -> Vec<Launch> {
    let part = |(start, length): (usize, usize)| {
        let flat = [Some(state.weight), state.low_bits, Some(state.update)].into_iter().flatten();
        let mut values: Vec<KernelArg> = flat.map(|value| value.skip_elements(start)).collect();
        values.extend([state.scalars, KernelArg::F32(scale), KernelArg::F32(weight_decay), KernelArg::count(length)]);
        Launch::kernel("muon_step", variant(state.weight.dtype()), over(length, "BLOCK", 1), values)
    };
    ranges(elements).map(part).collect()
}

/// A grid over the elements of a matrix, `constant` elements per program, and over a batch.
fn over(elements: usize, constant: &'static str, batch: usize) -> [Axis; 3] {
    [Axis::Elements(elements, constant), Axis::Blocks(batch), Axis::ONE]
}
