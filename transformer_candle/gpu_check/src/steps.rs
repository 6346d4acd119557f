//! Optimizer steps: the loss curves of both devices, and bitwise equality of repeated, eager and resumed runs.

use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use dataset::{Batch, CancelToken, DocumentTokens};
use kernels::Device;
use kernels::cases::{BufferContents, Random, relative_error};
use model::ModelShape;
use run_config::{ActivationRecompute, Algorithm, Format, Fp8Recipe, Precision, RunConfig};

use super::device_under_test::DeviceUnderTest;
use super::part::Size;
use super::report::{CheckRow, Findings};
use training::checkpoint::{self, Checkpoint, CheckpointContents, FORMAT_VERSION, TokenizerFiles, TrainerState};
use training::device::fp8_recipes;
use training::engine::{Engine, EngineSettings, model_shape};
use training::memory_plan;
use training::ranks::{RankInfo, Ranks};
use training::stop::StopSignal;
use training::{Result, TrainerError};

/// The tolerance of F32 losses. `AdamW` magnifies differences: where a gradient is nearly zero, its sign decides the
/// update.
const F32: f64 = 1e-3;
/// The tolerance in BF16 is this times the CPU's own BF16 error, plus [`BF16_FLOOR`].
const BF16_FACTOR: f64 = 2.0;
/// The constant part of the tolerance in BF16.
const BF16_FLOOR: f64 = 5e-3;
/// The largest ratio of the last loss to the first in a run that learned.
const LEARNED_RATIO: f64 = 0.98;

/// The learning rate of every step.
const LEARNING_RATE: f64 = 1e-3;
/// Tokens per document, on average.
const DOCUMENT_TOKENS: usize = 16;

/// A small model and data it can learn: nine of ten tokens are a function of the previous one, in documents that do not
/// attend to each other. The last batch repeats the first, so that their losses can be compared.
struct TrainingCase {
    text: String,
    shape: ModelShape,
    batches: Vec<Batch>,
    /// Number of steps after which the run is saved and resumed in another engine.
    first: u64,
    seed: u64,
    sequences: usize,
    sizes: String,
}

/// The settings of one run.
#[derive(Clone, Copy)]
struct RunSettings {
    precision: Precision,
    fp8_recipe: Fp8Recipe,
    algorithm: Algorithm,
    micro_batch: usize,
    graphs: bool,
}

