//! The weights of any model directory in Hugging Face's format: one `model.safetensors` or several with an index, in
//! f32, bf16 or f16.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use half::f16;
use kernels::{Buffer, DType, bf16};
use rayon::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;

use super::weights::zero_between_tensors;
use super::{adapter_tensors, hf_tensors};
use crate::error::failed;
use crate::initialization::write_masters;
use crate::layout::HfTensor;
use crate::tensor_file::read_header;
use crate::{Error, ModelShape, Result};

const SINGLE: &str = "model.safetensors";
/// The weights of adapters in peft's format.
pub const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Elements read at a time.
const PIECE: usize = 1 << 20;

/// A tensor of a file.
#[derive(Debug)]
struct StoredTensor {
    tensor: HfTensor,
    dtype: Dtype,
    /// Its first byte in the file.
    start: u64,
}

/// The weights of a model directory: files whose headers have been compared with the model, not read yet.
#[derive(Debug)]
pub struct PretrainedWeights {
    shape: ModelShape,
    part: Part,
    files: Vec<(PathBuf, Vec<StoredTensor>)>,
}

/// Which of a model's tensors files hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// All but the adapters.
    Model,
    /// The adapters.
    Adapters,
}

/// The part of `model.safetensors.index.json` that is read.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl PretrainedWeights {
    /// Reads the headers of the files. Tensors that follow from others are ignored: the head of a tied model, and the
    /// rotary frequencies that old versions of transformers stored.
    ///
    /// # Errors
    /// [`Error::Malformed`] for files that are cut or not safetensors, [`Error::Tensor`] for the first tensor that is
    /// missing, unknown, or of another shape or type, [`Error::NoWeights`] for missing files, [`Error::Io`] where a file
    /// cannot be read.
    pub fn open(directory: &Path, shape: &ModelShape) -> Result<Self> {
        let paths = weight_files(directory)?;
        let headers = paths.iter().map(|path| stored_header(path)).collect::<Result<Vec<_>>>()?;
        check_count(&headers, shape)?;
        Self::of_files(paths.into_iter().zip(headers).collect(), Part::Model, hf_tensors(shape), shape)
    }

    /// Like [`PretrainedWeights::open`], for the adapters in a directory in peft's format.
    ///
    /// # Errors
    /// Those of [`PretrainedWeights::open`].
    pub fn open_adapters(directory: &Path, shape: &ModelShape) -> Result<Self> {
        let path = directory.join(ADAPTER_WEIGHTS);
        if !path.exists() {
            let problem = format!("{ADAPTER_WEIGHTS} is missing");
            return Err(Error::NoWeights { directory: directory.to_owned(), problem });
        }
        let header = stored_header(&path)?;
        Self::of_files(vec![(path, header)], Part::Adapters, adapter_tensors(shape), shape)
    }

    fn of_files(
        stored: Vec<(PathBuf, StoredHeader)>,
        part: Part,
        tensors: Vec<HfTensor>,
        shape: &ModelShape,
    ) -> Result<Self> {
        let mut wanted: BTreeMap<String, HfTensor> =
            tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
        let listing = match &stored[..] {
            [(single, _)] => single.clone(),
            _ => stored.first().map(|(path, _)| path.with_file_name(INDEX)).unwrap_or_default(),
        };
        let mut files = Vec::with_capacity(stored.len());
        for (path, StoredHeader { tensors: header, data_start }) in stored {
            let mut tensors = Vec::new();
            for name in header.offset_keys() {
                let Some(info) = header.info(&name) else { continue };
                let differs = |problem: String| Error::Tensor { path: path.clone(), name: name.clone(), problem };
                let Some(tensor) = wanted.remove(&name) else {
                    if is_derived(&name, shape) {
                        continue;
                    }
                    return Err(differs("is in the file, but not in the model".to_owned()));
                };
                if info.shape != tensor.shape {
                    return Err(differs(format!("has shape {:?}, the model's has {:?}", info.shape, tensor.shape)));
                }
                if ![Dtype::F32, Dtype::BF16, Dtype::F16].contains(&info.dtype) {
                    return Err(differs(format!("holds {:?}; F32, BF16 and F16 can be read", info.dtype)));
                }
                let start = data_start + info.data_offsets.0 as u64;
                tensors.push(StoredTensor { tensor, dtype: info.dtype, start });
            }
            files.push((path, tensors));
        }
        match wanted.pop_first() {
            Some((name, _)) => Err(Error::Tensor { path: listing, name, problem: "is missing".to_owned() }),
            None => Ok(Self { shape: shape.clone(), part, files }),
        }
    }

    /// Reads every number once and refuses those that are not finite, unless `cancelled`.
    ///
    /// # Errors
    /// [`Error::NotFiniteWeights`] names the tensor.
    pub fn check_finite(&self, cancelled: &(dyn Fn() -> bool + Sync)) -> Result<()> {
        self.read_pieces(cancelled, |path, tensor, _, values| {
            if values.par_iter().all(|value| value.is_finite()) {
                return Ok(());
            }
            Err(Error::NotFiniteWeights { path: path.to_owned(), name: tensor.name.clone() })
        })
    }

    /// Fills flat weights of f32 or bf16, and beside bf16 weights the low bits of their f32 masters, unless
    /// `cancelled`. The vocabulary's padding becomes zero, and with a model's weights its adapters.
    pub fn read(
        &self,
        weights: &mut Buffer,
        mut low_bits: Option<&mut Buffer>,
        cancelled: &(dyn Fn() -> bool + Sync),
    ) -> Result<()> {
        if self.part == Part::Model {
            zero_between_tensors(&self.shape, weights)?;
        }
        if let Some(low_bits) = &mut low_bits {
            low_bits.zero()?;
        }
        let staging = Buffer::zeros(&[PIECE], DType::F32, weights.device())?;
        let target: &Buffer = weights;
        let low_bits = low_bits.as_deref();
        self.read_pieces(cancelled, |_, tensor, first, values| {
            write_masters(values, &staging, target, low_bits, tensor.offset + first)
        })
    }

    /// Calls `piece` with the file, the tensor, the piece's first element in it and the values, of all tensors in turn.
    fn read_pieces(
        &self,
        cancelled: &(dyn Fn() -> bool + Sync),
        mut piece: impl FnMut(&Path, &HfTensor, usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let mut bytes = Vec::new();
        for (path, tensors) in &self.files {
            let mut file = File::open(path).map_err(failed("open", path))?;
            for StoredTensor { tensor, dtype, start } in tensors {
                file.seek(SeekFrom::Start(*start)).map_err(failed("read", path))?;
                for first in (0..tensor.elements).step_by(PIECE) {
                    if cancelled() {
                        return Ok(());
                    }
                    let elements = PIECE.min(tensor.elements - first);
                    bytes.resize(elements * if *dtype == Dtype::F32 { 4 } else { 2 }, 0);
                    file.read_exact(&mut bytes).map_err(failed("read", path))?;
                    piece(path, tensor, first, &decode(&bytes, *dtype))?;
                }
            }
        }
        Ok(())
    }
}

