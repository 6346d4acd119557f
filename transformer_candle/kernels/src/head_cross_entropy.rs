//! Language-model head and cross-entropy as one operation: loss and gradients in one pass over chunks of rows, so that
//! the logits of all tokens never exist at once.
//!
//! Legend: N tokens, D hidden, V padded vocabulary (rows of the weight), C rows of a chunk, W elements from row to row
//! of logits.
//!
//! For a token with target t, over the real vocabulary only (the first `vocab_size` rows of the weight; the padding
//! gets no probability and no gradient):
//! ```text
//! loss     = log(sum_v exp(logit_v)) - logit_t
//! dlogit_v = scale (softmax_v - [v = t])
//! ```
//! A z-loss (Chowdhery et al., "`PaLM`", arXiv:2204.02311, section 5) of coefficient z adds `z lse^2` per token to what
//! is minimised, `lse = log(sum_v exp(logit_v))`, which keeps logits from drifting: `dlogit_v` gains
//! `scale 2 z lse softmax_v`. The loss that is returned stays the cross-entropy.
//!
//! The logits are F32 whatever the weights are: C rows cost little, and their rounding would reach every gradient.
//! Their gradient overwrites them. Beside weights in BF16 a GPU rounds it on the way, like every operand of a
//! GEMM there; a CPU that multiplies BF16 does for `dhidden`, which is BF16 itself, and not for `dweight`.
//!
//! On a GPU the padding's rows of the weight are multiplied too, with gradients of zero: they must be finite.

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::element::with_element;
use crate::{Buffer, DeviceKind, Element, Error, Result, WriteMode, cpu, cuda};

/// A token with this target has no loss and no gradient.
pub const IGNORED_TARGET: i32 = -100;

/// The sizes of one call of the head.
#[derive(Clone, Copy)]
pub(crate) struct HeadSizes {
    /// Tokens.
    pub(crate) n: usize,
    /// Hidden size.
    pub(crate) d: usize,
    /// Padded vocabulary.
    pub(crate) v: usize,
    /// Real vocabulary.
    pub(crate) vocab_size: usize,
    /// Rows of a chunk.
    pub(crate) c: usize,
    /// Elements from row to row of logits.
    pub(crate) w: usize,
}

/// The inputs of [`forward`] and [`forward_backward`].
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// The normed output of the last block, F32 or BF16.
    pub hidden_ND: &'a Buffer,
    /// The head, of the same element type.
    pub weight_VD: &'a Buffer,
    /// The token to be predicted at each position, or [`IGNORED_TARGET`]; I32.
    pub targets_N: &'a Buffer,
    /// Rows of the weight that stand for tokens; the others are padding.
    pub vocab_size: usize,
}

/// The gradients that [`forward_backward`] computes.
#[derive(Debug)]
pub struct Gradients<'a> {
    /// Gradient of `hidden_ND`, overwritten; of its element type.
    pub dhidden_ND: &'a mut Buffer,
    /// Gradient of the weight, overwritten or accumulated; F32. None for a head that does not train.
    pub dweight_VD: Option<&'a mut Buffer>,
    /// Whether `dweight_VD` is overwritten or accumulated.
    pub write_mode: WriteMode,
    /// Coefficient of the z-loss; 0 for none.
    pub z_loss: f32,
}

