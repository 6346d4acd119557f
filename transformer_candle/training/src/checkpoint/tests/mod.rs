//! Checkpoints of a tiny model whose values encode the step.

mod corruption;
mod crash;
mod folder;
mod round_trip;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use dataset::{CancelToken, DocumentTokens, NamedToken};
use kernels::memory::Category;
use kernels::{Buffer, DType, Device, bf16};
use model::{ModelShape, ParameterLayout, Precision, Weights};
use run_config::ModelConfig;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::save::save_through;
use super::staging::Create;
use super::*;
use crate::engine::{StateLayout, StateTensor};
use crate::ranks::Ranks;

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
    weights: Weights,
    /// First and second moments, and beside bf16 weights the low bits of their masters.
    optimizer: Vec<StateTensor>,
    tokenizer: TokenizerFiles,
}

impl Tiny {
    fn zeros(precision: Precision) -> Self {
        let shape = tiny_shape();
        let elements = ParameterLayout::new(&shape).elements();
        let zeros = |dtype| Buffer::zeros(&[elements], dtype, &Device::Cpu).unwrap();
        let bf16 = precision == Precision::Bf16;
        let tensor = |name, category, dtype| StateTensor {
            layout: StateLayout::new(name, category, dtype, 0..elements),
            buffer: zeros(dtype),
        };
        let moments = ["first_moment", "second_moment"];
        let moments = moments.map(|name| tensor(name, Category::OptimizerMoments, DType::F32));
        let low_bits = bf16.then(|| tensor("master_remainder", Category::MasterLowBits, DType::I16));
        Self {
            weights: zeros(if bf16 { DType::BF16 } else { DType::F32 }).into(),
            optimizer: moments.into_iter().chain(low_bits).collect(),
            tokenizer: tokenizer_files(),
            precision,
            shape,
        }
    }

    /// Buffers with values unique to a step.
    fn at(precision: Precision, step: u64) -> Self {
        let mut tiny = Self::zeros(precision);
        let elements = tiny.weights.flat.elements();
        let numbers = |salt: u64| (0..elements as u64).map(move |index| (index * 97 + step * 31 + salt) % 4093);
        match precision {
            Precision::Fp32 => tiny.weights.flat.write(&numbers(1).map(|n| n as f32 / 7.0).collect::<Vec<_>>()),
            Precision::Bf16 | Precision::Fp8 => {
                tiny.weights.flat.write(&numbers(1).map(|n| bf16::from_f32(n as f32)).collect::<Vec<_>>())
            }
        }
        .unwrap();
        for StateTensor { layout, buffer } in &mut tiny.optimizer {
            match layout.name {
                "first_moment" => buffer.write(&numbers(3).map(|n| n as f32 / 3.0 - 500.0).collect::<Vec<_>>()),
                "second_moment" => buffer.write(&numbers(4).map(|n| n as f32 * 1e-6).collect::<Vec<_>>()),
                _ => buffer.write(&numbers(2).map(|n| n as i16 - 2000).collect::<Vec<_>>()),
            }
            .unwrap();
        }
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
            weights: &self.weights.flat,
            optimizer: &self.optimizer,
            tokenizer: &self.tokenizer,
            state,
            base: None,
            ranks: &Ranks::ONE,
        }
    }

    fn restore(&mut self, checkpoint: &Path) -> Result<()> {
        let (checkpoint, cancel) = (Checkpoint::open(checkpoint)?, CancelToken::new());
        checkpoint.weights(&self.shape, &mut self.weights, &cancel)?;
        checkpoint.optimizer(&self.shape, &mut self.optimizer, &cancel)
    }

    /// The bits of every tensor that is saved; the vocabulary's padding is not.
    fn bits(&self) -> Vec<Vec<u32>> {
        let mut all = Vec::new();
        for tensor in model::hugging_face::hf_tensors(&self.shape) {
            let part = |buffer: &Buffer| buffer.view(tensor.offset, &[tensor.elements]).unwrap();
            for buffer in self.optimizer.iter().map(|tensor| &tensor.buffer).chain([&self.weights.flat]) {
                all.push(match buffer.dtype() {
                    DType::I16 => part(buffer).read::<i16>().unwrap().into_iter().map(|number| number as u32).collect(),
                    _ => part(buffer).read_f32().unwrap().into_iter().map(f32::to_bits).collect(),
                });
            }
        }
        all
    }
}

/// The trainer's state of a checkpoint.
fn load_state(checkpoint: &Path) -> Result<TrainerState> {
    Checkpoint::open(checkpoint)?.state()
}

/// Reads every byte of a checkpoint.
fn verify(checkpoint: &Path, cancel: &CancelToken) -> Result<Checkpoint> {
    Checkpoint::open(checkpoint)?.verified(cancel)
}

/// The newest intact checkpoint of a folder, and the corrupted ones that were skipped.
fn newest(folder: &Path) -> (PathBuf, Vec<CorruptedCheckpoint>) {
    let NewestCheckpoint { checkpoint, corrupted } = newest_intact(folder, &CancelToken::new()).unwrap();
    (checkpoint.directory().to_owned(), corrupted)
}

fn state_at(step: u64) -> TrainerState {
    TrainerState {
        format_version: FORMAT_VERSION,
        step,
        stage: 0,
        tokens: step * 4096,
        cursor: json!({"epoch": 0, "window": step, "lanes": [null, 3]}),
        seed: 7,
        fingerprint: BTreeMap::from([
            ("model.hidden_size".to_owned(), json!(8)),
            ("optimizer.beta1".to_owned(), json!(0.9)),
        ]),
        evaluation_loss: None,
        best: Some(BestEvaluation { step: 1, loss: 0.1 + 0.2 }),
        improvement: None,
        execution: None,
        matmul_algorithms: None,
        bf16_units: None,
        ledger: None,
    }
}

fn tokenizer_files() -> TokenizerFiles {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, r#"{"version": "1.0"}"#).unwrap();
    TokenizerFiles::read(&path, &DocumentTokens::ended_by(0, "<|endoftext|>"), 16).unwrap()
}

/// A folder with intact checkpoints of these steps, saved in this order.
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
fn corrupt(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}
