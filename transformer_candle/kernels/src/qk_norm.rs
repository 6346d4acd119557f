//! Root-mean-square norms of each query head and of each key head before the rotary embedding ("QK-norm": Dehghani et
//! al., "Scaling Vision Transformers to 22 Billion Parameters", arXiv:2302.05442, as Qwen3 has it).
//!
//! Legend: N tokens, H query heads, K key/value heads, E head size, P = (H + 2K) * E packed QKV. The weight holds the E
//! elements of all query heads, then those of all key heads. Rows are F32 or BF16, the weight likewise; statistics are
//! F32 and computed again in backward.

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::cuda::{self, KernelArg};
use crate::element::with_element;
use crate::{Buffer, DeviceKind, HeadLayout, Result, cpu};

/// Writes rows whose query and key heads are normed, `x / sqrt(mean(x^2) + epsilon) * weight`, and whose values are
/// copied.
pub fn forward(
    projected_NP: &Buffer,
    weight_2E: &Buffer,
    epsilon: f32,
    layout: &HeadLayout,
    qkv_NP: &mut Buffer,
) -> Result<()> {
    const OPERATION: &str = "qk_norm::forward";
    layout.check(OPERATION)?;
    let (dtype, shape) = (projected_NP.dtype(), [rows(projected_NP), layout.packed_width()]);
    let arguments = Arguments::new(OPERATION)
        .input("projected_NP", projected_NP, dtype, &shape)
        .input("weight_2E", weight_2E, dtype, &[2 * layout.head_size])
        .output("qkv_NP", qkv_NP, dtype, &shape);
    let [projected, weight, qkv] = [projected_NP, weight_2E, &*qkv_NP].map(KernelArg::from);
    let cpu = |access: &Access<'_>| {
        with_element!(OPERATION, "projected_NP", dtype, E => {
            let norms = cpu::qk_norm::Norms { weight: weight_2E.slice::<E>(access), epsilon };
            cpu::qk_norm::forward(projected_NP.slice(access), norms, layout, qkv_NP.slice_mut(access));
            Ok(())
        })
    };
    let launches = || cuda::qk_norm::forward([projected, weight, qkv], epsilon, layout, shape[0]);
    arguments.run(cpu, launches)
}

/// Turns the gradients of the normed query and key heads into those of the projected ones, and adds the weight's, where
/// it trains, to `dweight_2E` (F32).
///
/// With y = dnormed * weight: `dx = inv_rms * (y - x * inv_rms^2 * mean(y * x))`, `dweight += sum over tokens and heads
/// of dnormed * x * inv_rms`.
pub fn backward(
    projected_NP: &Buffer,
    weight_2E: &Buffer,
    epsilon: f32,
    layout: &HeadLayout,
    dqkv_NP: &mut Buffer,
    dweight_2E: Option<&mut Buffer>,
    workspace: &mut Buffer,
) -> Result<()> {
    const OPERATION: &str = "qk_norm::backward";
    layout.check(OPERATION)?;
    let (dtype, shape, device) =
        (projected_NP.dtype(), [rows(projected_NP), layout.packed_width()], projected_NP.device().kind());
    let arguments = Arguments::new(OPERATION)
        .input("projected_NP", projected_NP, dtype, &shape)
        .input("weight_2E", weight_2E, dtype, &[2 * layout.head_size])
        .output("dqkv_NP", dqkv_NP, dtype, &shape)
        .optional_output("dweight_2E", dweight_2E.as_deref(), DType::F32, &[2 * layout.head_size])
        .workspace(workspace, workspace_elements(shape[0], layout.head_size, device));
    let [projected, weight, dqkv] = [projected_NP, weight_2E, &*dqkv_NP].map(KernelArg::from);
    let dweight = dweight_2E.as_deref().map(KernelArg::from);
    let partials = KernelArg::from(&*workspace);
    let cpu = |access: &Access<'_>| {
        with_element!(OPERATION, "projected_NP", dtype, E => {
            let norms = cpu::qk_norm::Norms { weight: weight_2E.slice::<E>(access), epsilon };
            let (dqkv, dweight) = (dqkv_NP.slice_mut(access), dweight_2E.map(|dweight| dweight.slice_mut(access)));
            let partials = workspace.slice_mut(access);
            cpu::qk_norm::backward(projected_NP.slice(access), norms, layout, dqkv, dweight, partials);
            Ok(())
        })
    };
    let launches = || cuda::qk_norm::backward([projected, weight, dqkv], dweight, partials, epsilon, layout, shape[0]);
    arguments.run(cpu, launches)
}

/// Elements of F32 workspace for [`backward`] of N rows: the weight's gradient of each group of rows.
pub fn workspace_elements(n: usize, head_size: usize, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => cpu::column_sums::workspace_elements(n, 2 * head_size),
        DeviceKind::Cuda => cuda::qk_norm::workspace_elements(n, head_size),
    }
}

/// Returns the number of rows, N; every argument is then checked against it.
fn rows(buffer: &Buffer) -> usize {
    buffer.shape().first().copied().unwrap_or(0)
}

