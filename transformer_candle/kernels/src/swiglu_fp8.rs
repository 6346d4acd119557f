//! [`crate::swiglu`] with results that are rounded to fp8 where they are computed: the same bits as with
//! [`crate::fp8::quantize`] behind it, and two thirds of the bytes moved. Not with one scale for all, which is known only
//! when everything is computed; and not on a CPU, where it is the two one after the other, for comparison.
//!
//! Legend: N tokens, I intermediate size, 2I a row `[gate | up]`.

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::cuda::{self, KernelArg};
use crate::fp8::{Operand, ScaleBlock, TILE};
use crate::{Buffer, DeviceKind, Result, bf16, cpu};

/// Whether the operations take an intermediate size and scales of these blocks.
pub fn is_supported(intermediate_size: usize, block: ScaleBlock) -> bool {
    // Gate and up are in other tiles then.
    block != ScaleBlock::Tensor && intermediate_size.is_multiple_of(TILE)
}

/// Elements of F32 workspace for both: on a CPU for the numbers in between.
pub fn workspace_elements(n: usize, intermediate_size: usize, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cuda => 0,
        DeviceKind::Cpu => (3 * n * intermediate_size).div_ceil(2),
    }
}

/// Writes the codes of `silu(gate) * up` that `out` has. `gate_up_N2I` is BF16.
pub fn forward(gate_up_N2I: &Buffer, out_NI: &mut Operand, workspace: &mut Buffer) -> Result<()> {
    let ([n, width], block) = (gate_up_N2I.sizes(), out_NI.block);
    let sizes @ [_, i] = [n, width / 2];
    let arguments = Arguments::new("swiglu_fp8::forward").input("gate_up_N2I", gate_up_N2I, DType::BF16, &[n, 2 * i]);
    let arguments = out_NI
        .written_by(arguments, sizes)
        .workspace(workspace, workspace_elements(n, i, gate_up_N2I.device().kind()))
        .require(is_supported(i, block), || unsupported(i, block));
    let (gate_up, outputs) = (KernelArg::from(gate_up_N2I), out_NI.pointers());
    let cpu = |access: &Access<'_>| {
        let out = &mut cpu::fp8::as_bf16(workspace.slice_mut(access))[..n * i];
        cpu::swiglu::forward::<bf16>(gate_up_N2I.slice(access), out, i);
        out_NI.encode(out, sizes, access);
        Ok(())
    };
    arguments.run(cpu, || cuda::swiglu_fp8::forward(gate_up, block, outputs, sizes))
}

/// Writes the codes of the gradients of gate and up, for sums over both axes, and those of the output for sums over rows,
/// which the gradient of the down projection's weights is one of. `gate_up_N2I` and `dout_NI` are BF16, and stay.
pub fn backward(
    gate_up_N2I: &Buffer,
    dout_NI: &Buffer,
    dgate_up_N2I: &mut Operand,
    out_NI: &mut Operand,
    workspace: &mut Buffer,
) -> Result<()> {
    let (sizes @ [n, i], block) = (dout_NI.sizes(), out_NI.block);
    let arguments = Arguments::new("swiglu_fp8::backward")
        .input("gate_up_N2I", gate_up_N2I, DType::BF16, &[n, 2 * i])
        .input("dout_NI", dout_NI, DType::BF16, &sizes);
    let arguments = out_NI.written_by(dgate_up_N2I.written_by(arguments, [n, 2 * i]), sizes);
    let outputs = match (dgate_up_N2I.pointers(), out_NI.pointers()) {
        ([Some(gradient), Some(transposed)], [None, Some(out)]) if dgate_up_N2I.block == block => {
            Some([gradient, transposed, out])
        }
        _ => None,
    };
    let arguments = arguments
        .workspace(workspace, workspace_elements(n, i, dout_NI.device().kind()))
        .require(is_supported(i, block), || unsupported(i, block))
        .require(outputs.is_some(), || "it writes both codes of the gradient and the output's transpose".into());
    let inputs = [KernelArg::from(gate_up_N2I), KernelArg::from(dout_NI)];
    let cpu = |access: &Access<'_>| {
        let numbers = cpu::fp8::as_bf16(workspace.slice_mut(access));
        let (gate_up, rest) = numbers.split_at_mut(2 * n * i);
        let out = &mut rest[..n * i];
        gate_up.copy_from_slice(gate_up_N2I.slice(access));
        out.copy_from_slice(dout_NI.slice(access));
        cpu::swiglu::backward_recomputing::<bf16>(gate_up, out, i);
        dgate_up_N2I.encode(gate_up, [n, 2 * i], access);
        out_NI.encode(out, sizes, access);
        Ok(())
    };
    let launches =
        || outputs.map_or_else(Vec::new, |outputs| cuda::swiglu_fp8::backward(inputs, block, outputs, sizes));
    arguments.run(cpu, launches)
}

