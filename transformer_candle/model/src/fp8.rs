//! The operands of a linear map's GEMMs, rounded to fp8: weights once per step, the rest before each GEMM.

use kernels::fp8::{self, Codes, Operand, ScaleBlock};
use kernels::{Buffer, DType, DeviceKind, WriteMode, add_rms_norm_fp8, linear, swiglu_fp8};

use crate::activations::{ActivationSettings, BlockBuffers};
use crate::weight::Weight;
use crate::{ActivationRecompute, ModelShape, Result};

/// What the GEMMs of a linear map read instead of inputs, weights and gradients. All but the weights lie in memory that
/// the linear maps share. A GPU needs other codes where a GEMM sums over the rows of an operand.
#[derive(Clone, Debug)]
pub(crate) struct Fp8Operands {
    weight_OI: Operand,
    weight_over_outputs_OI: Operand,
    input_NI: Operand,
    input_over_tokens_NI: Operand,
    output_gradient_NO: Operand,
}

impl Fp8Operands {
    /// The operands of a linear map of these weights, whose codes are taken unless they are held in fp8 already.
    pub(crate) fn take(
        shape: &ModelShape,
        name: &str,
        weight_OI: &Weight,
        block: ScaleBlock,
        buffers: &mut BlockBuffers<'_>,
    ) -> Result<Self> {
        let &ActivationSettings { batch, sequence_length, device, .. } = buffers.settings;
        let (n, is_gpu, maps) = (batch * sequence_length, device == DeviceKind::Cuda, shape.linear_maps());
        let ([outputs, inputs], trains) = (weight_OI.values.sizes(), weight_OI.gradient.is_some());
        let own_codes = match weight_OI.codes() {
            Some((_, codes)) => codes,
            None => buffers.take_fp8_weight(name, block, [outputs, inputs]),
        };
        let matrix = |codes| Operand { block, codes_RC: Some(codes), codes_CR: None };
        let transpose = |codes| Operand { block, codes_RC: None, codes_CR: Some(codes) };
        let mut shared = |name, sizes, all: Vec<[usize; 2]>| SharedCodes { block, name, all }.take(sizes, buffers);

        let inputs_of_all = || maps.iter().flat_map(|map| [[n, map.inputs], [map.inputs, n]]).collect();
        let input_NI = matrix(shared(["fp8_input", "fp8_input_scales"], [n, inputs], inputs_of_all())?);
        let weight_OI = matrix(own_codes);
        let group = GradientGroup::of(name);
        let alike = || maps.iter().filter(|map| GradientGroup::of(map.name) == group);
        let [names, transposed_names] = group.names();
        let gradients = alike().map(|map| [n, map.outputs]).collect();
        let mut output_gradient_NO = matrix(shared(names, [n, outputs], gradients)?);
        if !is_gpu {
            let (weight_over_outputs_OI, input_over_tokens_NI) = (weight_OI.clone(), input_NI.clone());
            return Ok(Self { weight_OI, weight_over_outputs_OI, input_NI, input_over_tokens_NI, output_gradient_NO });
        }
        let input_over_tokens_NI = transpose(shared(["fp8_input", "fp8_input_scales"], [inputs, n], inputs_of_all())?);
        let weights = maps.iter().map(|map| [map.inputs, map.outputs]).collect();
        let names = ["fp8_weight_transposed", "fp8_weight_transposed_scales"];
        let weight_over_outputs_OI = transpose(shared(names, [inputs, outputs], weights)?);
        if trains {
            let gradients = alike().map(|map| [map.outputs, n]).collect();
            output_gradient_NO.codes_CR = Some(shared(transposed_names, [outputs, n], gradients)?);
        }
        Ok(Self { weight_OI, weight_over_outputs_OI, input_NI, input_over_tokens_NI, output_gradient_NO })
    }

    /// Rounds the weights; to be called whenever they have changed.
    pub(crate) fn round_weight(&mut self, weight_OI: &Buffer, workspace: &mut Buffer) -> Result<()> {
        Ok(fp8::quantize(weight_OI, &mut self.weight_OI, workspace)?)
    }

