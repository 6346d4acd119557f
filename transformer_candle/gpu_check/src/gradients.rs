//! Compares one decoder block and the whole model: values, loss and the gradient of every parameter. For architectures
//! that have other layers than Llama, only the whole model.
//!
//! In `fp32` the two devices differ by the order of sums. In `bf16` each rounds differently in every layer, so the
//! exact gradient is the CPU's in F32 from the same inputs, and the tolerance is twice the CPU's own BF16 error, for
//! any model.

use kernels::cases::{BufferContents, Random, relative_error};
use kernels::memory::{Arena, Category, allocate};
use kernels::{Buffer, DType, Device, WriteMode, head_cross_entropy};
use model::activations::ActivationSettings;
use model::backbone::{Backbone, rope_tables};
use model::layout::Parameter;
use model::parameters::BlockParameters;
use model::pass::Pass;
use model::weight::Weight;
use model::{
    ActivationRecompute, Decoder, DecoderSettings, ModelShape, ParameterLayout, Precision, Weights, dtype_of,
    initialization,
};
use run_config::{Architecture, ModelConfig};

use super::device_under_test::DeviceUnderTest;
use super::part::Size;
use super::report::{CheckRow, Findings};
use training::{Result, TrainerError};

/// The tolerance in F32: a few layers, each with sums in another order.
const F32: f64 = 1e-4;
/// The tolerance in BF16 is this times the CPU's own BF16 error, plus [`BF16_FLOOR`].
const BF16_FACTOR: f64 = 2.0;
/// The constant part of the tolerance in BF16.
const BF16_FLOOR: f64 = 2e-3;

/// A model, the sizes of a micro-batch, and the seed of weights and inputs.
struct GradientCase {
    shape: ModelShape,
    batch: usize,
    sequence_length: usize,
    seed: u64,
}

/// The results of a computation, by name.
type NamedBits = Vec<(String, BufferContents)>;

/// Checks a block and a model, in both precisions and all recompute settings.
pub(super) fn check(device: &DeviceUnderTest, size: Size, seed: u64, findings: &mut Findings<'_>) -> Result<()> {
    let case = GradientCase::new(size, seed, Architecture::Llama);
    for precision in [Precision::Fp32, Precision::Bf16] {
        let name = dtype_name(precision);
        let block = |device: &DeviceUnderTest, run, dtype, widened| case.block(device, run, dtype, widened);
        compare(&format!("block {name}"), &case.sizes(), precision, device, findings, &block)?;
        let model = |device: &DeviceUnderTest, run, dtype, widened| {
            case.model(device, run, dtype, widened, ActivationRecompute::None)
        };
        let without_recompute = compare(&format!("model {name}"), &case.sizes(), precision, device, findings, &model)?;
        for (recompute, what) in [(ActivationRecompute::Selective, "selective"), (ActivationRecompute::Block, "block")]
        {
            let recomputed = case.model(device, 3, dtype_of(precision), false, recompute)?;
            let row = CheckRow::new(format!("model {name}, recompute {what}"), case.sizes());
            findings.add(same(row, &without_recompute, &recomputed, "the run without recompute"));
        }
        for architecture in [Architecture::Qwen2, Architecture::Qwen3] {
            let case = GradientCase::new(size, seed, architecture);
            let model = |device: &DeviceUnderTest, run, dtype, widened| {
                case.model(device, run, dtype, widened, ActivationRecompute::None)
            };
            let name = format!("{} {name}", architecture.model_type());
            compare(&name, &case.sizes(), precision, device, findings, &model)?;
        }
    }
    Ok(())
}

/// A computation, given a device, the number of the run, a type, and whether BF16 inputs are widened to F32.
type Compute<'a> = dyn Fn(&DeviceUnderTest, usize, DType, bool) -> Result<NamedBits> + 'a;

/// Runs a computation on both devices, twice on the one under test, and adds a row per kind of result. Returns the
/// results of the first run.
fn compare(
    name: &str,
    sizes: &str,
    precision: Precision,
    device: &DeviceUnderTest,
    findings: &mut Findings<'_>,
    compute: &Compute<'_>,
) -> Result<NamedBits> {
    let cpu = DeviceUnderTest::new(Device::Cpu);
    let dtype = dtype_of(precision);
    let exact = compute(&cpu, 1, dtype, true)?;
    let bounds: Vec<f64> = match precision {
        Precision::Fp32 => vec![F32; exact.len()],
        Precision::Bf16 | Precision::Fp8 => {
            let rounded = compute(&cpu, 1, dtype, false)?;
            let tolerance = |((_, ours), (_, exact)): (&(String, BufferContents), &(String, BufferContents))| {
                BF16_FACTOR * relative_error(&ours.numbers(), &exact.numbers()) + BF16_FLOOR
            };
            rounded.iter().zip(&exact).map(tolerance).collect()
        }
    };
    let first = compute(device, 1, dtype, false)?;
    let repetition = compute(device, 2, dtype, false)?;
    for row in rows(name, sizes, &first, &exact, &bounds) {
        findings.add(row);
    }
    findings.add(same(CheckRow::new(format!("{name}, twice"), sizes), &first, &repetition, "the first run"));
    Ok(first)
}

