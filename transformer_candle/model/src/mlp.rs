//! The MLP with its norm: gate and up projections, `SwiGLU`, down projection; forward beside backward.

use kernels::{Buffer, DType, swiglu, timing};

use crate::activations::{ActivationSettings, BlockBuffers, Saved};
use crate::fp8::{self, Fp8Fusion, Fp8Operands};
use crate::linear::Linear;
use crate::lora::{self, MakeAdapters};
use crate::norm::{Norm, NormActivations};
use crate::parameters::BlockParameters;
use crate::pass::Pass;
use crate::weight::Weight;
use crate::{ModelShape, Result};

/// Norm, gate and up projections, `SwiGLU`, down projection.
#[derive(Clone, Debug)]
pub struct Mlp {
    norm: Norm,
    gate_up: Linear,
    down: Linear,
    /// The gate and up projections' outputs, side by side; in the backward pass their gradients.
    gate_up_N2I: Buffer,
    /// The `SwiGLU` of these; in the backward pass its gradient.
    activated_NI: Buffer,
    /// Whether the `SwiGLU` is computed in fp8, for the GEMMs that follow.
    has_fp8_swiglu: bool,
}

impl Mlp {
    /// The MLP of a block; `previous_ND` is the residual stream that the norm before attention wrote.
    pub(crate) fn new(
        shape: &ModelShape,
        weights: &BlockParameters<Weight>,
        previous_ND: Buffer,
        adapters: MakeAdapters<'_>,
        buffers: &mut BlockBuffers<'_>,
    ) -> Result<Self> {
        let &ActivationSettings { batch, sequence_length, dtype, residual_dtype, .. } = buffers.settings;
        let (n, d, i) = (batch * sequence_length, shape.hidden_size, shape.intermediate_size);
        let values = NormActivations {
            residual_ND: buffers.take("middle", Saved::Inner, residual_dtype, &[n, d]),
            inv_rms_N: buffers.take("mlp_inv_rms", Saved::Inner, DType::F32, &[n]),
            normed_ND: buffers.take_normed("mlp_normed", &[n, d]),
        };
        let [of_gate_up, of_down] = [&weights.adapters.gate_up, &weights.adapters.down].map(|of| adapters(of));
        let gate_up = Linear::new(shape, "gate_up", weights.gate_up.clone(), None, of_gate_up?, buffers)?;
        let down = Linear::new(shape, "down", weights.down.clone(), None, of_down?, buffers)?;
        let fusion = Fp8Fusion::of(shape, buffers.settings);
        Ok(Self {
            norm: Norm::new(weights.mlp_norm.clone(), Some(previous_ND), values).with_fusion(fusion),
            has_fp8_swiglu: fusion.swiglu,
            gate_up,
            down,
            gate_up_N2I: buffers.take("gate_up", Saved::Inner, dtype, &[n, 2 * i]),
            activated_NI: buffers.take("activated", Saved::Recomputable, dtype, &[n, i]),
        })
    }

    /// Rounds the weights to fp8, where GEMMs are in fp8.
    pub(crate) fn round_weights(&mut self, workspace: &mut Buffer) -> Result<()> {
        self.gate_up.round_weight(workspace)?;
        self.down.round_weight(workspace)
    }

    /// The residual stream after attention.
    pub fn residual_ND(&self) -> &Buffer {
        &self.norm.values.residual_ND
    }

    /// Writes what the MLP adds to the residual stream to `layer_output_ND`.
    pub fn forward(&mut self, pass: &mut Pass<'_>) -> Result<()> {
        self.recompute(pass)?;
        let (layer_output_ND, workspace) = (&mut pass.scratch.layer_output_ND, &mut pass.scratch.workspace);
        if self.has_fp8_swiglu
            && let Some((fp8, _)) = self.down.fp8_in_training()
        {
            return timing::scope("down", || fp8.forward_activated(&self.gate_up_N2I, layer_output_ND, workspace));
        }
        swiglu::forward(&self.gate_up_N2I, &mut self.activated_NI)?;
        self.down.forward(&self.activated_NI, layer_output_ND, workspace)
    }

    /// Computes as much of [`Mlp::forward`] as [`Mlp::backward`] needs, from attention's output in `layer_output_ND`.
    pub fn recompute(&mut self, pass: &mut Pass<'_>) -> Result<()> {
        self.norm.forward(pass)?;
        self.gate_up.forward(&self.norm.values.normed_ND, &mut self.gate_up_N2I, &mut pass.scratch.workspace)
    }

    /// Turns `dresidual_ND` from the gradient of the block's output into that of the residual stream after attention,
    /// and computes the gradients of the parameters.
    pub fn backward(&mut self, pass: &mut Pass<'_>) -> Result<()> {
        let (recomputes, write_mode) = (pass.recomputes(), pass.write_mode);
        self.norm.begin_backward(pass)?;
        let (scratch, workspace) = pass.scratch.backward()?;
        let dresidual_ND = &scratch.dresidual_ND;
        let Self { norm, gate_up, down, gate_up_N2I, activated_NI, has_fp8_swiglu } = self;
        down.begin_backward(dresidual_ND, workspace)?;
        // One buffer for the SwiGLU and for its gradient, whichever is needed first.
        let mut has_codes = false;
        if recomputes {
            down.backward_input(dresidual_ND, activated_NI, workspace)?;
            if *has_fp8_swiglu
                && let (Some((of_gate_up, _)), Some((of_down, dweight_OI))) =
                    (gate_up.fp8_in_training(), down.fp8_in_training())
            {
                Fp8Operands::backward_activated(of_gate_up, of_down, gate_up_N2I, activated_NI, workspace)?;
                timing::scope("down", || of_down.backward_weight(None, dweight_OI, write_mode, workspace))?;
                has_codes = true;
            } else {
                swiglu::backward_recomputing(gate_up_N2I, activated_NI)?;
                down.backward_weight(dresidual_ND, activated_NI, write_mode, workspace)?;
            }
        } else {
            down.backward_weight(dresidual_ND, activated_NI, write_mode, workspace)?;
            down.backward_input(dresidual_ND, activated_NI, workspace)?;
            swiglu::backward(gate_up_N2I, activated_NI)?;
        }
        let dgate_up_N2I = gate_up_N2I;
        if !has_codes {
            gate_up.begin_backward(dgate_up_N2I, workspace)?;
        }
        norm.backward_projection(gate_up, dgate_up_N2I, write_mode, workspace)?;
        gate_up.backward_input(dgate_up_N2I, &mut scratch.dnormed_ND, workspace)?;
        norm.backward(scratch, workspace)
    }

    /// Elements of workspace for the projections.
    pub(crate) fn workspace_elements(shape: &ModelShape, settings: &ActivationSettings) -> usize {
        let n = settings.batch * settings.sequence_length;
        let (d, i) = (shape.hidden_size, shape.intermediate_size);
        let projections =
            fp8::workspace_elements(settings, n, d, 2 * i).max(fp8::workspace_elements(settings, n, i, d));
        let adapters = [[d, i], [i, d]].map(|sizes| lora::workspace_elements(shape, settings, sizes));
        adapters.into_iter().fold(projections, usize::max)
    }
}
