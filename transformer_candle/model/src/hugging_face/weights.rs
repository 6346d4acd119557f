//! `model.safetensors`: the `safetensors` crate makes and checks the header; the payload moves between buffer and file in
//! pieces, so that no second copy of the model is ever in memory.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read, Write};
use std::path::Path;

use half::bf16;
use kernels::{Buffer, DType};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::{HfTensor, hf_tensors};
use crate::error::failed;
use crate::{Error, ModelShape, Result};

/// Elements moved at a time.
const PIECE: usize = 1 << 20;

/// The longest header that is read, as the format itself limits it.
const LONGEST_HEADER: u64 = 100_000_000;

/// Writes a model's tensors, f32 or bf16 as the flat buffer is. `path` is for messages only.
pub fn write_weights(writer: &mut dyn Write, path: &Path, shape: &ModelShape, weights: &Buffer) -> Result<()> {
    let mut tensors = hf_tensors(shape);
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    writer.write_all(&header(&tensors, weights.dtype())).map_err(failed("write", path))?;
    let mut bytes = Vec::new();
    for tensor in &tensors {
        for (offset, elements) in pieces(tensor) {
            let piece = weights.view(offset, &[elements])?;
            bytes.clear();
            match weights.dtype() {
                DType::BF16 => bytes.extend(piece.read::<bf16>()?.iter().flat_map(|value| value.to_le_bytes())),
                _ => bytes.extend(piece.read::<f32>()?.iter().flat_map(|value| value.to_le_bytes())),
            }
            writer.write_all(&bytes).map_err(failed("write", path))?;
        }
    }
    writer.flush().map_err(failed("write", path))
}

fn header(tensors: &[HfTensor], dtype: DType) -> Vec<u8> {
    let stored = if dtype == DType::BF16 { Dtype::BF16 } else { Dtype::F32 };
    let mut end = 0;
    let infos = tensors.iter().map(|tensor| {
        let start = end;
        end += tensor.elements * dtype.size_in_bytes();
        (tensor.name.clone(), TensorInfo { dtype: stored, shape: tensor.shape.clone(), data_offsets: (start, end) })
    });
    // Transformers refuses a file that does not name its framework.
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(format), infos.collect()).expect("ranges laid end to end are a valid header");
    let mut json = serde_json::to_vec(&metadata).expect("a header always serialises");
    json.resize(json.len().next_multiple_of(8), b' ');
    [(json.len() as u64).to_le_bytes().as_slice(), &json].concat()
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
    let header = read_header(reader, file_bytes, path)?;
    let stored = in_file_order(&header, shape, path)?;
    weights.zero()?;
    for (tensor, dtype) in &stored {
        for (offset, elements) in pieces(tensor) {
            let values = read_values(reader, *dtype, elements).map_err(failed("read", path))?;
            let mut piece = weights.view(offset, &[elements])?;
            if weights.dtype() == DType::BF16 {
                let values: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
                piece.write(&values)?;
            } else {
                piece.write(&values)?;
            }
        }
    }
    Ok(())
}

/// The model's tensors as they follow one another in the file, which must hold these and no others.
fn in_file_order(header: &Metadata, shape: &ModelShape, path: &Path) -> Result<Vec<(HfTensor, Dtype)>> {
    let differs = |name: String, problem| Error::Tensor { path: path.to_owned(), name, problem };
    let mut wanted: BTreeMap<String, HfTensor> =
        hf_tensors(shape).into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
    let mut stored: Vec<(String, &TensorInfo)> = header.tensors().into_iter().collect();
    stored.sort_by_key(|(_, info)| info.data_offsets);
    let mut tensors = Vec::with_capacity(stored.len());
    for (name, info) in stored {
        match check(wanted.remove(&name), info) {
            Ok(tensor) => tensors.push((tensor, info.dtype)),
            Err(problem) => return Err(differs(name, problem)),
        }
    }
    match wanted.pop_first() {
        Some((name, _)) => Err(differs(name, "is missing".to_owned())),
        None => Ok(tensors),
    }
}

fn check(tensor: Option<HfTensor>, info: &TensorInfo) -> Result<HfTensor, String> {
    let Some(tensor) = tensor else {
        return Err("is in the file, but not in the model".to_owned());
    };
    if info.shape != tensor.shape {
        return Err(format!("has shape {:?}, the model's has {:?}", info.shape, tensor.shape));
    }
    if !matches!(info.dtype, Dtype::F32 | Dtype::BF16) {
        return Err(format!("holds {:?}; F32 and BF16 can be read", info.dtype));
    }
    Ok(tensor)
}

fn read_header(reader: &mut dyn Read, file_bytes: u64, path: &Path) -> Result<Metadata> {
    let malformed = |problem: String| Error::Malformed { path: path.to_owned(), problem };
    let mut length = [0; 8];
    if file_bytes < length.len() as u64 {
        return Err(malformed(format!("it has {file_bytes} bytes")));
    }
    reader.read_exact(&mut length).map_err(failed("read", path))?;
    let length = u64::from_le_bytes(length);
    if length > LONGEST_HEADER || length + 8 > file_bytes {
        return Err(malformed(format!("it claims a header of {length} bytes in a file of {file_bytes}")));
    }
    let mut json = vec![0; length as usize];
    reader.read_exact(&mut json).map_err(failed("read", path))?;
    let metadata: Metadata = serde_json::from_slice(&json).map_err(|error| malformed(error.to_string()))?;
    if metadata.data_len() as u64 + length + 8 != file_bytes {
        return Err(malformed(format!("its header describes {} bytes, it has {file_bytes}", metadata.data_len())));
    }
    Ok(metadata)
}

fn read_values(reader: &mut dyn Read, dtype: Dtype, elements: usize) -> io::Result<Vec<f32>> {
    let mut bytes = vec![0; elements * dtype.bitsize() / 8];
    reader.read_exact(&mut bytes)?;
    Ok(match dtype {
        Dtype::BF16 => bytes.as_chunks().0.iter().map(|value| bf16::from_le_bytes(*value).to_f32()).collect(),
        _ => bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect(),
    })
}

/// The pieces of a tensor: (offset in the flat buffer, elements).
fn pieces(tensor: &HfTensor) -> impl Iterator<Item = (usize, usize)> {
    let (start, end) = (tensor.offset, tensor.offset + tensor.elements);
    (start..end).step_by(PIECE).map(move |offset| (offset, PIECE.min(end - offset)))
}
