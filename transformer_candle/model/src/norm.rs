//! A norm of the residual stream, which also adds the output of the layer before it to the stream.

use kernels::fp8::Operand;
use kernels::{Buffer, WriteMode, add_rms_norm, add_rms_norm_fp8};

use crate::Result;
use crate::fp8::Fp8Fusion;
use crate::linear::Linear;
use crate::pass::{GradientScratch, Pass};
use crate::weight::Weight;

/// Activations of a norm in the forward pass.
#[derive(Clone, Debug)]
pub struct NormActivations {
    /// The residual stream, of which the norm is taken.
    pub residual_ND: Buffer,
    /// Inverse root mean squares of its rows.
    pub inv_rms_N: Buffer,
    /// The normed rows.
    pub normed_ND: Buffer,
}

/// Residual add and root-mean-square norm.
#[derive(Clone, Debug)]
pub struct Norm {
    weight_D: Weight,
    /// The residual stream that the norm before wrote; None for the first norm, whose stream is the embedding itself.
    previous_ND: Option<Buffer>,
    /// Whether the backward pass recomputes the normed rows in fp8, for the gradient of the projection behind it.
    has_fp8: bool,
    /// The activations of its forward pass.
    pub values: NormActivations,
}

impl Norm {
    /// A norm; `previous_ND` is the residual stream that the norm before wrote, None for the first.
    pub(crate) fn new(weight_D: Weight, previous_ND: Option<Buffer>, values: NormActivations) -> Self {
        Self { weight_D, previous_ND, has_fp8: false, values }
    }

    /// The same norm, whose backward pass has its rows in fp8 where [`Fp8Fusion`] says so.
    pub(crate) fn with_fusion(self, fusion: Fp8Fusion) -> Self {
        Self { has_fp8: fusion.norms, ..self }
    }

    /// Adds the last layer's output to the residual stream and norms the sum.
    pub fn forward(&mut self, pass: &Pass<'_>) -> Result<()> {
        let NormActivations { residual_ND, inv_rms_N, normed_ND } = &mut self.values;
        let (weight_D, epsilon) = (&self.weight_D.values, pass.settings.epsilon);
        let Some(previous_ND) = &self.previous_ND else {
            return Ok(add_rms_norm::forward(residual_ND, weight_D, epsilon, normed_ND, inv_rms_N)?);
        };
        let (x, y) = (previous_ND, &pass.scratch.layer_output_ND);
        Ok(add_rms_norm::forward_add(x, y, weight_D, epsilon, residual_ND, normed_ND, inv_rms_N)?)
    }

    /// Recomputes the normed rows from the residual stream and its statistics.
    pub fn recompute(&mut self) -> Result<()> {
        let NormActivations { residual_ND, inv_rms_N, normed_ND } = &mut self.values;
        Ok(add_rms_norm::normalize(residual_ND, &self.weight_D.values, inv_rms_N, normed_ND)?)
    }

    /// Recomputes the normed rows for the backward pass, where they are not kept.
    pub fn begin_backward(&mut self, pass: &Pass<'_>) -> Result<()> {
        if pass.recomputes() && !self.has_fp8 { self.recompute() } else { Ok(()) }
    }

    /// Computes the gradients of the parameters of the projection whose inputs the normed rows are.
    pub fn backward_projection(
        &mut self,
        projection: &mut Linear,
        dy_NO: &Buffer,
        write_mode: WriteMode,
        workspace: &mut Buffer,
    ) -> Result<()> {
        let NormActivations { residual_ND, inv_rms_N, normed_ND } = &self.values;
        if !self.has_fp8 {
            return projection.backward_weight(dy_NO, normed_ND, write_mode, workspace);
        }
        let normalize = |codes: &mut Operand, workspace: &mut Buffer| {
            Ok(add_rms_norm_fp8::normalize(residual_ND, &self.weight_D.values, inv_rms_N, codes, workspace)?)
        };
        projection.backward_weight_of_codes(dy_NO, normalize, write_mode, workspace)
    }

    /// Adds the gradient that reaches the residual stream through the norm, from `dnormed_ND`, to `dresidual_ND`, and
    /// the weight's gradient to its sum.
    pub fn backward(&mut self, scratch: &mut GradientScratch, workspace: &mut Buffer) -> Result<()> {
        let NormActivations { residual_ND, inv_rms_N, .. } = &self.values;
        let GradientScratch { dresidual_ND, dnormed_ND, .. } = scratch;
        let (weight_D, dweight_D) = self.weight_D.with_gradient();
        Ok(add_rms_norm::backward(residual_ND, weight_D, inv_rms_N, dnormed_ND, dresidual_ND, dweight_D, workspace)?)
    }
}
