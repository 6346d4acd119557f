//! A linear map: a matrix of weights with its gradient, forward beside backward.

use kernels::{Buffer, WriteMode, linear};

use crate::Result;
use crate::parameters::Weight;

/// `y_NO = x_NI w_OI^T`, without a bias.
#[derive(Clone, Debug)]
pub struct Linear {
    weight_OI: Weight,
}

impl Linear {
    /// The map by these weights, [O, I].
    pub(crate) fn new(weight_OI: Weight) -> Self {
        Self { weight_OI }
    }

    /// Writes the outputs.
    pub fn forward(&self, x_NI: &Buffer, y_NO: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
        Ok(linear::forward(x_NI, &self.weight_OI.values, y_NO, workspace)?)
    }

    /// Writes the gradient of the inputs.
    pub fn backward_input(&self, dy_NO: &Buffer, dx_NI: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
        Ok(linear::backward_input(dy_NO, &self.weight_OI.values, dx_NI, workspace)?)
    }

    /// Writes the gradient of the weights, or adds to it.
    pub fn backward_weight(
        &mut self,
        dy_NO: &Buffer,
        x_NI: &Buffer,
        write_mode: WriteMode,
        workspace: &mut Buffer,
    ) -> Result<()> {
        let (_, dweight_OI) = self.weight_OI.with_gradient()?;
        Ok(linear::backward_weight(dy_NO, x_NI, dweight_OI, write_mode, workspace)?)
    }
}
