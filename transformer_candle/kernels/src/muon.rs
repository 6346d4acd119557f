//! Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982): momentum SGD whose
//! update of a matrix is orthogonalised: its singular values are moved to about one.
//!
//! For a weight W [M, N] with gradient G and S = min(M, N):
//! ```text
//! m = mu m + (1 - mu) CLIP_SCALE G              accumulate_momentum
//! X = mu m + (1 - mu) CLIP_SCALE G              (Nesterov)
//! X = X / max(|X|, 1e-7)                        orthogonalize: Frobenius norm, so that no singular value exceeds one
//! five times:  A = X X^T,  X = (a I + b A + c A^2) X      odd polynomial a s + b s^3 + c s^5 of every singular value s
//! w = (1 - LEARNING_RATE decay) w - LEARNING_RATE 0.2 sqrt(max(M, N)) X          step
//! ```
//! `0.2 sqrt(max(M, N))` gives an update the root mean square of `AdamW`'s (arXiv:2502.16982, equation 4), so that one
//! learning rate serves both. Matrices taller than wide use A = X^T X from the other side: A is [S, S] either way.
//!
//! Matrices of one shape are orthogonalised as a batch B. FLOPs of a matrix: 5 (4 S^2 L + 2 S^3) with L = max(M, N).

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::cuda::{self, KernelArg};
use crate::element::with_element;
use crate::optimizer_settings::{APPLY, CLIP_SCALE, LEARNING_RATE, SCALARS};
use crate::{Buffer, DeviceKind, Error, Result, cpu};

pub use crate::optimizer_settings::{ITERATIONS, Muon, Polynomials};

/// Root mean square of the elements of `AdamW`'s updates, about.
const UPDATE_RMS: f64 = 0.2;

/// The factor of an orthogonalised update [M, N], beside the learning rate.
fn update_scale(shape: &[usize]) -> f64 {
    UPDATE_RMS * (shape.iter().copied().max().unwrap_or(0) as f64).sqrt()
}

/// Adds the gradient of one matrix to its momentum, and writes the update that is still to be orthogonalised.
///
/// `momentum` and `grad` are F32, `update` F32 or BF16, all of one shape. If the step must not be applied ([`APPLY`] is
/// 0), the momentum stays and the update is zero.
pub fn accumulate_momentum(
    momentum: &mut Buffer,
    grad: &Buffer,
    update: &mut Buffer,
    scalars: &Buffer,
    settings: &Muon,
) -> Result<()> {
    let (shape, dtype) = (momentum.shape(), update.dtype());
    let arguments = Arguments::new("muon::accumulate_momentum")
        .output("momentum", momentum, DType::F32, shape)
        .input("grad", grad, DType::F32, shape)
        .output("update", update, dtype, shape)
        .input("scalars", scalars, DType::F32, &[SCALARS]);
    let (values, elements) = ([&*momentum, grad, &*update, scalars].map(KernelArg::from), momentum.elements());
    let cpu = |access: &Access<'_>| {
        let scalars = scalars.slice::<f32>(access);
        with_element!("muon::accumulate_momentum", "update", dtype, E => {
            if scalars[APPLY] == 0.0 {
                update.slice_mut::<E>(access).fill(E::default());
                return Ok(());
            }
            let momenta = (momentum.slice_mut(access), grad.slice(access));
            cpu::muon::accumulate_momentum(momenta, update.slice_mut::<E>(access), scalars[CLIP_SCALE], settings);
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::muon::accumulate_momentum(values, settings, elements))
}

/// The scratch buffers of [`orthogonalize`]. For `[B, M, N]` with S = min(M, N): elements of the update's type but for
/// `workspace`, whose size is [`workspace_elements`].
#[derive(Debug)]
pub struct Scratch<'a> {
    /// Every second iterate X, `[B, M, N]`.
    pub other_BMN: &'a mut Buffer,
    /// A = X X^T, `[B, S, S]`.
    pub gram_BSS: &'a mut Buffer,
    /// A^2, then the polynomial of A, `[B, S, S]`.
    pub polynomial_BSS: &'a mut Buffer,
    /// F32 workspace.
    pub workspace: &'a mut Buffer,
}

/// Orthogonalises every matrix of `update_BMN`, F32 or BF16, in place. Sums are in f32; a matrix of zeros stays one.
pub fn orthogonalize(update_BMN: &mut Buffer, scratch: Scratch<'_>, polynomials: Polynomials) -> Result<()> {
    let Scratch { other_BMN, gram_BSS, polynomial_BSS, workspace } = scratch;
    let (dtype, device) = (update_BMN.dtype(), update_BMN.device().kind());
    let &[b, m, n] = update_BMN.shape() else {
        let problem = format!("`update_BMN` has shape {:?}, three axes are needed", update_BMN.shape());
        return Err(Error::Invalid { operation: "muon::orthogonalize", problem });
    };
    let (sizes, s) = ([b, m, n], m.min(n));
    let arguments = Arguments::new("muon::orthogonalize")
        .output("update_BMN", update_BMN, dtype, &sizes)
        .output("other_BMN", other_BMN, dtype, &sizes)
        .output("gram_BSS", gram_BSS, dtype, &[b, s, s])
        .output("polynomial_BSS", polynomial_BSS, dtype, &[b, s, s])
        .workspace(workspace, workspace_elements(sizes, device));
    let matrices = cuda::muon::Matrices {
        update: (&*update_BMN).into(),
        other: (&*other_BMN).into(),
        gram: (&*gram_BSS).into(),
        polynomial: (&*polynomial_BSS).into(),
        workspace: cuda::Workspace::from_buffer(workspace),
    };
    let cpu = |access: &Access<'_>| {
        with_element!("muon::orthogonalize", "update_BMN", dtype, E => {
            let matrices = [update_BMN, other_BMN, gram_BSS, polynomial_BSS].map(|buffer| buffer.slice_mut::<E>(access));
            cpu::muon::orthogonalize(matrices, workspace.slice_mut(access), sizes, polynomials);
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::muon::orthogonalize(&matrices, sizes, polynomials))
}

/// Elements of F32 workspace that [`orthogonalize`] needs for `[B, M, N]`.
pub fn workspace_elements(sizes: [usize; 3], device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => cpu::muon::workspace_elements(sizes),
        DeviceKind::Cuda => cuda::muon::workspace_elements(sizes),
    }
}

