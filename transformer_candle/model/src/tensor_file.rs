//! Safetensors files of flat buffers: named ranges of them, written and read in pieces, so that no second copy of a
//! model is ever in memory. The `safetensors` crate makes and checks the header; numbers are little-endian.

mod header;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::path::Path;

use kernels::{Buffer, DType, DeviceKind, Element, Scalar, bf16};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

pub(crate) use self::header::read_header;
use crate::error::failed;
use crate::{Error, Result};

/// Elements moved at a time on a CPU: 256 KiB of f32 stay in the processor's cache.
const CPU_PIECE: usize = 1 << 16;

/// Elements moved at a time from or to a GPU: 4 MiB of f32, so that a copy's own time, some ten microseconds, is a few
/// percent of what its bytes take. The host never holds more than one piece.
const CUDA_PIECE: usize = 1 << 20;

/// A tensor of a file and the range of a flat buffer (F32, BF16 or I16) that holds it.
#[derive(Clone, Debug)]
pub struct NamedRange<'a> {
    /// The tensor's name in the file.
    pub name: String,
    /// The tensor's shape; its elements are the range's.
    pub shape: Vec<usize>,
    /// The buffer that the range lies in; reading a file writes there.
    pub buffer: &'a Buffer,
    /// The range's first element.
    pub offset: usize,
}

/// Which element types of a file fit a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conversion {
    /// The buffer's own type alone, so that every bit comes back.
    Refused,
    /// F32 and BF16 fit one another: widening is exact, narrowing rounds to the nearest, ties to even.
    BetweenFloats,
}

impl NamedRange<'_> {
    /// Size of its numbers in bytes.
    pub fn bytes(&self) -> usize {
        self.elements() * self.buffer.dtype().size_in_bytes()
    }

    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The buffer's type, as the format calls it.
    fn dtype(&self) -> Result<Dtype> {
        match self.buffer.dtype() {
            DType::F32 => Ok(Dtype::F32),
            DType::BF16 => Ok(Dtype::BF16),
            DType::I16 => Ok(Dtype::I16),
            actual => {
                let (operation, expected) = ("tensor_file", "F32, BF16 or I16");
                Err(kernels::Error::DType { operation, argument: "buffer", expected, actual }.into())
            }
        }
    }

    fn pieces(&self) -> impl Iterator<Item = Result<Buffer>> {
        let (end, piece) = (self.offset + self.elements(), self.piece());
        (self.offset..end).step_by(piece).map(move |offset| Ok(self.buffer.view(offset, &[piece.min(end - offset)])?))
    }

    fn piece(&self) -> usize {
        match self.buffer.device().kind() {
            DeviceKind::Cpu => CPU_PIECE,
            DeviceKind::Cuda => CUDA_PIECE,
        }
    }

    fn write<T: Number>(&self, writer: &mut dyn Write, path: &Path, bytes: &mut Vec<u8>) -> Result<()> {
        for piece in self.pieces() {
            T::encode(&piece?.read::<T>()?, bytes);
            writer.write_all(bytes).map_err(failed("write", path))?;
        }
        Ok(())
    }

    fn read<S: Number, T: Number>(
        &self,
        reader: &mut dyn Read,
        path: &Path,
        bytes: &mut Vec<u8>,
        convert: impl Fn(S) -> T,
    ) -> Result<()> {
        let mut values = Vec::with_capacity(self.piece().min(self.elements()));
        for piece in self.pieces() {
            let mut piece = piece?;
            bytes.resize(piece.elements() * size_of::<S>(), 0);
            reader.read_exact(bytes).map_err(failed("read", path))?;
            values.clear();
            values.extend(S::decode(bytes).map(&convert));
            piece.write(&values)?;
        }
        Ok(())
    }
}

/// Writes a file of these tensors, whose names differ: wider types first and then by name, as the format's own writer
/// orders them. `path` is for messages only.
pub fn write(writer: &mut dyn Write, path: &Path, ranges: Vec<NamedRange>) -> Result<()> {
    let mut tensors = ranges.into_iter().map(|range| Ok((range.dtype()?, range))).collect::<Result<Vec<_>>>()?;
    tensors.sort_by(|(a_dtype, a), (b_dtype, b)| b_dtype.cmp(a_dtype).then_with(|| a.name.cmp(&b.name)));
    let tensor =
        |(dtype, range): &(Dtype, NamedRange)| (range.name.clone(), *dtype, range.shape.clone(), range.bytes());
    writer.write_all(&header::header(tensors.iter().map(tensor))).map_err(failed("write", path))?;
    let mut bytes = Vec::new();
    for (dtype, range) in &tensors {
        match dtype {
            Dtype::I16 => range.write::<i16>(writer, path, &mut bytes)?,
            Dtype::BF16 => range.write::<bf16>(writer, path, &mut bytes)?,
            _ => range.write::<f32>(writer, path, &mut bytes)?,
        }
    }
    writer.flush().map_err(failed("write", path))
}

/// Fills the ranges from a file of `file_bytes` that holds exactly these tensors, in any order.
///
/// Names, shapes and types are compared before the first number is written: a file that is refused leaves the buffers
/// as they were. `path` is for messages only.
pub fn read(
    reader: &mut dyn Read,
    file_bytes: u64,
    path: &Path,
    ranges: Vec<NamedRange>,
    conversion: Conversion,
) -> Result<()> {
    let header = read_header(reader, file_bytes, path)?;
    let mut missing_ranges = by_name(ranges);
    let tensors = in_file_order(&header, path, &mut missing_ranges, &BTreeSet::new(), conversion)?;
    all_found(path, &missing_ranges)?;
    fill(reader, path, tensors)
}

