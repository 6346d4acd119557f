//! Weights of model directories that others wrote: files of several shards and types, and what is refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use kernels::{Buffer, DType, Device, cast};
use model::hugging_face::{PretrainedWeights, hf_tensors, weight_files};
use model::{Error, ModelShape};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;
use tempfile::TempDir;

use crate::models::{self, tiny, weights_by_name};

pub type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn encoded(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
    }
}

pub fn tensors(shape: &ModelShape, dtype: Dtype) -> Tensors {
    let values = weights_by_name(shape);
    let tensor = |name: &str| encoded(&values[name], dtype);
    hf_tensors(shape).into_iter().map(|t| (t.name.clone(), (dtype, t.shape, tensor(&t.name)))).collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

pub fn single(tensors: &Tensors) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("model.safetensors"), tensors);
    folder
}

/// A folder with the same tensors in three files with an index.
pub fn sharded(tensors: &Tensors) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut map = BTreeMap::new();
    for shard in 0..3 {
        let file = format!("model-{:05}-of-00003.safetensors", shard + 1);
        let part: Tensors = tensors.clone().into_iter().skip(shard).step_by(3).collect();
        map.extend(part.keys().map(|name| (name.clone(), file.clone())));
        write(&folder.path().join(&file), &part);
    }
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    folder
}

fn read(folder: &Path, shape: &ModelShape, dtype: DType) -> model::Result<Buffer> {
    let mut weights = models::weights(shape, dtype);
    let stored = PretrainedWeights::open(folder, shape)?;
    stored.check_numbers(&|| false, None)?;
    stored.read(&mut weights, None, &|| false, None)?;
    Ok(weights.flat)
}

/// The message with which the folder is refused.
fn refusal(folder: &Path, shape: &ModelShape) -> Error {
    read(folder, shape, DType::F32).unwrap_err()
}

#[test]
fn shards_and_a_single_file_hold_the_same_weights() {
    for tied in [true, false] {
        let shape = tiny(tied);
        let mut expected = models::flat_weights(&shape, DType::F32);
        models::set_weights(&shape, &mut expected, &weights_by_name(&shape));
        let tensors = tensors(&shape, Dtype::F32);
        for folder in [single(&tensors), sharded(&tensors)] {
            let weights = read(folder.path(), &shape, DType::F32).unwrap();
            assert_eq!(weights.read_f32().unwrap(), expected.read_f32().unwrap());
        }
    }
}

#[test]
fn an_observer_sees_every_byte_once_and_in_order() {
    let shape = tiny(true);
    // A tied model's head is not read.
    let mut tensors = tensors(&shape, Dtype::BF16);
    let head = tensors["model.embed_tokens.weight"].clone();
    tensors.insert("lm_head.weight".to_owned(), head);
    for folder in [single(&tensors), sharded(&tensors)] {
        let stored = PretrainedWeights::open(folder.path(), &shape).unwrap();
        let mut bytes_by_reader: [BTreeMap<PathBuf, Vec<u8>>; 2] = Default::default();
        let see = |bytes_by_path: &mut BTreeMap<PathBuf, Vec<u8>>, path: &Path, bytes: &[u8]| {
            bytes_by_path.entry(path.to_owned()).or_default().extend(bytes);
        };
        let mut weights = models::weights(&shape, DType::F32);
        let [checked, read] = &mut bytes_by_reader;
        stored.check_numbers(&|| false, Some(&mut |path, bytes| see(checked, path, bytes))).unwrap();
        stored.read(&mut weights, None, &|| false, Some(&mut |path, bytes| see(read, path, bytes))).unwrap();
        for bytes_by_path in bytes_by_reader {
            assert_eq!(bytes_by_path.len(), weight_files(folder.path()).unwrap().len());
            assert!(bytes_by_path.into_iter().all(|(path, bytes)| bytes == fs::read(path).unwrap()));
        }
    }
}

#[test]
fn every_float_type_is_widened_exactly() {
    let shape = tiny(false);
    for dtype in [Dtype::BF16, Dtype::F16] {
        let folder = single(&tensors(&shape, dtype));
        let weights = read(folder.path(), &shape, DType::F32).unwrap().read_f32().unwrap();
        let values = weights_by_name(&shape);
        for tensor in hf_tensors(&shape) {
            let rounded = values[&tensor.name].iter().map(|value| match dtype {
                Dtype::F16 => f16::from_f32(*value).to_f32(),
                _ => bf16::from_f32(*value).to_f32(),
            });
            assert!(rounded.eq(weights[tensor.offset..tensor.offset + tensor.elements].iter().copied()));
        }
    }
}

#[test]
fn weights_and_low_bits_together_are_the_stored_f32() {
    let shape = tiny(true);
    let folder = sharded(&tensors(&shape, Dtype::F32));
    let full = read(folder.path(), &shape, DType::F32).unwrap();
    let mut weights = models::weights(&shape, DType::BF16);
    let zeros = |dtype| Buffer::zeros(full.shape(), dtype, &Device::Cpu).unwrap();
    let (mut low_bits, mut master) = (zeros(DType::I16), zeros(DType::F32));
    let stored = PretrainedWeights::open(folder.path(), &shape).unwrap();
    stored.read(&mut weights, Some(&mut low_bits), &|| false, None).unwrap();
    cast::join_master(&weights.flat, &low_bits, &mut master).unwrap();
    assert_eq!(master.read_f32().unwrap(), full.read_f32().unwrap());
}

