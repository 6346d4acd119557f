//! `optimizer.safetensors`: moments and master remainders under the model's names, exact to the bit, written and read
//! in pieces so that no second copy of them is ever in memory.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read, Write};

use kernels::{Buffer, DType, Scalar};
use model::{ModelShape, hugging_face};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::error::{CheckpointError, Result};

/// Elements moved at a time.
const PIECE_ELEMENTS: usize = 1 << 16;

/// The longest header that is read, as the format itself limits it.
const LONGEST_HEADER: u64 = 100_000_000;

/// The optimizer's flat buffers, laid out as the weights are.
#[derive(Debug)]
pub(super) struct OptimizerBuffers<'a> {
    pub(super) first_moment: &'a Buffer,
    pub(super) second_moment: &'a Buffer,
    /// The low halves (I16) of f32 master weights whose high halves are the bf16 weights.
    pub(super) remainder: Option<&'a Buffer>,
}

/// A tensor of the file and the range of the flat buffer that holds it.
#[derive(Debug)]
struct NamedRange<'a> {
    name: String,
    shape: Vec<usize>,
    buffer: &'a Buffer,
    offset: usize,
}

impl NamedRange<'_> {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    fn bytes(&self) -> usize {
        self.elements() * self.buffer.dtype().size_in_bytes()
    }

    /// The type on disk.
    fn stored(&self) -> Dtype {
        if self.buffer.dtype() == DType::I16 { Dtype::I16 } else { Dtype::F32 }
    }

    /// (offset in the flat buffer, elements) of each piece.
    fn pieces(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (start, end) = (self.offset, self.offset + self.elements());
        (start..end).step_by(PIECE_ELEMENTS).map(move |offset| (offset, PIECE_ELEMENTS.min(end - offset)))
    }
}

/// Why a file could not be read into the buffers.
#[derive(Debug)]
pub(super) enum Unreadable {
    Io(io::Error),
    /// The bytes are no safetensors file.
    Malformed(String),
    /// A sound file with other tensors.
    Mismatch(String),
    Kernel(kernels::Error),
}

impl From<io::Error> for Unreadable {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<kernels::Error> for Unreadable {
    fn from(error: kernels::Error) -> Self {
        Self::Kernel(error)
    }
}

/// Every tensor of the file: `model.norm.weight.first_moment`, `.second_moment` and `.master_remainder`; wider types
/// first and then by name, as the format's own writer orders them.
fn tensors<'a>(shape: &ModelShape, buffers: &OptimizerBuffers<'a>) -> Vec<NamedRange<'a>> {
    let kinds = [
        ("first_moment", Some(buffers.first_moment)),
        ("second_moment", Some(buffers.second_moment)),
        ("master_remainder", buffers.remainder),
    ];
    let mut tensors = Vec::new();
    for (kind, buffer) in kinds {
        let Some(buffer) = buffer else { continue };
        tensors.extend(hugging_face::hf_tensors(shape).into_iter().map(|tensor| NamedRange {
            name: format!("{}.{kind}", tensor.name),
            shape: tensor.shape,
            buffer,
            offset: tensor.offset,
        }));
    }
    tensors.sort_by(|a, b| b.stored().cmp(&a.stored()).then(a.name.cmp(&b.name)));
    tensors
}

/// Bytes of payload; the header adds about 150 a tensor.
pub(super) fn payload_bytes(shape: &ModelShape, buffers: &OptimizerBuffers) -> u64 {
    tensors(shape, buffers).iter().map(|tensor| tensor.bytes() as u64).sum()
}

/// Writes the file.
pub(super) fn write(
    shape: &ModelShape,
    buffers: &OptimizerBuffers,
    writer: &mut dyn Write,
    failed: impl Fn(io::Error) -> CheckpointError,
) -> Result<()> {
    let tensors = tensors(shape, buffers);
    writer.write_all(&header(&tensors)).map_err(&failed)?;
    for tensor in &tensors {
        match tensor.stored() {
            Dtype::I16 => write_payload::<i16>(tensor, writer, &failed)?,
            _ => write_payload::<f32>(tensor, writer, &failed)?,
        }
    }
    Ok(())
}

