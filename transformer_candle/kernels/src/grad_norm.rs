//! The global norm of the gradients and what follows from it, without a number leaving the device.

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::cuda::{self, KernelArg};
use crate::{Buffer, DeviceKind, Result, adamw, cpu};

/// `norm_1 = sqrt(sum of squares of grads)`, summed in f64 over pieces of fixed size. All F32.
pub fn forward(grads: &Buffer, norm_1: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
    let arguments = Arguments::new("grad_norm::forward")
        .input("grads", grads, DType::F32, grads.shape())
        .output("norm_1", norm_1, DType::F32, &[1])
        .workspace(workspace, workspace_elements(grads.elements(), grads.device().kind()));
    let (values, elements) = ([grads, &*norm_1, &*workspace].map(KernelArg::from), grads.elements());
    let cpu = |access: &Access<'_>| {
        let partials = workspace.slice_mut(access);
        norm_1.slice_mut(access)[0] = cpu::grad_norm::forward(grads.slice(access), partials);
        Ok(())
    };
    arguments.run(cpu, || cuda::grad_norm::forward(values, elements))
}

/// Elements of F32 workspace that [`forward`] needs for this many gradients: one per 16 thousand.
pub fn workspace_elements(elements: usize, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => cpu::grad_norm::workspace_elements(elements),
        DeviceKind::Cuda => cuda::grad_norm::workspace_elements(elements),
    }
}

/// Writes two of the optimizer's scalars (see [`adamw`]): `CLIP_SCALE = min(1, max_grad_norm / (norm + 1e-6))`, as in
/// `torch.nn.utils.clip_grad_norm_` (1 without a maximum), and `APPLY` = 1, or 0 if the norm is not finite.
pub fn clip(norm_1: &Buffer, max_grad_norm: Option<f32>, scalars: &mut Buffer) -> Result<()> {
    let arguments = Arguments::new("grad_norm::clip").input("norm_1", norm_1, DType::F32, &[1]).output(
        "scalars",
        scalars,
        DType::F32,
        &[adamw::SCALARS],
    );
    let (norm, flags) = (KernelArg::from(norm_1), KernelArg::from(&*scalars));
    let cpu = |access: &Access<'_>| {
        let norm = norm_1.slice::<f32>(access)[0];
        let scalars = scalars.slice_mut(access);
        scalars[adamw::CLIP_SCALE] = reference::clip_scale(norm, max_grad_norm);
        scalars[adamw::APPLY] = if norm.is_finite() { 1.0 } else { 0.0 };
        Ok(())
    };
    arguments.run(cpu, || cuda::grad_norm::clip(norm, max_grad_norm, flags))
}

/// The plain version.
pub mod reference {
    use crate::Real;

    /// The Euclidean norm.
    pub fn norm<R: Real>(grads: &[R]) -> R {
        grads.iter().map(|&gradient| gradient * gradient).sum::<R>().sqrt()
    }

    /// The factor that clips gradients of this norm.
    pub fn clip_scale<R: Real>(norm: R, max_grad_norm: Option<R>) -> R {
        match max_grad_norm {
            Some(limit) if limit < norm + R::from_f64(1e-6) => limit / (norm + R::from_f64(1e-6)),
            _ => R::ONE,
        }
    }
}

/// Calls for checks and benchmarks, of flat buffers.
pub mod cases {
    use super::{clip, forward, workspace_elements};
    use crate::DType;
    use crate::cases::bounds::{F32, F32_POINTWISE};
    use crate::cases::{BufferContents, Case, CaseList, Inputs, Size};
    use crate::optimizer_settings::SCALARS;

    pub(crate) fn add(size: Size, dtype: DType, cases: &mut CaseList) {
        if dtype != DType::F32 {
            return;
        }
        for elements in size.elements() {
            cases.add(move |inputs| norm(inputs, elements));
        }
        for norm in [0.0, 0.5, 8.0, f32::INFINITY, f32::NAN] {
            cases.add(move |_| clipping(norm));
        }
    }