/// Adds scale times the sum of the tokens' losses to `loss_1` (F32), writes `dhidden_ND`, and writes or adds to
/// `dweight_VD` (F32), where it is given.
///
/// `scale_1` (F32) holds 1 / (targets of the whole accumulated batch). `logits_CW` is F32 scratch of any number of
/// rows, of V elements or more: [`logits_width`] is a good choice. On a GPU it is V. A target that is neither in
/// `0..vocab_size` nor [`IGNORED_TARGET`] is [`Error::OutOfRange`] on the CPU. A GPU cannot say so before it is done:
/// loss and gradients are NaN there, which keeps the optimizer from taking the step.
pub fn forward_backward(
    inputs: &Inputs<'_>,
    scale_1: &Buffer,
    loss_1: &mut Buffer,
    gradients: Gradients<'_>,
    logits_CW: &mut Buffer,
    workspace: &mut Buffer,
) -> Result<()> {
    const OPERATION: &str = "head_cross_entropy::forward_backward";
    let Gradients { dhidden_ND, mut dweight_VD, write_mode, z_loss } = gradients;
    let (sizes, dtype) = (HeadSizes::new(inputs, logits_CW), inputs.hidden_ND.dtype());
    let HeadSizes { n, d, v, .. } = sizes;
    let arguments = sizes
        .arguments(OPERATION, inputs, logits_CW, workspace)
        .input("scale_1", scale_1, DType::F32, &[1])
        .output("loss_1", loss_1, DType::F32, &[1])
        .output("dhidden_ND", dhidden_ND, dtype, &[n, d])
        .optional_output("dweight_VD", dweight_VD.as_deref(), DType::F32, &[v, d]);
    let requested = cuda::head_cross_entropy::Inputs::new(
        [inputs.hidden_ND, inputs.weight_VD],
        inputs.targets_N,
        logits_CW,
        workspace,
        sizes,
    );
    let gradients = cuda::head_cross_entropy::Gradients {
        scale: scale_1.into(),
        loss: (&*loss_1).into(),
        dhidden: (&*dhidden_ND).into(),
        dweight: dweight_VD.as_deref().map(cuda::Operand::from),
        write_mode,
        z_loss,
    };
    let cpu = |access: &Access<'_>| {
        let scale = scale_1.slice::<f32>(access)[0];
        with_element!(OPERATION, "hidden_ND", dtype, E => {
            let inputs = sliced::<E>(OPERATION, inputs, sizes, access)?;
            let gradients = cpu::head_cross_entropy::Gradients {
                dhidden: dhidden_ND.slice_mut(access),
                dweight: dweight_VD.as_deref_mut().map(|dweight| dweight.slice_mut(access)),
                write_mode,
                z_loss,
            };
            let (logits, workspace) = (logits_CW.slice_mut(access), workspace.slice_mut(access));
            let loss = cpu::head_cross_entropy::forward_backward(&inputs, scale, gradients, logits, workspace);
            let total = &mut loss_1.slice_mut::<f32>(access)[0];
            *total = (f64::from(*total) + f64::from(scale) * loss) as f32;
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::head_cross_entropy::forward_backward(&requested, &gradients))?;
    match dweight_VD {
        // Without tokens no chunk has overwritten it.
        Some(dweight_VD) if n == 0 && write_mode == WriteMode::Overwrite => dweight_VD.zero(),
        _ => Ok(()),
    }
}

/// Writes each token's loss in nats, 0 where the target is ignored, to `losses_N` (F32). The other arguments are those
/// of [`forward_backward`].
pub fn forward(
    inputs: &Inputs<'_>,
    losses_N: &mut Buffer,
    logits_CW: &mut Buffer,
    workspace: &mut Buffer,
) -> Result<()> {
    const OPERATION: &str = "head_cross_entropy::forward";
    let (sizes, dtype) = (HeadSizes::new(inputs, logits_CW), inputs.hidden_ND.dtype());
    let arguments =
        sizes.arguments(OPERATION, inputs, logits_CW, workspace).output("losses_N", losses_N, DType::F32, &[sizes.n]);
    let requested = cuda::head_cross_entropy::Inputs::new(
        [inputs.hidden_ND, inputs.weight_VD],
        inputs.targets_N,
        logits_CW,
        workspace,
        sizes,
    );
    let losses = cuda::KernelArg::from(&*losses_N);
    let cpu = |access: &Access<'_>| {
        with_element!(OPERATION, "hidden_ND", dtype, E => {
            let inputs = sliced::<E>(OPERATION, inputs, sizes, access)?;
            let (logits, workspace) = (logits_CW.slice_mut(access), workspace.slice_mut(access));
            cpu::head_cross_entropy::forward(&inputs, losses_N.slice_mut(access), logits, workspace);
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::head_cross_entropy::forward(&requested, losses))
}

/// W, the elements from row to row of logits, for a vocabulary of this size (padded to multiples of 64). On a CPU rows
/// do not lie a power of two apart, where they would share the lines of its caches.
pub fn logits_width(vocabulary: usize, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => vocabulary + 16,
        DeviceKind::Cuda => vocabulary,
    }
}

/// Elements of F32 workspace for logits of C rows and a weight of D columns and V (padded) rows.
pub fn workspace_elements(chunk_rows: usize, hidden_size: usize, vocabulary: usize, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => cpu::head_cross_entropy::workspace_elements(chunk_rows, hidden_size, vocabulary),
        DeviceKind::Cuda => cuda::head_cross_entropy::workspace_elements(chunk_rows),
    }
}

impl HeadSizes {
    fn new(inputs: &Inputs<'_>, logits_CW: &Buffer) -> Self {
        let &Inputs { hidden_ND, weight_VD, vocab_size, .. } = inputs;
        let ([v, d], [c, w]) = (weight_VD.sizes(), logits_CW.sizes());
        Self { n: hidden_ND.size(0), d, v, vocab_size, c, w }
    }

