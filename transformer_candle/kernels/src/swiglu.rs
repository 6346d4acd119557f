//! `SwiGLU`: `silu(gate) * up` on the packed output of the gate/up projection (Shazeer, "GLU Variants Improve
//! Transformer", arXiv:2002.05202), and its gradient.
//!
//! Legend: N tokens, I intermediate size, 2I a row `[gate | up]`.

use crate::access::{Access, Arguments};
use crate::cuda::{self, KernelArg};
use crate::element::with_element;
use crate::{Buffer, Result, cpu};

/// `out = silu(gate) * up` with `silu(x) = x / (1 + e^-x)`. Both F32 or both BF16.
pub fn forward(gate_up_N2I: &Buffer, out_NI: &mut Buffer) -> Result<()> {
    let (dtype, [n, i]) = (out_NI.dtype(), out_NI.sizes());
    let arguments = Arguments::new("swiglu::forward").input("gate_up_N2I", gate_up_N2I, dtype, &[n, 2 * i]).output(
        "out_NI",
        out_NI,
        dtype,
        &[n, i],
    );
    let (gate_up, out) = (KernelArg::from(gate_up_N2I), KernelArg::from(&*out_NI));
    let cpu = |access: &Access<'_>| {
        with_element!("swiglu::forward", "out_NI", dtype, E => {
            cpu::swiglu::forward::<E>(gate_up_N2I.slice(access), out_NI.slice_mut(access), i);
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::swiglu::forward(gate_up, out, [n, i]))
}

/// Overwrites gate and up with their gradients, of which nothing but their values is needed. Both F32 or both BF16.
///
/// With s = sigmoid(gate): `dgate = dout * up * s * (1 + gate * (1 - s))`, `dup = dout * gate * s`.
pub fn backward(gate_up_N2I: &mut Buffer, dout_NI: &Buffer) -> Result<()> {
    let (dtype, [n, i]) = (dout_NI.dtype(), dout_NI.sizes());
    let arguments = Arguments::new("swiglu::backward").input("dout_NI", dout_NI, dtype, &[n, i]).output(
        "gate_up_N2I",
        gate_up_N2I,
        dtype,
        &[n, 2 * i],
    );
    let (gate_up, dout) = (KernelArg::from(&*gate_up_N2I), KernelArg::from(dout_NI));
    let cpu = |access: &Access<'_>| {
        with_element!("swiglu::backward", "dout_NI", dtype, E => {
            cpu::swiglu::backward::<E>(gate_up_N2I.slice_mut(access), dout_NI.slice(access), i);
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::swiglu::backward(gate_up, dout, [n, i]))
}

/// [`backward`] that also recomputes the output: `out_NI` comes in with the output's gradient, and is overwritten by
/// the output, bit for bit as [`forward`] wrote it. For callers that did not keep the output and need it next.
pub fn backward_recomputing(gate_up_N2I: &mut Buffer, out_NI: &mut Buffer) -> Result<()> {
    const OPERATION: &str = "swiglu::backward_recomputing";
    let (dtype, [n, i]) = (out_NI.dtype(), out_NI.sizes());
    let arguments = Arguments::new(OPERATION).output("out_NI", out_NI, dtype, &[n, i]).output(
        "gate_up_N2I",
        gate_up_N2I,
        dtype,
        &[n, 2 * i],
    );
    let (gate_up, out) = (KernelArg::from(&*gate_up_N2I), KernelArg::from(&*out_NI));
    let cpu = |access: &Access<'_>| {
        with_element!(OPERATION, "out_NI", dtype, E => {
            cpu::swiglu::backward_recomputing::<E>(gate_up_N2I.slice_mut(access), out_NI.slice_mut(access), i);
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::swiglu::backward_recomputing(gate_up, out, [n, i]))
}

/// The operation in the plainest terms; `i` is I.
pub mod reference {
    use crate::Real;

    /// See [`super::forward`].
    pub fn forward<R: Real>(gate_up_N2I: &[R], i: usize) -> Vec<R> {
        let silu_times = |gate: R, up: R| gate * sigmoid(gate) * up;
        let row = |row: &[R]| (0..i).map(|j| silu_times(row[j], row[i + j])).collect::<Vec<_>>();
        gate_up_N2I.chunks_exact(2 * i).flat_map(row).collect()
    }

    /// See [`super::backward`].
    pub fn backward<R: Real>(gate_up_N2I: &[R], dout_NI: &[R], i: usize) -> Vec<R> {
        let rows = gate_up_N2I.chunks_exact(2 * i).zip(dout_NI.chunks_exact(i));
        let gradients = rows.flat_map(|(row, dout)| {
            let dgate = (0..i).map(|j| dout[j] * row[i + j] * silu_slope(row[j]));
            let dup = (0..i).map(|j| dout[j] * row[j] * sigmoid(row[j]));
            dgate.chain(dup).collect::<Vec<_>>()
        });
        gradients.collect()
    }

    fn sigmoid<R: Real>(x: R) -> R {
        R::ONE / (R::ONE + (-x).exp())
    }

    fn silu_slope<R: Real>(x: R) -> R {
        sigmoid(x) * (R::ONE + x * (R::ONE - sigmoid(x)))
    }
}

/// Calls for checks and benchmarks, of sizes [N, I].
pub mod cases {
    use super::{backward, backward_recomputing, forward};
    use crate::DType;
    use crate::cases::{Case, CaseList, Inputs, Size};

    pub(crate) fn add(size: Size, _dtype: DType, cases: &mut CaseList) {
        for sizes in size.wide() {
            for make in [activation, gradient, gradient_recomputing] {
                cases.add(move |inputs| make(inputs, sizes));
            }
        }
    }

    /// [`forward`].
    pub fn activation(inputs: &mut Inputs, [n, i]: [usize; 2]) -> Case {
        Case::new(inputs.name("swiglu::forward"), format!("{n} x {i}"))
            .input("gate_up", &[n, 2 * i], inputs.numbers(&[n, 2 * i]))
            .output("out", &[n, i], inputs.dtype, inputs.bound())
            .call(|[gate_up, out]| forward(gate_up, out))
    }

    /// [`backward`].
    pub fn gradient(inputs: &mut Inputs, [n, i]: [usize; 2]) -> Case {
        Case::new(inputs.name("swiglu::backward"), format!("{n} x {i}"))
            .updated("gate_up", &[n, 2 * i], inputs.numbers(&[n, 2 * i]), inputs.bound())
            .input("dout", &[n, i], inputs.numbers(&[n, i]))
            .call(|[gate_up, dout]| backward(gate_up, dout))
    }

    /// [`backward_recomputing`].
    pub fn gradient_recomputing(inputs: &mut Inputs, [n, i]: [usize; 2]) -> Case {
        Case::new(inputs.name("swiglu::backward_recomputing"), format!("{n} x {i}"))
            .updated("gate_up", &[n, 2 * i], inputs.numbers(&[n, 2 * i]), inputs.bound())
            .updated("out", &[n, i], inputs.numbers(&[n, i]), inputs.bound())
            .call(|[gate_up, out]| backward_recomputing(gate_up, out))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor, Var};
    use proptest::prelude::*;

    use super::*;
    use crate::Error;
    use crate::testing::*;

    fn copy(buffer: &Buffer) -> Buffer {
        let mut copy = zeros(buffer.shape(), buffer.dtype());
        copy.copy_from(buffer).unwrap();
        copy
    }

    /// The output and the gradient of one call.
    fn run(gate_up: &[f64], dout: &[f64], i: usize, dtype: DType) -> [Buffer; 2] {
        let n = dout.len() / i;
        let (gate_up, dout) = (buffer(gate_up, &[n, 2 * i], dtype), buffer(dout, &[n, i], dtype));
        let (mut out, mut dgate_up, mut drecomputed) = (zeros(&[n, i], dtype), copy(&gate_up), copy(&gate_up));
        forward(&gate_up, &mut out).unwrap();
        backward(&mut dgate_up, &dout).unwrap();
        let mut recomputed = dout;
        backward_recomputing(&mut drecomputed, &mut recomputed).unwrap();
        for (ours, theirs) in [(&recomputed, &out), (&drecomputed, &dgate_up)] {
            let bits = |buffer: &Buffer| buffer.read_f32().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert_eq!(bits(ours), bits(theirs));
        }
        [out, dgate_up]
    }

    fn inputs(n: usize, i: usize) -> [Vec<f64>; 2] {
        [numbers(1, n * 2 * i).into_iter().map(|x| 8.0 * x).collect(), numbers(2, n * i)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn any_shape_matches_the_reference(n in 1usize..40, i in 1usize..90) {
            let [gate_up, dout] = inputs(n, i);
            for dtype in [DType::F32, DType::BF16] {
                let [out, dgate_up] = run(&gate_up, &dout, i, dtype);
                assert_near(&out, &reference::forward(&gate_up, i));
                assert_near(&dgate_up, &reference::backward(&gate_up, &dout, i));
            }
        }
    }

    #[test]
    fn f32_matches_pytorch() {
        let golden = Golden::load("swiglu");
        let (gate_up, dout, i) = (golden.values("gate_up_N2I"), golden.values("dout_NI"), golden.shape("out_NI")[1]);
        let [out, dgate_up] = run(&gate_up, &dout, i, DType::F32);
        assert_near(&out, &golden.values("out_NI"));
        assert_near(&dgate_up, &golden.values("dgate_up_N2I"));
    }

    #[test]
    fn f32_matches_candle_autograd() {
        let (n, i) = (9, 14);
        let [gate_up, dout] = inputs(n, i);
        let leaf = Var::from_tensor(&Tensor::from_vec(gate_up.clone(), (n, 2 * i), &Device::Cpu).unwrap()).unwrap();
        let (gate, up) = (leaf.narrow(1, 0, i).unwrap(), leaf.narrow(1, i, i).unwrap());
        let silu = (&gate / (gate.neg().unwrap().exp().unwrap() + 1.0).unwrap()).unwrap();
        let product = (silu * up).unwrap();
        let weights = Tensor::from_vec(dout.clone(), (n, i), &Device::Cpu).unwrap();
        let gradients = (&product * weights).unwrap().sum_all().unwrap().backward().unwrap();
        let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let [out, dgate_up] = run(&gate_up, &dout, i, DType::F32);
        assert_near(&out, &values(&product));
        assert_near(&dgate_up, &values(gradients.get(&leaf).unwrap()));
    }

    #[test]
    fn the_references_gradient_is_the_slope_of_its_forward() {
        let [gate_up, dout] = inputs(3, 5);
        let slope = finite_differences(|gate_up| dot(&reference::forward(gate_up, 5), &dout), &gate_up);
        assert_same_gradient(&reference::backward(&gate_up, &dout, 5), &slope);
    }

    #[test]
    fn far_out_values_neither_overflow_nor_get_lost() {
        let [out, dgate_up] = run(&[1e4, -1e4, f64::NAN, 2.0, 2.0, 2.0], &[1.0; 3], 3, DType::F32);
        let (out, dgate_up) = (out.read_f32().unwrap(), dgate_up.read_f32().unwrap());
        assert_eq!((out[0], out[1], out[2].is_nan()), (2e4, 0.0, true));
        assert_eq!((dgate_up[0], dgate_up[1], dgate_up[2].is_nan()), (2.0, 0.0, true));
    }

    #[test]
    fn wrong_arguments_are_refused_by_name() {
        let gate_up = zeros(&[4, 6], DType::F32);
        let error = forward(&gate_up, &mut zeros(&[4, 2], DType::F32)).unwrap_err();
        assert_eq!(error.to_string(), "swiglu::forward: `gate_up_N2I` has shape [4, 6], expected [4, 4]");
        let error = forward(&gate_up, &mut gate_up.view(12, &[4, 3]).unwrap()).unwrap_err();
        assert!(matches!(error, Error::Aliased { output: "out_NI", other: "gate_up_N2I", .. }), "{error}");
        let (mut gradient, dout) = (gate_up.clone(), gate_up.view(12, &[4, 3]).unwrap());
        let error = backward(&mut gradient, &dout).unwrap_err();
        assert!(matches!(error, Error::Aliased { output: "gate_up_N2I", other: "dout_NI", .. }), "{error}");
        let error = forward(&zeros(&[4, 6], DType::I32), &mut zeros(&[4, 3], DType::I32)).unwrap_err();
        assert!(matches!(error, Error::DType { argument: "out_NI", .. }), "{error}");
    }
}