    /// [`forward`].
    pub fn norm(inputs: &mut Inputs, elements: usize) -> Case {
        Case::new("grad_norm::forward f32", elements.to_string())
            .input("grads", &[elements], inputs.f32(&[elements]))
            .output("norm", &[1], DType::F32, F32)
            .workspace(move |device| workspace_elements(elements, device))
            .call(|[grads, norm, workspace]| forward(grads, norm, workspace))
    }

    /// [`clip`].
    pub fn clipping(norm: f32) -> Case {
        // No limit if the norm is not finite: the scale is then 1, and not a NaN, which equals nothing.
        let limit = norm.is_finite().then_some(1.0);
        let mut scalars = vec![7.0; SCALARS];
        scalars[..3].copy_from_slice(&[1e-3, 0.1, 0.05]);
        Case::new("grad_norm::clip f32", format!("norm {norm}"))
            .input("norm", &[1], BufferContents::from_numbers([norm], DType::F32))
            .updated("scalars", &[SCALARS], BufferContents::from_numbers(scalars, DType::F32), F32_POINTWISE)
            .call(move |[norm, scalars]| clip(norm, limit, scalars))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::testing::*;

    fn norm(grads: &Buffer) -> Buffer {
        let mut norm_1 = zeros(&[1], DType::F32);
        forward(grads, &mut norm_1, &mut workspace(workspace_elements(grads.elements(), DeviceKind::Cpu))).unwrap();
        norm_1
    }

    fn clipped(norm: f32, limit: Option<f32>) -> Vec<f32> {
        let mut scalars = buffer(&[9.0; adamw::SCALARS], &[adamw::SCALARS], DType::F32);
        clip(&integers(&[norm]), limit, &mut scalars).unwrap();
        scalars.read().unwrap()
    }

    #[test]
    fn f32_matches_pytorch() {
        let golden = Golden::load("grad_norm");
        let norm_1 = norm(&golden.buffer("grads"));
        assert_near(&norm_1, &golden.values("norm_1"));
        let scalars = clipped(norm_1.read().unwrap()[0], Some(golden.values("max_norm")[0] as f32));
        let expected = golden.values("clip_scale")[0];
        assert!((f64::from(scalars[adamw::CLIP_SCALE]) - expected).abs() <= 1e-6 * expected);
    }

    #[test]
    fn any_length_matches_the_reference() {
        for length in [0, 1, 7, 8, 9, 32_767, 32_768, 32_769, 100_003] {
            let grads = numbers(length as u64, length);
            assert_near(&norm(&buffer(&grads, &[length], DType::F32)), &[reference::norm(&grads)]);
        }
    }

    #[test]
    fn a_norm_whose_square_no_f32_holds_is_right() {
        let large = norm(&buffer(&[3e25, -4e25], &[2], DType::F32));
        assert!(relative_error(&large.read().unwrap(), &[5e25]) < 1e-6);
        let small = norm(&buffer(&[3e-30, -4e-30], &[2], DType::F32));
        assert!(relative_error(&small.read().unwrap(), &[5e-30]) < 1e-6);
    }

    #[test]
    fn only_a_norm_above_the_maximum_is_scaled() {
        assert_eq!(clipped(0.5, Some(1.0)), [9.0, 9.0, 9.0, 1.0, 1.0]);
        assert_eq!(clipped(4.0, Some(1.0)), [9.0, 9.0, 9.0, 1.0 / (4.0 + 1e-6), 1.0]);
        assert_eq!(clipped(4.0, None), [9.0, 9.0, 9.0, 1.0, 1.0]);
    }

    #[test]
    fn a_norm_that_is_not_finite_forbids_the_update() {
        for bad in [f32::NAN, f32::INFINITY] {
            let with_bad = norm(&integers(&[1.0, bad, 2.0]));
            assert!(!with_bad.read::<f32>().unwrap()[0].is_finite());
            assert_eq!(clipped(bad, Some(1.0))[adamw::APPLY].to_bits(), 0);
        }
    }

    #[test]
    fn a_norm_inside_of_the_gradients_is_refused() {
        let grads = zeros(&[10], DType::F32);
        let error = forward(&grads, &mut grads.view(3, &[1]).unwrap(), &mut workspace(2)).unwrap_err();
        assert!(matches!(error, Error::Aliased { output: "norm_1", other: "grads", .. }), "{error}");
    }
}