    /// Writes the outputs.
    pub(crate) fn forward(&mut self, x_NI: &Buffer, y_NO: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
        fp8::quantize(x_NI, &mut self.input_NI, workspace)?;
        Ok(linear::forward(&self.input_NI, &self.weight_OI, y_NO, workspace)?)
    }

    /// [`Fp8Operands::forward`] of the `SwiGLU` of gate and up.
    pub(crate) fn forward_activated(
        &mut self,
        gate_up_N2I: &Buffer,
        y_NO: &mut Buffer,
        workspace: &mut Buffer,
    ) -> Result<()> {
        swiglu_fp8::forward(gate_up_N2I, &mut self.input_NI, workspace)?;
        Ok(linear::forward(&self.input_NI, &self.weight_OI, y_NO, workspace)?)
    }

    /// Computes the gradients of gate and up, for both gradients of their projection, and the `SwiGLU` again, for the
    /// gradient of `down`'s weights; `dactivated_NI` is its gradient.
    pub(crate) fn backward_activated(
        gate_up: &mut Self,
        down: &mut Self,
        gate_up_N2I: &Buffer,
        dactivated_NI: &Buffer,
        workspace: &mut Buffer,
    ) -> Result<()> {
        let (gradient, activated) = (&mut gate_up.output_gradient_NO, &mut down.input_over_tokens_NI);
        Ok(swiglu_fp8::backward(gate_up_N2I, dactivated_NI, gradient, activated, workspace)?)
    }

    /// Rounds the gradient of the outputs, for both of the gradients below.
    pub(crate) fn round_gradient(&mut self, dy_NO: &Buffer, workspace: &mut Buffer) -> Result<()> {
        Ok(fp8::quantize(dy_NO, &mut self.output_gradient_NO, workspace)?)
    }

    /// Writes the gradient of the inputs.
    pub(crate) fn backward_input(&mut self, dx_NI: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
        fp8::transpose(&self.weight_OI, &mut self.weight_over_outputs_OI)?;
        Ok(linear::backward_input(&self.output_gradient_NO, &self.weight_over_outputs_OI, dx_NI, workspace)?)
    }

    /// The codes of the inputs that [`Fp8Operands::backward_weight`] reads, for an operation that writes them itself.
    pub(crate) fn input_over_tokens(&mut self) -> &mut Operand {
        &mut self.input_over_tokens_NI
    }

    /// Writes the gradient of the weights, or adds to it; without `x_NI` where its codes have been written.
    pub(crate) fn backward_weight(
        &mut self,
        x_NI: Option<&Buffer>,
        dweight_OI: &mut Buffer,
        write_mode: WriteMode,
        workspace: &mut Buffer,
    ) -> Result<()> {
        if let Some(x_NI) = x_NI {
            fp8::quantize(x_NI, &mut self.input_over_tokens_NI, workspace)?;
        }
        let (dy, x) = (&self.output_gradient_NO, &self.input_over_tokens_NI);
        Ok(linear::backward_weight(dy, x, dweight_OI, write_mode, workspace)?)
    }
}

/// Weights that are held in fp8 where GEMMs are in BF16: they become BF16 before each GEMM, in memory that the linear maps
/// share.
#[derive(Clone, Debug)]
pub(crate) struct DequantizedWeight {
    block: ScaleBlock,
    codes_OI: Codes,
    values_OI: Buffer,
}

impl DequantizedWeight {
    /// None for weights that are not held in fp8.
    pub(crate) fn take(shape: &ModelShape, weight_OI: &Weight, buffers: &mut BlockBuffers<'_>) -> Result<Option<Self>> {
        let Some((block, codes_OI)) = weight_OI.codes() else { return Ok(None) };
        let largest = shape.linear_maps().map(|map| map.inputs * map.outputs).into_iter().max().unwrap_or(0);
        let values = buffers.take_shared("dequantized_weight", DType::BF16, &[largest]);
        let values_OI = values.view(0, codes_OI.values.shape())?;
        Ok(Some(Self { block, codes_OI, values_OI }))
    }

