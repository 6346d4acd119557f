//! [`crate::add_rms_norm::normalize`] with a result that is rounded to fp8 where it is computed: the same bits as with
//! [`crate::fp8::quantize`] behind it, and less than half of the bytes moved. Not with one scale for all, which is known
//! only when everything is computed; and not on a CPU, where it is the two one after the other, for comparison.
//!
//! Legend: N tokens, D hidden size.

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::cuda::{self, KernelArg};
use crate::fp8::{Operand, ScaleBlock};
use crate::{Buffer, DeviceKind, Result, bf16, cpu};

/// Whether the operation takes scales of these blocks.
pub fn is_supported(block: ScaleBlock) -> bool {
    block != ScaleBlock::Tensor
}

/// Elements of F32 workspace: on a CPU for the numbers in between.
pub fn workspace_elements(n: usize, d: usize, device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cuda => 0,
        DeviceKind::Cpu => (n * d).div_ceil(2),
    }
}

/// Writes the codes that `out` has of the norm of `sum_ND`, from the `inv_rms` that forward saved. Sum and weight are
/// BF16; on a GPU N and D are multiples of 16.
pub fn normalize(
    sum_ND: &Buffer,
    weight_D: &Buffer,
    inv_rms_N: &Buffer,
    out_ND: &mut Operand,
    workspace: &mut Buffer,
) -> Result<()> {
    let (sizes @ [n, d], block) = (sum_ND.sizes(), out_ND.block);
    let arguments = Arguments::new("add_rms_norm_fp8::normalize")
        .input("sum_ND", sum_ND, DType::BF16, &sizes)
        .input("weight_D", weight_D, DType::BF16, &[d])
        .input("inv_rms_N", inv_rms_N, DType::F32, &[n]);
    let arguments = out_ND
        .written_by(arguments, sizes)
        .workspace(workspace, workspace_elements(n, d, sum_ND.device().kind()))
        .require(is_supported(block), || format!("it takes scales of squares, not {block:?}"));
    let (inputs, outputs) = ([sum_ND, weight_D, inv_rms_N].map(KernelArg::from), out_ND.pointers());
    let cpu = |access: &Access<'_>| {
        let normed = &mut cpu::fp8::as_bf16(workspace.slice_mut(access))[..n * d];
        let (sum, weight) = (sum_ND.slice::<bf16>(access), weight_D.slice(access));
        cpu::add_rms_norm::normalize(sum, weight, inv_rms_N.slice(access), normed);
        out_ND.encode(normed, sizes, access);
        Ok(())
    };
    arguments.run(cpu, || cuda::add_rms_norm::normalize_fp8(inputs, block, outputs, sizes))
}

/// Calls for checks and benchmarks, of sizes [N, D]: they count the bytes that differ from those of the operations one
/// after the other, on the same device.
pub mod cases {
    use super::{normalize, workspace_elements};
    use crate::DType;
    use crate::add_rms_norm::{self, cases::saved};
    use crate::cases::bounds::EXACT;
    use crate::cases::{Case, CaseList, Inputs, Size};
    use crate::fp8::cases::{count_differing, operand, scratch_codes};
    use crate::fp8::{self, ScaleBlock, quantize};

    pub(crate) fn add(size: Size, dtype: DType, list: &mut CaseList) {
        let sizes = match size {
            Size::Small => vec![[48, 144]],
            Size::Medium => vec![[304, 272]],
            Size::Full => vec![[208, 272], [8192, 2048]],
        };
        for sizes in sizes.into_iter().filter(|_| dtype == DType::BF16) {
            for block in [ScaleBlock::Square128, ScaleBlock::Square32] {
                list.add(move |inputs| norm_again(inputs, sizes, block));
            }
        }
    }

    /// [`normalize`].
    pub fn norm_again(inputs: &mut Inputs, sizes @ [n, d]: [usize; 2], block: ScaleBlock) -> Case {
        let [sum, inv_rms] = saved(inputs, sizes);
        let case = Case::new(inputs.name("add_rms_norm_fp8::normalize"), format!("{n} x {d}, {block:?}"))
            .in_given_types()
            .scratch("normed", &sizes, DType::BF16)
            .output("differing bytes", &[1], DType::F32, EXACT)
            .workspace(move |device| workspace_elements(n, d, device).max(fp8::workspace_elements(n, d, device)))
            .input("sum", &sizes, sum)
            .input("weight", &[d], inputs.numbers(&[d]))
            .input("inv_rms", &[n], inv_rms);
        [sizes, [d, n], sizes, [d, n]]
            .into_iter()
            .fold(case, |case, sizes| scratch_codes(case, sizes, block))
            .call(move |[normed, _, workspace, sum, weight, inv_rms, a, b, c, d, e, f, g, h]| {
                let mut codes = operand(block, Some([a, b]), Some([c, d]));
                normalize(sum, weight, inv_rms, &mut codes, workspace)?;
                add_rms_norm::normalize(sum, weight, inv_rms, normed)?;
                quantize(normed, &mut operand(block, Some([e, f]), Some([g, h])), workspace)
            })
            .observe(move |[_, count, _, _, _, _, a, b, c, d, e, f, g, h]| {
                count_differing(&[a, b, c, d], &[e, f, g, h], count)
            })
    }
}
