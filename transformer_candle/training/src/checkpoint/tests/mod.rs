//! Checkpoints of a tiny model whose every number tells the step it was saved at.

mod corruption;
mod crash;
mod folder;
mod round_trip;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use dataset::CancelToken;
use kernels::{Buffer, DType, Device, bf16};
use model::{ModelShape, ParameterLayout, Precision};
use run_config::ModelConfig;
use serde_json::json;
use tempfile::TempDir;

use super::aside::Create;
use super::save::save_through;
use super::*;

fn tiny_shape() -> ModelShape {
    let config = ModelConfig {
        hidden_size: 8,
        intermediate_size: 12,
        num_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        max_position_embeddings: 16,
        ..ModelConfig::default()
    };
    ModelShape::new(&config, 67)
}

/// The buffers of a trainer.
struct Tiny {
    shape: ModelShape,
    precision: Precision,
    weights: Buffer,
    remainder: Option<Buffer>,
    first_moment: Buffer,
    second_moment: Buffer,
    tokenizer: TokenizerFiles,
}

impl Tiny {
    fn zeros(precision: Precision) -> Self {
        let shape = tiny_shape();
        let elements = ParameterLayout::new(&shape).elements();
        let zeros = |dtype| Buffer::zeros(&[elements], dtype, &Device::Cpu).unwrap();
        let bf16 = precision == Precision::Bf16;
        Self {
            weights: zeros(if bf16 { DType::BF16 } else { DType::F32 }),
            remainder: bf16.then(|| zeros(DType::I16)),
            first_moment: zeros(DType::F32),
            second_moment: zeros(DType::F32),
            tokenizer: tokenizer_files(),
            precision,
            shape,
        }
    }

    /// With numbers that no other step has.
    fn at(precision: Precision, step: u64) -> Self {
        let mut tiny = Self::zeros(precision);
        let elements = tiny.weights.elements();
        let numbers = |salt: u64| (0..elements as u64).map(move |index| (index * 97 + step * 31 + salt) % 4093);
        match precision {
            Precision::Fp32 => tiny.weights.write(&numbers(1).map(|n| n as f32 / 7.0).collect::<Vec<_>>()),
            Precision::Bf16 => tiny.weights.write(&numbers(1).map(|n| bf16::from_f32(n as f32)).collect::<Vec<_>>()),
        }
        .unwrap();
        if let Some(remainder) = &mut tiny.remainder {
            remainder.write(&numbers(2).map(|n| n as i16 - 2000).collect::<Vec<_>>()).unwrap();
        }
        tiny.first_moment.write(&numbers(3).map(|n| n as f32 / 3.0 - 500.0).collect::<Vec<_>>()).unwrap();
        tiny.second_moment.write(&numbers(4).map(|n| n as f32 * 1e-6).collect::<Vec<_>>()).unwrap();
        tiny
    }

    fn save(&self, directory: &Path, state: &TrainerState) -> PathBuf {
        save(directory, &self.contents(state)).unwrap()
    }

    fn save_through(&self, directory: &Path, state: &TrainerState, create: Create) -> Result<PathBuf> {
        save_through(directory, &self.contents(state), create)
    }

    fn contents<'a>(&'a self, state: &'a TrainerState) -> CheckpointContents<'a> {
        CheckpointContents {
            shape: &self.shape,
            precision: self.precision,
            weights: &self.weights,
            remainder: self.remainder.as_ref(),
            first_moment: &self.first_moment,
            second_moment: &self.second_moment,
            tokenizer: &self.tokenizer,
            state,
        }
    }

    fn restore(&mut self, checkpoint: &Path) -> Result<()> {
        let Self { shape, weights, remainder, first_moment, second_moment, .. } = self;
        restore(checkpoint, shape, weights, remainder.as_mut(), first_moment, second_moment, &CancelToken::new())
    }

    /// The bits of every tensor that is saved; the vocabulary's padding is not.
    fn bits(&self) -> Vec<Vec<u32>> {
        let mut all = Vec::new();
        for tensor in model::hugging_face::hf_tensors(&self.shape) {
            let part = |buffer: &Buffer| buffer.view(tensor.offset, &[tensor.elements]).unwrap();
            for buffer in [&self.weights, &self.first_moment, &self.second_moment] {
                all.push(part(buffer).read_f32().unwrap().into_iter().map(f32::to_bits).collect());
            }
            if let Some(remainder) = &self.remainder {
                all.push(part(remainder).read::<i16>().unwrap().into_iter().map(|number| number as u32).collect());
            }
        }
        all
    }
}

fn state_at(step: u64) -> TrainerState {
    TrainerState {
        format_version: FORMAT_VERSION,
        step,
        tokens: step * 4096,
        cursor: json!({"epoch": 0, "window": step, "lanes": [null, 3]}),
        seed: 7,
        identity: BTreeMap::from([
            ("model.hidden_size".to_owned(), json!(8)),
            ("optimizer.beta1".to_owned(), json!(0.9)),
        ]),
        evaluation_loss: None,
        best: Some(BestEvaluation { step: 1, loss: 0.1 + 0.2 }),
        execution: None,
        products: None,
        ledger: None,
    }
}

fn tokenizer_files() -> TokenizerFiles {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, r#"{"version": "1.0"}"#).unwrap();
    TokenizerFiles::read(&path, "<|endoftext|>", 0, 16).unwrap()
}

/// A folder with sound checkpoints of these steps, saved in this order.
fn saved(steps: &[u64]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for &step in steps {
        Tiny::at(Precision::Fp32, step).save(folder.path(), &state_at(step));
    }
    folder
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Flips the last bit of a file's middle byte.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}
