//! Language-model head and cross-entropy as one operation: loss and gradients in one pass over chunks of rows, so that the
//! logits of all tokens never exist at once.
//!
//! Legend: N tokens, D hidden, V padded vocabulary (rows of the weight), C rows of a chunk, W elements from row to row of logits.
//!
//! For a token with target t, over the real vocabulary only (the first `vocab_size` rows of the weight; the padding gets no
//! probability and no gradient):
//! ```text
//! loss     = log(sum_v exp(logit_v)) - logit_t
//! dlogit_v = scale (softmax_v - [v = t])
//! ```
//! The logits are F32 whatever the weights are: C rows cost little, and their rounding would reach every gradient. Their gradient
//! takes their place. Beside weights in BF16 a card rounds it on the way, like every operand of a product there; a CPU that multiplies
//! BF16 does for `dhidden`, which is BF16 itself, and not for `dweight`.
//!
//! On a card the padding's rows of the weight are multiplied too, with gradients of zero: they must be finite.

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::cuda::head_cross_entropy::{Gradients, Inputs};
use crate::element::with_element;
use crate::{Accumulate, Buffer, DeviceKind, Error, Result, cpu, cuda};

/// A token with this target has no loss and no gradient.
pub const IGNORED_TARGET: i32 = -100;

/// Adds scale times the sum of the tokens' losses to `loss_1` (F32), writes `dhidden_ND`, and writes or adds to `dweight_VD` (F32).
///
/// `scale_1` (F32) holds 1 / (targets of the whole accumulated batch). `hidden_ND`, `weight_VD` and `dhidden_ND` are F32 or BF16 alike,
/// `targets_N` is I32, `logits_CW` F32 scratch of any number of rows, of V elements or more: [`logits_width`] is a good choice. On a
/// card it is V. A target that is neither in `0..vocab_size` nor
/// [`IGNORED_TARGET`] is [`Error::OutOfRange`] on the CPU. A card cannot say so before it is done: loss and gradients are NaN there,
/// which keeps the optimizer from taking the step.
pub fn forward_backward(
    hidden_ND: &Buffer,
    weight_VD: &Buffer,
    targets_N: &Buffer,
    vocab_size: usize,
    scale_1: &Buffer,
    loss_1: &mut Buffer,
    dhidden_ND: &mut Buffer,
    dweight_VD: &mut Buffer,
    accumulate: Accumulate,
    logits_CW: &mut Buffer,
    workspace: &mut Buffer,
) -> Result<()> {
    let (sizes, dtype) = (Sizes::of(hidden_ND, weight_VD, logits_CW, vocab_size), hidden_ND.dtype());
    let Sizes { n, d, v, .. } = sizes;
    let arguments = sizes
        .arguments("head_cross_entropy::forward_backward", hidden_ND, weight_VD, targets_N, logits_CW, workspace)
        .input("scale_1", scale_1, DType::F32, &[1])
        .output("loss_1", loss_1, DType::F32, &[1])
        .output("dhidden_ND", dhidden_ND, dtype, &[n, d])
        .output("dweight_VD", dweight_VD, DType::F32, &[v, d]);
    let inputs = Inputs::of(hidden_ND, weight_VD, targets_N, logits_CW, workspace, sizes);
    let gradients = Gradients {
        scale: scale_1.into(),
        loss: (&*loss_1).into(),
        dhidden: (&*dhidden_ND).into(),
        dweight: (&*dweight_VD).into(),
        accumulate,
    };
    let cpu = |access: &Access<'_>| {
        let targets = checked_targets("head_cross_entropy::forward_backward", targets_N.slice(access), vocab_size)?;
        let scale = scale_1.slice::<f32>(access)[0];
        with_element!("head_cross_entropy::forward_backward", "hidden_ND", dtype, E => {
            let loss = cpu::head_cross_entropy::forward_backward::<E>(
                hidden_ND.slice(access),
                weight_VD.slice(access),
                targets,
                sizes,
                scale,
                dhidden_ND.slice_mut(access),
                dweight_VD.slice_mut(access),
                accumulate,
                logits_CW.slice_mut(access),
                workspace.slice_mut(access),
            );
            let total = &mut loss_1.slice_mut::<f32>(access)[0];
            *total = (f64::from(*total) + f64::from(scale) * loss) as f32;
            Ok(())
        })
    };
    let cuda = |card: &cuda::Cuda| {
        let requests = cuda::head_cross_entropy::forward_backward(&inputs, &gradients);
        cuda::perform(card, &requests)
    };
    arguments.run(cpu, cuda)?;
    if n == 0 && accumulate == Accumulate::Begin {
        // No chunk wrote it.
        dweight_VD.zero()?;
    }
    Ok(())
}