fn unsupported(i: usize, block: ScaleBlock) -> String {
    format!("it takes intermediate sizes that are multiples of {TILE} and scales of squares, not {i} and {block:?}")
}

/// Calls for checks and benchmarks, of sizes [N, I]: both count the bytes that differ from those of the operations one
/// after the other, on the same device.
pub mod cases {
    use super::{backward, forward, workspace_elements};
    use crate::cases::bounds::EXACT;
    use crate::cases::{Case, CaseList, Inputs, Size};
    use crate::fp8::cases::{count_differing, operand, scratch_codes};
    use crate::fp8::{self, ScaleBlock, quantize};
    use crate::{DType, swiglu};

    pub(crate) fn add(size: Size, dtype: DType, list: &mut CaseList) {
        let sizes = match size {
            Size::Small => vec![[48, 128]],
            Size::Medium => vec![[304, 384]],
            Size::Full => vec![[208, 384], [8192, 8192]],
        };
        for sizes in sizes.into_iter().filter(|_| dtype == DType::BF16) {
            for block in [ScaleBlock::Square128, ScaleBlock::Square32] {
                list.add(move |inputs| activation(inputs, sizes, block));
                list.add(move |inputs| gradient(inputs, sizes, block));
            }
        }
    }

    fn case(inputs: &Inputs, operation: &str, [n, i]: [usize; 2], block: ScaleBlock) -> Case {
        Case::new(inputs.name(operation), format!("{n} x {i}, {block:?}"))
            .in_given_types()
            .scratch("out", &[n, i], DType::BF16)
            .output("differing bytes", &[1], DType::F32, EXACT)
            .workspace(move |device| workspace_elements(n, i, device).max(fp8::workspace_elements(n, 2 * i, device)))
    }

    /// [`forward`].
    pub fn activation(inputs: &mut Inputs, sizes @ [n, i]: [usize; 2], block: ScaleBlock) -> Case {
        let case = case(inputs, "swiglu_fp8::forward", sizes, block);
        let case = case.input("gate_up", &[n, 2 * i], inputs.numbers(&[n, 2 * i]));
        [sizes, [i, n], sizes, [i, n]]
            .into_iter()
            .fold(case, |case, sizes| scratch_codes(case, sizes, block))
            .call(move |[out, _, workspace, gate_up, a, b, c, d, e, f, g, h]| {
                forward(gate_up, &mut operand(block, Some([a, b]), Some([c, d])), workspace)?;
                swiglu::forward(gate_up, out)?;
                quantize(out, &mut operand(block, Some([e, f]), Some([g, h])), workspace)
            })
            .observe(move |[_, count, _, _, a, b, c, d, e, f, g, h]| {
                count_differing(&[a, b, c, d], &[e, f, g, h], count)
            })
    }

    /// [`backward`].
    pub fn gradient(inputs: &mut Inputs, sizes @ [n, i]: [usize; 2], block: ScaleBlock) -> Case {
        let case = case(inputs, "swiglu_fp8::backward", sizes, block)
            .state("gate_up", &[n, 2 * i], inputs.numbers(&[n, 2 * i]))
            .input("dout", &sizes, inputs.numbers(&sizes));
        let matrices = [[n, 2 * i], [2 * i, n], [i, n]];
        [matrices, matrices]
            .into_iter()
            .flatten()
            .fold(case, |case, sizes| scratch_codes(case, sizes, block))
            .call(move |[out, _, workspace, gate_up, dout, a, b, c, d, e, f, g, h, j, k, l, m]| {
                let mut gradient = operand(block, Some([a, b]), Some([c, d]));
                backward(gate_up, dout, &mut gradient, &mut operand(block, None, Some([e, f])), workspace)?;
                out.copy_from(dout)?;
                swiglu::backward_recomputing(gate_up, out)?;
                quantize(gate_up, &mut operand(block, Some([g, h]), Some([j, k])), workspace)?;
                quantize(out, &mut operand(block, None, Some([l, m])), workspace)
            })
            .observe(move |[_, count, _, _, _, a, b, c, d, e, f, g, h, j, k, l, m]| {
                count_differing(&[a, b, c, d, e, f], &[g, h, j, k, l, m], count)
            })
    }
}