fn header(tensors: &[NamedRange]) -> Vec<u8> {
    let mut end = 0;
    let infos = tensors.iter().map(|tensor| {
        let start = end;
        end += tensor.bytes();
        let info = TensorInfo { dtype: tensor.stored(), shape: tensor.shape.clone(), data_offsets: (start, end) };
        (tensor.name.clone(), info)
    });
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(format), infos.collect()).expect("ranges laid end to end are a valid header");
    let mut json = serde_json::to_vec(&metadata).expect("a header always serialises");
    json.resize(json.len().next_multiple_of(8), b' ');
    [(json.len() as u64).to_le_bytes().as_slice(), &json].concat()
}

fn write_payload<T: Stored>(
    tensor: &NamedRange,
    writer: &mut dyn Write,
    failed: impl Fn(io::Error) -> CheckpointError,
) -> Result<()> {
    let mut bytes = Vec::new();
    for (offset, elements) in tensor.pieces() {
        T::encode(&tensor.buffer.view(offset, &[elements])?.read::<T>()?, &mut bytes);
        writer.write_all(&bytes).map_err(&failed)?;
    }
    Ok(())
}

/// Fills the buffers from a file that holds exactly their tensors.
pub(super) fn read(
    shape: &ModelShape,
    buffers: &OptimizerBuffers,
    file: &mut impl Read,
    file_bytes: u64,
) -> std::result::Result<(), Unreadable> {
    let metadata = read_header(file, file_bytes)?;
    let tensors = tensors(shape, buffers);
    let mut targets: BTreeMap<&str, &NamedRange> =
        tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    for name in metadata.offset_keys() {
        let info = metadata.info(&name).expect("the header lists its own names");
        let Some(target) = targets.remove(name.as_str()) else {
            return Err(Unreadable::Mismatch(format!("it holds a tensor {name}, which this run has not")));
        };
        if info.shape != target.shape || info.dtype != target.stored() {
            return Err(Unreadable::Mismatch(format!(
                "its {name} is {:?} {:?}, this run's is {:?} {:?}",
                info.dtype,
                info.shape,
                target.stored(),
                target.shape
            )));
        }
        match target.stored() {
            Dtype::I16 => read_payload::<i16>(target, file)?,
            _ => read_payload::<f32>(target, file)?,
        }
    }
    match targets.pop_first() {
        Some((name, _)) => Err(Unreadable::Mismatch(format!("it has no tensor {name}"))),
        None => Ok(()),
    }
}

fn read_header(file: &mut impl Read, file_bytes: u64) -> std::result::Result<Metadata, Unreadable> {
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > LONGEST_HEADER || length + 8 > file_bytes {
        return Err(Unreadable::Malformed(format!("a header of {length} bytes in a file of {file_bytes}")));
    }
    let mut json = vec![0; length as usize];
    file.read_exact(&mut json)?;
    let metadata: Metadata = serde_json::from_slice(&json).map_err(|error| Unreadable::Malformed(error.to_string()))?;
    if metadata.data_len() as u64 + length + 8 != file_bytes {
        return Err(Unreadable::Malformed("its header and its size disagree".to_owned()));
    }
    Ok(metadata)
}

fn read_payload<T: Stored>(tensor: &NamedRange, file: &mut impl Read) -> std::result::Result<(), Unreadable> {
    let mut bytes = Vec::new();
    for (offset, elements) in tensor.pieces() {
        bytes.resize(elements * size_of::<T>(), 0);
        file.read_exact(&mut bytes)?;
        tensor.buffer.view(offset, &[elements])?.write(&T::decode(&bytes))?;
    }
    Ok(())
}

/// A number as the format stores it: little-endian.
trait Stored: Scalar {
    fn encode(values: &[Self], bytes: &mut Vec<u8>);
    fn decode(bytes: &[u8]) -> Vec<Self>;
}

macro_rules! stored {
    ($($number:ty),*) => {$(
        impl Stored for $number {
            fn encode(values: &[Self], bytes: &mut Vec<u8>) {
                bytes.resize(size_of_val(values), 0);
                let (places, _) = bytes.as_chunks_mut();
                places.iter_mut().zip(values).for_each(|(place, value)| *place = value.to_le_bytes());
            }

            fn decode(bytes: &[u8]) -> Vec<Self> {
                bytes.as_chunks().0.iter().map(|number| Self::from_le_bytes(*number)).collect()
            }
        }
    )*};
}
stored!(f32, i16);