/// Each token's loss in nats, 0 where the target is ignored, into `losses_N` (F32). The rest as in [`forward_backward`].
pub fn forward(
    hidden_ND: &Buffer,
    weight_VD: &Buffer,
    targets_N: &Buffer,
    vocab_size: usize,
    losses_N: &mut Buffer,
    logits_CW: &mut Buffer,
    workspace: &mut Buffer,
) -> Result<()> {
    let (sizes, dtype) = (Sizes::of(hidden_ND, weight_VD, logits_CW, vocab_size), hidden_ND.dtype());
    let arguments = sizes
        .arguments("head_cross_entropy::forward", hidden_ND, weight_VD, targets_N, logits_CW, workspace)
        .output("losses_N", losses_N, DType::F32, &[sizes.n]);
    let inputs = Inputs::of(hidden_ND, weight_VD, targets_N, logits_CW, workspace, sizes);
    let losses = cuda::Value::from(&*losses_N);
    let cpu = |access: &Access<'_>| {
        let targets = checked_targets("head_cross_entropy::forward", targets_N.slice(access), vocab_size)?;
        with_element!("head_cross_entropy::forward", "hidden_ND", dtype, E => {
            cpu::head_cross_entropy::forward::<E>(
                hidden_ND.slice(access),
                weight_VD.slice(access),
                targets,
                sizes,
                losses_N.slice_mut(access),
                logits_CW.slice_mut(access),
                workspace.slice_mut(access),
            );
            Ok(())
        })
    };
    arguments.run(cpu, |card| cuda::perform(card, &cuda::head_cross_entropy::forward(&inputs, losses)))
}

/// W for so large a vocabulary (padded to multiples of 64). On a CPU rows do not lie a power of two apart, where they would share the
/// lines of its caches.
pub fn logits_width(vocabulary: usize, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => vocabulary + 16,
        DeviceKind::Cuda => vocabulary,
    }
}

/// Elements of F32 workspace for logits of C rows and weights of so many columns and (padded) rows.
pub fn workspace_elements(chunk_rows: usize, hidden_size: usize, vocabulary: usize, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => cpu::head_cross_entropy::workspace_elements(chunk_rows, hidden_size, vocabulary),
        DeviceKind::Cuda => cuda::head_cross_entropy::workspace_elements(chunk_rows),
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) n: usize,
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

impl Sizes {
    fn of(hidden_ND: &Buffer, weight_VD: &Buffer, logits_CW: &Buffer, vocab_size: usize) -> Self {
        let size = |buffer: &Buffer, axis: usize| buffer.shape().get(axis).copied().unwrap_or(0);
        let ([v, d], [c, w]) = [weight_VD, logits_CW].map(|buffer| [size(buffer, 0), size(buffer, 1)]).into();
        Self { n: size(hidden_ND, 0), d, v, vocab_size, c, w }
    }

    /// The arguments that both directions share.
    fn arguments(
        self,
        operation: &'static str,
        hidden_ND: &Buffer,
        weight_VD: &Buffer,
        targets_N: &Buffer,
        logits_CW: &Buffer,
        workspace: &Buffer,
    ) -> Arguments {
        let (Self { n, d, v, vocab_size, c, w }, dtype) = (self, hidden_ND.dtype());
        let device = hidden_ND.device().kind();
        Arguments::of(operation)
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

    /// The gradients of `scale * sum(losses)` with respect to `hidden_ND` and `weight_VD`.
    pub fn gradients<R: Real>(
        hidden_ND: &[R],
        weight_VD: &[R],
        targets_N: &[i32],
        d: usize,
        scale: R,
    ) -> (Vec<R>, Vec<R>) {
        let mut dhidden_ND = vec![R::ZERO; hidden_ND.len()];
        let mut dweight_VD = vec![R::ZERO; weight_VD.len()];
        let rows = hidden_ND.chunks(d).zip(dhidden_ND.chunks_mut(d)).zip(targets_N);
        for ((hidden, dhidden), &target) in rows.filter(|(_, target)| **target != IGNORED_TARGET) {
            let logits = logits(hidden, weight_VD, d);
            let normalizer = log_sum_exp(&logits);
            for (v, &logit) in logits.iter().enumerate() {
                let hit = if v == target as usize { R::ONE } else { R::ZERO };
                let dlogit = scale * ((logit - normalizer).exp() - hit);
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

#[cfg(test)]
#[path = "head_cross_entropy_tests.rs"]
mod tests;
