//! What could be changed in a run that does not fit in memory: each change with what it saves and costs, and the changes
//! that together make it fit.

use std::fmt;

use model::{LoraShape, ModelShape};
use run_config::{ActivationRecompute, Algorithm, BasePrecision, Precision, RunConfig};
use serde::Serialize;

use super::{
    fit::{self, RECOMPUTES},
    speed::SpeedModel,
};
use crate::{
    engine::{EngineSettings, StepOf},
    error::{Budget, shortage::recompute},
    units::rounded,
};

/// Sequences are not halved below this length: little context is left, and few activations are saved.
const SHORTEST_SEQUENCE: usize = 256;
/// Sequences are not halved more often than this to make a run fit; a smaller model comes first.
const MOST_HALVINGS: u32 = 2;
/// The rank of adapters is not halved below this one: adapters are small beside activations then.
const SMALLEST_RANK: usize = 4;
/// The rank of adapters that are suggested instead of training every weight, and how many times as high their learning
/// rate is (Schulman et al., 2025, "`LoRA` Without Regret").
const SUGGESTED_RANK: usize = 16;
const ADAPTER_RATE: f64 = 10.0;
/// Query heads that may share a key and value head, as in the models of 70 B parameters.
const MOST_HEADS_PER_KV_HEAD: usize = 8;

/// A key of a config with its value before and after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// Such as `data.batch_size`.
    pub key: &'static str,
    /// The value that the plan was made with.
    pub from: String,
    /// The value that fits.
    pub to: String,
}

impl Change {
    /// Formats the change as `--override` takes it.
    pub fn as_override(&self) -> String {
        format!("{}={}", self.key, self.to)
    }
}

impl fmt::Display for Change {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {} (was {})", self.key, self.to, self.from)
    }
}

/// One thing that could be changed alone, with what it saves and what it costs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FitOption {
    /// What it is, such as `shorter sequences`.
    pub name: &'static str,
    /// The keys to change.
    pub changes: Vec<Change>,
    /// Bytes of all planned buffers with it.
    pub bytes: u64,
    /// Bytes that it saves.
    pub saves_bytes: u64,
    /// Whether that alone is enough.
    pub fits: bool,
    /// Tokens per second with it over those without, optimistic.
    pub relative_speed: Option<f64>,
    /// What it costs besides speed.
    pub costs: &'static str,
}