    /// Lists the arguments that both directions share, with their checks.
    fn arguments(
        self,
        operation: &'static str,
        inputs: &Inputs<'_>,
        logits_CW: &Buffer,
        workspace: &Buffer,
    ) -> Arguments {
        let &Inputs { hidden_ND, weight_VD, targets_N, .. } = inputs;
        let (Self { n, d, v, vocab_size, c, w }, dtype) = (self, hidden_ND.dtype());
        let device = hidden_ND.device().kind();
        Arguments::new(operation)
            .require(0 < vocab_size && vocab_size <= v, || format!("vocab_size {vocab_size} is not within 1..={v}"))
            .require(c > 0 && d > 0, || format!("{c} rows of logits and {d} hidden values make no chunk"))
            .input("hidden_ND", hidden_ND, dtype, &[n, d])
            .input("weight_VD", weight_VD, dtype, &[v, d])
            .input("targets_N", targets_N, DType::I32, &[n])
            .require(w == v || (w > v && device == DeviceKind::Cpu), || format!("rows of {w} logits for {v} words"))
            .output("logits_CW", logits_CW, DType::F32, &[c, w])
            .workspace(workspace, workspace_elements(c, d, v, device))
    }
}

/// The inputs as CPU slices, their targets checked.
fn sliced<'a, E: Element>(
    operation: &'static str,
    inputs: &Inputs<'a>,
    sizes: HeadSizes,
    access: &'a Access<'_>,
) -> Result<cpu::head_cross_entropy::Inputs<'a, E>> {
    let targets = checked_targets(operation, inputs.targets_N.slice(access), sizes.vocab_size)?;
    let (hidden, weight) = (inputs.hidden_ND.slice(access), inputs.weight_VD.slice(access));
    Ok(cpu::head_cross_entropy::Inputs { hidden, weight, targets, sizes })
}

fn checked_targets<'a>(operation: &'static str, targets: &'a [i32], limit: usize) -> Result<&'a [i32]> {
    let valid = |target: i32| target == IGNORED_TARGET || usize::try_from(target).is_ok_and(|target| target < limit);
    match targets.iter().position(|&target| !valid(target)) {
        None => Ok(targets),
        Some(position) => {
            let value = i64::from(targets[position]);
            Err(Error::OutOfRange { operation, argument: "targets_N", position, value, limit })
        }
    }
}

/// The plain version.
pub mod reference {
    use super::IGNORED_TARGET;
    use crate::Real;

    /// Every token's loss, 0 where ignored; `weight_VD` holds the real vocabulary only.
    pub fn losses<R: Real>(hidden_ND: &[R], weight_VD: &[R], targets_N: &[i32], d: usize) -> Vec<R> {
        let loss = |(hidden, &target): (&[R], &i32)| {
            let logits = logits(hidden, weight_VD, d);
            if target == IGNORED_TARGET { R::ZERO } else { log_sum_exp(&logits) - logits[target as usize] }
        };
        hidden_ND.chunks(d).zip(targets_N).map(loss).collect()
    }

    /// The gradients of `scale * sum(losses + z_loss * lse^2)` with respect to `hidden_ND` and `weight_VD`.
    pub fn gradients<R: Real>(
        hidden_ND: &[R],
        weight_VD: &[R],
        targets_N: &[i32],
        d: usize,
        [scale, z_loss]: [R; 2],
    ) -> (Vec<R>, Vec<R>) {
        let mut dhidden_ND = vec![R::ZERO; hidden_ND.len()];
        let mut dweight_VD = vec![R::ZERO; weight_VD.len()];
        let rows = hidden_ND.chunks(d).zip(dhidden_ND.chunks_mut(d)).zip(targets_N);
        for ((hidden, dhidden), &target) in rows.filter(|(_, target)| **target != IGNORED_TARGET) {
            let logits = logits(hidden, weight_VD, d);
            let normalizer = log_sum_exp(&logits);
            for (v, &logit) in logits.iter().enumerate() {
                let hit = if v == target as usize { R::ONE } else { R::ZERO };
                let dlogit = scale * ((logit - normalizer).exp() * (R::ONE + (z_loss + z_loss) * normalizer) - hit);
                for k in 0..d {
                    dhidden[k] += dlogit * weight_VD[v * d + k];
                    dweight_VD[v * d + k] += dlogit * hidden[k];
                }
            }
        }
        (dhidden_ND, dweight_VD)
    }

    fn logits<R: Real>(hidden: &[R], weight_VD: &[R], d: usize) -> Vec<R> {
        let dot = |row: &[R]| row.iter().zip(hidden).map(|(&w, &h)| w * h).sum();
        weight_VD.chunks(d).map(dot).collect()
    }

    fn log_sum_exp<R: Real>(logits: &[R]) -> R {
        let largest = logits.iter().copied().fold(logits[0], R::max);
        largest + logits.iter().map(|&logit| (logit - largest).exp()).sum::<R>().ln()
    }
}

#[path = "head_cross_entropy_cases.rs"]
pub mod cases;

#[cfg(test)]
#[path = "head_cross_entropy_tests.rs"]
mod tests;
