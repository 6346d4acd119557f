//! A linear map: a matrix of weights, perhaps a bias and perhaps adapters with their gradients, forward beside
//! backward.

use kernels::fp8::Operand;
use kernels::{Buffer, WriteMode, bias, linear, timing};

use crate::activations::BlockBuffers;
use crate::fp8::{DequantizedWeight, Fp8Operands};
use crate::lora::Adapter;
use crate::weight::Weight;
use crate::{ModelShape, Result};

/// The map `y_NO = x_NI w_OI^T + bias_O`, with or without the bias; adapters add to some of the outputs. What does not
/// train has no gradient.
#[derive(Clone, Debug)]
pub struct Linear {
    /// The name in profiles.
    name: &'static str,
    weight_OI: Weight,
    bias_O: Option<Weight>,
    adapters: Vec<Adapter>,
    operands: Operands,
}

/// The operands of a linear map's GEMMs; those of its adapters are never in fp8.
#[derive(Clone, Debug)]
enum Operands {
    /// Inputs, weights and gradients as they are.
    Plain,
    /// Inputs and gradients as they are, and BF16 weights of fp8 codes.
    Dequantized(DequantizedWeight),
    /// All in fp8.
    Fp8(Box<Fp8Operands>),
}

impl Linear {
    /// The linear map with weights `[O, I]`, bias `[O]` and adapters; `name` is for profiles.
    pub(crate) fn new(
        shape: &ModelShape,
        name: &'static str,
        weight_OI: Weight,
        bias_O: Option<Weight>,
        adapters: Vec<Adapter>,
        buffers: &mut BlockBuffers<'_>,
    ) -> Result<Self> {
        let operands = match buffers.settings.fp8 {
            Some(block) => Operands::Fp8(Box::new(Fp8Operands::take(shape, name, &weight_OI, block, buffers)?)),
            None => DequantizedWeight::take(shape, &weight_OI, buffers)?.map_or(Operands::Plain, Operands::Dequantized),
        };
        Ok(Self { name, weight_OI, bias_O, adapters, operands })
    }

    /// Rounds the weights to fp8, where GEMMs are in fp8 and the weights are not: to be called whenever they have changed.
    pub(crate) fn round_weight(&mut self, workspace: &mut Buffer) -> Result<()> {
        match &mut self.operands {
            Operands::Fp8(fp8) if self.weight_OI.scales.is_none() => {
                timing::scope(self.name, || fp8.round_weight(&self.weight_OI.values, workspace))
            }
            _ => Ok(()),
        }
    }

    /// Writes the outputs.
    pub fn forward(&mut self, x_NI: &Buffer, y_NO: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
        timing::scope(self.name, || {
            match &mut self.operands {
                Operands::Plain => linear::forward(x_NI, &self.weight_OI.values, y_NO, workspace)?,
                Operands::Dequantized(weight_OI) => linear::forward(x_NI, weight_OI.values()?, y_NO, workspace)?,
                Operands::Fp8(fp8) => fp8.forward(x_NI, y_NO, workspace)?,
            }
            if let Some(bias_O) = &self.bias_O {
                bias::forward(y_NO, &bias_O.values)?;
            }
            self.adapters.iter_mut().try_for_each(|adapter| adapter.forward(x_NI, y_NO, workspace))
        })
    }

    /// The fp8 operands and the gradient of the weights, where GEMMs are in fp8 and the weights train.
    pub(crate) fn fp8_in_training(&mut self) -> Option<(&mut Fp8Operands, &mut Buffer)> {
        let Operands::Fp8(fp8) = &mut self.operands else { return None };
        Some(&mut **fp8).zip(self.weight_OI.gradient.as_mut())
    }

    /// Receives the gradient of the outputs, which [`Linear::backward_input`] and [`Linear::backward_weight`] are then
    /// called with: where GEMMs are in fp8 it is rounded once for both.
    pub fn begin_backward(&mut self, dy_NO: &Buffer, workspace: &mut Buffer) -> Result<()> {
        let Operands::Fp8(fp8) = &mut self.operands else { return Ok(()) };
        timing::scope(self.name, || fp8.round_gradient(dy_NO, workspace))
    }

    /// Writes the gradient of the inputs.
    pub fn backward_input(&mut self, dy_NO: &Buffer, dx_NI: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
        timing::scope(self.name, || {
            match &mut self.operands {
                Operands::Plain => linear::backward_input(dy_NO, &self.weight_OI.values, dx_NI, workspace)?,
                Operands::Dequantized(weight_OI) => {
                    linear::backward_input(dy_NO, weight_OI.values()?, dx_NI, workspace)?;
                }
                Operands::Fp8(fp8) => fp8.backward_input(dx_NI, workspace)?,
            }
            self.adapters.iter_mut().try_for_each(|adapter| adapter.backward_input(dy_NO, dx_NI, workspace))
        })
    }

    /// Writes the gradients of the matrices that train, or adds to them; adds to the gradient of a bias that does.
    pub fn backward_weight(
        &mut self,
        dy_NO: &Buffer,
        x_NI: &Buffer,
        write_mode: WriteMode,
        workspace: &mut Buffer,
    ) -> Result<()> {
        timing::scope(self.name, || {
            if let Some(dweight_OI) = &mut self.weight_OI.gradient {
                match &mut self.operands {
                    Operands::Fp8(fp8) => fp8.backward_weight(Some(x_NI), dweight_OI, write_mode, workspace)?,
                    _ => linear::backward_weight(dy_NO, x_NI, dweight_OI, write_mode, workspace)?,
                }
            }
            self.backward_bias(dy_NO, workspace)?;
            let mut adapters = self.adapters.iter_mut();
            adapters.try_for_each(|adapter| adapter.backward_weight(dy_NO, x_NI, write_mode, workspace))
        })
    }

