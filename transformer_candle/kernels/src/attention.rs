//! Causal attention of packed QKV rows with grouped key/value heads, scale 1 / sqrt(E), without ever holding a score
//! for every pair of positions (Dao et al., "`FlashAttention`", arXiv:2205.14135). `rope` comes before.
//!
//! Legend: N tokens = B sequences of T positions, H query heads, K key/value heads (query head h uses h / (H / K)), E
//! head size, P = (H + 2K) * E, C capacity of a cache in tokens, S new tokens.
//!
//! A sequence may hold several documents one after the other, each of which then sees itself only: `documents_N`, I32,
//! holds for every token the position within its sequence at which its document begins. It never decreases within a
//! sequence.

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::cpu::attention::CallShape;
use crate::cuda::{self, KernelArg};
use crate::element::with_element;
use crate::{Buffer, DeviceKind, HeadLayout, Result, cpu};

pub use crate::heads::AttentionShape;

/// The inputs and outputs of [`forward`], saved for [`backward`].
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a> {
    /// Queries, keys and values.
    pub qkv_NP: &'a Buffer,
    /// The start of every token's document, as given to [`forward`]; None where sequences are not divided.
    pub documents_N: Option<&'a Buffer>,
    /// The output of [`forward`].
    pub out_NHE: &'a Buffer,
    /// The log-sum-exp of every row's scores, F32.
    pub lse_BHT: &'a Buffer,
}

/// Writes `out`, [N, H * E], and for [`backward`] the log of every row's sum of e^score, `lse` F32 [B, H, T].
/// `qkv` and `out` are both F32 or both BF16.
pub fn forward(
    qkv_NP: &Buffer,
    documents_N: Option<&Buffer>,
    shape: &AttentionShape,
    out_NHE: &mut Buffer,
    lse_BHT: &mut Buffer,
    workspace: &mut Buffer,
) -> Result<()> {
    const OPERATION: &str = "attention::forward";
    let &AttentionShape { heads, batch, sequence_length } = shape;
    heads.check(OPERATION)?;
    let (dtype, n) = (qkv_NP.dtype(), shape.tokens());
    let arguments = Arguments::new(OPERATION)
        .input("qkv_NP", qkv_NP, dtype, &[n, heads.packed_width()])
        .optional_input("documents_N", documents_N, DType::I32, &[n])
        .output("out_NHE", out_NHE, dtype, &[n, heads.query_width()])
        .output("lse_BHT", lse_BHT, DType::F32, &[batch, heads.heads, sequence_length])
        .workspace(workspace, forward_workspace_elements(shape, qkv_NP.device().kind()));
    let (qkv, documents) = (KernelArg::from(qkv_NP), documents_N.map(KernelArg::from));
    let outputs = [KernelArg::from(&*out_NHE), KernelArg::from(&*lse_BHT)];
    let cpu = |access: &Access<'_>| {
        let shape = CallShape::whole(shape);
        let documents = documents_N.map(|documents| documents.slice(access));
        with_element!(OPERATION, "qkv_NP", dtype, E => {
            let (out, lse) = (out_NHE.slice_mut(access), lse_BHT.slice_mut(access));
            let workspace = workspace.slice_mut(access);
            cpu::attention::forward::<E>(qkv_NP.slice(access), documents, &shape, out, lse, workspace);
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::attention::forward(qkv, documents, outputs, shape))
}

/// Writes every element of `dqkv` from what [`forward`] read and wrote and the gradient of its output. All F32 or all
/// BF16, but for `lse`.
pub fn backward(
    saved: &Saved<'_>,
    dout_NHE: &Buffer,
    shape: &AttentionShape,
    dqkv_NP: &mut Buffer,
    workspace: &mut Buffer,
) -> Result<()> {
    const OPERATION: &str = "attention::backward";
    let &Saved { qkv_NP, documents_N, out_NHE, lse_BHT } = saved;
    let &AttentionShape { heads, batch, sequence_length } = shape;
    heads.check(OPERATION)?;
    let (dtype, n) = (qkv_NP.dtype(), shape.tokens());
    let arguments = Arguments::new(OPERATION)
        .input("qkv_NP", qkv_NP, dtype, &[n, heads.packed_width()])
        .optional_input("documents_N", documents_N, DType::I32, &[n])
        .input("out_NHE", out_NHE, dtype, &[n, heads.query_width()])
        .input("lse_BHT", lse_BHT, DType::F32, &[batch, heads.heads, sequence_length])
        .input("dout_NHE", dout_NHE, dtype, &[n, heads.query_width()])
        .output("dqkv_NP", dqkv_NP, dtype, &[n, heads.packed_width()])
        .workspace(workspace, backward_workspace_elements(shape, qkv_NP.device().kind()));
    let [qkv, out, lse, dout] = [qkv_NP, out_NHE, lse_BHT, dout_NHE].map(KernelArg::from);
    let (documents, [dqkv, delta]) = (documents_N.map(KernelArg::from), [&*dqkv_NP, &*workspace].map(KernelArg::from));
    let cpu = |access: &Access<'_>| {
        let shape = CallShape::whole(shape);
        with_element!(OPERATION, "qkv_NP", dtype, E => {
            let saved = cpu::attention::Saved {
                qkv: qkv_NP.slice::<E>(access),
                documents: documents_N.map(|documents| documents.slice(access)),
                out: out_NHE.slice(access),
                lse: lse_BHT.slice(access),
                dout: dout_NHE.slice(access),
            };
            cpu::attention::backward(&saved, &shape, dqkv_NP.slice_mut(access), workspace.slice_mut(access));
            Ok(())
        })
    };
    arguments.run(cpu, || {
        let saved = cuda::attention::Saved { qkv, documents, out, lse, dout };
        cuda::attention::backward(&saved, dqkv, delta, shape)
    })
}

