//! A linear map: a matrix of weights, perhaps a bias and perhaps adapters with their gradients, forward beside
//! backward.

use kernels::{Buffer, WriteMode, bias, linear, timing};

use crate::Result;
use crate::lora::Adapter;
use crate::weight::Weight;

/// The map `y_NO = x_NI w_OI^T + bias_O`, with or without the bias; adapters add to some of the outputs. What does not
/// train has no gradient.
#[derive(Clone, Debug)]
pub struct Linear {
    /// The name in profiles.
    name: &'static str,
    weight_OI: Weight,
    bias_O: Option<Weight>,
    adapters: Vec<Adapter>,
}

impl Linear {
    /// The linear map with weights `[O, I]`, bias `[O]` and adapters; `name` is for profiles.
    pub(crate) fn new(name: &'static str, weight_OI: Weight, bias_O: Option<Weight>, adapters: Vec<Adapter>) -> Self {
        Self { name, weight_OI, bias_O, adapters }
    }

    /// Writes the outputs.
    pub fn forward(&mut self, x_NI: &Buffer, y_NO: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
        timing::scope(self.name, || {
            linear::forward(x_NI, &self.weight_OI.values, y_NO, workspace)?;
            if let Some(bias_O) = &self.bias_O {
                bias::forward(y_NO, &bias_O.values)?;
            }
            self.adapters.iter_mut().try_for_each(|adapter| adapter.forward(x_NI, y_NO, workspace))
        })
    }

    /// Writes the gradient of the inputs.
    pub fn backward_input(&mut self, dy_NO: &Buffer, dx_NI: &mut Buffer, workspace: &mut Buffer) -> Result<()> {
        timing::scope(self.name, || {
            linear::backward_input(dy_NO, &self.weight_OI.values, dx_NI, workspace)?;
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
                linear::backward_weight(dy_NO, x_NI, dweight_OI, write_mode, workspace)?;
            }
            if let Some(dbias_O) = self.bias_O.as_mut().and_then(|bias_O| bias_O.gradient.as_mut()) {
                bias::backward(dy_NO, dbias_O, workspace)?;
            }
            let mut adapters = self.adapters.iter_mut();
            adapters.try_for_each(|adapter| adapter.backward_weight(dy_NO, x_NI, write_mode, workspace))
        })
    }
}
