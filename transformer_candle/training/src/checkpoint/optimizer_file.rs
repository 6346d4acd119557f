//! `optimizer.safetensors`: the optimizer's state under the parameters' names, bit for bit. With several ranks each
//! writes a file of the state that it keeps; any number of ranks reads them, as each tensor is whole in one file.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::path::Path;

use model::tensor_file::{self, NamedRange};
use model::{ModelShape, hugging_face};

use super::files::OPTIMIZER;
use crate::engine::{StateLayout, StateTensor};
use crate::ranks::RankInfo;

/// Returns every tensor of a rank's file, such as `model.norm.weight.first_moment`.
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

/// The name of a rank's file.
pub(super) fn name(rank_info: RankInfo) -> String {
    match rank_info.world_size {
        1 => OPTIMIZER.to_owned(),
        world_size => format!("optimizer-{:05}-of-{world_size:05}.safetensors", rank_info.rank + 1),
    }
}

/// Returns the optimizer's files among those of a checkpoint.
pub(super) fn names<'a>(files: impl Iterator<Item = &'a String>) -> Vec<&'a str> {
    let is_part = |name: &&str| name.starts_with("optimizer-") && name.ends_with(".safetensors");
    files.map(String::as_str).filter(|name| *name == OPTIMIZER || is_part(name)).collect()
}

/// The names of the tensors that other ranks keep.
fn kept_by_others(shape: &ModelShape, state: &[StateTensor]) -> BTreeSet<String> {
    let parameters = hugging_face::trainable_tensors(shape);
    let of_state = |StateTensor { layout, .. }: &StateTensor| {
        let state_name = |parameter: &hugging_face::HfTensor| {
            let elements = parameter.offset..parameter.offset + parameter.elements;
            let is_elsewhere = layout.is_kept(&elements) && layout.offset_of(&elements).is_none();
            is_elsewhere.then(|| format!("{}.{}", parameter.name, layout.name))
        };
        parameters.iter().filter_map(state_name).collect::<Vec<_>>()
    };
    state.iter().flat_map(of_state).collect()
}

/// Bytes of the tensors' data, those of all ranks together; the header adds about 150 per tensor.
pub(super) fn payload_bytes<'a>(shape: &ModelShape, state: impl Iterator<Item = &'a StateLayout>) -> u64 {
    let parameters = hugging_face::trainable_tensors(shape);
    let elements = |layout: &StateLayout| {
        let ranges = parameters.iter().map(|parameter| parameter.offset..parameter.offset + parameter.elements);
        ranges.filter(|range| layout.is_kept(range)).map(|range| range.len()).sum::<usize>()
    };
    state.map(|layout| (elements(layout) * layout.dtype.size_in_bytes()) as u64).sum()
}

/// Writes a rank's file.
pub(super) fn write(
    writer: &mut dyn Write,
    path: &Path,
    shape: &ModelShape,
    state: &[StateTensor],
) -> model::Result<()> {
    tensor_file::write(writer, path, ranges(shape, state))
}

/// Fills the state that a rank keeps from files that together hold exactly the tensors of all ranks.
pub(super) struct Reader<'a> {
    own: BTreeMap<String, NamedRange<'a>>,
    others: BTreeSet<String>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(shape: &ModelShape, state: &'a mut [StateTensor]) -> Self {
        Self { others: kept_by_others(shape, state), own: tensor_file::by_name(ranges(shape, state)) }
    }

    /// Reads one of the files.
    pub(super) fn read(&mut self, reader: &mut dyn Read, file_bytes: u64, path: &Path) -> model::Result<()> {
        tensor_file::read_one_of_several(reader, file_bytes, path, &mut self.own, &self.others)
    }

    /// Makes sure that no tensor was missing.
    pub(super) fn finish(self, path: &Path) -> model::Result<()> {
        tensor_file::all_found(path, &self.own)
    }
}
