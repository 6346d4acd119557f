//! Attention: whole sequences forward and backward, and new tokens behind a cache.

use kernels::{Buffer, DType, Device, DeviceKind, HeadLayout, attention};

use super::{BF16_ATTENTION, EXACT, F32, Inputs};
use crate::Result;
use crate::commands::gpu_check::Size;
use crate::commands::gpu_check::case::Case;
use crate::commands::gpu_check::subject::Bits;

/// Sequences, their positions, and the heads.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    length: usize,
    layout: HeadLayout,
}

impl Sizes {
    const fn new(batch: usize, length: usize, heads: usize, kv_heads: usize, head_size: usize) -> Self {
        Self { batch, length, layout: HeadLayout { heads, kv_heads, head_size } }
    }

    fn tokens(&self) -> usize {
        self.batch * self.length
    }

    fn text(&self) -> String {
        let HeadLayout { heads, kv_heads, head_size } = self.layout;
        format!("{} x {}, {heads}/{kv_heads} x {head_size}", self.batch, self.length)
    }
}

const SMALL: [Sizes; 2] = [Sizes::new(1, 33, 2, 1, 32), Sizes::new(1, 20, 1, 1, 40)];
const FULL: [Sizes; 7] = [
    Sizes::new(2, 33, 2, 1, 32),
    Sizes::new(1, 130, 6, 2, 40),
    Sizes::new(1, 1, 4, 4, 64),
    Sizes::new(2, 300, 4, 1, 96),
    Sizes::new(1, 777, 24, 8, 64),
    Sizes::new(1, 1000, 16, 4, 128),
    Sizes::new(1, 2048, 32, 8, 64),
];

pub(super) fn visit(size: Size, inputs: &mut Inputs, visit: &mut dyn FnMut(&Case) -> Result<()>) -> Result<()> {
    let list = match size {
        Size::Small => SMALL.as_slice(),
        Size::Full => &FULL,
    };
    for sizes in list {
        visit(&forward(inputs, *sizes))?;
        visit(&backward(inputs, *sizes)?)?;
        visit(&decode(inputs, *sizes, 0))?;
    }
    for sizes in list {
        // One new token, then a few, behind a cache that is filled that far.
        visit(&decode(inputs, Sizes { length: 1, ..*sizes }, sizes.length))?;
        visit(&decode(inputs, Sizes { length: 3, ..*sizes }, sizes.length))?;
    }
    Ok(())
}

fn bound(inputs: &Inputs) -> f64 {
    if inputs.dtype == DType::BF16 { BF16_ATTENTION } else { F32 }
}

fn forward(inputs: &mut Inputs, sizes: Sizes) -> Case {
    let Sizes { batch, length, layout } = sizes;
    let (qkv, out) = ([sizes.tokens(), layout.packed_width()], [sizes.tokens(), layout.query_width()]);
    Case::new(inputs.name("attention::forward"), sizes.text())
        .input("qkv", &qkv, inputs.numbers(&qkv))
        .output("out", &out, inputs.dtype, bound(inputs))
        .output("log_sum_exp", &[batch, layout.heads, length], DType::F32, F32)
        .workspace(move |_, device| attention::forward_workspace_elements(&layout, batch, length, device))
        .call(move |[qkv, out, lse, workspace]| attention::forward(qkv, &layout, batch, length, out, lse, workspace))
}

fn backward(inputs: &mut Inputs, sizes: Sizes) -> Result<Case> {
    let Sizes { batch, length, layout } = sizes;
    let (wide, narrow) = ([sizes.tokens(), layout.packed_width()], [sizes.tokens(), layout.query_width()]);
    let qkv = inputs.numbers(&wide);
    let [out, lse] = saved(&qkv, sizes, inputs.dtype)?;
    Ok(Case::new(inputs.name("attention::backward"), sizes.text())
        .input("qkv", &wide, qkv)
        .input("out", &narrow, out)
        .input("log_sum_exp", &[batch, layout.heads, length], lse)
        .input("dout", &narrow, inputs.numbers(&narrow))
        .output("dqkv", &wide, inputs.dtype, bound(inputs))
        .workspace(move |_, device| attention::backward_workspace_elements(&layout, batch, length, device))
        .call(move |[qkv, out, lse, dout, dqkv, workspace]| {
            attention::backward(qkv, out, lse, dout, &layout, batch, length, dqkv, workspace)
        }))
}

/// What the forward pass saves, computed in F32 on the CPU.
fn saved(qkv: &Bits, sizes: Sizes, dtype: DType) -> Result<[Bits; 2]> {
    let Sizes { batch, length, layout } = sizes;
    let zeros = |shape: &[usize]| Buffer::zeros(shape, DType::F32, &Device::Cpu);
    let mut wide = zeros(&[sizes.tokens(), layout.packed_width()])?;
    qkv.widened().write_to(&mut wide)?;
    let (mut out, mut lse) = (zeros(&[sizes.tokens(), layout.query_width()])?, zeros(&[batch, layout.heads, length])?);
    let needed = attention::forward_workspace_elements(&layout, batch, length, DeviceKind::Cpu);
    attention::forward(&wide, &layout, batch, length, &mut out, &mut lse, &mut zeros(&[needed])?)?;
    Ok([Bits::of_numbers(out.read_f32()?, dtype), Bits::read(&lse)?])
}

fn decode(inputs: &mut Inputs, sizes: Sizes, past: usize) -> Case {
    let Sizes { length: new, layout, .. } = sizes;
    let (qkv, out) = ([new, layout.packed_width()], [new, layout.query_width()]);
    let cache = [past + new + 5, layout.key_width()];
    let text = Sizes { batch: 1, ..sizes }.text();
    Case::new(inputs.name("attention::decode"), format!("{text} after {past}"))
        .input("qkv", &qkv, inputs.numbers(&qkv))
        .updated("keys", &cache, inputs.numbers(&cache), EXACT)
        .updated("values", &cache, inputs.numbers(&cache), EXACT)
        .output("out", &out, inputs.dtype, bound(inputs))
        .workspace(move |_, device| attention::forward_workspace_elements(&layout, 1, new, device))
        .call(move |[qkv, keys, values, out, workspace]| {
            attention::decode(qkv, &layout, past, keys, values, out, workspace)
        })
}
