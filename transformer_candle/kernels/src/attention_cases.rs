//! Calls for checks and benchmarks: whole sequences forward and backward, and decoding with a KV cache.

use super::{
    AttentionShape, Saved, backward, backward_workspace_elements, decode, decode_workspace_elements, forward,
    forward_workspace_elements,
};
use crate::cases::bounds::{BF16_ATTENTION, EXACT, F32};
use crate::cases::{BufferContents, Case, CaseList, Inputs, Size};
use crate::{Buffer, DType, Device, DeviceKind, HeadLayout, Result};

/// Sizes of a case.
#[derive(Clone, Copy)]
pub struct Sizes {
    /// Sequences, their length and their heads.
    pub shape: AttentionShape,
    /// Whether the sequences hold several documents.
    pub packed: bool,
}

impl Sizes {
    const fn new([batch, sequence_length]: [usize; 2], [heads, kv_heads, head_size]: [usize; 3]) -> Self {
        let heads = HeadLayout { heads, kv_heads, head_size };
        Self { shape: AttentionShape { heads, batch, sequence_length }, packed: false }
    }

    const fn packed(self) -> Self {
        Self { packed: true, ..self }
    }

    fn tokens(&self) -> usize {
        self.shape.batch * self.shape.sequence_length
    }

    fn text(&self) -> String {
        let AttentionShape { heads: HeadLayout { heads, kv_heads, head_size }, batch, sequence_length } = self.shape;
        let documents = if self.packed { ", documents" } else { "" };
        format!("{batch} x {sequence_length}, {heads}/{kv_heads} x {head_size}{documents}")
    }
}

pub(crate) fn add(size: Size, _dtype: DType, cases: &mut CaseList) {
    let list = match size {
        Size::Small => vec![
            Sizes::new([1, 33], [2, 1, 32]),
            Sizes::new([1, 20], [1, 1, 40]),
            Sizes::new([1, 33], [1, 1, 32]).packed(),
        ],
        Size::Medium => vec![
            Sizes::new([3, 150], [6, 2, 32]),
            Sizes::new([40, 20], [2, 2, 40]),
            Sizes::new([2, 100], [2, 1, 32]).packed(),
        ],
        Size::Full => vec![
            Sizes::new([2, 33], [2, 1, 32]),
            Sizes::new([1, 130], [6, 2, 40]),
            Sizes::new([1, 1], [4, 4, 64]),
            Sizes::new([2, 300], [4, 1, 96]),
            Sizes::new([1, 777], [24, 8, 64]),
            Sizes::new([1, 1000], [16, 4, 128]),
            Sizes::new([1, 2048], [32, 8, 64]),
            Sizes::new([2, 301], [4, 1, 64]).packed(),
            Sizes::new([1, 900], [4, 2, 128]).packed(),
        ],
    };
    for &sizes in &list {
        cases.add(move |inputs| outputs(inputs, sizes));
        cases.try_add(move |inputs| gradient(inputs, sizes));
    }
    for Sizes { shape, .. } in list.into_iter().filter(|sizes| !sizes.packed) {
        let (layout, length) = (shape.heads, shape.sequence_length);
        // A prompt; one new token, then three, after a cache; and after enough tokens that the keys are split over
        // programs.
        for [new, past] in [[length, 0], [1, length], [3, length], [3, length + 200]] {
            cases.add(move |inputs| decoding(inputs, layout, new, past));
        }
    }
}

fn bound(inputs: &Inputs) -> f64 {
    if inputs.dtype == DType::BF16 { BF16_ATTENTION } else { F32 }
}

/// Draws the position of the first token of each token's document. Read only if sequences are packed.
fn documents(inputs: &mut Inputs, sizes: Sizes) -> BufferContents {
    let mut bits = Vec::with_capacity(sizes.tokens());
    for _ in 0..sizes.shape.batch {
        let mut first = 0;
        for position in 0..sizes.shape.sequence_length {
            if position > 0 && inputs.random.below(12) == 0 {
                first = position;
            }
            bits.push(first as u32);
        }
    }
    BufferContents { dtype: DType::I32, bits }
}

/// The shapes of packed rows, of output rows and of the log-sum-exp.
fn shapes(sizes: Sizes) -> ([usize; 2], [usize; 2], [usize; 3]) {
    let AttentionShape { heads, batch, sequence_length } = sizes.shape;
    let n = sizes.tokens();
    ([n, heads.packed_width()], [n, heads.query_width()], [batch, heads.heads, sequence_length])
}