/// A key of a config, and the function that formats its value in a variant.
type KeyOfVariant = (&'static str, fn(&Variant) -> String);

/// A config with changes, and the settings of its engine.
#[derive(Clone, Debug)]
struct Variant {
    config: RunConfig,
    shape: ModelShape,
    settings: EngineSettings,
}

impl Variant {
    fn from_step(step: StepOf<'_>) -> Self {
        Self { config: step.config.clone(), shape: step.shape.clone(), settings: step.settings }
    }

    fn bytes(&self) -> u64 {
        self.step().bytes()
    }

    fn step(&self) -> StepOf<'_> {
        StepOf { config: &self.config, shape: &self.shape, settings: self.settings }
    }

    fn micro_batch(mut self, micro_batch: usize) -> Self {
        self.settings.micro_batch = micro_batch;
        self
    }

    fn recompute(mut self, recompute: ActivationRecompute) -> Self {
        (self.settings.activation_recompute, self.config.runtime.activation_recompute) = (recompute, recompute);
        self
    }

    fn layers(mut self, layers: usize) -> Self {
        (self.shape.num_layers, self.config.model.num_layers) = (layers, layers);
        self
    }

    fn kv_heads(mut self, heads: usize) -> Self {
        (self.shape.num_key_value_heads, self.config.model.num_key_value_heads) = (heads, heads);
        self
    }

    /// The variant with adapters of this rank, whose output is scaled as before.
    fn rank(mut self, rank: usize) -> Self {
        let lora = &mut self.config.lora;
        let shrinks = rank as f64 / lora.rank.unwrap_or(rank) as f64;
        let factor = if lora.rslora { shrinks.sqrt() } else { shrinks };
        lora.alpha = Some(lora.alpha.map_or(rank as f64, |alpha| rounded(factor * alpha)));
        lora.rank = Some(rank);
        self.shape.lora = LoraShape::from_config(lora, self.config.runtime.precision);
        self
    }

    /// The variant whose frozen projections are held in fp8; none where they are, or are multiplied in fp32.
    fn fp8_base(&self) -> Option<Self> {
        let is_possible = self.config.runtime.precision == Precision::Bf16
            && self.shape.lora.as_ref().is_some_and(|lora| !lora.fp8_base);
        is_possible.then(|| {
            let mut variant = self.clone();
            variant.config.lora.base_precision = BasePrecision::Fp8;
            variant.shape.lora = LoraShape::from_config(&variant.config.lora, Precision::Bf16);
            variant
        })
    }

    /// Variants with halved ranks, largest first; none where the adapters are loaded (`lora.init_from`).
    fn smaller_ranks(&self) -> impl Iterator<Item = Self> + use<> {
        let lora = &self.config.lora;
        let halve = |rank: &usize| Some(rank / 2).filter(|rank| *rank >= SMALLEST_RANK);
        let first = lora.rank.filter(|_| lora.init_from.is_none()).as_ref().and_then(halve);
        let variant = self.clone();
        std::iter::successors(first, halve).map(move |rank| variant.clone().rank(rank))
    }

    /// The variant that trains adapters instead of a pretrained model's weights; none without those, or with adapters.
    fn adapters(&self) -> Option<Self> {
        let is_possible = self.config.model.init_from.is_some() && self.config.lora.rank.is_none();
        is_possible.then(|| {
            let mut variant = self.clone().rank(SUGGESTED_RANK);
            let optimizer = &mut variant.config.optimizer;
            optimizer.algorithm = Algorithm::AdamW;
            optimizer.learning_rate = rounded(ADAPTER_RATE * optimizer.learning_rate);
            variant
        })
    }

    /// The variant with sequences half as long, twice as many in a step, as many in a micro-batch.
    fn halved(mut self) -> Self {
        self.config.data.sequence_length /= 2;
        self.config.data.sequences_per_step *= 2;
        self
    }

    fn halvings(&self) -> impl Iterator<Item = Self> + use<> {
        let halve = |variant: &Self| {
            let length = variant.config.data.sequence_length;
            (length.is_multiple_of(2) && length / 2 >= SHORTEST_SEQUENCE).then(|| variant.clone().halved())
        };
        std::iter::successors(halve(self), halve)
    }

    /// Variants with fewer key and value heads, most first.
    fn fewer_kv_heads(&self) -> impl Iterator<Item = Self> + '_ {
        let (heads, kv_heads) = (self.shape.num_attention_heads, self.shape.num_key_value_heads);
        let fewest = heads.div_ceil(MOST_HEADS_PER_KV_HEAD);
        let fewer = (fewest..kv_heads).rev().filter(move |fewer| heads.is_multiple_of(*fewer));
        fewer.map(|fewer| self.clone().kv_heads(fewer))
    }

    /// The keys in which the two differ.
    fn changes_from(&self, original: &Self) -> Vec<Change> {
        let keys: [KeyOfVariant; 11] = [
            ("lora.rank", |variant| text_of(variant.config.lora.rank)),
            ("lora.alpha", |variant| text_of(variant.config.lora.alpha)),
            ("lora.base_precision", |variant| base_precision(variant.config.lora.base_precision).to_owned()),
            ("optimizer.algorithm", |variant| algorithm(variant.config.optimizer.algorithm).to_owned()),
            ("optimizer.learning_rate", |variant| variant.config.optimizer.learning_rate.to_string()),
            ("model.num_layers", |variant| variant.shape.num_layers.to_string()),
            ("model.num_key_value_heads", |variant| variant.shape.num_key_value_heads.to_string()),
            ("data.sequence_length", |variant| variant.config.data.sequence_length.to_string()),
            ("data.sequences_per_step", |variant| variant.config.data.sequences_per_step.to_string()),
            ("data.batch_size", |variant| variant.settings.micro_batch.to_string()),
            ("runtime.activation_recompute", |variant| recompute(variant.settings.activation_recompute).to_owned()),
        ];
        let change = |(key, value): KeyOfVariant| {
            let (from, to) = (value(original), value(self));
            (from != to).then_some(Change { key, from, to })
        };
        keys.into_iter().filter_map(change).collect()
    }
}

/// Formats a value as a config has it.
fn text_of(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "null".to_owned(), |value| value.to_string())
}

fn base_precision(base_precision: BasePrecision) -> &'static str {
    match base_precision {
        BasePrecision::Auto => "auto",
        BasePrecision::Fp8 => "fp8",
    }
}

fn algorithm(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::AdamW => "adamw",
        Algorithm::Muon => "muon",
    }
}

/// Returns the first variant that fits, else the last.
fn first_that_fits(variants: impl Iterator<Item = Variant>, budget: &Budget) -> Option<Variant> {
    let mut last = None;
    for variant in variants {
        let fits = variant.bytes() <= budget.bytes;
        last = Some(variant);
        if fits {
            break;
        }
    }
    last
}

/// Whether the model's sizes may be changed: not those of a pretrained one.
fn has_free_sizes(config: &RunConfig) -> bool {
    config.model.init_from.is_none()
}