#[test]
fn tensors_that_follow_from_others_are_ignored() {
    let shape = tiny(true);
    let mut stored = tensors(&shape, Dtype::F32);
    let embedding = stored["model.embed_tokens.weight"].clone();
    stored.insert("lm_head.weight".to_owned(), embedding);
    let frequencies = (Dtype::F32, vec![3], vec![0; 12]);
    stored.insert("model.layers.0.self_attn.rotary_emb.inv_freq".to_owned(), frequencies);
    assert!(read(single(&stored).path(), &shape, DType::F32).is_ok());
}

#[test]
fn a_tied_model_with_another_head_is_refused() {
    let shape = tiny(true);
    let mut stored = tensors(&shape, Dtype::BF16);
    let (_, sizes, mut bytes) = stored["model.embed_tokens.weight"].clone();
    *bytes.last_mut().unwrap() ^= 1;
    stored.insert("lm_head.weight".to_owned(), (Dtype::BF16, sizes, bytes));
    for folder in [single(&stored), sharded(&stored)] {
        let stored = PretrainedWeights::open(folder.path(), &shape).unwrap();
        let mut weights = models::weights(&shape, DType::F32);
        let checked = stored.check_numbers(&|| false, None);
        for refused in [checked, stored.read(&mut weights, None, &|| false, None)] {
            let message = refused.unwrap_err().to_string();
            assert!(message.contains("`tie_word_embeddings` is true, but `lm_head.weight` differs"), "{message}");
        }
    }
    stored.insert("lm_head.weight".to_owned(), (Dtype::BF16, vec![2], vec![0; 4]));
    assert!(refusal(single(&stored).path(), &shape).to_string().contains("`lm_head.weight` has shape [2]"));
}

#[test]
fn tensors_of_another_model_are_named() {
    let shape = tiny(true);
    let name = "model.layers.1.self_attn.k_proj.weight";
    let refused = |change: &dyn Fn(&mut Tensors)| {
        let mut stored = tensors(&shape, Dtype::F32);
        change(&mut stored);
        refusal(sharded(&stored).path(), &shape).to_string()
    };
    assert!(refused(&|stored| drop(stored.remove(name))).contains(&format!("`{name}` is missing")));
    let narrow = |stored: &mut Tensors| drop(stored.insert(name.to_owned(), (Dtype::F32, vec![2, 2], vec![0; 16])));
    assert!(refused(&narrow).contains("has shape [2, 2]"));
    let integers =
        |stored: &mut Tensors| drop(stored.insert(name.to_owned(), (Dtype::I32, vec![12, 20], vec![0; 960])));
    assert!(refused(&integers).contains("holds I32"));
    let foreign = (Dtype::F32, vec![1], vec![0; 4]);
    let biased =
        |stored: &mut Tensors| drop(stored.insert("model.layers.0.self_attn.q_proj.bias".to_owned(), foreign.clone()));
    assert!(refused(&biased).contains("q_proj.bias` is in the file, but not in the model"));
}

#[test]
fn a_number_that_is_not_finite_is_refused_with_its_tensor() {
    let shape = tiny(false);
    for (value, dtype) in [(f32::NAN, Dtype::F32), (f32::INFINITY, Dtype::BF16), (f32::NEG_INFINITY, Dtype::F16)] {
        let mut tensors = tensors(&shape, dtype);
        let (_, _, bytes) = tensors.get_mut("lm_head.weight").unwrap();
        let end = bytes.len();
        bytes.splice(end - encoded(&[value], dtype).len().., encoded(&[value], dtype));
        let folder = sharded(&tensors);
        let stored = PretrainedWeights::open(folder.path(), &shape).unwrap();
        let mut weights = models::weights(&shape, DType::BF16);
        let checked = stored.check_numbers(&|| false, None);
        for refused in [checked, stored.read(&mut weights, None, &|| false, None)] {
            let message = refused.unwrap_err().to_string();
            assert!(message.contains("`lm_head.weight` holds numbers that are not finite"), "{message}");
        }
    }
}

#[test]
fn a_cut_or_missing_shard_is_refused_before_anything_is_read() {
    let shape = tiny(true);
    let folder = sharded(&tensors(&shape, Dtype::F32));
    let shard = folder.path().join("model-00002-of-00003.safetensors");
    let bytes = fs::read(&shard).unwrap();
    for length in [0, 7, 100, bytes.len() - 1] {
        fs::write(&shard, &bytes[..length]).unwrap();
        assert!(matches!(PretrainedWeights::open(folder.path(), &shape), Err(Error::Malformed { .. })), "{length}");
    }
    fs::remove_file(&shard).unwrap();
    let error = PretrainedWeights::open(folder.path(), &shape).unwrap_err().to_string();
    assert!(error.contains("model-00002-of-00003.safetensors is missing"), "{error}");
    fs::copy(folder.path().join("model-00001-of-00003.safetensors"), &shard).unwrap();
    let error = PretrainedWeights::open(folder.path(), &shape).unwrap_err().to_string();
    assert!(error.contains("is in another file too"), "{error}");
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(PretrainedWeights::open(empty.path(), &shape), Err(Error::NoWeights { .. })));
}

#[test]
fn an_index_cannot_name_files_elsewhere() {
    let shape = tiny(true);
    let folder = tempfile::tempdir().unwrap();
    for name in ["../model.safetensors", "/etc/passwd", "..", ""] {
        let index = json!({"weight_map": {"model.norm.weight": name}});
        fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        let error = PretrainedWeights::open(folder.path(), &shape).unwrap_err();
        assert!(error.to_string().contains("not in the directory"), "{error}");
    }
    fs::write(folder.path().join("model.safetensors.index.json"), "{}").unwrap();
    let error = PretrainedWeights::open(folder.path(), &shape).unwrap_err().to_string();
    assert!(error.contains("is not an index of weights: missing field `weight_map`"), "{error}");
}
