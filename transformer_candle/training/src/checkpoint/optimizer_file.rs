//! `optimizer.safetensors`: moments and master remainders under the model's names, exact to the bit.

use std::io::{Read, Write};
use std::path::Path;

use kernels::Buffer;
use model::tensor_file::{self, Conversion, NamedRange};
use model::{ModelShape, hugging_face};

/// The optimizer's flat buffers, laid out as the weights are.
#[derive(Debug)]
pub(super) struct OptimizerBuffers<'a> {
    pub(super) first_moment: &'a Buffer,
    pub(super) second_moment: &'a Buffer,
    /// The low halves (I16) of f32 master weights whose high halves are the bf16 weights.
    pub(super) remainder: Option<&'a Buffer>,
}

/// Every tensor of the file: `model.norm.weight.first_moment`, `.second_moment` and `.master_remainder`.
fn ranges<'a>(shape: &ModelShape, buffers: &OptimizerBuffers<'a>) -> Vec<NamedRange<'a>> {
    let kinds = [
        ("first_moment", Some(buffers.first_moment)),
        ("second_moment", Some(buffers.second_moment)),
        ("master_remainder", buffers.remainder),
    ];
    let mut ranges = Vec::new();
    for (kind, buffer) in kinds {
        let Some(buffer) = buffer else { continue };
        ranges.extend(hugging_face::hf_tensors(shape).into_iter().map(|tensor| NamedRange {
            name: format!("{}.{kind}", tensor.name),
            shape: tensor.shape,
            buffer,
            offset: tensor.offset,
        }));
    }
    ranges
}

/// Bytes of payload; the header adds about 150 a tensor.
pub(super) fn payload_bytes(shape: &ModelShape, buffers: &OptimizerBuffers) -> u64 {
    ranges(shape, buffers).iter().map(|range| range.bytes() as u64).sum()
}

/// Writes the file.
pub(super) fn write(
    writer: &mut dyn Write,
    path: &Path,
    shape: &ModelShape,
    buffers: &OptimizerBuffers,
) -> model::Result<()> {
    tensor_file::write(writer, path, ranges(shape, buffers))
}

/// Fills the buffers from a file that holds exactly their tensors.
pub(super) fn read(
    reader: &mut dyn Read,
    file_bytes: u64,
    path: &Path,
    shape: &ModelShape,
    buffers: &OptimizerBuffers,
) -> model::Result<()> {
    tensor_file::read(reader, file_bytes, path, ranges(shape, buffers), Conversion::Refused)
}