/// Attention of S new tokens of one sequence whose first `past` tokens are cached: appends the new keys and values to
/// the caches, both [C, K * E], and writes `out`, [S, H * E]. `past` is 0 for a prompt. All F32 or all BF16; keys and
/// queries already turned by `rope`. The workspace is [`decode_workspace_elements`].
pub fn decode(
    qkv_SP: &Buffer,
    layout: &HeadLayout,
    past: usize,
    keys_CKE: &mut Buffer,
    values_CKE: &mut Buffer,
    out_SHE: &mut Buffer,
    workspace: &mut Buffer,
) -> Result<()> {
    const OPERATION: &str = "attention::decode";
    layout.check(OPERATION)?;
    let size = |buffer: &Buffer| buffer.shape().first().copied().unwrap_or(0);
    let (dtype, new, capacity) = (qkv_SP.dtype(), size(qkv_SP), size(keys_CKE));
    let arguments = Arguments::new(OPERATION)
        .input("qkv_SP", qkv_SP, dtype, &[new, layout.packed_width()])
        .output("keys_CKE", keys_CKE, dtype, &[capacity, layout.key_width()])
        .output("values_CKE", values_CKE, dtype, &[capacity, layout.key_width()])
        .output("out_SHE", out_SHE, dtype, &[new, layout.query_width()])
        .workspace(workspace, decode_workspace_elements(layout, new, qkv_SP.device().kind()))
        .require(past.checked_add(new).is_some_and(|end| end <= capacity), || {
            format!("{new} tokens after {past} do not fit a cache of {capacity}")
        });
    let [qkv, keys, values] = [qkv_SP, &*keys_CKE, &*values_CKE].map(KernelArg::from);
    let outputs = [&*out_SHE, &*workspace].map(KernelArg::from);
    let cpu = |access: &Access<'_>| {
        let shape = CallShape { layout: *layout, batch: 1, length: new, past };
        with_element!(OPERATION, "qkv_SP", dtype, E => {
            let (keys, values) = (keys_CKE.slice_mut(access), values_CKE.slice_mut(access));
            let (out, workspace) = (out_SHE.slice_mut(access), workspace.slice_mut(access));
            cpu::attention::decode::<E>(qkv_SP.slice(access), &shape, keys, values, out, workspace);
            Ok(())
        })
    };
    arguments.run(cpu, || {
        let cache = cuda::attention::Cache { keys, values, past };
        cuda::attention::decode(qkv, cache, outputs, layout, new)
    })
}

/// Elements of F32 workspace for all three functions with at most these sequences and positions. It follows from the
/// sizes alone: on a CPU scratch for a fixed number of tasks, whatever the threads; on a GPU two numbers per row, for
/// the gradient.
pub fn workspace_elements(shape: &AttentionShape, device: DeviceKind) -> usize {
    forward_workspace_elements(shape, device).max(backward_workspace_elements(shape, device))
}

/// Elements of F32 workspace for [`forward`].
pub fn forward_workspace_elements(shape: &AttentionShape, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => cpu::attention::workspace_elements(&CallShape::whole(shape)),
        DeviceKind::Cuda => 0,
    }
}

/// Elements of F32 workspace for [`decode`] of at most `new` tokens.
pub fn decode_workspace_elements(layout: &HeadLayout, new: usize, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => {
            cpu::attention::workspace_elements(&CallShape { layout: *layout, batch: 1, length: new, past: 0 })
        }
        DeviceKind::Cuda => cuda::attention::decode_workspace_elements(layout, new),
    }
}

/// Elements of F32 workspace for [`backward`].
pub fn backward_workspace_elements(shape: &AttentionShape, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => cpu::attention::backward_workspace_elements(&CallShape::whole(shape)),
        DeviceKind::Cuda => 2 * shape.tokens() * shape.heads.heads,
    }
}

