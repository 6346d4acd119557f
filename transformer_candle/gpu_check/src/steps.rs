//! Optimizer steps: the loss as it falls on both devices, and the same bits again whenever they must be.

use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use dataset::{Batch, CancelToken};
use kernels::Device;
use model::ModelShape;
use run_config::{ActivationRecompute, Format, Precision, RunConfig};

use super::device_under_test::{BufferContents, DeviceUnderTest, Random, relative_error};
use super::part::Size;
use super::report::{CheckRow, Findings};
use training::checkpoint::{self, Checkpoint, CheckpointContents, FORMAT_VERSION, TokenizerFiles, TrainerState};
use training::engine::{Engine, EngineSettings, model_shape};
use training::memory_plan;
use training::stop::StopSignal;
use training::{Result, TrainerError};

/// F32 losses after steps whose differences `AdamW` magnifies: where a gradient is nearly zero, its sign decides the step.
const F32: f64 = 1e-3;
/// How far BF16 leads the CPU away from its own F32 losses, times this, and a little more.
const BF16_FACTOR: f64 = 2.0;
const BF16_FLOOR: f64 = 5e-3;
/// Of a run that learned something, the last loss over the first at most.
const LEARNED: f64 = 0.98;

/// The same for every step.
const LEARNING_RATE: f64 = 1e-3;
/// Tokens of a document, on average.
const DOCUMENT: usize = 16;

/// A small model with something to learn: nine tokens of ten follow from the one before, in documents kept apart.
/// The last batch is the first one again, so that its loss falls by what was learned and not by what chance makes easier.
struct Task {
    text: String,
    shape: ModelShape,
    batches: Vec<Batch>,
    /// Steps before the run is saved and resumed elsewhere.
    first: u64,
    seed: u64,
    sequences: usize,
    sizes: String,
}

/// How the steps are run.
#[derive(Clone, Copy)]
struct Way {
    precision: Precision,
    micro_batch: usize,
    graphs: bool,
}

/// What a run left behind.
struct Trained {
    losses: Vec<f32>,
    /// Weights and optimizer state.
    state: Vec<(&'static str, BufferContents)>,
}

/// Checks training, both precisions.
pub(super) fn check(device: &DeviceUnderTest, size: Size, seed: u64, findings: &mut Findings<'_>) -> Result<()> {
    let task = Task::new(size, seed)?;
    let cpu = DeviceUnderTest::new(Device::Cpu);
    let way = |precision| Way { precision, micro_batch: task.sequences / 2, graphs: true };
    let (fp32, bf16) = (way(Precision::Fp32), way(Precision::Bf16));
    let exact = task.train(&cpu, 1, fp32)?;
    let rounded = task.train(&cpu, 1, bf16)?;
    let on_fp32 = task.train(device, 1, fp32)?;
    let row = |check: &str| CheckRow::new(check, &task.sizes);
    findings.add(row("training fp32: losses").within(relative_error(&on_fp32.losses, &exact.losses), F32));
    findings.add(learned(row("training fp32: learns"), &on_fp32.losses));

    let on_bf16 = task.train(device, 1, bf16)?;
    let bound = BF16_FACTOR * relative_error(&rounded.losses, &exact.losses) + BF16_FLOOR;
    findings.add(row("training bf16: losses").within(relative_error(&on_bf16.losses, &rounded.losses), bound));
    findings.add(learned(row("training bf16: learns"), &on_bf16.losses));
    findings.add(same(row("training bf16, twice"), &on_bf16, &task.train(device, 2, bf16)?));
    let eager = task.train(device, 3, Way { graphs: false, ..bf16 })?;
    findings.add(same(row("training bf16, without graphs"), &on_bf16, &eager));
    let resumed = task.train_in_two(device, 4, bf16)?;
    let check = format!("training bf16, saved after {} steps", task.first);
    findings.add(same(row(&check), &on_bf16, &resumed));
    let cut = task.train(device, 5, Way { micro_batch: 1, ..bf16 })?;
    findings.add(row("training bf16, micro-batches of 1").within(relative_error(&cut.losses, &on_bf16.losses), bound));
    Ok(())
}

fn learned(row: CheckRow, losses: &[f32]) -> CheckRow {
    let (first, last) = (losses.first().copied().unwrap_or(0.0), losses.last().copied().unwrap_or(0.0));
    row.require(f64::from(last) < LEARNED * f64::from(first), || format!("the loss went from {first} to {last}"))
        .note(format!("loss {first:.3} to {last:.3}"))
}

fn same(row: CheckRow, one: &Trained, other: &Trained) -> CheckRow {
    let differs = one.state.iter().zip(&other.state).find(|((_, one), (_, other))| one != other);
    let bits = |losses: &[f32]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    row.require(bits(&one.losses) == bits(&other.losses), || "the losses are not those of the first run".to_owned())
        .require(differs.is_none(), || {
            format!("{} is not that of the first run", differs.map_or("", |((name, _), _)| name))
        })
}

impl Task {
    fn new(size: Size, seed: u64) -> Result<Self> {
        let (hidden, layers, heads, kv_heads, vocabulary) = match size {
            Size::Small => (64, 1, 2, 1, 64),
            Size::Full => (256, 2, 4, 2, 256),
        };
        let (length, sequences, first, steps) = match size {
            Size::Small => (32, 4, 1, 3),
            Size::Full => (128, 8, 20, 50),
        };
        let text = format!(
            "model: {{vocab_size: {vocabulary}, hidden_size: {hidden}, intermediate_size: {}, num_layers: {layers}, \
             num_attention_heads: {heads}, num_key_value_heads: {kv_heads}, max_position_embeddings: {length}}}\n\
             data: {{sequence_length: {length}, packing: documents, batch_size: 1, sequences_per_step: {sequences}}}\n\
             scheduler: {{total_steps: {steps}}}\n",
            2 * hidden
        );
        let config = RunConfig::parse(&text, Format::Yaml, &[])?;
        let mut random = Random::new(seed);
        let batch = |_| following(&mut random, sequences, length, vocabulary);
        let mut batches: Vec<Batch> = (1..steps).map(batch).collect();
        batches.extend(batches.first().cloned());
        Ok(Self {
            shape: model_shape(&config)?,
            batches,
            sizes: format!("{steps} steps of {sequences} x {length}, {layers} layers of {hidden}"),
            text,
            first,
            seed,
            sequences,
        })
    }

