//! A model directory written, read back, and refused where it is not the model's.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::Path;

use half::bf16;
use kernels::{Buffer, DType};
use model::hugging_face::{
    config_json, generation_config_json, hf_tensors, read_weights, shape_from_config_json, write_weights,
};
use model::{ModelShape, Precision};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::models::{self, tiny};

fn bits(buffer: &Buffer) -> Vec<u32> {
    buffer.read_f32().unwrap().iter().map(|value| value.to_bits()).collect()
}

/// Writes `config.json`, `generation_config.json` and `model.safetensors`.
fn save_model(directory: &Path, shape: &ModelShape, weights: &Buffer, [bos, eos]: [Option<u32>; 2]) {
    let precision = if weights.dtype() == DType::BF16 { Precision::Bf16 } else { Precision::Fp32 };
    fs::write(directory.join("config.json"), config_json(shape, precision, bos, eos).to_string()).unwrap();
    fs::write(
        directory.join("generation_config.json"),
        generation_config_json(bos, eos.as_slice(), &serde_json::Map::new()).to_string(),
    )
    .unwrap();
    let path = directory.join("model.safetensors");
    write_weights(&mut File::create(&path).unwrap(), &path, shape, weights).unwrap();
}

fn load_weights(directory: &Path, shape: &ModelShape, weights: &mut Buffer) -> model::Result<()> {
    let path = directory.join("model.safetensors");
    let mut file = File::open(&path).unwrap();
    let bytes = file.metadata().unwrap().len();
    read_weights(&mut file, bytes, &path, shape, weights)
}

fn loaded(directory: &Path, shape: &ModelShape, dtype: DType) -> model::Result<Buffer> {
    let mut weights = models::flat_weights(shape, dtype);
    load_weights(directory, shape, &mut weights).map(|()| weights)
}

#[test]
fn a_model_comes_back_bit_for_bit() {
    let dtypes = |shape: ModelShape| [(shape.clone(), DType::F32), (shape, DType::BF16)];
    for (shape, dtype) in models::variants().into_iter().flat_map(dtypes) {
        let folder = tempfile::tempdir().unwrap();
        let weights = models::flat_weights(&shape, dtype);
        save_model(folder.path(), &shape, &weights, [Some(0); 2]);
        let config = serde_json::from_slice(&fs::read(folder.path().join("config.json")).unwrap()).unwrap();
        assert_eq!(shape_from_config_json(&config).unwrap(), shape);
        assert_eq!(bits(&loaded(folder.path(), &shape, dtype).unwrap()), bits(&weights));
    }
}

#[test]
fn what_the_file_does_not_hold_becomes_zero() {
    for tied in [true, false] {
        let (shape, folder) = (tiny(tied), tempfile::tempdir().unwrap());
        save_model(folder.path(), &shape, &models::flat_weights(&shape, DType::F32), [None; 2]);
        let mut weights = models::flat_weights(&shape, DType::F32);
        weights.write(&vec![f32::NAN; weights.elements()]).unwrap();
        load_weights(folder.path(), &shape, &mut weights).unwrap();
        let mut values = weights.read_f32().unwrap();
        for tensor in hf_tensors(&shape) {
            let stored = &mut values[tensor.offset..tensor.offset + tensor.elements];
            assert!(stored.iter().all(|value| !value.is_nan()), "{}", tensor.name);
            stored.fill(0.0);
        }
        assert!(values.len() as u64 > shape.parameter_count(), "there is padding");
        assert!(values.iter().all(|value| value.to_bits() == 0));
    }
}

