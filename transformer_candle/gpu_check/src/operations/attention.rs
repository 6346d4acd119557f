//! Attention: whole sequences forward and backward, and decoding with a KV cache.

use kernels::attention::{AttentionShape, Saved};
use kernels::{Buffer, DType, Device, DeviceKind, HeadLayout, attention};

use super::bounds::{BF16_ATTENTION, EXACT, F32};
use super::input_generator::InputGenerator;
use crate::case::Case;
use crate::device_under_test::BufferContents;
use crate::part::Size;
use training::Result;

/// Sizes of an attention case: batch, sequence length and heads.
#[derive(Clone, Copy)]
struct AttentionCase {
    batch: usize,
    length: usize,
    layout: HeadLayout,
    /// Whether the sequences hold several documents.
    packed: bool,
}

impl AttentionCase {
    const fn new(batch: usize, length: usize, heads: usize, kv_heads: usize, head_size: usize) -> Self {
        Self { batch, length, layout: HeadLayout { heads, kv_heads, head_size }, packed: false }
    }

    const fn packed(self) -> Self {
        Self { packed: true, ..self }
    }

    fn tokens(&self) -> usize {
        self.batch * self.length
    }

    fn shape(&self) -> AttentionShape {
        AttentionShape { heads: self.layout, batch: self.batch, sequence_length: self.length }
    }

    fn text(&self) -> String {
        let HeadLayout { heads, kv_heads, head_size } = self.layout;
        let documents = if self.packed { ", documents" } else { "" };
        format!("{} x {}, {heads}/{kv_heads} x {head_size}{documents}", self.batch, self.length)
    }
}

const SMALL: [AttentionCase; 3] = [
    AttentionCase::new(1, 33, 2, 1, 32),
    AttentionCase::new(1, 20, 1, 1, 40),
    AttentionCase::new(1, 33, 1, 1, 32).packed(),
];
const FULL: [AttentionCase; 9] = [
    AttentionCase::new(2, 33, 2, 1, 32),
    AttentionCase::new(1, 130, 6, 2, 40),
    AttentionCase::new(1, 1, 4, 4, 64),
    AttentionCase::new(2, 300, 4, 1, 96),
    AttentionCase::new(1, 777, 24, 8, 64),
    AttentionCase::new(1, 1000, 16, 4, 128),
    AttentionCase::new(1, 2048, 32, 8, 64),
    AttentionCase::new(2, 301, 4, 1, 64).packed(),
    AttentionCase::new(1, 900, 4, 2, 128).packed(),
];

pub(super) fn visit(size: Size, inputs: &mut InputGenerator, visit: &mut dyn FnMut(&Case) -> Result<()>) -> Result<()> {
    let list = match size {
        Size::Small => SMALL.as_slice(),
        Size::Full => &FULL,
    };
    for sizes in list {
        visit(&forward(inputs, *sizes))?;
        visit(&backward(inputs, *sizes)?)?;
    }
    for sizes in list.iter().filter(|sizes| !sizes.packed) {
        visit(&decode(inputs, *sizes, 0))?;
        // One new token, then three, after a cache of `length` tokens.
        visit(&decode(inputs, AttentionCase { length: 1, ..*sizes }, sizes.length))?;
        visit(&decode(inputs, AttentionCase { length: 3, ..*sizes }, sizes.length))?;
        // After enough tokens that the keys are split over programs.
        visit(&decode(inputs, AttentionCase { length: 3, ..*sizes }, sizes.length + 200))?;
    }
    Ok(())
}

fn bound(inputs: &InputGenerator) -> f64 {
    if inputs.dtype == DType::BF16 { BF16_ATTENTION } else { F32 }
}

/// Draws the position of the first token of each token's document. Read only if sequences are packed.
fn documents(inputs: &mut InputGenerator, sizes: AttentionCase) -> BufferContents {
    let mut bits = Vec::with_capacity(sizes.tokens());
    for _ in 0..sizes.batch {
        let mut first = 0;
        for position in 0..sizes.length {
            if position > 0 && inputs.random.below(12) == 0 {
                first = position;
            }
            bits.push(first as u32);
        }
    }
    BufferContents { dtype: DType::I32, bits }
}

