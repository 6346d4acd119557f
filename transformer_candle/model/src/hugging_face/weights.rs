//! `model.safetensors`: a flat buffer of weights under the names of `transformers`.

use std::io::{Read, Write};
use std::path::Path;

use kernels::Buffer;

use super::{HfTensor, adapter_tensors, hf_tensors};
use crate::tensor_file::{self, Conversion, NamedRange};
use crate::{ModelShape, Result};

/// Writes a model's tensors, f32 or bf16 as the flat buffer is. `path` is for messages only.
pub fn write_weights(writer: &mut dyn Write, path: &Path, shape: &ModelShape, weights: &Buffer) -> Result<()> {
    tensor_file::write(writer, path, ranges(hf_tensors(shape), weights))
}

/// Writes a model's adapters as peft's `adapter_model.safetensors`. `path` is for messages only.
pub fn write_adapters(writer: &mut dyn Write, path: &Path, shape: &ModelShape, weights: &Buffer) -> Result<()> {
    tensor_file::write(writer, path, ranges(adapter_tensors(shape), weights))
}

/// Fills the adapters of a flat buffer from a file of exactly these, each f32 or bf16. `path` is for messages only.
pub fn read_adapters(
    reader: &mut dyn Read,
    file_bytes: u64,
    path: &Path,
    shape: &ModelShape,
    weights: &mut Buffer,
) -> Result<()> {
    tensor_file::read(reader, file_bytes, path, ranges(adapter_tensors(shape), weights), Conversion::BetweenFloats)
}

/// Fills a flat buffer from a safetensors file of exactly this model's tensors, each f32 or bf16.
///
/// Values are converted to the buffer's element type: widening is exact, narrowing rounds to the nearest, ties to even.
/// The vocabulary's padding is set to zero. `path` is for messages only.
pub fn read_weights(
    reader: &mut dyn Read,
    file_bytes: u64,
    path: &Path,
    shape: &ModelShape,
    weights: &mut Buffer,
) -> Result<()> {
    tensor_file::read(reader, file_bytes, path, ranges(hf_tensors(shape), weights), Conversion::BetweenFloats)?;
    zero_between_tensors(shape, weights)
}

fn ranges(tensors: Vec<HfTensor>, weights: &Buffer) -> Vec<NamedRange<'_>> {
    tensors
        .into_iter()
        .map(|tensor| NamedRange { name: tensor.name, shape: tensor.shape, buffer: weights, offset: tensor.offset })
        .collect()
}

/// Zeroes the elements that no tensor of the file holds.
pub(super) fn zero_between_tensors(shape: &ModelShape, weights: &mut Buffer) -> Result<()> {
    let tensors = hf_tensors(shape).into_iter().filter(|tensor| tensor.offset < weights.elements());
    let mut ranges: Vec<_> = tensors.map(|tensor| (tensor.offset, tensor.elements)).collect();
    ranges.push((weights.elements(), 0));
    ranges.sort_unstable();
    let mut end = 0;
    for (offset, elements) in ranges {
        if end < offset {
            weights.view(end, &[offset - end])?.zero()?;
        }
        end = offset + elements;
    }
    Ok(())
}