/// The operation in the plainest terms.
pub mod reference {
    use crate::{HeadLayout, Real};

    /// Returns `out_NHE` and `lse_BHT`; see [`super::forward`]. T is the rows of `qkv_NP` over `batch`.
    pub fn forward<R: Real>(
        qkv_NP: &[R],
        documents_N: Option<&[i32]>,
        layout: &HeadLayout,
        batch: usize,
    ) -> [Vec<R>; 2] {
        let tokens = qkv_NP.len() / layout.packed_width();
        let (mut out_NHE, mut lse_BHT) =
            (vec![R::ZERO; tokens * layout.query_width()], vec![R::ZERO; tokens * layout.heads]);
        for row in rows(layout, documents_N, batch, tokens / batch) {
            let scores = row.scores(qkv_NP);
            let row_max = scores.iter().copied().fold(scores[0], R::max);
            let sum = scores.iter().map(|&score| (score - row_max).exp()).sum::<R>();
            lse_BHT[row.statistic] = row_max + sum.ln();
            for e in 0..layout.head_size {
                let term = |(t, &score): (usize, &R)| (score - row_max).exp() / sum * qkv_NP[row.value(t) + e];
                out_NHE[row.out + e] = (row.first..).zip(&scores).map(term).sum();
            }
        }
        [out_NHE, lse_BHT]
    }

    /// Returns `dqkv_NP`; see [`super::backward`].
    pub fn backward<R: Real>(
        qkv_NP: &[R],
        documents_N: Option<&[i32]>,
        out_NHE: &[R],
        lse_BHT: &[R],
        dout_NHE: &[R],
        layout: &HeadLayout,
        batch: usize,
    ) -> Vec<R> {
        let mut dqkv_NP = vec![R::ZERO; qkv_NP.len()];
        let heads = 0..layout.head_size;
        for row in rows(layout, documents_N, batch, qkv_NP.len() / layout.packed_width() / batch) {
            let delta = heads.clone().map(|e| dout_NHE[row.out + e] * out_NHE[row.out + e]).sum::<R>();
            for (t, score) in (row.first..).zip(row.scores(qkv_NP)) {
                let p = (score - lse_BHT[row.statistic]).exp();
                let dp = heads.clone().map(|e| dout_NHE[row.out + e] * qkv_NP[row.value(t) + e]).sum::<R>();
                let ds = p * (dp - delta) * row.scale();
                for e in heads.clone() {
                    dqkv_NP[row.value(t) + e] += p * dout_NHE[row.out + e];
                    dqkv_NP[row.key(t) + e] += ds * qkv_NP[row.query + e];
                    dqkv_NP[row.query + e] += ds * qkv_NP[row.key(t) + e];
                }
            }
        }
        dqkv_NP
    }

    /// A query head at one position: the offsets of its elements, its output, its log-sum-exp and its keys.
    struct Row<'a> {
        layout: &'a HeadLayout,
        query: usize,
        out: usize,
        statistic: usize,
        first_key: usize,
        /// Positions of the first key that it attends to, and of the last, which is its own.
        first: usize,
        position: usize,
    }

    impl Row<'_> {
        fn key(&self, t: usize) -> usize {
            self.first_key + t * self.layout.packed_width()
        }

        fn value(&self, t: usize) -> usize {
            self.key(t) + self.layout.key_width()
        }

        fn scale<R: Real>(&self) -> R {
            R::ONE / R::from_f64(self.layout.head_size as f64).sqrt()
        }

        fn scores<R: Real>(&self, qkv_NP: &[R]) -> Vec<R> {
            let term = |t, e| qkv_NP[self.query + e] * qkv_NP[self.key(t) + e];
            (self.first..=self.position)
                .map(|t| (0..self.layout.head_size).map(|e| term(t, e)).sum::<R>() * self.scale())
                .collect()
        }
    }

    fn rows<'a>(
        layout: &'a HeadLayout,
        documents_N: Option<&'a [i32]>,
        batch: usize,
        length: usize,
    ) -> impl Iterator<Item = Row<'a>> {
        let (heads, head_size) = (layout.heads, layout.head_size);
        (0..batch * heads * length).map(move |statistic| {
            let (sequence, head, position) =
                (statistic / length / heads, statistic / length % heads, statistic % length);
            let token = sequence * length + position;
            let first_key = (heads + head / layout.group_size()) * head_size;
            Row {
                layout,
                query: token * layout.packed_width() + head * head_size,
                out: token * layout.query_width() + head * head_size,
                statistic,
                first_key: sequence * length * layout.packed_width() + first_key,
                first: documents_N.map_or(0, |documents_N| documents_N[token].unsigned_abs() as usize),
                position,
            }
        })
    }
}

#[path = "attention_cases.rs"]
pub mod cases;

#[cfg(test)]
#[path = "attention_tests.rs"]
mod tests;