    fn engine(&self, device: &Device, way: Way) -> Result<Engine> {
        let mut config = RunConfig::parse(&self.text, Format::Yaml, &[])?;
        config.runtime.precision = way.precision;
        let settings = EngineSettings {
            micro_batch: way.micro_batch,
            activation_recompute: ActivationRecompute::Selective,
            device: device.kind(),
        };
        let mut engine = memory_plan::allocate(&config, &self.shape, settings, device)?;
        if !way.graphs {
            engine.decoder.run_eagerly();
        }
        Ok(engine)
    }

    fn new_engine(&self, device: &Device, way: Way) -> Result<Engine> {
        let mut engine = self.engine(device, way)?;
        engine.initialize(self.seed)?;
        Ok(engine)
    }

    fn steps(&self, engine: &mut Engine, steps: RangeInclusive<u64>) -> Result<Vec<f32>> {
        let (mut losses, stop) = (Vec::new(), StopSignal::new());
        for step in steps {
            let batch = &self.batches[step as usize - 1];
            let outcome = engine.step(batch, step, LEARNING_RATE, &stop)?;
            losses.extend(outcome.map(|outcome| outcome.loss));
        }
        Ok(losses)
    }

    fn last(&self) -> u64 {
        self.batches.len() as u64
    }

    fn train(&self, device: &DeviceUnderTest, run: usize, way: Way) -> Result<Trained> {
        let mut engine = self.new_engine(&device.device, way)?;
        let losses = self.steps(&mut engine, 1..=self.last())?;
        Trained::read(device, run, &engine, losses)
    }

    /// The same in two trainers, the second of which has nothing of the first but its checkpoint.
    fn train_in_two(&self, device: &DeviceUnderTest, run: usize, way: Way) -> Result<Trained> {
        let folder = Folder::new()?;
        let mut engine = self.new_engine(&device.device, way)?;
        let mut losses = self.steps(&mut engine, 1..=self.first)?;
        let saved = self.save(&engine, way, &folder.0)?;
        drop(engine);
        let mut engine = self.engine(&device.device, way)?;
        let Engine { decoder, optimizer, .. } = &mut engine;
        let (checkpoint, cancel) = (Checkpoint::open(&saved)?, CancelToken::new());
        checkpoint.weights(&self.shape, decoder.weights_mut(), &cancel)?;
        checkpoint.optimizer(&self.shape, optimizer.state_mut(), &cancel)?;
        engine.warm_up()?;
        losses.extend(self.steps(&mut engine, self.first + 1..=self.last())?);
        Trained::read(device, run, &engine, losses)
    }