/// Returns ranges by their tensors' names.
pub fn by_name(ranges: Vec<NamedRange>) -> BTreeMap<String, NamedRange> {
    ranges.into_iter().map(|range| (range.name.clone(), range)).collect()
}

/// Fills those of the ranges that a file of several holds, and takes them out of `missing_ranges`. The tensors in
/// `others`, and no more, may be in it as well. The last file is followed by [`all_found`].
pub fn read_one_of_several(
    reader: &mut dyn Read,
    file_bytes: u64,
    path: &Path,
    missing_ranges: &mut BTreeMap<String, NamedRange<'_>>,
    others: &BTreeSet<String>,
) -> Result<()> {
    let header = read_header(reader, file_bytes, path)?;
    let tensors = in_file_order(&header, path, missing_ranges, others, Conversion::Refused)?;
    fill(reader, path, tensors)
}

/// Fails if a tensor was found in none of the files.
pub fn all_found(path: &Path, missing_ranges: &BTreeMap<String, NamedRange>) -> Result<()> {
    match missing_ranges.first_key_value() {
        Some((name, _)) => Err(differs(path, name.clone(), "is missing".to_owned())),
        None => Ok(()),
    }
}

/// A tensor of a file, with the range to fill or the bytes to skip.
type Stored<'a> = (Dtype, std::result::Result<NamedRange<'a>, u64>);

fn fill(reader: &mut dyn Read, path: &Path, tensors: Vec<Stored<'_>>) -> Result<()> {
    let mut bytes = Vec::new();
    for (dtype, range) in tensors {
        let range = match range {
            Ok(range) => range,
            Err(skipped) => {
                io::copy(&mut reader.take(skipped), &mut io::sink()).map_err(failed("read", path))?;
                continue;
            }
        };
        match (dtype, range.dtype()?) {
            (Dtype::I16, _) => range.read(reader, path, &mut bytes, |value: i16| value)?,
            (Dtype::BF16, Dtype::BF16) => range.read(reader, path, &mut bytes, |value: bf16| value)?,
            (Dtype::BF16, _) => range.read(reader, path, &mut bytes, bf16::widen)?,
            (_, Dtype::BF16) => range.read(reader, path, &mut bytes, bf16::narrow)?,
            _ => range.read(reader, path, &mut bytes, |value: f32| value)?,
        }
    }
    Ok(())
}

/// Returns the tensors in the order of the file, with their types there, and takes those that it finds out of
/// `missing_ranges`.
fn in_file_order<'a>(
    header: &Metadata,
    path: &Path,
    missing_ranges: &mut BTreeMap<String, NamedRange<'a>>,
    others: &BTreeSet<String>,
    conversion: Conversion,
) -> Result<Vec<Stored<'a>>> {
    let mut tensors = Vec::with_capacity(missing_ranges.len());
    for name in header.offset_keys() {
        let info = header.info(&name).expect("the header lists its own names");
        if others.contains(&name) {
            let (start, end) = info.data_offsets;
            tensors.push((info.dtype, Err((end - start) as u64)));
            continue;
        }
        let Some(range) = missing_ranges.remove(&name) else {
            return Err(differs(path, name, "is in the file, but not in the model".to_owned()));
        };
        if let Some(problem) = difference(info, &range.shape, range.dtype()?, conversion) {
            return Err(differs(path, name, problem));
        }
        tensors.push((info.dtype, Ok(range)));
    }
    Ok(tensors)
}

fn differs(path: &Path, name: String, problem: String) -> Error {
    Error::Tensor { path: path.to_owned(), name, problem }
}

fn difference(info: &TensorInfo, shape: &[usize], dtype: Dtype, conversion: Conversion) -> Option<String> {
    if info.shape != shape {
        return Some(format!("has shape {:?}, the model's has {shape:?}", info.shape));
    }
    let floats = [Dtype::F32, Dtype::BF16];
    let converted = conversion == Conversion::BetweenFloats && floats.contains(&dtype);
    let (fits, readable) = if converted {
        (floats.contains(&info.dtype), "F32 and BF16".to_owned())
    } else {
        (info.dtype == dtype, format!("only {dtype:?}"))
    };
    (!fits).then(|| format!("holds {:?}; {readable} can be read", info.dtype))
}

/// A number as the format stores it: little-endian.
trait Number: Scalar {
    fn encode(values: &[Self], bytes: &mut Vec<u8>);
    fn decode(bytes: &[u8]) -> impl Iterator<Item = Self>;
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Number for $number {
            fn encode(values: &[Self], bytes: &mut Vec<u8>) {
                bytes.resize(size_of_val(values), 0);
                let (places, _) = bytes.as_chunks_mut();
                places.iter_mut().zip(values).for_each(|(place, value)| *place = value.to_le_bytes());
            }

            fn decode(bytes: &[u8]) -> impl Iterator<Item = Self> {
                bytes.as_chunks().0.iter().map(|number| Self::from_le_bytes(*number))
            }
        }
    )*};
}
numbers!(f32, bf16, i16);

#[cfg(test)]
mod tests;
