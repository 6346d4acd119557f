//! `optimizer.safetensors`: the optimizer's state under the parameters' names, bit for bit.

use std::io::{Read, Write};
use std::path::Path;

use model::tensor_file::{self, Conversion, NamedRange};
use model::{ModelShape, hugging_face};

use crate::engine::{StateLayout, StateTensor};

/// Every tensor of the file, such as `model.norm.weight.first_moment`.
fn ranges<'a>(shape: &ModelShape, state: &'a [StateTensor]) -> Vec<NamedRange<'a>> {
    let parameters = hugging_face::trainable_tensors(shape);
    let of_state = |StateTensor { layout, buffer }: &'a StateTensor| {
        let range = |parameter: &hugging_face::HfTensor| {
            let offset = layout.offset_of(&(parameter.offset..parameter.offset + parameter.elements))?;
            let name = format!("{}.{}", parameter.name, layout.name);
            Some(NamedRange { name, shape: parameter.shape.clone(), buffer, offset })
        };
        parameters.iter().filter_map(range).collect::<Vec<_>>()
    };
    state.iter().flat_map(of_state).collect()
}

/// Bytes of the tensors' data; the header adds about 150 per tensor.
pub(super) fn payload_bytes<'a>(shape: &ModelShape, state: impl Iterator<Item = &'a StateLayout>) -> u64 {
    let parameters = hugging_face::trainable_tensors(shape);
    let elements = |layout: &StateLayout| {
        let ranges = parameters.iter().map(|parameter| parameter.offset..parameter.offset + parameter.elements);
        ranges.filter(|range| layout.offset_of(range).is_some()).map(|range| range.len()).sum::<usize>()
    };
    state.map(|layout| (elements(layout) * layout.dtype.size_in_bytes()) as u64).sum()
}

/// Writes the file.
pub(super) fn write(
    writer: &mut dyn Write,
    path: &Path,
    shape: &ModelShape,
    state: &[StateTensor],
) -> model::Result<()> {
    tensor_file::write(writer, path, ranges(shape, state))
}

/// Fills the state from a file that holds exactly its tensors.
pub(super) fn read(
    reader: &mut dyn Read,
    file_bytes: u64,
    path: &Path,
    shape: &ModelShape,
    state: &mut [StateTensor],
) -> model::Result<()> {
    tensor_file::read(reader, file_bytes, path, ranges(shape, state), Conversion::Refused)
}