/// Lists what could be changed, one thing at a time, each as far as it has to be to fit or else as far as it goes.
pub(super) fn list(step: StepOf<'_>, budget: &Budget, model: Option<&SpeedModel>) -> Vec<FitOption> {
    let original = Variant::from_step(step);
    let (bytes, seconds) = (original.bytes(), model.map(|model| model.speed(original.step()).tokens_per_second[1]));
    let sequences = step.config.data.sequences_per_step / step.settings.rank_info.world_size;
    let free_sizes = has_free_sizes(step.config);
    let divisors = (1..step.settings.micro_batch).rev().filter(|micro_batch| sequences.is_multiple_of(*micro_batch));
    let more_frugal = RECOMPUTES.into_iter().skip_while(|mode| *mode != step.settings.activation_recompute).skip(1);
    let layers = if free_sizes { (1..original.shape.num_layers).rev() } else { (0..0).rev() };
    let kv_heads = original.fewer_kv_heads().filter(|_| free_sizes);
    let option = |name, costs, variant: Option<Variant>| {
        let variant = variant?;
        let with = variant.bytes();
        let speed = model.map(|model| model.speed(variant.step()).tokens_per_second[1]);
        Some(FitOption {
            name,
            changes: variant.changes_from(&original),
            bytes: with,
            saves_bytes: bytes.saturating_sub(with),
            fits: with <= budget.bytes,
            relative_speed: speed.zip(seconds).map(|(with, without)| with / without),
            costs,
        })
    };
    let options = [
        option(
            "adapters (LoRA)",
            "fewer parameters learn; at a learning rate ten times as high",
            first_that_fits(original.adapters().into_iter(), budget),
        ),
        option(
            "base in fp8",
            "frozen weights have 4 significant bits",
            first_that_fits(original.fp8_base().into_iter(), budget),
        ),
        option("smaller rank", "adapters that can learn less", first_that_fits(original.smaller_ranks(), budget)),
        option(
            "shorter sequences",
            "less context; the same tokens per step",
            first_that_fits(original.halvings(), budget),
        ),
        option("fewer KV heads", "a slightly weaker model", first_that_fits(kv_heads, budget)),
        option(
            "smaller micro-batch",
            "more accumulation; the result is the same up to rounding",
            first_that_fits(divisors.map(|micro_batch| original.clone().micro_batch(micro_batch)), budget),
        ),
        option(
            "more recomputation",
            "the result is the same",
            first_that_fits(more_frugal.map(|mode| original.clone().recompute(mode)), budget),
        ),
        option(
            "smaller model",
            "a weaker model",
            first_that_fits(layers.map(|layers| original.clone().layers(layers)), budget),
        ),
    ];
    options.into_iter().flatten().collect()
}

/// The changes with which a run fits: first those of the micro-batch and of recomputation, which leave the result as it
/// is, the fastest of them; then a base in fp8, shorter sequences, adapters of a smaller rank or instead of all weights,
/// fewer KV heads, fewer layers. None if nothing is enough.
pub(super) fn fitting_changes(step: StepOf<'_>, budget: &Budget, model: Option<&SpeedModel>) -> Option<Vec<Change>> {
    let original = Variant::from_step(step);
    let with_halvings = |variant: Variant| {
        let shorter: Vec<Variant> = variant.halvings().take(MOST_HALVINGS as usize).collect();
        std::iter::once(variant).chain(shorter)
    };
    let halved: Vec<Variant> = with_halvings(original.clone()).skip(1).collect();
    let free_sizes = has_free_sizes(step.config);
    let kv_heads = || original.fewer_kv_heads().filter(|_| free_sizes);
    let layers =
        || (1..original.shape.num_layers).rev().filter(|_| free_sizes).map(|layers| original.clone().layers(layers));
    let shortest = halved.last().cloned().unwrap_or_else(|| original.clone());
    let ranks = || original.smaller_ranks().chain(shortest.smaller_ranks());
    let adapters = || {
        let variants = original.adapters().into_iter().flat_map(|variant| [Some(variant.clone()), variant.fp8_base()]);
        variants.flatten().flat_map(with_halvings)
    };
    let fp8_base = || original.fp8_base().into_iter();
    let same_model = std::iter::once(original.clone()).chain(fp8_base()).chain(halved.iter().cloned());
    let same_model = same_model.chain(fp8_base().flat_map(with_halvings).skip(1)).chain(ranks()).chain(adapters());
    let variants = same_model.chain(kv_heads()).chain(layers());
    let best_variant = variants.into_iter().find_map(|variant| fastest(&variant, budget, model))?;
    Some(best_variant.changes_from(&original))
}

/// The fastest micro-batch and recompute mode with which a variant fits; without a speed the largest micro-batch that
/// recomputes least.
fn fastest(variant: &Variant, budget: &Budget, model: Option<&SpeedModel>) -> Option<Variant> {
    let micro_batch = fit::most_sequences(&variant.config, variant.settings.device);
    let modes = RECOMPUTES.into_iter().skip_while(|mode| *mode != variant.settings.activation_recompute);
    let variants = modes.filter_map(|activation_recompute| {
        let most = EngineSettings { micro_batch, activation_recompute, ..variant.settings };
        let fit = fit::largest(&[variant.step()], 0, most, budget.bytes)?;
        Some(variant.clone().recompute(activation_recompute).micro_batch(fit.micro_batch))
    });
    let Some(model) = model else { return variants.into_iter().next() };
    variants.min_by(|a, b| model.step_seconds(a.step())[1].total_cmp(&model.step_seconds(b.step())[1]))
}
