//! `stages`: a training in parts that differ in sequence length, batch, learning rate or mixture weights.

mod fill;
mod rules;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(crate) use self::fill::fill;
pub(crate) use self::rules::check;
use crate::{BatchSize, MixtureComponent, RunConfig};

/// A stage of the training: its length, and where it differs from the rest of the config. The first stage
/// starts at step 1, each other one where the stage before it ends. Sizes of all stages are planned and allocated
/// before step 1. On resume only learning rates and the length of the last stage may change.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct StageConfig {
    /// Optimizer steps of the stage; either this or `tokens`. Those of all stages add up to `scheduler.total_steps`,
    /// which may be left out.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub steps: Option<u64>,
    /// Tokens of the stage instead of `steps`, rounded up to whole steps.
    #[schemars(range(min = 1, max = 1_000_000_000_000_000_i64))]
    pub tokens: Option<u64>,
    /// Where in the training text the stage starts.
    pub at: StageStart,
    /// Tokens of one training sequence. At most `model.max_position_embeddings`, which by default is that of the longest
    /// stage. Default: `data.sequence_length`.
    #[schemars(range(min = 2, max = 1_048_576))]
    pub sequence_length: Option<usize>,
    /// Sequences of an optimizer step. Default: those that make `data.tokens_per_step`, where that is given, else
    /// `data.sequences_per_step`.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub sequences_per_step: Option<usize>,
    /// Tokens of an optimizer step, another spelling of `sequences_per_step`: a multiple of the stage's
    /// `sequence_length`.
    #[schemars(range(min = 1, max = 1_000_000_000_000_i64))]
    pub tokens_per_step: Option<usize>,
    /// Sequences of a micro-batch, a divisor of the stage's `sequences_per_step`, or `auto`. Default:
    /// `data.batch_size`.
    pub batch_size: Option<BatchSize>,
    /// Peak learning rate in the stage: the schedule of the run, scaled so that it would peak here; `min_lr` is scaled
    /// too. Default: `optimizer.learning_rate`.
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub learning_rate: Option<f64>,
    /// Other weights of sources of `data.mixture` in this stage, such as `[{source: HuggingFaceFW/fineweb, weight: 0.2}]`.
    /// Sources that are not named keep theirs.
    pub mixture: Vec<StageWeight>,
}

/// Where in the training text a stage starts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StageStart {
    /// At the next shuffle window. Sequences of the window in use that were not trained on are left out; the ledger
    /// lists them.
    #[default]
    NextWindow,
    /// When the window in use ends: the stage before lasts until then, and the steps that this takes are missing from
    /// the stages behind it. Not with `data.mixture`, whose sources have windows of their own.
    WindowEnd,
}

/// The mixture weight of a source in one stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StageWeight {
    /// The source of `data.mixture`: its `name`, or its `dataset` if it has no name.
    #[schemars(length(min = 1))]
    pub source: String,
    /// Its mixture weight in this stage.
    #[schemars(range(max = 1e12), extend("exclusiveMinimum" = 0))]
    pub weight: f64,
}

impl RunConfig {
    /// Returns the stages of the training in order, each as a config without stages that has the run's
    /// `scheduler.total_steps`; for a config without stages, that config alone.
    pub fn stage_configs(&self) -> Vec<Self> {
        match &self.stages {
            None => vec![self.clone()],
            Some(stages) => stages.iter().map(|stage| self.with_stage(stage)).collect(),
        }
    }

    /// Returns the config of one stage, from 0, or of the last one if there are fewer ([`RunConfig::stage_configs`]).
    #[must_use]
    pub fn at_stage(&self, stage: usize) -> Self {
        let stages = self.stages.as_deref().unwrap_or_default();
        stages.get(stage).or(stages.last()).map_or_else(|| self.clone(), |stage| self.with_stage(stage))
    }

    fn with_stage(&self, stage: &StageConfig) -> Self {
        let mut config = Self { stages: None, ..self.clone() };
        let data = &mut config.data;
        data.sequence_length = stage.sequence_length.unwrap_or(data.sequence_length);
        data.sequences_per_step = stage.sequences_per_step.unwrap_or(data.sequences_per_step);
        data.batch_size = stage.batch_size.unwrap_or(data.batch_size);
        data.gradient_accumulation_steps = match data.batch_size {
            BatchSize::Auto => None,
            BatchSize::Fixed(sequences) => Some(data.sequences_per_step / sequences),
        };
        for StageWeight { source, weight } in &stage.mixture {
            let components = data.mixture.iter_mut().filter(|component| component.is_named(source));
            components.for_each(|component| component.weight = *weight);
        }
        if let Some(learning_rate) = stage.learning_rate {
            config.scheduler.min_lr *= learning_rate / config.optimizer.learning_rate;
            config.optimizer.learning_rate = learning_rate;
        }
        config
    }

    /// Returns the last step of each stage, counted from 1; empty for a config without stages.
    pub fn stage_ends(&self) -> Vec<u64> {
        let mut end: u64 = 0;
        let ends = self.stages.iter().flatten().map(|stage| {
            end = end.saturating_add(stage.steps.unwrap_or(0));
            end
        });
        ends.collect()
    }

    /// Tokens of the longest training sequence of all stages.
    pub fn longest_sequence(&self) -> usize {
        let lengths = self.stages.iter().flatten().map(|stage| stage.sequence_length.unwrap_or(0));
        lengths.max().filter(|_| self.stages.is_some()).unwrap_or(self.data.sequence_length)
    }
}

impl MixtureComponent {
    /// Whether stages refer to the source by this name.
    fn is_named(&self, source: &str) -> bool {
        self.stage_name().is_some_and(|name| name == source)
    }

    /// The name by which stages refer to the source; `None` for local files without a name.
    fn stage_name(&self) -> Option<&str> {
        self.name.as_deref().or(self.dataset.as_deref())
    }
}
