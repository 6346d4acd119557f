//! The bias of a linear map: a vector that is added to every row of its output.
//!
//! Legend: N tokens, O outputs. Rows and bias are F32 or BF16, the gradient of the bias is F32. In BF16 the matmul has
//! rounded its output before the bias is added.

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::cuda::{self, KernelArg};
use crate::element::with_element;
use crate::{Buffer, DeviceKind, Result, cpu};

/// Adds the bias to every row, in place.
pub fn forward(y_NO: &mut Buffer, bias_O: &Buffer) -> Result<()> {
    const OPERATION: &str = "bias::forward";
    let (dtype, [n, o]) = (y_NO.dtype(), y_NO.sizes());
    let arguments = Arguments::new(OPERATION).input("bias_O", bias_O, dtype, &[o]).output("y_NO", y_NO, dtype, &[n, o]);
    let (y, bias) = (KernelArg::from(&*y_NO), KernelArg::from(bias_O));
    let cpu = |access: &Access<'_>| {
        with_element!(OPERATION, "y_NO", dtype, E => {
            cpu::bias::forward::<E>(y_NO.slice_mut(access), bias_O.slice(access));
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::bias::forward(y, bias, [n, o]))
}

/// Adds the sum of the rows to `dbias_O`. The gradient of the rows is that of the output itself.
pub fn backward(dy_NO: &Buffer, dbias_O: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
    const OPERATION: &str = "bias::backward";
    let (dtype, [n, o]) = (dy_NO.dtype(), dy_NO.sizes());
    let arguments = Arguments::new(OPERATION)
        .input("dy_NO", dy_NO, dtype, &[n, o])
        .output("dbias_O", dbias_O, DType::F32, &[o])
        .workspace(workspace, workspace_elements(n, o, dy_NO.device().kind()));
    let [dy, dbias, partials] = [dy_NO, &*dbias_O, &*workspace].map(KernelArg::from);
    let cpu = |access: &Access<'_>| {
        with_element!(OPERATION, "dy_NO", dtype, E => {
            cpu::bias::backward::<E>(dy_NO.slice(access), dbias_O.slice_mut(access), workspace.slice_mut(access));
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::bias::backward(dy, dbias, partials, [n, o]))
}

/// Elements of F32 workspace for [`backward`] of N rows of O: the sum of each group of rows.
pub fn workspace_elements(n: usize, o: usize, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => cpu::column_sums::workspace_elements(n, o),
        DeviceKind::Cuda => cuda::bias::workspace_elements(n, o),
    }
}

/// The operation in the plainest terms.
pub mod reference {
    use crate::Real;

    /// See [`super::forward`].
    pub fn forward<R: Real>(y_NO: &[R], bias_O: &[R]) -> Vec<R> {
        y_NO.iter().enumerate().map(|(at, &y)| y + bias_O[at % bias_O.len()]).collect()
    }

    /// Returns what is added to `dbias_O`; see [`super::backward`].
    pub fn backward<R: Real>(dy_NO: &[R], outputs: usize) -> Vec<R> {
        (0..outputs).map(|o| dy_NO.iter().skip(o).step_by(outputs).copied().sum::<R>()).collect()
    }
}

/// Calls for checks and benchmarks, of sizes [N, O].
pub mod cases {
    use super::{backward, forward, workspace_elements};
    use crate::DType;
    use crate::cases::bounds::F32;
    use crate::cases::{Case, CaseList, Inputs, Size};

    pub(crate) fn add(size: Size, _dtype: DType, cases: &mut CaseList) {
        for sizes in size.hidden() {
            cases.add(move |inputs| sum(inputs, sizes));
            cases.add(move |inputs| gradient(inputs, sizes));
        }
    }

    /// [`forward`].
    pub fn sum(inputs: &mut Inputs, [n, o]: [usize; 2]) -> Case {
        Case::new(inputs.name("bias::forward"), format!("{n} x {o}"))
            .updated("y", &[n, o], inputs.numbers(&[n, o]), inputs.bound())
            .input("bias", &[o], inputs.numbers(&[o]))
            .call(|[y, bias]| forward(y, bias))
    }

    /// [`backward`].
    pub fn gradient(inputs: &mut Inputs, [n, o]: [usize; 2]) -> Case {
        Case::new(inputs.name("bias::backward"), format!("{n} x {o}"))
            .input("dy", &[n, o], inputs.numbers(&[n, o]))
            .updated("dbias", &[o], inputs.f32(&[o]), F32)
            .workspace(move |device| workspace_elements(n, o, device))
            .call(|[dy, dbias, workspace]| backward(dy, dbias, workspace))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Error;
    use crate::testing::*;

    /// The rows with the bias, and the gradient of the bias added to `start`.
    fn run(y: &[f64], bias: &[f64], dy: &[f64], start: &[f64], dtype: DType) -> [Buffer; 2] {
        let o = bias.len();
        let (mut y, dy) = (buffer(y, &[y.len() / o, o], dtype), buffer(dy, &[dy.len() / o, o], dtype));
        let mut dbias = buffer(start, &[o], DType::F32);
        forward(&mut y, &buffer(bias, &[o], dtype)).unwrap();
        let mut space = workspace(workspace_elements(dy.shape()[0], o, DeviceKind::Cpu));
        backward(&dy, &mut dbias, &mut space).unwrap();
        [y, dbias]
    }

    fn matches_reference(n: usize, o: usize) {
        let [y, dy, bias, start] = [(1, n * o), (2, n * o), (3, o), (4, o)].map(|(seed, size)| numbers(seed, size));
        for dtype in [DType::F32, DType::BF16] {
            let bias: Vec<f64> = buffer(&bias, &[o], dtype).read_f32().unwrap().into_iter().map(f64::from).collect();
            let [y_ours, dbias] = run(&y, &bias, &dy, &start, dtype);
            assert_near(&y_ours, &reference::forward(&y, &bias));
            let expected: Vec<f64> =
                reference::backward(&dy, o).into_iter().zip(&start).map(|(sum, start)| sum + start).collect();
            assert_within(&dbias, &expected, 1e-5);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn any_shape_matches_the_reference(n in 1usize..80, o in 1usize..300) {
            matches_reference(n, o);
        }
    }

    #[test]
    fn many_rows_match_the_reference() {
        matches_reference(2500, 6);
        assert!(workspace_elements(1 << 20, 1024, DeviceKind::Cpu) <= 64 * 1024);
    }

    #[test]
    fn f32_matches_pytorch() {
        let golden = Golden::load("bias");
        let [y, bias, dy] = ["y_NO", "bias_O", "dy_NO"].map(|name| golden.values(name));
        let [sum, dbias] = run(&y, &bias, &dy, &vec![0.0; bias.len()], DType::F32);
        assert_near(&sum, &golden.values("sum_NO"));
        assert_near(&dbias, &golden.values("dbias_O"));
    }

    #[test]
    fn wrong_arguments_are_refused_by_name() {
        let mut y = zeros(&[4, 6], DType::F32);
        let error = forward(&mut y, &zeros(&[5], DType::F32)).unwrap_err();
        assert_eq!(error.to_string(), "bias::forward: `bias_O` has shape [5], expected [6]");
        let row = y.view(6, &[6]).unwrap();
        let error = forward(&mut y, &row).unwrap_err();
        assert!(matches!(error, Error::Aliased { output: "y_NO", other: "bias_O", .. }), "{error}");
        let error = backward(&y, &mut zeros(&[6], DType::BF16), &mut workspace(64)).unwrap_err();
        assert!(matches!(error, Error::DType { argument: "dbias_O", .. }), "{error}");
        assert!(backward(&y, &mut zeros(&[6], DType::F32), &mut workspace(1)).is_err());
    }
}
