//! The weights of any model directory in Hugging Face's format: one `model.safetensors` or several with an index, in
//! f32, bf16 or f16.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use half::f16;
use kernels::{Buffer, bf16};
use rayon::prelude::*;
use run_config::regular_file;
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::weight_files::{INDEX, weight_files};
use super::weights::zero_between_tensors;
use super::{adapter_tensors, hf_tensors};
use crate::error::failed;
use crate::layout::HfTensor;
use crate::tensor_file::read_header;
use crate::weights::{WeightWriter, Weights};
use crate::{Error, ModelShape, Result};

/// The weights of adapters in peft's format.
pub const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
/// Elements read at a time.
const PIECE: usize = 1 << 20;

/// A tensor of a file.
#[derive(Debug)]
struct StoredTensor {
    tensor: HfTensor,
    dtype: Dtype,
    /// Offset of its first byte in the file.
    start: u64,
}

/// The weights of a model directory: files whose headers have been compared with the model, not read yet.
#[derive(Debug)]
pub struct PretrainedWeights {
    shape: ModelShape,
    part: Part,
    files: Vec<(PathBuf, Vec<StoredTensor>)>,
    /// The head of a tied model, where it is stored beside the embedding that it must equal.
    tied_head: Option<(PathBuf, StoredTensor)>,
}

/// Which of a model's tensors files hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// All but the adapters.
    Model,
    /// The adapters.
    Adapters,
}

/// A piece of a tensor's numbers, as a file holds them.
struct Piece<'a> {
    path: &'a Path,
    tensor: &'a HfTensor,
    /// Index of the piece's first number in the tensor.
    first: usize,
    dtype: Dtype,
    bytes: &'a [u8],
}

/// Callback that is given every byte of every file, each from its start to its end, while the weights are read: as for
/// a hash.
pub type ByteObserver<'a> = dyn FnMut(&Path, &[u8]) + Send + 'a;

impl PretrainedWeights {
    /// Reads the headers of the files. Tensors that follow from others are not read: the head of a tied model, which is
    /// compared with the embedding, and the rotary frequencies that old versions of transformers stored.
    ///
    /// # Errors
    /// [`Error::Malformed`] for files that are cut or not safetensors, [`Error::Tensor`] for the first tensor that is
    /// missing, unknown, or of another shape or type, [`Error::NoWeights`] for missing files, [`Error::Io`] where a
    /// file cannot be read.
    pub fn open(directory: &Path, shape: &ModelShape) -> Result<Self> {
        let paths = weight_files(directory)?;
        let headers = paths.iter().map(|path| stored_header(path)).collect::<Result<Vec<_>>>()?;
        check_count(&headers, shape)?;
        Self::of_files(paths.into_iter().zip(headers).collect(), Part::Model, hf_tensors(shape), shape)
    }