    /// The weights, until those of another linear map are asked for.
    pub(crate) fn values(&mut self) -> Result<&Buffer> {
        fp8::dequantize(&self.codes_OI, self.block, &mut self.values_OI)?;
        Ok(&self.values_OI)
    }
}

/// Which recomputed operations of a model that trains write fp8 codes instead of numbers, for the GEMMs after them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fp8Fusion {
    /// Norms in the backward pass.
    pub norms: bool,
    /// `SwiGLU`, in the forward pass as well.
    pub swiglu: bool,
}

impl Fp8Fusion {
    /// Those on such a device, where neither adapters need the numbers, nor a backward pass without recompute.
    pub fn new(
        shape: &ModelShape,
        fp8: Option<ScaleBlock>,
        recompute: ActivationRecompute,
        device: DeviceKind,
    ) -> Self {
        let are_needed = shape.lora.is_some() || recompute == ActivationRecompute::None;
        let Some(block) = fp8.filter(|_| device == DeviceKind::Cuda && !are_needed) else { return Self::default() };
        Self {
            norms: add_rms_norm_fp8::is_supported(block),
            swiglu: swiglu_fp8::is_supported(shape.intermediate_size, block),
        }
    }

    /// Those of a model with these activations.
    pub(crate) fn of(shape: &ModelShape, settings: &ActivationSettings) -> Self {
        let &ActivationSettings { fp8, recompute, device, .. } = settings;
        if settings.training { Self::new(shape, fp8, recompute, device) } else { Self::default() }
    }
}

/// Linear maps whose gradients of outputs share memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum GradientGroup {
    /// Maps into the residual stream: while the gradient of `down` is needed, that of `gate_up` is computed.
    Residual,
    Other,
}

impl GradientGroup {
    fn of(map: &str) -> Self {
        if ["attention_output", "down"].contains(&map) { Self::Residual } else { Self::Other }
    }

    /// The names of codes and scales, of the gradient and of its transpose.
    fn names(self) -> [[&'static str; 2]; 2] {
        match self {
            Self::Residual => [
                ["fp8_residual_gradient", "fp8_residual_gradient_scales"],
                ["fp8_residual_gradient_transposed", "fp8_residual_gradient_transposed_scales"],
            ],
            Self::Other => [
                ["fp8_output_gradient", "fp8_output_gradient_scales"],
                ["fp8_output_gradient_transposed", "fp8_output_gradient_transposed_scales"],
            ],
        }
    }
}

/// Codes in memory that the operands of several linear maps share.
struct SharedCodes {
    block: ScaleBlock,
    /// The names of the codes and of their scales.
    name: [&'static str; 2],
    /// The sizes of all operands.
    all: Vec<[usize; 2]>,
}

impl SharedCodes {
    /// Takes the codes of an operand of these sizes.
    fn take(&self, sizes: [usize; 2], buffers: &mut BlockBuffers<'_>) -> Result<Codes> {
        let Self { block, name: [values_name, scales_name], all } = self;
        let elements = |shape: &[usize]| shape.iter().product::<usize>();
        let values = all.iter().map(|sizes| elements(sizes)).max().unwrap_or(0);
        let scales = all.iter().map(|&sizes| elements(&block.scales(sizes).1)).max().unwrap_or(0);
        let (dtype, shape) = block.scales(sizes);
        Ok(Codes {
            values: buffers.take_shared(values_name, DType::U8, &[values]).view(0, &sizes)?,
            scales: buffers.take_shared(scales_name, dtype, &[scales]).view(0, &shape)?,
        })
    }
}

/// Elements of F32 workspace that the GEMMs of a linear map need for N tokens.
pub(crate) fn workspace_elements(settings: &ActivationSettings, n: usize, inputs: usize, outputs: usize) -> usize {
    let device = settings.device;
    if settings.fp8.is_none() {
        return linear::workspace_elements(n, inputs, outputs, device);
    }
    let operands = [[n, inputs], [outputs, inputs], [n, outputs]];
    let rounding = operands.into_iter().map(|[rows, columns]| fp8::workspace_elements(rows, columns, device));
    rounding.fold(linear::fp8_workspace_elements(n, inputs, outputs, device), usize::max)
}