fn forward(inputs: &mut InputGenerator, sizes: AttentionCase) -> Case {
    let (AttentionCase { batch, length, layout, packed }, shape) = (sizes, sizes.shape());
    let (qkv, out) = ([sizes.tokens(), layout.packed_width()], [sizes.tokens(), layout.query_width()]);
    Case::new(inputs.name("attention::forward"), sizes.text())
        .input("qkv", &qkv, inputs.numbers(&qkv))
        .input("documents", &[sizes.tokens()], documents(inputs, sizes))
        .output("out", &out, inputs.dtype, bound(inputs))
        .output("log_sum_exp", &[batch, layout.heads, length], DType::F32, F32)
        .workspace(move |device| attention::forward_workspace_elements(&shape, device))
        .call(move |[qkv, documents, out, lse, workspace]| {
            let documents = packed.then_some(&*documents);
            attention::forward(qkv, documents, &shape, out, lse, workspace)
        })
}

fn backward(inputs: &mut InputGenerator, sizes: AttentionCase) -> Result<Case> {
    let (AttentionCase { batch, length, layout, packed }, shape) = (sizes, sizes.shape());
    let (wide, narrow) = ([sizes.tokens(), layout.packed_width()], [sizes.tokens(), layout.query_width()]);
    let (qkv, documents) = (inputs.numbers(&wide), documents(inputs, sizes));
    let [out, lse] = saved(&qkv, &documents, sizes, inputs.dtype)?;
    Ok(Case::new(inputs.name("attention::backward"), sizes.text())
        .input("qkv", &wide, qkv)
        .input("documents", &[sizes.tokens()], documents)
        .input("out", &narrow, out)
        .input("log_sum_exp", &[batch, layout.heads, length], lse)
        .input("dout", &narrow, inputs.numbers(&narrow))
        .output("dqkv", &wide, inputs.dtype, bound(inputs))
        .workspace(move |device| attention::backward_workspace_elements(&shape, device))
        .call(move |[qkv, documents, out, lse, dout, dqkv, workspace]| {
            let documents = packed.then_some(&*documents);
            let saved = Saved { qkv_NP: qkv, documents_N: documents, out_NHE: out, lse_BHT: lse };
            attention::backward(&saved, dout, &shape, dqkv, workspace)
        }))
}

/// Returns what the forward pass saves, output and log-sum-exp, computed in F32 on the CPU.
fn saved(
    qkv: &BufferContents,
    documents: &BufferContents,
    sizes: AttentionCase,
    dtype: DType,
) -> Result<[BufferContents; 2]> {
    let (AttentionCase { batch, length, layout, packed }, shape) = (sizes, sizes.shape());
    let zeros = |shape: &[usize]| Buffer::zeros(shape, DType::F32, &Device::Cpu);
    let mut wide = zeros(&[sizes.tokens(), layout.packed_width()])?;
    qkv.widened().write_to(&mut wide)?;
    let mut document_starts = Buffer::zeros(&[sizes.tokens()], DType::I32, &Device::Cpu)?;
    documents.write_to(&mut document_starts)?;
    let document_starts = packed.then_some(&document_starts);
    let (mut out, mut lse) = (zeros(&[sizes.tokens(), layout.query_width()])?, zeros(&[batch, layout.heads, length])?);
    let needed = attention::forward_workspace_elements(&shape, DeviceKind::Cpu);
    attention::forward(&wide, document_starts, &shape, &mut out, &mut lse, &mut zeros(&[needed])?)?;
    Ok([BufferContents::from_numbers(out.read_f32()?, dtype), BufferContents::read(&lse)?])
}

fn decode(inputs: &mut InputGenerator, sizes: AttentionCase, past: usize) -> Case {
    let AttentionCase { length: new, layout, .. } = sizes;
    let (qkv, out) = ([new, layout.packed_width()], [new, layout.query_width()]);
    let cache = [past + new + 5, layout.key_width()];
    let text = AttentionCase { batch: 1, ..sizes }.text();
    Case::new(inputs.name("attention::decode"), format!("{text} after {past}"))
        .input("qkv", &qkv, inputs.numbers(&qkv))
        .updated("keys", &cache, inputs.numbers(&cache), EXACT)
        .updated("values", &cache, inputs.numbers(&cache), EXACT)
        .output("out", &out, inputs.dtype, bound(inputs))
        .workspace(move |device| attention::decode_workspace_elements(&layout, new, device))
        .call(move |[qkv, keys, values, out, workspace]| {
            attention::decode(qkv, &layout, past, keys, values, out, workspace)
        })
}