#[test]
fn the_file_holds_llama_s_tensors_without_the_padding() {
    let (shape, folder) = (tiny(false), tempfile::tempdir().unwrap());
    save_model(folder.path(), &shape, &models::flat_weights(&shape, DType::F32), [None; 2]);
    let bytes = fs::read(folder.path().join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.len(), 3 * 9 + 3);
    let embedding = file.tensor("model.embed_tokens.weight").unwrap();
    assert_eq!((embedding.dtype(), embedding.shape()), (Dtype::F32, [71, 20].as_slice()));
    let keys = file.tensor("model.layers.2.self_attn.k_proj.weight").unwrap();
    let expected = &models::weights_by_name(&shape)["model.layers.2.self_attn.k_proj.weight"];
    let expected: Vec<u8> = expected.iter().flat_map(|value| value.to_le_bytes()).collect();
    assert_eq!(keys.data(), expected);
}

#[test]
fn either_element_type_is_read_into_either() {
    let shape = tiny(true);
    let exact = models::flat_weights(&shape, DType::F32);
    let rounded = models::flat_weights(&shape, DType::BF16);
    for (stored, dtype) in [(&exact, DType::BF16), (&rounded, DType::F32)] {
        let folder = tempfile::tempdir().unwrap();
        save_model(folder.path(), &shape, stored, [None; 2]);
        assert_eq!(bits(&loaded(folder.path(), &shape, dtype).unwrap()), bits(&rounded));
    }
}

/// Writes the tiny model's tensors after `change`, and returns what reading them says.
fn refusal(change: impl FnOnce(&mut HashMap<String, (Dtype, Vec<usize>, Vec<u8>)>)) -> String {
    let (shape, folder) = (tiny(true), tempfile::tempdir().unwrap());
    save_model(folder.path(), &shape, &models::flat_weights(&shape, DType::F32), [None; 2]);
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let own = |view: TensorView| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
    let mut tensors = file.iter().map(|(name, view)| (name.to_owned(), own(view))).collect();
    change(&mut tensors);
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, data))| (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
    fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
    let message = loaded(folder.path(), &shape, DType::F32).unwrap_err().to_string();
    assert!(message.contains("model.safetensors"), "{message}");
    message
}

#[test]
fn bad_tensors_are_named() {
    let name = "model.layers.1.mlp.down_proj.weight";
    let message = refusal(|tensors| drop(tensors.remove(name)));
    assert!(message.contains(name) && message.contains("missing"), "{message}");

    let extra = refusal(|tensors| {
        let value = tensors["model.norm.weight"].clone();
        tensors.insert("model.layers.1.self_attn.q_proj.bias".to_owned(), value);
    });
    assert!(extra.contains("q_proj.bias"), "{extra}");

    let turned = refusal(|tensors| tensors.get_mut(name).unwrap().1.reverse());
    assert!(turned.contains(name) && turned.contains("[36, 20]") && turned.contains("[20, 36]"), "{turned}");

    let halved = refusal(|tensors| {
        let (dtype, _, data) = tensors.get_mut(name).unwrap();
        *dtype = Dtype::F16;
        data.truncate(data.len() / 2);
    });
    assert!(halved.contains(name) && halved.contains("F16"), "{halved}");
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let (shape, folder) = (tiny(true), tempfile::tempdir().unwrap());
    save_model(folder.path(), &shape, &models::flat_weights(&shape, DType::BF16), [None; 2]);
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    for length in [0, 7, 8, 100, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&path, &bytes[..length]).unwrap();
        assert!(loaded(folder.path(), &shape, DType::F32).is_err(), "{length} bytes");
    }
}

#[test]
fn bf16_files_store_the_weights_own_bits() {
    let (shape, folder) = (tiny(true), tempfile::tempdir().unwrap());
    save_model(folder.path(), &shape, &models::flat_weights(&shape, DType::BF16), [None; 2]);
    let bytes = fs::read(folder.path().join("model.safetensors")).unwrap();
    let norm = SafeTensors::deserialize(&bytes).unwrap().tensor("model.norm.weight").unwrap().data().to_vec();
    let expected = &models::weights_by_name(&shape)["model.norm.weight"];
    let expected: Vec<u8> = expected.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect();
    assert_eq!(norm, expected);
}
