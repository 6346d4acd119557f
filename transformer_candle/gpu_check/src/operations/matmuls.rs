//! Linear layers, and the head with its loss.

use kernels::head_cross_entropy::{Gradients, Inputs};
use kernels::{DType, WriteMode, head_cross_entropy, linear};

use super::bounds::{BF16, F32, F32_SUM};
use super::input_generator::InputGenerator;
use crate::case::Case;
use crate::device_under_test::BufferContents;
use crate::part::Size;
use training::Result;

/// Sizes of a head: tokens `n`, hidden size `d`, padded vocabulary `v`, vocabulary, rows of a chunk `c`.
#[derive(Clone, Copy)]
struct Head {
    n: usize,
    d: usize,
    v: usize,
    vocab_size: usize,
    c: usize,
}

pub(super) fn visit(size: Size, inputs: &mut InputGenerator, visit: &mut dyn FnMut(&Case) -> Result<()>) -> Result<()> {
    let (linear_sizes, heads) = match size {
        Size::Small => (vec![[5, 64, 48]], vec![Head { n: 9, d: 64, v: 128, vocab_size: 71, c: 4 }]),
        Size::Full => (
            vec![[37, 80, 48], [1000, 1536, 2560], [2048, 2048, 3072], [2048, 2048, 16_384], [2048, 8192, 2048]],
            vec![
                Head { n: 100, d: 80, v: 128, vocab_size: 71, c: 64 },
                Head { n: 1024, d: 2048, v: 50_048, vocab_size: 50_000, c: 640 },
            ],
        ),
    };
    for sizes in linear_sizes {
        visit(&forward(inputs, sizes))?;
        visit(&backward_input(inputs, sizes))?;
        visit(&backward_weight(inputs, sizes))?;
    }
    // The largest models are trained in BF16; in F32 the CPU reference alone would take a minute.
    let (dtype, largest) = (inputs.dtype, 1 << 14);
    for head in heads.into_iter().filter(|head| dtype == DType::BF16 || head.v <= largest) {
        visit(&losses(inputs, head))?;
        visit(&loss_and_gradients(inputs, head))?;
    }
    Ok(())
}

fn linear_case(inputs: &InputGenerator, operation: &str, [n, i, o]: [usize; 3]) -> Case {
    Case::new(inputs.name(operation), format!("{n} x {i} -> {o}"))
}

fn forward(inputs: &mut InputGenerator, sizes @ [n, i, o]: [usize; 3]) -> Case {
    linear_case(inputs, "linear::forward", sizes)
        .input("x", &[n, i], inputs.numbers(&[n, i]))
        .input("w", &[o, i], inputs.numbers(&[o, i]))
        .output("y", &[n, o], inputs.dtype, inputs.bound())
        .workspace(move |device| linear::workspace_elements(n, i, o, device))
        .call(|[x, w, y, workspace]| linear::forward(x, w, y, workspace))
}

fn backward_input(inputs: &mut InputGenerator, sizes @ [n, i, o]: [usize; 3]) -> Case {
    linear_case(inputs, "linear::backward_input", sizes)
        .input("dy", &[n, o], inputs.numbers(&[n, o]))
        .input("w", &[o, i], inputs.numbers(&[o, i]))
        .output("dx", &[n, i], inputs.dtype, inputs.bound())
        .workspace(move |device| linear::workspace_elements(n, i, o, device))
        .call(|[dy, w, dx, workspace]| linear::backward_input(dy, w, dx, workspace))
}

fn backward_weight(inputs: &mut InputGenerator, sizes @ [n, i, o]: [usize; 3]) -> Case {
    linear_case(inputs, "linear::backward_weight", sizes)
        .input("dy", &[n, o], inputs.numbers(&[n, o]))
        .input("x", &[n, i], inputs.numbers(&[n, i]))
        .updated("dw", &[o, i], inputs.f32(&[o, i]), F32_SUM)
        .workspace(move |device| linear::workspace_elements(n, i, o, device))
        .call(|[dy, x, dw, workspace]| linear::backward_weight(dy, x, dw, WriteMode::Accumulate, workspace))
}

impl Head {
    fn case(self, inputs: &mut InputGenerator, operation: &str) -> Case {
        let Self { n, d, v, vocab_size, c } = self;
        let target = |inputs: &mut InputGenerator| match inputs.random.below(5) {
            0 => head_cross_entropy::IGNORED_TARGET.cast_unsigned(),
            _ => inputs.random.below(vocab_size) as u32,
        };
        let targets = (0..n).map(|_| target(inputs)).collect();
        Case::new(inputs.name(operation), format!("{n} x {d} -> {vocab_size} of {v}, by {c}"))
            .input("hidden", &[n, d], inputs.numbers(&[n, d]))
            .input("weight", &[v, d], inputs.numbers(&[v, d]))
            .input("targets", &[n], BufferContents { dtype: DType::I32, bits: targets })
            .scratch("logits", &[c, v], DType::F32)
            .workspace(move |device| head_cross_entropy::workspace_elements(c, d, v, device))
    }
}

/// The logits are F32 sums of exact products; everything after them is F32.
fn losses(inputs: &mut InputGenerator, head: Head) -> Case {
    head.case(inputs, "head_cross_entropy::forward").output("losses", &[head.n], DType::F32, F32_SUM).call(
        move |[hidden, weight, targets, logits, workspace, losses]| {
            let inputs =
                Inputs { hidden_ND: hidden, weight_VD: weight, targets_N: targets, vocab_size: head.vocab_size };
            head_cross_entropy::forward(&inputs, losses, logits, workspace)
        },
    )
}

/// The gradients are GEMMs of the logits' gradients, which are rounded to BF16.
fn loss_and_gradients(inputs: &mut InputGenerator, head: Head) -> Case {
    let Head { n, d, v, vocab_size, .. } = head;
    let weight_bound = if inputs.dtype == DType::BF16 { BF16 } else { F32 };
    let scale = BufferContents::from_numbers([1.0 / n as f32], DType::F32);
    head.case(inputs, "head_cross_entropy::forward_backward")
        .input("scale", &[1], scale)
        .updated("loss", &[1], BufferContents::from_numbers([1.25], DType::F32), F32_SUM)
        .output("dhidden", &[n, d], inputs.dtype, inputs.bound())
        .updated("dweight", &[v, d], BufferContents::from_numbers(vec![0.0; v * d], DType::F32), weight_bound)
        .call(move |[hidden, weight, targets, logits, workspace, scale, loss, dhidden, dweight]| {
            let inputs = Inputs { hidden_ND: hidden, weight_VD: weight, targets_N: targets, vocab_size };
            let (write_mode, z_loss) = (WriteMode::Accumulate, 1e-4);
            let gradients = Gradients { dhidden_ND: dhidden, dweight_VD: Some(dweight), write_mode, z_loss };
            head_cross_entropy::forward_backward(&inputs, scale, loss, gradients, logits, workspace)
        })
}