    fn save(&self, engine: &Engine, way: Way, folder: &Path) -> Result<PathBuf> {
        let tokenizer = folder.join("tokenizer.json");
        fs::write(&tokenizer, "{}").map_err(TrainerError::io("write", &tokenizer))?;
        let state = TrainerState {
            format_version: FORMAT_VERSION,
            step: self.first,
            tokens: 0,
            cursor: serde_json::Value::Null,
            seed: self.seed,
            fingerprint: std::collections::BTreeMap::new(),
            evaluation_loss: None,
            best: None,
            execution: None,
            matmul_algorithms: None,
            ledger: None,
        };
        let contents = CheckpointContents {
            shape: &self.shape,
            precision: way.precision,
            weights: engine.decoder.weights(),
            optimizer: engine.optimizer.state(),
            tokenizer: &TokenizerFiles::read(&tokenizer, "", 0, self.shape.max_position_embeddings)?,
            state: &state,
        };
        Ok(checkpoint::save(&folder.join("checkpoints"), &contents)?)
    }
}

impl Trained {
    fn read(device: &DeviceUnderTest, run: usize, engine: &Engine, losses: Vec<f32>) -> Result<Self> {
        let optimizer = engine.optimizer.state().iter().map(|tensor| (tensor.layout.name, &tensor.buffer));
        let tensors = [("weights", engine.decoder.weights())].into_iter().chain(optimizer);
        let read = |(name, buffer)| Ok((name, device.read(name, run, buffer)?));
        let state = tensors.map(read).collect::<Result<_>>()?;
        Ok(Self { losses: device.numbers("losses", run, losses), state })
    }
}

/// Tokens of which nine in ten follow from the one before by one rule. Documents begin anywhere.
fn following(random: &mut Random, sequences: usize, length: usize, vocabulary: usize) -> Batch {
    let (mut inputs, mut targets, mut starts) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..sequences {
        let (mut token, mut start) = (random.below(vocabulary), 0);
        for position in 0..length {
            if random.below(DOCUMENT) == 0 {
                start = position as i32;
            }
            starts.push(start);
            inputs.push(token as u32);
            let rule = (5 * token + 3) % vocabulary;
            token = if random.below(10) == 0 { random.below(vocabulary) } else { rule };
            targets.push(token as i32);
        }
    }
    let target_count = targets.len();
    let document_starts = Some(starts);
    Batch { inputs, targets, document_starts, sequence_length: length, target_count, target_bytes: None }
}

/// A folder of its own, gone when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("transformer-candle-gpu-check-{}", Random::seed_from_now()));
        fs::create_dir_all(&path).map_err(TrainerError::io("create", &path))?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed is a few megabytes in the system's folder for such things.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_stays_has_learned_nothing() {
        assert!(learned(CheckRow::new("", ""), &[4.0, 3.0]).failure.is_none());
        let failure = learned(CheckRow::new("", ""), &[4.0, 3.99]).failure.unwrap();
        assert_eq!(failure, "the loss went from 4 to 3.99");
        assert!(learned(CheckRow::new("", ""), &[4.0, f32::NAN]).failure.is_some());
    }

    #[test]
    fn a_sound_device_learns_whatever_the_seed() {
        for seed in 0..100 {
            let task = Task::new(Size::Small, seed).unwrap();
            let way = Way { precision: Precision::Fp32, micro_batch: task.sequences, graphs: false };
            let losses = task.train(&DeviceUnderTest::new(Device::Cpu), 1, way).unwrap().losses;
            let (first, last) = (losses[0], losses[losses.len() - 1]);
            assert!(f64::from(last) < 0.98 * LEARNED * f64::from(first), "seed {seed}: {first} to {last}");
        }
    }

    #[test]
    fn most_tokens_follow_from_the_one_before() {
        let batch = following(&mut Random::new(1), 3, 200, 64);
        let follows = |(&input, &target): (&u32, &i32)| (5 * input + 3) % 64 == target as u32;
        let share = batch.inputs.iter().zip(&batch.targets).filter(|&pair| follows(pair)).count() as f64 / 600.0;
        assert!((0.85..0.96).contains(&share), "{share}");
        assert!((0..600).all(|at| at % 200 == 199 || batch.targets[at] as u32 == batch.inputs[at + 1]));
        let starts = batch.document_starts.unwrap();
        let begun = (0..600).filter(|&at| at % 200 > 0 && starts[at] as usize == at % 200).count();
        assert!((20..60).contains(&begun), "{begun}");
    }
}
