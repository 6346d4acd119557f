//! The operands of a linear map's GEMMs, rounded to fp8 before each.

use kernels::fp8::{self, ScaleBlock};
use kernels::{Buffer, DType};

use crate::activations::BlockBuffers;
use crate::shape::LinearMap;
use crate::{ModelShape, Result};

/// Where a linear map rounds the operands of its GEMMs to: memory that all linear maps share.
#[derive(Clone, Debug)]
pub(crate) struct Fp8Operands {
    pub(crate) input_NI: RoundedOperand,
    pub(crate) weight_OI: RoundedOperand,
    pub(crate) output_gradient_NO: RoundedOperand,
}

/// An operand as an fp8 GEMM sees it.
#[derive(Clone, Debug)]
pub(crate) struct RoundedOperand {
    block: ScaleBlock,
    values: Buffer,
}

impl Fp8Operands {
    /// The operands of a linear map of [inputs, outputs]; None where GEMMs are not in fp8.
    pub(crate) fn take(
        shape: &ModelShape,
        [inputs, outputs]: [usize; 2],
        buffers: &mut BlockBuffers<'_>,
    ) -> Result<Option<Self>> {
        let Some(block) = buffers.settings.fp8 else { return Ok(None) };
        let n = buffers.settings.batch * buffers.settings.sequence_length;
        let maps = shape.linear_maps();
        let largest = |elements: fn(&LinearMap) -> usize| maps.iter().map(elements).max().unwrap_or(0);
        let mut operand = |name, elements: usize, sizes: [usize; 2]| -> Result<_> {
            let shared = buffers.take_shared(name, DType::BF16, &[elements]);
            Ok(RoundedOperand { block, values: shared.view(0, &sizes)? })
        };
        Ok(Some(Self {
            input_NI: operand("fp8_input", n * largest(|map| map.inputs), [n, inputs])?,
            weight_OI: operand("fp8_weight", largest(|map| map.inputs * map.outputs), [outputs, inputs])?,
            output_gradient_NO: operand("fp8_output_gradient", n * largest(|map| map.outputs), [n, outputs])?,
        }))
    }
}

impl RoundedOperand {
    /// Rounds an operand, or passes it through where GEMMs are not in fp8.
    pub(crate) fn of<'a>(rounded: Option<&'a mut Self>, operand: &'a Buffer) -> Result<&'a Buffer> {
        rounded.map_or(Ok(operand), |Self { block, values }| {
            fp8::round(operand, *block, values)?;
            Ok(values)
        })
    }
}