/// The operation in the plainest terms, by the norm of one row.
pub mod reference {
    use crate::{HeadLayout, Real, add_rms_norm};

    /// See [`super::forward`].
    pub fn forward<R: Real>(projected_NP: &[R], weight_2E: &[R], epsilon: R, layout: &HeadLayout) -> Vec<R> {
        let heads = projected_NP.chunks_exact(layout.head_size).enumerate();
        let normed = heads.flat_map(|(head, x)| match weight_of(head, weight_2E, layout) {
            Some((_, weight)) => add_rms_norm::reference::forward(x, weight, epsilon)[0].clone(),
            None => x.to_vec(),
        });
        normed.collect()
    }

    /// Returns the gradients of the rows and of the weight; see [`super::backward`].
    pub fn backward<R: Real>(
        projected_NP: &[R],
        weight_2E: &[R],
        epsilon: R,
        layout: &HeadLayout,
        dqkv_NP: &[R],
    ) -> [Vec<R>; 2] {
        let (mut dprojected_NP, mut dweight_2E) = (Vec::new(), vec![R::ZERO; weight_2E.len()]);
        let heads = projected_NP.chunks_exact(layout.head_size).zip(dqkv_NP.chunks_exact(layout.head_size));
        for (head, (x, dnormed)) in heads.enumerate() {
            let Some((first, weight)) = weight_of(head, weight_2E, layout) else {
                dprojected_NP.extend_from_slice(dnormed);
                continue;
            };
            let [_, inv_rms] = add_rms_norm::reference::forward(x, weight, epsilon);
            let [dx, dweight] = add_rms_norm::reference::backward(x, weight, &inv_rms, dnormed);
            dprojected_NP.extend(dx);
            dweight_2E[first..].iter_mut().zip(dweight).for_each(|(sum, dweight)| *sum += dweight);
        }
        [dprojected_NP, dweight_2E]
    }

    /// The first element of a head's weight and the weight; none for heads of values. Heads are counted through all
    /// rows.
    fn weight_of<'a, R>(head: usize, weight_2E: &'a [R], layout: &HeadLayout) -> Option<(usize, &'a [R])> {
        let &HeadLayout { heads, kv_heads, head_size } = layout;
        let head = head % (heads + 2 * kv_heads);
        let first = usize::from(head >= heads) * head_size;
        (head < heads + kv_heads).then(|| (first, &weight_2E[first..][..head_size]))
    }
}

/// Calls for checks and benchmarks, of N rows.
pub mod cases {
    use super::{backward, forward, workspace_elements};
    use crate::cases::bounds::F32;
    use crate::cases::{Case, CaseList, Inputs, Size};
    use crate::{DType, HeadLayout};

    const EPSILON: f32 = 1e-5;

    pub(crate) fn add(size: Size, _dtype: DType, cases: &mut CaseList) {
        for positions in size.positions() {
            let (n, layout) = (positions.tokens(), positions.layout);
            cases.add(move |inputs| norm(inputs, n, layout));
            cases.add(move |inputs| gradient(inputs, n, layout));
        }
    }

    fn sizes(n: usize, HeadLayout { heads, kv_heads, head_size }: HeadLayout) -> String {
        format!("{n}, {heads}/{kv_heads} x {head_size}")
    }

    /// [`forward`].
    pub fn norm(inputs: &mut Inputs, n: usize, layout: HeadLayout) -> Case {
        let (rows, weight) = ([n, layout.packed_width()], [2 * layout.head_size]);
        Case::new(inputs.name("qk_norm::forward"), sizes(n, layout))
            .input("projected", &rows, inputs.numbers(&rows))
            .input("weight", &weight, inputs.numbers(&weight))
            .output("qkv", &rows, inputs.dtype, inputs.bound())
            .call(move |[projected, weight, qkv]| forward(projected, weight, EPSILON, &layout, qkv))
    }

    /// [`backward`]. Queries and keys alone are read and written.
    pub fn gradient(inputs: &mut Inputs, n: usize, layout: HeadLayout) -> Case {
        let (rows, weight) = ([n, layout.packed_width()], [2 * layout.head_size]);
        Case::new(inputs.name("qk_norm::backward"), sizes(n, layout))
            .input("projected", &rows, inputs.numbers(&rows))
            .input("weight", &weight, inputs.numbers(&weight))
            .updated("dqkv", &rows, inputs.numbers(&rows), inputs.bound())
            .updated("dweight", &weight, inputs.f32(&weight), F32)
            .workspace(move |device| workspace_elements(n, layout.head_size, device))
            .bytes(3 * n * (layout.query_width() + layout.key_width()) * inputs.dtype.size_in_bytes())
            .call(move |[projected, weight, dqkv, dweight, workspace]| {
                backward(projected, weight, EPSILON, &layout, dqkv, Some(dweight), workspace)
            })
    }
}

#[cfg(test)]
#[path = "qk_norm_tests.rs"]
mod tests;