/// The losses and the final state of a run.
struct TrainedState {
    losses: Vec<f32>,
    /// Weights and optimizer state.
    state: Vec<(&'static str, BufferContents)>,
}

/// Checks training in both precisions.
pub(super) fn check(device: &DeviceUnderTest, size: Size, seed: u64, findings: &mut Findings<'_>) -> Result<()> {
    let case = TrainingCase::new(size, seed)?;
    let cpu = DeviceUnderTest::new(Device::Cpu);
    let with = |precision, algorithm| RunSettings {
        precision,
        fp8_recipe: Fp8Recipe::Auto,
        algorithm,
        micro_batch: case.sequences / 2,
        graphs: true,
    };
    let (fp32, bf16) = (with(Precision::Fp32, Algorithm::AdamW), with(Precision::Bf16, Algorithm::AdamW));
    let exact = case.train(&cpu, 1, fp32)?;
    let rounded = case.train(&cpu, 1, bf16)?;
    let on_fp32 = case.train(device, 1, fp32)?;
    let row = |check: &str| CheckRow::new(check, &case.sizes);
    findings.add(row("training fp32: losses").within(relative_error(&on_fp32.losses, &exact.losses), F32));
    findings.add(learned(row("training fp32: learns"), &on_fp32.losses));

    let on_bf16 = case.train(device, 1, bf16)?;
    let bound = BF16_FACTOR * relative_error(&rounded.losses, &exact.losses) + BF16_FLOOR;
    findings.add(row("training bf16: losses").within(relative_error(&on_bf16.losses, &rounded.losses), bound));
    findings.add(learned(row("training bf16: learns"), &on_bf16.losses));
    findings.add(same(row("training bf16, twice"), &on_bf16, &case.train(device, 2, bf16)?));
    let eager = case.train(device, 3, RunSettings { graphs: false, ..bf16 })?;
    findings.add(same(row("training bf16, without graphs"), &on_bf16, &eager));
    let resumed = case.train_in_two(device, 4, bf16)?;
    let check = format!("training bf16, saved after {} steps", case.first);
    findings.add(same(row(&check), &on_bf16, &resumed));
    let small = case.train(device, 5, RunSettings { micro_batch: 1, ..bf16 })?;
    findings
        .add(row("training bf16, micro-batches of 1").within(relative_error(&small.losses, &on_bf16.losses), bound));
    check_muon(&case, device, with(Precision::Bf16, Algorithm::Muon), bound, findings)?;
    let fp8 = RunSettings { micro_batch: case.sequences, ..with(Precision::Fp8, Algorithm::AdamW) };
    // Small checks leave the other recipes to the operations.
    let recipes = if size == Size::Small { 1 } else { usize::MAX };
    let on_device = fp8_recipes(&device.device);
    if on_device.is_empty() {
        findings.add(CheckRow::skipped("training fp8", &case.sizes, "no fp8 matmuls"));
    }
    for fp8_recipe in on_device.into_iter().take(recipes) {
        check_fp8(&case, device, RunSettings { fp8_recipe, ..fp8 }, &exact.losses, findings)?;
    }
    Ok(())
}

/// Checks training in fp8: its losses against the CPU's, which computes what fp8 matmuls are defined to, and equal bits
/// without CUDA graphs and when it is resumed. `exact` are the losses in F32.
fn check_fp8(
    case: &TrainingCase,
    device: &DeviceUnderTest,
    fp8: RunSettings,
    exact: &[f32],
    findings: &mut Findings<'_>,
) -> Result<()> {
    let recipe = format!("{:?}", fp8.fp8_recipe).to_lowercase();
    let row = |check: &str| CheckRow::new(format!("training fp8 {recipe}{check}"), &case.sizes);
    let rounded = case.train(&DeviceUnderTest::new(Device::Cpu), 1, fp8)?;
    let trained = case.train(device, 9, fp8)?;
    let bound = BF16_FACTOR * relative_error(&rounded.losses, exact) + BF16_FLOOR;
    findings.add(row(": losses").within(relative_error(&trained.losses, &rounded.losses), bound));
    findings.add(learned(row(": learns"), &trained.losses));
    let resumed = case.train_in_two(device, 10, RunSettings { graphs: false, ..fp8 })?;
    findings.add(same(row(": eager, resumed"), &trained, &resumed));
    Ok(())
}

/// Checks training with Muon: its losses within `bound` of the CPU's, and equal bits.
fn check_muon(
    case: &TrainingCase,
    device: &DeviceUnderTest,
    muon: RunSettings,
    bound: f64,
    findings: &mut Findings<'_>,
) -> Result<()> {
    let row = |check: &str| CheckRow::new(check, &case.sizes);
    let rounded = case.train(&DeviceUnderTest::new(Device::Cpu), 1, muon)?;
    let trained = case.train(device, 6, muon)?;
    findings.add(row("training bf16, Muon: losses").within(relative_error(&trained.losses, &rounded.losses), bound));
    let eager = case.train(device, 7, RunSettings { graphs: false, ..muon })?;
    findings.add(same(row("training bf16, Muon, without graphs"), &trained, &eager));
    let resumed = case.train_in_two(device, 8, muon)?;
    findings.add(same(row(&format!("training bf16, Muon, saved after {} steps", case.first)), &trained, &resumed));
    Ok(())
}

fn learned(row: CheckRow, losses: &[f32]) -> CheckRow {
    let (first, last) = (losses.first().copied().unwrap_or(0.0), losses.last().copied().unwrap_or(0.0));
    row.require(f64::from(last) < LEARNED_RATIO * f64::from(first), || format!("the loss went from {first} to {last}"))
        .note(format!("loss {first:.3} to {last:.3}"))
}

fn same(row: CheckRow, one: &TrainedState, other: &TrainedState) -> CheckRow {
    let differs = one.state.iter().zip(&other.state).find(|((_, one), (_, other))| one != other);
    let bits = |losses: &[f32]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    row.require(bits(&one.losses) == bits(&other.losses), || "the losses differ from the first run".to_owned())
        .require(differs.is_none(), || {
            format!("{} differs from the first run", differs.map_or("", |((name, _), _)| name))
        })
}

impl TrainingCase {
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
        let batch = |_| predictable_batch(&mut random, sequences, length, vocabulary);
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

    fn engine(&self, device: &Device, settings: RunSettings) -> Result<Engine> {
        let mut config = RunConfig::parse(&self.text, Format::Yaml, &[])?;
        config.runtime.precision = settings.precision;
        config.runtime.fp8_recipe = settings.fp8_recipe;
        config.optimizer.algorithm = settings.algorithm;
        let engine_settings = EngineSettings {
            micro_batch: settings.micro_batch,
            activation_recompute: ActivationRecompute::Selective,
            device: device.kind(),
            rank_info: RankInfo::default(),
        };
        let mut engine = memory_plan::allocate(&config, &self.shape, engine_settings, device)?;
        if !settings.graphs {
            engine.decoder.run_eagerly();
            engine.optimizer.run_eagerly();
        }
        Ok(engine)
    }