    /// Like [`PretrainedWeights::open`], for the adapters in a directory in peft's format.
    ///
    /// # Errors
    /// The errors of [`PretrainedWeights::open`].
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
        let mut missing_tensors: BTreeMap<String, HfTensor> =
            tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
        let listing = match &stored[..] {
            [(single, _)] => single.clone(),
            _ => stored.first().map(|(path, _)| path.with_file_name(INDEX)).unwrap_or_default(),
        };
        let (mut files, mut tied_head) = (Vec::with_capacity(stored.len()), None);
        let embedding = missing_tensors.get(EMBEDDING).cloned();
        let names: BTreeSet<String> = missing_tensors.keys().cloned().collect();
        for (path, StoredHeader { tensors: header, data_start }) in stored {
            let mut tensors = Vec::new();
            for name in header.offset_keys() {
                let Some(info) = header.info(&name) else { continue };
                let differs = |problem: String| Error::Tensor { path: path.clone(), name: name.clone(), problem };
                let is_tied_head = shape.tie_embeddings && name == HEAD;
                let tensor = if is_tied_head { embedding.clone() } else { missing_tensors.remove(&name) };
                let Some(tensor) = tensor else {
                    // Rotary frequencies follow from the config.
                    if name.ends_with(".rotary_emb.inv_freq") {
                        continue;
                    }
                    let is_repeated = names.contains(&name);
                    return Err(differs(
                        if is_repeated { "is in another file too" } else { "is in the file, but not in the model" }
                            .to_owned(),
                    ));
                };
                if info.shape != tensor.shape {
                    return Err(differs(format!("has shape {:?}, the model's has {:?}", info.shape, tensor.shape)));
                }
                if ![Dtype::F32, Dtype::BF16, Dtype::F16].contains(&info.dtype) {
                    return Err(differs(format!("holds {:?}; F32, BF16 and F16 can be read", info.dtype)));
                }
                let start = data_start + info.data_offsets.0 as u64;
                let stored = StoredTensor { tensor, dtype: info.dtype, start };
                if is_tied_head {
                    tied_head = Some((path.clone(), stored));
                } else {
                    tensors.push(stored);
                }
            }
            tensors.sort_unstable_by_key(|tensor| tensor.start);
            files.push((path, tensors));
        }
        match missing_tensors.pop_first() {
            Some((name, _)) => Err(Error::Tensor { path: listing, name, problem: "is missing".to_owned() }),
            None => Ok(Self { shape: shape.clone(), part, files, tied_head }),
        }
    }

    /// Reads every number once and refuses those that are not finite, and a tied model with another head than its
    /// embedding; unless `cancelled`. `observer` sees what is read.
    ///
    /// # Errors
    /// [`Error::NotFiniteWeights`] names the tensor; [`Error::ConfigJson`] for the head.
    pub fn check_numbers(
        &self,
        cancelled: &(dyn Fn() -> bool + Sync),
        observer: Option<&mut ByteObserver<'_>>,
    ) -> Result<()> {
        self.read_pieces(cancelled, observer, check_finite)?;
        self.check_tied_head(cancelled)
    }

    /// Fills weights of f32 or bf16, and beside bf16 weights the low bits of their f32 masters, unless `cancelled`. The vocabulary's padding becomes zero, and with a model's weights its adapters. `observer` sees
    /// what is read.
    ///
    /// # Errors
    /// The errors of [`PretrainedWeights::check_numbers`].
    pub fn read(
        &self,
        weights: &mut Weights,
        mut low_bits: Option<&mut Buffer>,
        cancelled: &(dyn Fn() -> bool + Sync),
        observer: Option<&mut ByteObserver<'_>>,
    ) -> Result<()> {
        self.check_tied_head(cancelled)?;
        if self.part == Part::Model {
            zero_between_tensors(&self.shape, &mut weights.flat)?;
        }
        if let Some(low_bits) = &mut low_bits {
            low_bits.zero()?;
        }
        let mut writer = WeightWriter::new(weights, low_bits.as_deref(), PIECE)?;
        self.read_pieces(cancelled, observer, |piece| {
            check_finite(piece)?;
            let offset = piece.tensor.offset + piece.first;
            if piece.dtype == Dtype::BF16 {
                return writer.write_bf16(offset, &piece.bf16_values());
            }
            writer.write(offset, &piece.values())
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
            let mut file = regular_file::open(path).map_err(failed("open", path))?;
            let mut position = 0;
            for stored in tensors {
                match &mut observer {
                    Some(observer) => observe(&mut file, path, stored.start - position, observer)?,
                    None => stored.seek(&mut file, path)?,
                }
                position = stored.start + (stored.tensor.elements * stored.element_bytes()) as u64;
                for first in (0..stored.tensor.elements).step_by(PIECE) {
                    if cancelled() {
                        return Ok(());
                    }
                    let piece = stored.read_piece(&mut file, path, first, &mut bytes)?;
                    match &mut observer {
                        Some(observer) => rayon::join(|| observer(path, piece.bytes), || use_piece(&piece)).1?,
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

    /// Refuses a tied model whose stored head differs from its embedding, since `transformers` computes with both;
    /// unless `cancelled`.
    fn check_tied_head(&self, cancelled: &(dyn Fn() -> bool + Sync)) -> Result<()> {
        let stored = self.files.iter().flat_map(|(path, tensors)| tensors.iter().map(move |stored| (path, stored)));
        let embedding = stored.into_iter().find(|(_, stored)| stored.tensor.name == EMBEDDING);
        let (Some((head_path, head)), Some((path, embedding))) = (&self.tied_head, embedding) else {
            return Ok(());
        };
        let (mut head_file, mut file) = (head.open(head_path)?, embedding.open(path)?);
        let (mut head_bytes, mut bytes) = (Vec::new(), Vec::new());
        for first in (0..head.tensor.elements).step_by(PIECE) {
            if cancelled() {
                return Ok(());
            }
            let head = head.read_piece(&mut head_file, head_path, first, &mut head_bytes)?.values();
            let embedding = embedding.read_piece(&mut file, path, first, &mut bytes)?.values();
            let are_equal = |(one, other): (f32, f32)| one.to_bits() == other.to_bits();
            if !head.into_par_iter().zip(embedding).all(are_equal) {
                let problem = format!(
                    "`tie_word_embeddings` is true, but `{HEAD}` differs from `{EMBEDDING}` in the files of weights; set \
                     it to false to use both, as transformers does"
                );
                return Err(Error::ConfigJson { problem });
            }
        }
        Ok(())
    }
}

impl StoredTensor {
    fn element_bytes(&self) -> usize {
        if self.dtype == Dtype::F32 { 4 } else { 2 }
    }

    /// Opens the file at the tensor's first byte.
    fn open(&self, path: &Path) -> Result<File> {
        let mut file = regular_file::open(path).map_err(failed("open", path))?;
        self.seek(&mut file, path)?;
        Ok(file)
    }

    fn seek(&self, file: &mut File, path: &Path) -> Result<()> {
        file.seek(SeekFrom::Start(self.start)).map(drop).map_err(failed("read", path))
    }

    /// Reads the numbers from `first` on, at most [`PIECE`] of them, which are the next ones of the file.
    fn read_piece<'a>(
        &'a self,
        file: &mut File,
        path: &'a Path,
        first: usize,
        bytes: &'a mut Vec<u8>,
    ) -> Result<Piece<'a>> {
        let elements = PIECE.min(self.tensor.elements - first);
        bytes.resize(elements * self.element_bytes(), 0);
        file.read_exact(bytes).map_err(failed("read", path))?;
        Ok(Piece { path, tensor: &self.tensor, first, dtype: self.dtype, bytes })
    }
}

/// Passes the next bytes of a file, at most `count`, to the observer: a header, or a tensor that is not read.
fn observe(file: &mut File, path: &Path, count: u64, observer: &mut ByteObserver<'_>) -> Result<()> {
    let mut reader = BufReader::with_capacity(2 * PIECE, file.take(count));
    loop {
        let bytes = reader.fill_buf().map_err(failed("read", path))?;
        if bytes.is_empty() {
            return Ok(());
        }
        observer(path, bytes);
        let length = bytes.len();
        reader.consume(length);
    }
}

/// Refuses numbers that are not finite.
fn check_finite(piece: &Piece<'_>) -> Result<()> {
    let halves = piece.bytes.as_chunks().0.par_iter();
    let is_finite = match piece.dtype {
        Dtype::F32 => piece.bytes.as_chunks().0.par_iter().all(|number| f32::from_le_bytes(*number).is_finite()),
        Dtype::F16 => halves.all(|number| f16::from_le_bytes(*number).is_finite()),
        _ => halves.all(|number| bf16::from_le_bytes(*number).is_finite()),
    };
    if is_finite {
        return Ok(());
    }
    Err(Error::NotFiniteWeights { path: piece.path.to_owned(), name: piece.tensor.name.clone() })
}

impl Piece<'_> {
    /// Returns the numbers, widened exactly.
    fn values(&self) -> Vec<f32> {
        let halves = self.bytes.as_chunks().0.par_iter();
        match self.dtype {
            Dtype::F32 => self.bytes.as_chunks().0.par_iter().map(|number| f32::from_le_bytes(*number)).collect(),
            Dtype::F16 => halves.map(|number| f16::from_le_bytes(*number).to_f32()).collect(),
            _ => halves.map(|number| bf16::from_le_bytes(*number).to_f32()).collect(),
        }
    }

    /// Returns the numbers of a bf16 tensor as they are.
    fn bf16_values(&self) -> Vec<bf16> {
        self.bytes.as_chunks().0.par_iter().map(|number| bf16::from_le_bytes(*number)).collect()
    }
}

/// The header of a file of weights.
struct StoredHeader {
    tensors: Metadata,
    /// The byte of the file that the tensors' offsets count from.
    data_start: u64,
}

fn stored_header(path: &Path) -> Result<StoredHeader> {
    let mut file = regular_file::open(path).map_err(failed("open", path))?;
    let bytes = file.metadata().map_err(failed("read", path))?.len();
    let tensors = read_header(&mut file, bytes, path)?;
    let data_start = file.stream_position().map_err(failed("read", path))?;
    Ok(StoredHeader { tensors, data_start })
}

/// Refuses a config with far more parameters than the files hold, whose tensors would take too much memory to list. A
/// few that are missing are named one by one instead.
fn check_count(headers: &[StoredHeader], shape: &ModelShape) -> Result<()> {
    let expected = shape.parameter_count();
    let tensors = headers.iter().flat_map(|header| header.tensors.tensors().into_values());
    let actual: u64 = tensors.map(|tensor| tensor.shape.iter().product::<usize>() as u64).sum();
    if expected / 2 <= actual {
        return Ok(());
    }
    let problem = format!("it describes {expected} parameters, and the files of weights hold {actual}");
    Err(Error::ConfigJson { problem })
}