fn decode(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    let halves = bytes.as_chunks().0.par_iter();
    match dtype {
        Dtype::F32 => bytes.as_chunks().0.par_iter().map(|number| f32::from_le_bytes(*number)).collect(),
        Dtype::F16 => halves.map(|number| f16::from_le_bytes(*number).to_f32()).collect(),
        _ => halves.map(|number| bf16::from_le_bytes(*number).to_f32()).collect(),
    }
}

/// The files of a model directory that hold its weights, by name.
///
/// # Errors
/// [`Error::NoWeights`] where one is missing, [`Error::Malformed`] for an index that is not one.
pub fn weight_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let (single, index) = (directory.join(SINGLE), directory.join(INDEX));
    let missing = |problem: String| Error::NoWeights { directory: directory.to_owned(), problem };
    if single.exists() {
        return Ok(vec![single]);
    }
    if !index.exists() {
        return Err(missing(format!("there is neither {SINGLE} nor {INDEX}; other formats are not read")));
    }
    let malformed = |problem: String| Error::Malformed { path: index.clone(), problem };
    let text = std::fs::read(&index).map_err(failed("read", &index))?;
    let Index { weight_map } = serde_json::from_slice(&text).map_err(|error| malformed(error.to_string()))?;
    let mut names: Vec<String> = weight_map.into_values().collect();
    names.sort_unstable();
    names.dedup();
    if let Some(name) = names.iter().find(|name| Path::new(name).file_name().is_none_or(|file| file != name.as_str())) {
        return Err(malformed(format!("it names the file {name:?}, which is not in the directory")));
    }
    if let Some(name) = names.iter().find(|name| !directory.join(name).exists()) {
        return Err(missing(format!("{name} is missing, which {INDEX} names")));
    }
    Ok(names.into_iter().map(|name| directory.join(name)).collect())
}

/// The header of a file of weights.
struct StoredHeader {
    tensors: Metadata,
    /// The byte of the file that the tensors' offsets count from.
    data_start: u64,
}

fn stored_header(path: &Path) -> Result<StoredHeader> {
    let mut file = File::open(path).map_err(failed("open", path))?;
    let bytes = file.metadata().map_err(failed("read", path))?.len();
    let tensors = read_header(&mut file, bytes, path)?;
    let data_start = file.stream_position().map_err(failed("read", path))?;
    Ok(StoredHeader { tensors, data_start })
}

/// Refuses a config with far more parameters than the files hold, whose tensors would take too much memory to list. A
/// few that are missing are named one by one instead.
fn check_count(headers: &[StoredHeader], shape: &ModelShape) -> Result<()> {
    let described = shape.parameter_count();
    let tensors = headers.iter().flat_map(|header| header.tensors.tensors().into_values());
    let held: u64 = tensors.map(|tensor| tensor.shape.iter().product::<usize>() as u64).sum();
    if described / 2 <= held {
        return Ok(());
    }
    let problem = format!("it describes {described} parameters, and the files of weights hold {held}");
    Err(Error::ConfigJson { problem })
}

/// Whether a stored tensor follows from others.
fn is_derived(name: &str, shape: &ModelShape) -> bool {
    name.ends_with(".rotary_emb.inv_freq") || (shape.tie_embeddings && name == "lm_head.weight")
}
