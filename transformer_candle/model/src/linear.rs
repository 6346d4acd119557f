//! A linear map: a matrix of weights and perhaps a bias with their gradients, forward beside backward.

use kernels::{Buffer, WriteMode, bias, linear};

use crate::Result;
use crate::parameters::Weight;

/// `y_NO = x_NI w_OI^T + bias_O`, with or without the bias.
#[derive(Clone, Debug)]
pub struct Linear {
    weight_OI: Weight,
    bias_O: Option<Weight>,
}

impl Linear {
    /// The map by these weights, [O, I], and this bias, [O].
    pub(crate) fn new(weight_OI: Weight, bias_O: Option<Weight>) -> Self {
        Self { weight_OI, bias_O }
    }

    /// Writes the outputs.
    pub fn forward(&self, x_NI: &Buffer, y_NO: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
        linear::forward(x_NI, &self.weight_OI.values, y_NO, workspace)?;
        if let Some(bias_O) = &self.bias_O {
            bias::forward(y_NO, &bias_O.values)?;
        }
        Ok(())
    }

    /// Writes the gradient of the inputs.
    pub fn backward_input(&self, dy_NO: &Buffer, dx_NI: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
        Ok(linear::backward_input(dy_NO, &self.weight_OI.values, dx_NI, workspace)?)
    }

    /// Writes the gradient of the weights, or adds to it; adds to the gradient of the bias.
    pub fn backward_weight(
        &mut self,
        dy_NO: &Buffer,
        x_NI: &Buffer,
        write_mode: WriteMode,
        workspace: &mut Buffer,
    ) -> Result<()> {
        let (_, dweight_OI) = self.weight_OI.with_gradient()?;
        linear::backward_weight(dy_NO, x_NI, dweight_OI, write_mode, workspace)?;
        if let Some(bias_O) = &mut self.bias_O {
            let (_, dbias_O) = bias_O.with_gradient()?;
            bias::backward(dy_NO, dbias_O, workspace)?;
        }
        Ok(())
    }
}
