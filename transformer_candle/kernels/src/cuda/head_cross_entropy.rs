//! Head and cross-entropy on a GPU: for every chunk of rows the logits, their losses and gradients, and two more GEMMs.
//!
//! Legend: N tokens, D hidden, V padded vocabulary, C rows of a chunk. The workspace is the GEMMs', then the F64 sum of
//! the losses, then the losses of a chunk.

use super::launch::{Axis, Launch, variant};
use super::{KernelArg, Matmul, Operand, WORKSPACE_BYTES, WORKSPACE_ELEMENTS, Workspace};
use crate::head_cross_entropy::HeadSizes;
use crate::{Buffer, WriteMode};

/// F32 elements that the sum of the losses takes, so that the losses begin at a multiple of 16 bytes.
const TOTAL: usize = 4;

/// The inputs and the scratch memory of [`forward`] and [`forward_backward`].
#[derive(Clone, Copy)]
pub(crate) struct Inputs {
    hidden: Operand,
    weight: Operand,
    targets: KernelArg,
    logits: Operand,
    workspace: KernelArg,
    gemm_workspace: Workspace,
    sizes: HeadSizes,
}

/// The further arguments of [`forward_backward`], and how gradients are written.
#[derive(Clone, Copy)]
pub(crate) struct Gradients {
    pub(crate) scale: KernelArg,
    pub(crate) loss: KernelArg,
    pub(crate) dhidden: Operand,
    pub(crate) dweight: Option<Operand>,
    pub(crate) write_mode: WriteMode,
    pub(crate) z_loss: f32,
}

/// A chunk of rows, from `start` on.
#[derive(Clone, Copy)]
struct Chunk {
    start: usize,
    rows: usize,
}

/// See [`crate::head_cross_entropy::forward_backward`]. A row's gradient takes the place of its logits: in bf16 the
/// first half of it.
pub(crate) fn forward_backward(inputs: &Inputs, gradients: &Gradients) -> Vec<Launch> {
    let HeadSizes { n, d, v, .. } = inputs.sizes;
    let &Gradients { scale, loss, dhidden, dweight, write_mode, z_loss } = gradients;
    let &Inputs { hidden, weight, gemm_workspace, .. } = inputs;
    let dlogits = inputs.logits.reinterpreted(hidden.dtype);
    let total = inputs.workspace.skip_elements(WORKSPACE_ELEMENTS);
    let losses = total.skip_elements(TOTAL);
    let each = |chunk: Chunk| {
        let Chunk { start, rows } = chunk;
        let [is_first, is_last] = [start == 0, start + rows == n].map(|yes| KernelArg::I32(i32::from(yes)));
        let sum = [losses, KernelArg::count(rows), total, scale, loss, is_first, is_last];
        let values = [scale, KernelArg::F32(z_loss), losses, dlogits.into()];
        let write_mode = if start == 0 { write_mode } else { WriteMode::Accumulate };
        let dweight = dweight.map(|dweight| {
            let hidden = hidden.skip_rows(start);
            let matmul = Matmul::set(dweight, [v, d, rows], dlogits.transposed(), hidden, gemm_workspace);
            Launch::Gemm(Matmul { write_mode, ..matmul })
        });
        let to_the_input = [
            inputs.logits(chunk),
            inputs.losses("head_cross_entropy_gradients", variant(hidden.dtype), chunk, &values),
            Launch::kernel("head_cross_entropy_total", "f32", [Axis::ONE; 3], sum),
            Launch::Gemm(Matmul::set(dhidden.skip_rows(start), [rows, d, v], dlogits, weight, gemm_workspace)),
        ];
        to_the_input.into_iter().chain(dweight)
    };
    inputs.chunks().flat_map(each).collect()
}

/// See [`crate::head_cross_entropy::forward`].
pub(crate) fn forward(inputs: &Inputs, losses: KernelArg) -> Vec<Launch> {
    let each = |chunk: Chunk| {
        let losses = losses.skip_elements(chunk.start);
        [inputs.logits(chunk), inputs.losses("head_cross_entropy_losses", "f32", chunk, &[losses])]
    };
    inputs.chunks().flat_map(each).collect()
}

/// Elements of F32 workspace: a GEMM's, the sum of the losses and a chunk's losses.
pub(crate) fn workspace_elements(c: usize) -> usize {
    WORKSPACE_ELEMENTS + TOTAL + c
}

impl Inputs {
    pub(crate) fn new(
        [hidden_ND, weight_VD]: [&Buffer; 2],
        targets_N: &Buffer,
        logits_CW: &Buffer,
        workspace: &Buffer,
        sizes: HeadSizes,
    ) -> Self {
        Self {
            hidden: hidden_ND.into(),
            weight: weight_VD.into(),
            targets: targets_N.into(),
            logits: logits_CW.into(),
            workspace: workspace.into(),
            gemm_workspace: Workspace { bytes: WORKSPACE_BYTES, ..Workspace::from_buffer(workspace) },
            sizes,
        }
    }

    fn chunks(&self) -> impl Iterator<Item = Chunk> {
        let HeadSizes { n, c, .. } = self.sizes;
        (0..n).step_by(c).map(move |start| Chunk { start, rows: c.min(n - start) })
    }

    /// The GEMM that computes the logits of a chunk.
    fn logits(&self, Chunk { start, rows }: Chunk) -> Launch {
        let (HeadSizes { d, v, .. }, weight) = (self.sizes, self.weight.transposed());
        Launch::Gemm(Matmul::set(self.logits, [rows, v, d], self.hidden.skip_rows(start), weight, self.gemm_workspace))
    }

    /// The launch of a kernel over the rows of a chunk's logits, which computes losses, or losses and gradients;
    /// `between` are its arguments between targets and sizes.
    fn losses(&self, function: &str, variant: &str, Chunk { start, rows }: Chunk, between: &[KernelArg]) -> Launch {
        let HeadSizes { v, vocab_size, .. } = self.sizes;
        let mut values = vec![self.logits.into(), self.targets.skip_elements(start)];
        values.extend(between);
        values.extend([vocab_size, v].map(KernelArg::count));
        Launch::kernel(function, variant, [Axis::Blocks(rows), Axis::ONE, Axis::ONE], values)
    }
}

/// A pointer to the first element of a matrix.
impl From<Operand> for KernelArg {
    fn from(operand: Operand) -> Self {
        Self::Pointer { address: operand.address, dtype: operand.dtype }
    }
}
