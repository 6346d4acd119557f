//! The weights of any model directory in Hugging Face's format: one `model.safetensors` or several with an index, in
//! f32, bf16 or f16.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
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

/// Some numbers of a tensor, as a file holds them.
struct Piece<'a> {
    path: &'a Path,
    tensor: &'a HfTensor,
    /// The first of them in the tensor.
    first: usize,
    dtype: Dtype,
    bytes: &'a [u8],
}

/// Is given every byte of every file, each from its start to its end, while the weights are read: as for a hash.
pub type ByteObserver<'a> = dyn FnMut(&Path, &[u8]) + Send + 'a;

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
            tensors.sort_unstable_by_key(|tensor| tensor.start);
            files.push((path, tensors));
        }
        match wanted.pop_first() {
            Some((name, _)) => Err(Error::Tensor { path: listing, name, problem: "is missing".to_owned() }),
            None => Ok(Self { shape: shape.clone(), part, files }),
        }
    }

    /// Reads every number once and refuses those that are not finite, unless `cancelled`. `observer` sees what is read.
    ///
    /// # Errors
    /// [`Error::NotFiniteWeights`] names the tensor.
    pub fn check_finite(
        &self,
        cancelled: &(dyn Fn() -> bool + Sync),
        observer: Option<&mut ByteObserver<'_>>,
    ) -> Result<()> {
        self.read_pieces(cancelled, observer, |piece| {
            if piece.values().par_iter().all(|value| value.is_finite()) {
                return Ok(());
            }
            Err(Error::NotFiniteWeights { path: piece.path.to_owned(), name: piece.tensor.name.clone() })
        })
    }

    /// Fills flat weights of f32 or bf16, and beside bf16 weights the low bits of their f32 masters, unless
    /// `cancelled`. The vocabulary's padding becomes zero, and with a model's weights its adapters. `observer` sees what
    /// is read.
    pub fn read(
        &self,
        weights: &mut Buffer,
        mut low_bits: Option<&mut Buffer>,
        cancelled: &(dyn Fn() -> bool + Sync),
        observer: Option<&mut ByteObserver<'_>>,
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
        self.read_pieces(cancelled, observer, |piece| {
            let offset = piece.tensor.offset + piece.first;
            let has_master = low_bits.is_some_and(|low_bits| offset < low_bits.elements());
            if piece.dtype == Dtype::BF16 && target.dtype() == DType::BF16 && !has_master {
                let values = piece.bf16_values();
                return Ok(target.view(offset, &[values.len()])?.write(&values)?);
            }
            write_masters(&piece.values(), &staging, target, low_bits, offset)
        })
    }

    /// Calls `use_piece` with the pieces of all tensors in turn.
    fn read_pieces(
        &self,
        cancelled: &(dyn Fn() -> bool + Sync),
        mut observer: Option<&mut ByteObserver<'_>>,
        mut use_piece: impl FnMut(&Piece<'_>) -> Result<()> + Send,
    ) -> Result<()> {
        let mut bytes = Vec::new();
        for (path, tensors) in &self.files {
            let mut file = File::open(path).map_err(failed("open", path))?;
            let mut position = 0;
            for StoredTensor { tensor, dtype, start } in tensors {
                let size = if *dtype == Dtype::F32 { 4 } else { 2 };
                match &mut observer {
                    Some(observer) => observe(&mut file, path, start - position, observer)?,
                    None => drop(file.seek(SeekFrom::Start(*start)).map_err(failed("read", path))?),
                }
                position = start + (tensor.elements * size) as u64;
                for first in (0..tensor.elements).step_by(PIECE) {
                    if cancelled() {
                        return Ok(());
                    }
                    let elements = PIECE.min(tensor.elements - first);
                    bytes.resize(elements * size, 0);
                    file.read_exact(&mut bytes).map_err(failed("read", path))?;
                    let piece = Piece { path, tensor, first, dtype: *dtype, bytes: &bytes };
                    match &mut observer {
                        Some(observer) => rayon::join(|| observer(path, &bytes), || use_piece(&piece)).1?,
                        None => use_piece(&piece)?,
                    }
                }
            }
            if let Some(observer) = &mut observer {
                observe(&mut file, path, u64::MAX, observer)?;
            }
        }
        Ok(())
    }
}

/// Shows the next bytes of a file, at most `count`: a header, or a tensor that is not read.
fn observe(file: &mut File, path: &Path, count: u64, observer: &mut ByteObserver<'_>) -> Result<()> {
    let mut reader = BufReader::with_capacity(2 * PIECE, file.take(count));
    loop {
        let bytes = reader.fill_buf().map_err(failed("read", path))?;
        if bytes.is_empty() {
            return Ok(());
        }
        observer(path, bytes);
        let shown = bytes.len();
        reader.consume(shown);
    }
}

impl Piece<'_> {
    /// Widened exactly.
    fn values(&self) -> Vec<f32> {
        let halves = self.bytes.as_chunks().0.par_iter();
        match self.dtype {
            Dtype::F32 => self.bytes.as_chunks().0.par_iter().map(|number| f32::from_le_bytes(*number)).collect(),
            Dtype::F16 => halves.map(|number| f16::from_le_bytes(*number).to_f32()).collect(),
            _ => halves.map(|number| bf16::from_le_bytes(*number).to_f32()).collect(),
        }
    }

    /// As they are, of a tensor of bf16.
    fn bf16_values(&self) -> Vec<bf16> {
        self.bytes.as_chunks().0.par_iter().map(|number| bf16::from_le_bytes(*number)).collect()
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