    fn new_engine(&self, device: &Device, settings: RunSettings) -> Result<Engine> {
        let mut engine = self.engine(device, settings)?;
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

    fn train(&self, device: &DeviceUnderTest, run: usize, settings: RunSettings) -> Result<TrainedState> {
        let mut engine = self.new_engine(&device.device, settings)?;
        let losses = self.steps(&mut engine, 1..=self.last())?;
        TrainedState::read(device, run, &engine, losses)
    }

    /// Trains the same steps in two engines, the second of which resumes from the first one's checkpoint.
    fn train_in_two(&self, device: &DeviceUnderTest, run: usize, settings: RunSettings) -> Result<TrainedState> {
        let folder = TemporaryDirectory::new()?;
        let mut engine = self.new_engine(&device.device, settings)?;
        let mut losses = self.steps(&mut engine, 1..=self.first)?;
        let saved = self.save(&engine, settings, &folder.0)?;
        drop(engine);
        let mut engine = self.engine(&device.device, settings)?;
        let Engine { decoder, optimizer, .. } = &mut engine;
        let (checkpoint, cancel) = (Checkpoint::open(&saved)?, CancelToken::new());
        checkpoint.weights(&self.shape, decoder.weights_mut(), &cancel)?;
        checkpoint.optimizer(&self.shape, optimizer.state_mut(), &cancel)?;
        engine.warm_up()?;
        losses.extend(self.steps(&mut engine, self.first + 1..=self.last())?);
        TrainedState::read(device, run, &engine, losses)
    }

    fn save(&self, engine: &Engine, settings: RunSettings, folder: &Path) -> Result<PathBuf> {
        let tokenizer = folder.join("tokenizer.json");
        fs::write(&tokenizer, "{}").map_err(TrainerError::io("write", &tokenizer))?;
        let marks = DocumentTokens::ended_by(0, "");
        let state = TrainerState {
            format_version: FORMAT_VERSION,
            step: self.first,
            seed: self.seed,
            ..TrainerState::default()
        };
        let contents = CheckpointContents {
            shape: &self.shape,
            precision: settings.precision,
            weights: &engine.decoder.weights().flat,
            optimizer: engine.optimizer.state(),
            tokenizer: &TokenizerFiles::read(&tokenizer, &marks, self.shape.max_position_embeddings)?,
            state: &state,
            base: None,
            ranks: &Ranks::ONE,
        };
        Ok(checkpoint::save(&folder.join("checkpoints"), &contents)?)
    }
}

impl TrainedState {
    fn read(device: &DeviceUnderTest, run: usize, engine: &Engine, losses: Vec<f32>) -> Result<Self> {
        let optimizer = engine.optimizer.state().iter().map(|tensor| (tensor.layout.name, &tensor.buffer));
        let tensors = [("weights", &engine.decoder.weights().flat)].into_iter().chain(optimizer);
        let read = |(name, buffer)| Ok((name, device.read(name, run, buffer)?));
        let state = tensors.map(read).collect::<Result<_>>()?;
        Ok(Self { losses: device.numbers("losses", run, losses), state })
    }
}

/// Draws a batch in which nine of ten tokens are a function of the previous one. Documents start at random positions.
fn predictable_batch(random: &mut Random, sequences: usize, length: usize, vocabulary: usize) -> Batch {
    let (mut inputs, mut targets, mut starts) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..sequences {
        let (mut token, mut start) = (random.below(vocabulary), 0);
        for position in 0..length {
            if random.below(DOCUMENT_TOKENS) == 0 {
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

/// A temporary directory, deleted when dropped.
struct TemporaryDirectory(PathBuf);

impl TemporaryDirectory {
    fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("transformer-candle-gpu-check-{}", Random::seed_from_now()));
        fs::create_dir_all(&path).map_err(TrainerError::io("create", &path))?;
        Ok(Self(path))
    }
}

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        // Failing to delete leaves a few megabytes in the system's temporary directory.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_constant_loss_fails() {
        assert!(learned(CheckRow::new("", ""), &[4.0, 3.0]).failure.is_none());
        let failure = learned(CheckRow::new("", ""), &[4.0, 3.99]).failure.unwrap();
        assert_eq!(failure, "the loss went from 4 to 3.99");
        assert!(learned(CheckRow::new("", ""), &[4.0, f32::NAN]).failure.is_some());
    }

    #[test]
    fn a_correct_device_learns_with_any_seed() {
        for seed in 0..100 {
            let case = TrainingCase::new(Size::Small, seed).unwrap();
            let settings = RunSettings {
                fp8_recipe: Fp8Recipe::Auto,
                precision: Precision::Fp32,
                algorithm: Algorithm::AdamW,
                micro_batch: case.sequences,
                graphs: false,
            };
            let losses = case.train(&DeviceUnderTest::new(Device::Cpu), 1, settings).unwrap().losses;
            let (first, last) = (losses[0], losses[losses.len() - 1]);
            assert!(f64::from(last) < 0.98 * LEARNED_RATIO * f64::from(first), "seed {seed}: {first} to {last}");
        }
    }

    #[test]
    fn nine_of_ten_tokens_are_predictable() {
        let batch = predictable_batch(&mut Random::new(1), 3, 200, 64);
        let follows = |(&input, &target): (&u32, &i32)| (5 * input + 3) % 64 == target as u32;
        let fraction = batch.inputs.iter().zip(&batch.targets).filter(|&pair| follows(pair)).count() as f64 / 600.0;
        assert!((0.85..0.96).contains(&fraction), "{fraction}");
        assert!((0..600).all(|at| at % 200 == 199 || batch.targets[at] as u32 == batch.inputs[at + 1]));
        let starts = batch.document_starts.unwrap();
        let new_documents = (0..600).filter(|&at| at % 200 > 0 && starts[at] as usize == at % 200).count();
        assert!((20..60).contains(&new_documents), "{new_documents}");
    }
}
