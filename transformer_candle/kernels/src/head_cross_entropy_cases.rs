//! Calls for checks and benchmarks.

use super::{Gradients, IGNORED_TARGET, Inputs as HeadInputs, forward, forward_backward, workspace_elements};
use crate::cases::bounds::{BF16, F32, F32_SUM};
use crate::cases::{self, BufferContents, Case, CaseList, Inputs, Size};
use crate::{DType, WriteMode};

/// Sizes of a head.
#[derive(Clone, Copy)]
pub struct Sizes {
    /// Tokens.
    pub n: usize,
    /// Hidden size.
    pub d: usize,
    /// Padded vocabulary.
    pub v: usize,
    /// Vocabulary.
    pub vocab_size: usize,
    /// Rows of a chunk of logits.
    pub c: usize,
    /// Elements from row to row of logits.
    pub w: usize,
    /// Whether about a fifth of the targets is ignored.
    pub ignores: bool,
}

pub(crate) fn add(size: Size, dtype: DType, list: &mut CaseList) {
    let heads = match size {
        Size::Small => vec![Sizes { n: 9, d: 64, v: 128, vocab_size: 71, c: 4, w: 128, ignores: true }],
        Size::Medium => vec![Sizes { n: 150, d: 48, v: 1024, vocab_size: 1000, c: 64, w: 1024, ignores: true }],
        Size::Full => vec![
            Sizes { n: 100, d: 80, v: 128, vocab_size: 71, c: 64, w: 128, ignores: true },
            Sizes { n: 1024, d: 2048, v: 50_048, vocab_size: 50_000, c: 640, w: 50_048, ignores: true },
        ],
    };
    // The largest models are trained in BF16; in F32 the CPU reference alone would take a minute.
    let largest = 1 << 14;
    for sizes in heads.into_iter().filter(|head| dtype == DType::BF16 || head.v <= largest) {
        list.add(move |inputs| losses(inputs, sizes));
        for write_mode in [WriteMode::Overwrite, WriteMode::Accumulate] {
            list.add(move |inputs| loss_and_gradients(inputs, sizes, write_mode));
        }
    }
}

impl Sizes {
    fn case(self, inputs: &mut Inputs, operation: &str, mode: &str) -> Case {
        let Self { n, d, v, vocab_size, c, w, ignores } = self;
        let target = |inputs: &mut Inputs| match inputs.random.below(5) {
            0 if ignores => IGNORED_TARGET.cast_unsigned(),
            _ => inputs.random.below(vocab_size) as u32,
        };
        let targets = (0..n).map(|_| target(inputs)).collect();
        Case::new(inputs.name(operation), format!("{n} x {d} -> {vocab_size} of {v}, by {c}{mode}"))
            .input("hidden", &[n, d], inputs.numbers(&[n, d]))
            .input("weight", &[v, d], inputs.numbers(&[v, d]))
            .input("targets", &[n], BufferContents { dtype: DType::I32, bits: targets })
            .scratch("logits", &[c, w], DType::F32)
            .workspace(move |device| workspace_elements(c, d, v, device))
    }
}

/// [`forward`]. The logits are F32 sums of exact products; everything after them is F32.
pub fn losses(inputs: &mut Inputs, sizes: Sizes) -> Case {
    let Sizes { n, d, v, vocab_size, .. } = sizes;
    sizes
        .case(inputs, "head_cross_entropy::forward", "")
        .flops(2 * n * d * v)
        .output("losses", &[n], DType::F32, F32_SUM)
        .call(move |[hidden_ND, weight_VD, targets_N, logits, workspace, losses]| {
            forward(&HeadInputs { hidden_ND, weight_VD, targets_N, vocab_size }, losses, logits, workspace)
        })
}

/// [`forward_backward`]. The gradients are GEMMs of the logits' gradients, which are rounded to BF16.
pub fn loss_and_gradients(inputs: &mut Inputs, sizes: Sizes, write_mode: WriteMode) -> Case {
    let Sizes { n, d, v, vocab_size, .. } = sizes;
    let weight_bound = if inputs.dtype == DType::BF16 { BF16 } else { F32 };
    let zeros = || BufferContents::from_numbers(vec![0.0; v * d], DType::F32);
    let case = sizes
        .case(inputs, "head_cross_entropy::forward_backward", cases::mode(write_mode))
        .flops(6 * n * d * v)
        .input("scale", &[1], BufferContents::from_numbers([1.0 / n as f32], DType::F32))
        .updated("loss", &[1], BufferContents::from_numbers([1.25], DType::F32), F32_SUM)
        .output("dhidden", &[n, d], inputs.dtype, inputs.bound());
    let case = match write_mode {
        WriteMode::Overwrite => case.output("dweight", &[v, d], DType::F32, weight_bound),
        WriteMode::Accumulate => case.updated("dweight", &[v, d], zeros(), weight_bound),
    };
    case.call(move |[hidden_ND, weight_VD, targets_N, logits, workspace, scale, loss, dhidden_ND, dweight]| {
        let inputs = HeadInputs { hidden_ND, weight_VD, targets_N, vocab_size };
        let gradients = Gradients { dhidden_ND, dweight_VD: Some(dweight), write_mode, z_loss: 1e-4 };
        forward_backward(&inputs, scale, loss, gradients, logits, workspace)
    })
}
