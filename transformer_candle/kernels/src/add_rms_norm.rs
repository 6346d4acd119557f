//! Residual add and root-mean-square norm (Zhang and Sennrich, "Root Mean Square Layer Normalization",
//! arXiv:1910.07467): `sum = x + output`, `normed = sum * inv_rms * weight` with `inv_rms = 1 / sqrt(mean(sum^2) +
//! epsilon)`.
//!
//! Legend: N tokens, D hidden size. Rows are F32 or BF16, the weight likewise; statistics and sums are F32. In BF16 the
//! sum is rounded first and the norm is taken of the rounded sum, so that [`normalize`] and [`backward`] see what
//! forward saw. Forward alone, on a CPU, also takes an F32 residual stream (`x`, `output` and `sum`) beside a BF16 weight
//! and norm: over dozens of layers the rounding of the sum is most of the error of BF16.

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::cuda::{self, KernelArg};
use crate::element::{result_dtype, with_element, with_elements};
use crate::{Buffer, DeviceKind, Result, cpu};

/// Writes the norm of `x` alone, without a residual add; saves `inv_rms`.
pub fn forward(
    x_ND: &Buffer,
    weight_D: &Buffer,
    epsilon: f32,
    normed_ND: &mut Buffer,
    inv_rms_N: &mut Buffer,
) -> Result<()> {
    const OPERATION: &str = "add_rms_norm::forward";
    let (dtype, x_dtype, [n, d]) = (weight_D.dtype(), residual_dtype(x_ND, weight_D), x_ND.sizes());
    let arguments = Arguments::new(OPERATION)
        .input("x_ND", x_ND, x_dtype, &[n, d])
        .same_on_a_gpu("x_ND", x_ND, dtype)
        .input("weight_D", weight_D, dtype, &[d])
        .output("normed_ND", normed_ND, dtype, &[n, d])
        .output("inv_rms_N", inv_rms_N, DType::F32, &[n]);
    let [x, weight, normed, inv_rms] = [x_ND, weight_D, &*normed_ND, &*inv_rms_N].map(KernelArg::from);
    let cpu = |access: &Access<'_>| {
        with_elements!(OPERATION, "weight_D", [dtype, x_dtype], [E, R] => {
            let (x, weight) = (x_ND.slice::<R>(access), weight_D.slice::<E>(access));
            cpu::add_rms_norm::forward(x, weight, epsilon, normed_ND.slice_mut(access), inv_rms_N.slice_mut(access));
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::add_rms_norm::forward(x, weight, epsilon, [normed, inv_rms], [n, d]))
}

/// Writes `sum = x + output` and its norm; saves `inv_rms`.
pub fn forward_add(
    x_ND: &Buffer,
    output_ND: &Buffer,
    weight_D: &Buffer,
    epsilon: f32,
    sum_ND: &mut Buffer,
    normed_ND: &mut Buffer,
    inv_rms_N: &mut Buffer,
) -> Result<()> {
    const OPERATION: &str = "add_rms_norm::forward_add";
    let (dtype, x_dtype, [n, d]) = (weight_D.dtype(), residual_dtype(x_ND, weight_D), x_ND.sizes());
    let arguments = Arguments::new(OPERATION)
        .input("x_ND", x_ND, x_dtype, &[n, d])
        .same_on_a_gpu("x_ND", x_ND, dtype)
        .input("output_ND", output_ND, x_dtype, &[n, d])
        .input("weight_D", weight_D, dtype, &[d])
        .output("sum_ND", sum_ND, x_dtype, &[n, d])
        .output("normed_ND", normed_ND, dtype, &[n, d])
        .output("inv_rms_N", inv_rms_N, DType::F32, &[n]);
    let [x, output, weight] = [x_ND, output_ND, weight_D].map(KernelArg::from);
    let outputs = [&*sum_ND, &*normed_ND, &*inv_rms_N].map(KernelArg::from);
    let cpu = |access: &Access<'_>| {
        with_elements!(OPERATION, "weight_D", [dtype, x_dtype], [E, R] => {
            let (x, output, weight) = (x_ND.slice::<R>(access), output_ND.slice(access), weight_D.slice::<E>(access));
            let (sum, normed) = (sum_ND.slice_mut(access), normed_ND.slice_mut(access));
            cpu::add_rms_norm::forward_add(x, output, weight, epsilon, sum, normed, inv_rms_N.slice_mut(access));
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::add_rms_norm::forward_add([x, output], weight, epsilon, outputs, [n, d]))
}

/// The element type that the residual stream must have beside this weight.
fn residual_dtype(x_ND: &Buffer, weight_D: &Buffer) -> DType {
    result_dtype(x_ND.dtype(), weight_D.dtype())
}

/// Recomputes the norm from the sum and the `inv_rms` that forward saved, bit for bit as forward wrote it.
pub fn normalize(sum_ND: &Buffer, weight_D: &Buffer, inv_rms_N: &Buffer, normed_ND: &mut Buffer) -> Result<()> {
    const OPERATION: &str = "add_rms_norm::normalize";
    let (dtype, [n, d]) = (sum_ND.dtype(), sum_ND.sizes());
    let arguments = Arguments::new(OPERATION)
        .input("sum_ND", sum_ND, dtype, &[n, d])
        .input("weight_D", weight_D, dtype, &[d])
        .input("inv_rms_N", inv_rms_N, DType::F32, &[n])
        .output("normed_ND", normed_ND, dtype, &[n, d]);
    let [sum, weight, inv_rms, normed] = [sum_ND, weight_D, inv_rms_N, &*normed_ND].map(KernelArg::from);
    let cpu = |access: &Access<'_>| {
        with_element!(OPERATION, "sum_ND", dtype, E => {
            let (sum, weight) = (sum_ND.slice::<E>(access), weight_D.slice(access));
            cpu::add_rms_norm::normalize(sum, weight, inv_rms_N.slice(access), normed_ND.slice_mut(access));
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::add_rms_norm::normalize([sum, weight, inv_rms], normed, [n, d]))
}

/// Adds to `dsum` the gradient that reaches the sum through the norm, and to `dweight` (F32), where the weight trains,
/// the weight's gradient. `dsum` comes in with the gradient that reaches the sum past the norm; afterwards it is the
/// gradient of both summands.
///
/// With y = dnormed * weight: `dsum += inv_rms * (y - sum * inv_rms^2 * mean(y * sum))`, `dweight += sum over n of
/// dnormed * sum * inv_rms`.
pub fn backward(
    sum_ND: &Buffer,
    weight_D: &Buffer,
    inv_rms_N: &Buffer,
    dnormed_ND: &Buffer,
    dsum_ND: &mut Buffer,
    dweight_D: Option<&mut Buffer>,
    workspace: &mut Buffer,
) -> Result<()> {
    const OPERATION: &str = "add_rms_norm::backward";
    let (dtype, [n, d]) = (sum_ND.dtype(), sum_ND.sizes());
    let arguments = Arguments::new(OPERATION)
        .input("sum_ND", sum_ND, dtype, &[n, d])
        .input("weight_D", weight_D, dtype, &[d])
        .input("inv_rms_N", inv_rms_N, DType::F32, &[n])
        .input("dnormed_ND", dnormed_ND, dtype, &[n, d])
        .output("dsum_ND", dsum_ND, dtype, &[n, d])
        .optional_output("dweight_D", dweight_D.as_deref(), DType::F32, &[d])
        .workspace(workspace, workspace_elements(n, d, sum_ND.device().kind()));
    let saved = [sum_ND, weight_D, inv_rms_N].map(KernelArg::from);
    let (dnormed, dsum) = (KernelArg::from(dnormed_ND), KernelArg::from(&*dsum_ND));
    let outputs = (dsum, dweight_D.as_deref().map(KernelArg::from));
    let partials = KernelArg::from(&*workspace);
    let cpu = |access: &Access<'_>| {
        with_element!(OPERATION, "sum_ND", dtype, E => {
            let saved = cpu::add_rms_norm::Saved {
                sum: sum_ND.slice::<E>(access),
                weight: weight_D.slice(access),
                inv_rms: inv_rms_N.slice(access),
            };
            let (dsum, dweight) = (dsum_ND.slice_mut(access), dweight_D.map(|dweight| dweight.slice_mut(access)));
            cpu::add_rms_norm::backward(&saved, dnormed_ND.slice(access), dsum, dweight, workspace.slice_mut(access));
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::add_rms_norm::backward(saved, dnormed, outputs, partials, [n, d]))
}

/// Elements of F32 workspace for [`backward`] of N rows of D: the weight's gradient of each group of rows.
pub fn workspace_elements(n: usize, d: usize, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => cpu::column_sums::workspace_elements(n, d),
        DeviceKind::Cuda => cuda::add_rms_norm::workspace_elements(n, d),
    }
}

/// The operation in the plainest terms.
pub mod reference {
    use crate::Real;

    /// Returns `normed_ND` and `inv_rms_N`; see [`super::forward`].
    pub fn forward<R: Real>(x_ND: &[R], weight_D: &[R], epsilon: R) -> [Vec<R>; 2] {
        let d = R::from_f64(weight_D.len() as f64);
        let inv_rms = |x: &[R]| R::ONE / (x.iter().map(|&x| x * x).sum::<R>() / d + epsilon).sqrt();
        let inv_rms_N: Vec<R> = x_ND.chunks_exact(weight_D.len()).map(inv_rms).collect();
        let normed = |(at, &x): (usize, &R)| x * inv_rms_N[at / weight_D.len()] * weight_D[at % weight_D.len()];
        [x_ND.iter().enumerate().map(normed).collect(), inv_rms_N]
    }

    /// Returns what is added to `dsum_ND` and to `dweight_D`; see [`super::backward`].
    pub fn backward<R: Real>(sum_ND: &[R], weight_D: &[R], inv_rms_N: &[R], dnormed_ND: &[R]) -> [Vec<R>; 2] {
        let d = weight_D.len();
        let (mut dsum_ND, mut dweight_D) = (Vec::with_capacity(sum_ND.len()), vec![R::ZERO; d]);
        for (n, &inv_rms) in inv_rms_N.iter().enumerate() {
            let (sum, dnormed) = (&sum_ND[n * d..][..d], &dnormed_ND[n * d..][..d]);
            let mean = (0..d).map(|j| dnormed[j] * weight_D[j] * sum[j]).sum::<R>() / R::from_f64(d as f64);
            for j in 0..d {
                dsum_ND.push(inv_rms * (dnormed[j] * weight_D[j] - sum[j] * inv_rms * inv_rms * mean));
                dweight_D[j] += dnormed[j] * sum[j] * inv_rms;
            }
        }
        [dsum_ND, dweight_D]
    }
}

/// Calls for checks and benchmarks, of sizes [N, D].
pub mod cases {
    use super::{backward, forward, forward_add, normalize, workspace_elements};
    use crate::DType;
    use crate::cases::bounds::F32;
    use crate::cases::{BufferContents, Case, CaseList, Inputs, Size};

    const EPSILON: f32 = 1e-5;

    pub(crate) fn add(size: Size, _dtype: DType, cases: &mut CaseList) {
        for sizes in size.hidden() {
            for make in [norm, norm_of_sum, norm_again] {
                cases.add(move |inputs| make(inputs, sizes));
            }
            for trains in [true, false] {
                cases.add(move |inputs| gradient(inputs, sizes, trains));
            }
        }
    }

    /// [`forward`].
    pub fn norm(inputs: &mut Inputs, [n, d]: [usize; 2]) -> Case {
        Case::new(inputs.name("add_rms_norm::forward"), format!("{n} x {d}"))
            .input("x", &[n, d], inputs.numbers(&[n, d]))
            .input("weight", &[d], inputs.numbers(&[d]))
            .output("normed", &[n, d], inputs.dtype, inputs.bound())
            .output("inv_rms", &[n], DType::F32, F32)
            .call(|[x, weight, normed, inv_rms]| forward(x, weight, EPSILON, normed, inv_rms))
    }

    /// [`forward_add`]. The norm is taken of the rounded sum, so that its statistics carry that rounding.
    pub fn norm_of_sum(inputs: &mut Inputs, [n, d]: [usize; 2]) -> Case {
        Case::new(inputs.name("add_rms_norm::forward_add"), format!("{n} x {d}"))
            .input("x", &[n, d], inputs.numbers(&[n, d]))
            .input("layer_output", &[n, d], inputs.numbers(&[n, d]))
            .input("weight", &[d], inputs.numbers(&[d]))
            .output("sum", &[n, d], inputs.dtype, inputs.bound())
            .output("normed", &[n, d], inputs.dtype, inputs.bound())
            .output("inv_rms", &[n], DType::F32, inputs.bound())
            .call(|[x, output, weight, sum, normed, inv_rms]| {
                forward_add(x, output, weight, EPSILON, sum, normed, inv_rms)
            })
    }

    /// Returns a random sum and the statistics that the forward pass would have saved of it.
    pub(crate) fn saved(inputs: &mut Inputs, [n, d]: [usize; 2]) -> [BufferContents; 2] {
        let sum = inputs.numbers(&[n, d]);
        let inv_rms = |row: &[f32]| {
            let squares: f64 = row.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
            (1.0 / (squares / d as f64 + f64::from(EPSILON)).sqrt()) as f32
        };
        let statistics: Vec<f32> = sum.numbers().chunks(d).map(inv_rms).collect();
        [sum, BufferContents::from_numbers(statistics, DType::F32)]
    }

    /// [`normalize`].
    pub fn norm_again(inputs: &mut Inputs, [n, d]: [usize; 2]) -> Case {
        let [sum, inv_rms] = saved(inputs, [n, d]);
        Case::new(inputs.name("add_rms_norm::normalize"), format!("{n} x {d}"))
            .input("sum", &[n, d], sum)
            .input("weight", &[d], inputs.numbers(&[d]))
            .input("inv_rms", &[n], inv_rms)
            .output("normed", &[n, d], inputs.dtype, inputs.bound())
            .call(|[sum, weight, inv_rms, normed]| normalize(sum, weight, inv_rms, normed))
    }

    /// [`backward`], of a weight that trains or of a frozen one.
    pub fn gradient(inputs: &mut Inputs, [n, d]: [usize; 2], trains: bool) -> Case {
        let [sum, inv_rms] = saved(inputs, [n, d]);
        let sizes = if trains { format!("{n} x {d}") } else { format!("{n} x {d}, frozen weight") };
        Case::new(inputs.name("add_rms_norm::backward"), sizes)
            .input("sum", &[n, d], sum)
            .input("weight", &[d], inputs.numbers(&[d]))
            .input("inv_rms", &[n], inv_rms)
            .input("dnormed", &[n, d], inputs.numbers(&[n, d]))
            .updated("dsum", &[n, d], inputs.numbers(&[n, d]), inputs.bound())
            .updated("dweight", &[d], inputs.f32(&[d]), F32)
            .workspace(move |device| workspace_elements(n, d, device))
            .call(move |[sum, weight, inv_rms, dnormed, dsum, dweight, workspace]| {
                backward(sum, weight, inv_rms, dnormed, dsum, trains.then_some(dweight), workspace)
            })
    }
}

#[cfg(test)]
#[path = "add_rms_norm_tests.rs"]
mod tests;