    /// [`Linear::backward_weight`] without adapters, of inputs that `write_codes` computes in fp8, where GEMMs are.
    pub(crate) fn backward_weight_of_codes(
        &mut self,
        dy_NO: &Buffer,
        write_codes: impl FnOnce(&mut Operand, &mut Buffer) -> Result<()>,
        write_mode: WriteMode,
        workspace: &mut Buffer,
    ) -> Result<()> {
        timing::scope(self.name, || {
            if let Some((fp8, dweight_OI)) = self.fp8_in_training() {
                write_codes(fp8.input_over_tokens(), workspace)?;
                fp8.backward_weight(None, dweight_OI, write_mode, workspace)?;
            }
            self.backward_bias(dy_NO, workspace)
        })
    }

    fn backward_bias(&mut self, dy_NO: &Buffer, workspace: &mut Buffer) -> Result<()> {
        let dbias_O = self.bias_O.as_mut().and_then(|bias_O| bias_O.gradient.as_mut());
        dbias_O.map_or(Ok(()), |dbias_O| Ok(bias::backward(dy_NO, dbias_O, workspace)?))
    }
}

#[cfg(test)]
mod tests {
    use kernels::fp8::{ScaleBlock, reference};
    use kernels::memory::Arena;
    use kernels::{DType, Device, DeviceKind, bf16};

    use super::*;
    use crate::ActivationRecompute;
    use crate::activations::ActivationSettings;
    use crate::shape::tests::one_billion;

    const BLOCK: ScaleBlock = ScaleBlock::Square32;

    /// A matrix of numbers of very different sizes, and the same rounded to fp8.
    fn operand(seed: usize, sizes @ [rows, columns]: [usize; 2]) -> [Buffer; 2] {
        let number =
            |at: usize| (((at * 97 + seed) % 1009) as f64 / 500.0 - 1.0) * 10f64.powi((at / columns % 7) as i32);
        let exact: Vec<f64> = (0..rows * columns).map(|at| bf16::from_f64(number(at)).to_f64()).collect();
        [exact.clone(), reference::round(&exact, sizes, BLOCK)].map(|values| {
            let mut buffer = Buffer::zeros(&sizes, DType::BF16, &Device::Cpu).unwrap();
            buffer.write(&values.into_iter().map(bf16::from_f64).collect::<Vec<_>>()).unwrap();
            buffer
        })
    }

    #[test]
    fn all_three_gemms_of_a_map_have_rounded_operands() {
        let [n, inputs, outputs] = [50, 96, 70];
        let shape = ModelShape { hidden_size: inputs, intermediate_size: outputs, ..one_billion() };
        let settings = ActivationSettings {
            batch: 1,
            sequence_length: n,
            dtype: DType::BF16,
            residual_dtype: DType::BF16,
            fp8: Some(BLOCK),
            recompute: ActivationRecompute::None,
            training: true,
            device: DeviceKind::Cpu,
            workspace_elements: 0,
        };
        let ([x, x_rounded], [w, w_rounded], [dy, dy_rounded]) =
            (operand(1, [n, inputs]), operand(2, [outputs, inputs]), operand(3, [n, outputs]));
        let zeros = |shape: &[usize], dtype| Buffer::zeros(shape, dtype, &Device::Cpu).unwrap();
        let results = || {
            let [y, dx] = [outputs, inputs].map(|width| zeros(&[n, width], DType::BF16));
            [y, dx, zeros(&[outputs, inputs], DType::F32)]
        };
        let ([mut y, mut dx, dw], [mut expected_y, mut expected_dx, mut expected_dw]) = (results(), results());
        let elements = linear::fp8_workspace_elements(n, inputs, outputs, DeviceKind::Cpu);
        let mut workspace = zeros(&[elements], DType::F32);
        linear::forward(&x_rounded, &w_rounded, &mut expected_y, &mut workspace).unwrap();
        linear::backward_input(&dy_rounded, &w_rounded, &mut expected_dx, &mut workspace).unwrap();
        let mode = WriteMode::Overwrite;
        linear::backward_weight(&dy_rounded, &x_rounded, &mut expected_dw, mode, &mut workspace).unwrap();

        let weight = Weight { values: w.clone(), scales: None, gradient: Some(dw.clone()) };
        let make = |arena: &mut Arena| {
            let mut buffers = BlockBuffers::new(&settings, arena);
            Linear::new(&shape, "map", weight.clone(), None, Vec::new(), &mut buffers)
        };
        assert!(kernels::memory::count(make).unwrap().1.bytes() > 0);
        let mut map = kernels::memory::allocate(&Device::Cpu, make).unwrap();
        map.round_weight(&mut workspace).unwrap();
        map.forward(&x, &mut y, &mut workspace).unwrap();
        map.begin_backward(&dy, &mut workspace).unwrap();
        map.backward_input(&dy, &mut dx, &mut workspace).unwrap();
        map.backward_weight(&dy, &x, mode, &mut workspace).unwrap();
        for (ours, expected) in [(y, expected_y), (dx, expected_dx), (dw, expected_dw)] {
            assert_eq!(ours.read_f32().unwrap(), expected.read_f32().unwrap());
        }
    }
}
