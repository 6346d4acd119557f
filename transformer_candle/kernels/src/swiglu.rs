//! SwiGLU: `silu(gate) * up` on the packed output of the gate/up projection (Shazeer, "GLU Variants Improve Transformer",
//! arXiv:2002.05202), and its gradient.
//!
//! Legend: N tokens, I intermediate size, 2I a row `[gate | up]`.

use crate::access::Arguments;
use crate::element::with_element;
use crate::{Buffer, Result, cpu};

/// `out = silu(gate) * up` with `silu(x) = x / (1 + e^-x)`. Both F32 or both BF16.
pub fn forward(gate_up_N2I: &Buffer, out_NI: &mut Buffer) -> Result<()> {
    let (dtype, [n, i]) = (out_NI.dtype(), sizes(out_NI));
    let arguments = Arguments::of("swiglu::forward")
        .input("gate_up_N2I", gate_up_N2I, dtype, &[n, 2 * i])
        .output("out_NI", out_NI, dtype, &[n, i]);
    arguments.cpu(|access| {
        with_element!("swiglu::forward", "out_NI", dtype, E => {
            cpu::swiglu::forward::<E>(gate_up_N2I.slice(access), out_NI.slice_mut(access), i);
            Ok(())
        })
    })
}

/// Writes the gradient of gate and up, of which nothing but their values is needed. All F32 or all BF16.
///
/// With s = sigmoid(gate): `dgate = dout * up * s * (1 + gate * (1 - s))`, `dup = dout * gate * s`.
pub fn backward(gate_up_N2I: &Buffer, dout_NI: &Buffer, dgate_up_N2I: &mut Buffer) -> Result<()> {
    let (dtype, [n, i]) = (dout_NI.dtype(), sizes(dout_NI));
    let arguments = Arguments::of("swiglu::backward")
        .input("gate_up_N2I", gate_up_N2I, dtype, &[n, 2 * i])
        .input("dout_NI", dout_NI, dtype, &[n, i])
        .output("dgate_up_N2I", dgate_up_N2I, dtype, &[n, 2 * i]);
    arguments.cpu(|access| {
        with_element!("swiglu::backward", "dout_NI", dtype, E => {
            let (gate_up, dout) = (gate_up_N2I.slice::<E>(access), dout_NI.slice(access));
            cpu::swiglu::backward(gate_up, dout, dgate_up_N2I.slice_mut(access), i);
            Ok(())
        })
    })
}

/// N, I of the tensor that has them; every argument is then checked against these.
fn sizes(rows_NI: &Buffer) -> [usize; 2] {
    [0, 1].map(|axis| rows_NI.shape().get(axis).copied().unwrap_or(0))
}

/// The operation in the plainest terms.
pub mod reference {
    use crate::Real;

    /// See [`super::forward`].
    pub fn forward<F: Real>(gate_up_N2I: &[F], out_NI: &mut [F], i: usize) {
        for (gate_up, out) in gate_up_N2I.chunks_exact(2 * i).zip(out_NI.chunks_exact_mut(i)) {
            let (gate, up) = gate_up.split_at(i);
            for j in 0..i {
                out[j] = gate[j] * sigmoid(gate[j]) * up[j];
            }
        }
    }

    /// See [`super::backward`].
    pub fn backward<F: Real>(gate_up_N2I: &[F], dout_NI: &[F], dgate_up_N2I: &mut [F], i: usize) {
        let rows = gate_up_N2I.chunks_exact(2 * i).zip(dout_NI.chunks_exact(i)).zip(dgate_up_N2I.chunks_exact_mut(2 * i));
        for ((gate_up, dout), dgate_up) in rows {
            let (gate, up) = gate_up.split_at(i);
            let (dgate, dup) = dgate_up.split_at_mut(i);
            for j in 0..i {
                let s = sigmoid(gate[j]);
                dgate[j] = dout[j] * up[j] * s * (F::ONE + gate[j] * (F::ONE - s));
                dup[j] = dout[j] * gate[j] * s;
            }
        }
    }

    fn sigmoid<F: Real>(x: F) -> F {
        F::ONE / (F::ONE + (-x).exp())
    }
}