/// Returns a row for each kind of value (`qkv` of all layers is one kind), with its worst layer.
fn rows(name: &str, sizes: &str, ours: &NamedBits, exact: &NamedBits, bounds: &[f64]) -> Vec<CheckRow> {
    let mut worst: Vec<(&str, &str, f64, f64)> = Vec::new();
    for (((full, ours), (_, exact)), &bound) in ours.iter().zip(exact).zip(bounds) {
        let kind = full.rsplit('.').next().unwrap_or(full);
        let error = relative_error(&ours.numbers(), &exact.numbers());
        match worst.iter_mut().find(|(other, ..)| *other == kind) {
            None => worst.push((kind, full, error, bound)),
            // A NaN stays the worst.
            Some(entry) if error.is_nan() || error / bound > entry.2 / entry.3 => *entry = (kind, full, error, bound),
            Some(_) => {}
        }
    }
    let row = |(kind, full, error, bound): (&str, &str, f64, f64)| {
        let row = CheckRow::new(format!("{name}: {kind}"), sizes).within(error, bound);
        if kind == full { row } else { row.note(format!("worst: {full}")) }
    };
    worst.into_iter().map(row).collect()
}

/// Requires that two results have the same bits.
fn same(row: CheckRow, one: &NamedBits, other: &NamedBits, what: &str) -> CheckRow {
    let differs = one.iter().zip(other).find(|((_, one), (_, other))| one != other);
    row.require(differs.is_none(), || format!("{} differs from {what}", differs.map_or("", |((name, _), _)| name)))
}

impl GradientCase {
    fn new(size: Size, seed: u64, architecture: Architecture) -> Self {
        let (hidden_size, intermediate_size, vocab_size, num_layers) = match size {
            Size::Small => (64, 96, 71, 2),
            Size::Full => (1024, 2816, 5000, 3),
        };
        let (num_attention_heads, num_key_value_heads) = if size == Size::Small { (2, 1) } else { (16, 4) };
        let (batch, sequence_length) = if size == Size::Small { (1, 32) } else { (2, 500) };
        let config = ModelConfig {
            architecture,
            hidden_size,
            intermediate_size,
            num_layers,
            num_attention_heads,
            num_key_value_heads,
            max_position_embeddings: sequence_length,
            tie_embeddings: size == Size::Small,
            // Large enough that every layer contributes to the gradients.
            init_std: 1.0 / (hidden_size as f64).sqrt(),
            ..ModelConfig::default()
        };
        let shape = ModelShape::new(&config, vocab_size);
        Self { shape, batch, sequence_length, seed }
    }

    fn sizes(&self) -> String {
        let ModelShape { num_layers, hidden_size, .. } = self.shape;
        format!("{num_layers} layers of {hidden_size}, {} x {}", self.batch, self.sequence_length)
    }

    fn tokens(&self) -> usize {
        self.batch * self.sequence_length
    }

    /// Returns initial weights in `dtype`; with `widened`, the same values as F32.
    fn weights(&self, dtype: DType, widened: bool) -> Result<BufferContents> {
        let mut weights = Weights::zeros(&self.shape, dtype, &Device::Cpu)?;
        initialization::fill(&self.shape, self.seed, &mut weights, None)?;
        let bits = BufferContents::read(&weights.flat)?;
        Ok(if widened { bits.widened() } else { bits })
    }