/// FLOPs of a matmul over the causal half of the scores.
fn causal_flops(Sizes { shape, .. }: Sizes) -> usize {
    shape.batch * shape.sequence_length * shape.sequence_length * shape.heads.query_width()
}

/// [`forward`]: two matmuls over the causal half.
pub fn outputs(inputs: &mut Inputs, sizes: Sizes) -> Case {
    let (Sizes { shape, packed }, (wide, narrow, lse)) = (sizes, shapes(sizes));
    Case::new(inputs.name("attention::forward"), sizes.text())
        .flops(2 * causal_flops(sizes))
        .input("qkv", &wide, inputs.numbers(&wide))
        .input("documents", &[sizes.tokens()], documents(inputs, sizes))
        .output("out", &narrow, inputs.dtype, bound(inputs))
        .output("log_sum_exp", &lse, DType::F32, F32)
        .workspace(move |device| forward_workspace_elements(&shape, device))
        .call(move |[qkv, documents, out, lse, workspace]| {
            forward(qkv, packed.then_some(&*documents), &shape, out, lse, workspace)
        })
}

/// [`backward`]: five matmuls over the causal half.
pub fn gradient(inputs: &mut Inputs, sizes: Sizes) -> Result<Case> {
    let (Sizes { shape, packed }, (wide, narrow, lse)) = (sizes, shapes(sizes));
    let (qkv, documents) = (inputs.numbers(&wide), documents(inputs, sizes));
    let [saved_out, saved_lse] = saved(&qkv, &documents, sizes, inputs.dtype)?;
    Ok(Case::new(inputs.name("attention::backward"), sizes.text())
        .flops(5 * causal_flops(sizes))
        .input("qkv", &wide, qkv)
        .input("documents", &[sizes.tokens()], documents)
        .input("out", &narrow, saved_out)
        .input("log_sum_exp", &lse, saved_lse)
        .input("dout", &narrow, inputs.numbers(&narrow))
        .output("dqkv", &wide, inputs.dtype, bound(inputs))
        .workspace(move |device| backward_workspace_elements(&shape, device))
        .call(move |[qkv, documents, out, lse, dout, dqkv, workspace]| {
            let documents_N = packed.then_some(&*documents);
            let saved = Saved { qkv_NP: qkv, documents_N, out_NHE: out, lse_BHT: lse };
            backward(&saved, dout, &shape, dqkv, workspace)
        }))
}

/// Returns what the forward pass saves, output and log-sum-exp, computed in F32 on the CPU.
fn saved(qkv: &BufferContents, documents: &BufferContents, sizes: Sizes, dtype: DType) -> Result<[BufferContents; 2]> {
    let (Sizes { shape, packed }, (wide, narrow, lse)) = (sizes, shapes(sizes));
    let zeros = |shape: &[usize]| Buffer::zeros(shape, DType::F32, &Device::Cpu);
    let mut qkv_NP = zeros(&wide)?;
    qkv.widened().write_to(&mut qkv_NP)?;
    let mut documents_N = Buffer::zeros(&[sizes.tokens()], DType::I32, &Device::Cpu)?;
    documents.write_to(&mut documents_N)?;
    let (mut out_NHE, mut lse_BHT) = (zeros(&narrow)?, zeros(&lse)?);
    let mut workspace = zeros(&[forward_workspace_elements(&shape, DeviceKind::Cpu)])?;
    let documents_N = packed.then_some(&documents_N);
    forward(&qkv_NP, documents_N, &shape, &mut out_NHE, &mut lse_BHT, &mut workspace)?;
    Ok([BufferContents::from_numbers(out_NHE.read_f32()?, dtype), BufferContents::read(&lse_BHT)?])
}

/// [`decode`] of new tokens after `past` in a cache with room for five more.
pub fn decoding(inputs: &mut Inputs, layout: HeadLayout, new: usize, past: usize) -> Case {
    let HeadLayout { heads, kv_heads, head_size } = layout;
    let (qkv, out) = ([new, layout.packed_width()], [new, layout.query_width()]);
    let cache = [past + new + 5, layout.key_width()];
    Case::new(inputs.name("attention::decode"), format!("{new} after {past}, {heads}/{kv_heads} x {head_size}"))
        .input("qkv", &qkv, inputs.numbers(&qkv))
        .updated("keys", &cache, inputs.numbers(&cache), EXACT)
        .updated("values", &cache, inputs.numbers(&cache), EXACT)
        .output("out", &out, inputs.dtype, bound(inputs))
        .workspace(move |device| decode_workspace_elements(&layout, new, device))
        .call(move |[qkv, keys, values, out, workspace]| decode(qkv, &layout, past, keys, values, out, workspace))
}