/// Applies an orthogonalised update to one matrix.
///
/// `weight` is F32, or BF16 beside its low bits (I16; see [`crate::cast`]), and `update` F32 or BF16, all `[M, N]`.
pub fn step(
    weight: &mut Buffer,
    low_bits: Option<&mut Buffer>,
    update: &Buffer,
    scalars: &Buffer,
    weight_decay: f32,
) -> Result<()> {
    let shape = weight.shape();
    let master = if low_bits.is_some() { DType::BF16 } else { DType::F32 };
    let mut arguments = Arguments::new("muon::step")
        .output("weight", weight, master, shape)
        .input("update", update, master, shape)
        .input("scalars", scalars, DType::F32, &[SCALARS]);
    if let Some(low_bits) = &low_bits {
        arguments = arguments.output("low_bits", low_bits, DType::I16, shape);
    }
    let (scale, elements) = (update_scale(shape) as f32, weight.elements());
    let state = cuda::muon::State {
        weight: KernelArg::from(&*weight),
        low_bits: low_bits.as_deref().map(KernelArg::from),
        update: KernelArg::from(update),
        scalars: KernelArg::from(scalars),
    };
    let cpu = |access: &Access<'_>| {
        let scalars = scalars.slice::<f32>(access);
        if scalars[APPLY] == 0.0 {
            return Ok(());
        }
        let rate = f64::from(scalars[LEARNING_RATE]);
        let (decay, rate) = ((1.0 - rate * f64::from(weight_decay)) as f32, (rate * f64::from(scale)) as f32);
        match low_bits {
            None => cpu::muon::step(weight.slice_mut(access), update.slice(access), decay, rate),
            Some(low_bits) => {
                let master = (weight.slice_mut(access), low_bits.slice_mut(access));
                cpu::muon::step_split(master, update.slice(access), decay, rate);
            }
        }
        Ok(())
    };
    arguments.run(cpu, || cuda::muon::step(&state, scale, weight_decay, elements))
}

/// The plain version.
pub mod reference {
    use super::{APPLY, CLIP_SCALE, LEARNING_RATE, Muon, Polynomials, update_scale};
    use crate::Real;
    use crate::linear::reference::{backward_input, forward};

    /// Performs one step of one weight [M, N] with its momentum.
    pub fn step<R: Real>(
        (weight, momentum): (&mut [R], &mut [R]),
        gradient: &[R],
        [m, n]: [usize; 2],
        scalars: &[R],
        settings: &Muon,
        weight_decay: R,
    ) {
        if scalars[APPLY] == R::ZERO {
            return;
        }
        let (mu, rest) = (R::from_f64(settings.momentum), R::from_f64(1.0 - settings.momentum));
        let mut update = Vec::with_capacity(gradient.len());
        for (momentum, &gradient) in momentum.iter_mut().zip(gradient) {
            let gradient = scalars[CLIP_SCALE] * gradient;
            *momentum = mu * *momentum + rest * gradient;
            update.push(mu * *momentum + rest * gradient);
        }
        let rate = scalars[LEARNING_RATE];
        let decay = R::ONE - rate * weight_decay;
        let rate = rate * R::from_f64(update_scale(&[m, n]));
        for (weight, x) in weight.iter_mut().zip(orthogonalize(&update, [m, n], settings.polynomials)) {
            *weight = decay * *weight - rate * x;
        }
    }

    /// Returns a matrix [M, N] with its singular values moved to about one.
    pub fn orthogonalize<R: Real>(matrix: &[R], [m, n]: [usize; 2], polynomials: Polynomials) -> Vec<R> {
        let norm = matrix.iter().map(|&x| x * x).sum::<R>().sqrt();
        let norm = if norm > R::from_f64(1e-7) { norm } else { R::from_f64(1e-7) };
        let mut x: Vec<R> = matrix.iter().map(|&x| x / norm).collect();
        for coefficients in polynomials.coefficients() {
            let [a, b, c] = coefficients.map(|coefficient| R::from_f64(f64::from(coefficient)));
            let gram = forward(&x, &x, [m, n, m]);
            let square = forward(&gram, &gram, [m, m, m]);
            let diagonal = |at: usize| if at / m == at % m { a } else { R::ZERO };
            let polynomial: Vec<R> = (0..m * m).map(|at| diagonal(at) + b * gram[at] + c * square[at]).collect();
            x = backward_input(&polynomial, &x, [m, n, m]);
        }
        x
    }
}

#[path = "muon_cases.rs"]
pub mod cases;

#[cfg(test)]
#[path = "muon_tests.rs"]
mod tests;