    /// Computes output, gradient of the input and gradients of the parameters of the first block.
    fn block(&self, device: &DeviceUnderTest, run: usize, dtype: DType, widened: bool) -> Result<NamedBits> {
        let (n, d) = (self.tokens(), self.shape.hidden_size);
        let mut random = Random::new(self.seed);
        let mut numbers = || {
            let bits = BufferContents::from_numbers(random.numbers(n * d), dtype);
            if widened { bits.widened() } else { bits }
        };
        let (input, output_gradient, weights) = (numbers(), numbers(), self.weights(dtype, widened)?);
        let (mut backbone, parameters) = self.bind(device, &weights)?;
        let Backbone { blocks, settings, scratch, .. } = &mut backbone;
        let (block, write_mode) = (&mut blocks[0], WriteMode::Accumulate);
        let mut pass = Pass { settings, documents_N: None, past: 0, write_mode, scratch };
        input.write_to(block.attention.residual_mut())?;
        block.forward(&mut pass)?;
        let mut results = NamedBits::new();
        let mut keep = |name: &str, buffer: &Buffer| {
            results.push((name.to_owned(), device.read(name, run, buffer)?));
            Ok::<(), TrainerError>(())
        };
        keep("attention_residual", block.mlp.residual_ND())?;
        keep("mlp_output", &pass.scratch.layer_output_ND)?;
        output_gradient.write_to(&mut pass.scratch.backward()?.0.dresidual_ND)?;
        block.backward(&mut pass)?;
        keep("input_gradient", &pass.scratch.backward()?.0.dresidual_ND)?;
        let BlockParameters { qkv, attention_output, gate_up, down, attention_norm, mlp_norm, .. } = parameters;
        let gradients = [
            ("attention_norm", attention_norm),
            ("qkv", qkv),
            ("attention_output", attention_output),
            ("mlp_norm", mlp_norm),
            ("gate_up", gate_up),
            ("down", down),
        ];
        for (name, weight) in gradients {
            keep(name, &weight.gradient.ok_or(model::Error::EvaluationOnly)?)?;
        }
        Ok(results)
    }

    /// Builds the model with these weights; also returns its first block's parameters.
    fn bind(&self, device: &DeviceUnderTest, weights: &BufferContents) -> Result<(Backbone, BlockParameters<Weight>)> {
        let (shape, device) = (&self.shape, &device.device);
        let layout = ParameterLayout::new(shape);
        let settings = ActivationSettings {
            batch: self.batch,
            sequence_length: self.sequence_length,
            dtype: weights.dtype,
            residual_dtype: weights.dtype,
            fp8: None,
            recompute: ActivationRecompute::None,
            training: true,
            device: device.kind(),
            workspace_elements: 0,
        };
        let new = |arena: &mut Arena| -> Result<_> {
            let flat = arena.take("weights", Category::Weights, weights.dtype, &[layout.elements()]);
            let gradients = arena.take("gradients", Category::Gradients, DType::F32, &[layout.elements()]);
            let parameters = layout.weights(&flat.clone().into(), Some(&gradients))?;
            let rope = rope_tables(shape, self.sequence_length, arena)?;
            Ok((flat, Backbone::new(shape, &settings, &parameters, rope, &[], arena)?, parameters))
        };
        let (mut flat, backbone, mut parameters) = allocate(device, new)?;
        weights.write_to(&mut flat)?;
        Ok((backbone, parameters.blocks.swap_remove(0)))
    }

    /// Computes the model's loss and gradients over two micro-batches, some of whose targets are ignored.
    fn model(
        &self,
        device: &DeviceUnderTest,
        run: usize,
        dtype: DType,
        widened: bool,
        recompute: ActivationRecompute,
    ) -> Result<NamedBits> {
        let n = self.tokens();
        let weights = self.weights(dtype, widened)?;
        let settings = DecoderSettings {
            batch: self.batch,
            sequence_length: self.sequence_length,
            precision: if weights.dtype == DType::BF16 { Precision::Bf16 } else { Precision::Fp32 },
            fp8: None,
            recompute,
            device: device.device.kind(),
            training: true,
            z_loss: 0.0,
        };
        let mut decoder = allocate(&device.device, |arena| Decoder::new(&self.shape, &settings, arena))?;
        weights.write_to(&mut decoder.weights_mut().flat)?;
        let mut inputs = Buffer::zeros(&[n], DType::U32, &device.device)?;
        let mut targets = Buffer::zeros(&[n], DType::I32, &device.device)?;
        let mut random = Random::new(self.seed);
        for _ in 0..2 {
            inputs.write(&(0..n).map(|_| self.token(&mut random)).collect::<Vec<_>>())?;
            let target = |random: &mut Random| match random.below(8) {
                0 => head_cross_entropy::IGNORED_TARGET,
                _ => self.token(random).cast_signed(),
            };
            targets.write(&(0..n).map(|_| target(&mut random)).collect::<Vec<_>>())?;
            decoder.forward_backward(&inputs, None, &targets, 1.0 / n as f32)?;
        }
        let mut results = vec![("loss".to_owned(), device.read("loss", run, decoder.loss())?)];
        for Parameter { spec, offset } in decoder.layout().by_offset() {
            let gradient = decoder.gradients().view(*offset, &spec.shape)?;
            results.push((spec.name.clone(), device.read(&spec.name, run, &gradient)?));
        }
        Ok(results)
    }

    fn token(&self, random: &mut Random) -> u32 {
        random.below(self.shape.vocab_size) as u32
    }
}

fn dtype_name(precision: Precision) -> &'static str {
    match precision {
        Precision::Fp32 => "fp32",
        Precision::Bf16 => "bf16",
        Precision::Fp8 => "fp8",
    }
}
