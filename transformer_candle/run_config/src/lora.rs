//! `lora`: low-rank adapters beside frozen weights.

use std::borrow::Cow;
use std::path::PathBuf;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::json;

/// Low-rank adapters (LoRA, Hu et al., 2021): the weights of `model.init_from` stay as they are, and beside
/// each target module two small matrices train, whose product is added to it. Checkpoints are adapters as
/// peft reads them. Default: every weight trains.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LoraConfig {
    /// Rank of the adapters: the width between their two matrices (peft: `r`). 8 to 64 are usual. Needs
    /// `model.init_from` and `optimizer.algorithm: adamw`. Default: no adapters.
    #[schemars(range(min = 1, max = 4096))]
    pub rank: Option<usize>,
    /// What the adapters add is multiplied by `alpha / rank` (peft: `lora_alpha`). Default: `rank`.
    #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0))]
    pub alpha: Option<f64>,
    /// Probability that an input of an adapter is zero in a step; the others are divided by one minus it.
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub dropout: f64,
    /// Modules that get an adapter: `all-linear`, or a list of q_proj, k_proj, v_proj, o_proj, gate_proj,
    /// up_proj and down_proj.
    pub target_modules: TargetModules,
    /// Divide `alpha` by the root of `rank` instead (rsLoRA, Kalajdzievski, 2023; peft: `use_rslora`), so
    /// that larger ranks do not learn more slowly.
    pub rslora: bool,
    /// How the frozen weights of the blocks' linear layers are held in memory. In `fp8` they take half the
    /// memory of bf16, beside matmuls in bf16 or fp8: they are rounded once, when they are read, and the
    /// files stay as they are.
    pub base_precision: BasePrecision,
    /// Folder of adapters in peft's format, such as a checkpoint of another run, whose weights training
    /// starts from. The other keys of `lora` are then theirs unless given; only `dropout` may differ.
    /// Default: adapters that add nothing yet, drawn from `runtime.seed`.
    pub init_from: Option<PathBuf>,
}

/// How the frozen weights beside adapters are held in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BasePrecision {
    /// fp8 where `runtime.precision` is fp8, whose matmuls read nothing else; otherwise as activations are.
    #[default]
    Auto,
    /// fp8, also beside matmuls in bf16: on any GPU, at the cost of converting them before each matmul.
    Fp8,
}

/// A linear layer of a decoder block, by its name in transformers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TargetModule {
    /// The query projection.
    QProj,
    /// The key projection.
    KProj,
    /// The value projection.
    VProj,
    /// The output projection of attention.
    OProj,
    /// The gate projection of the MLP.
    GateProj,
    /// The up projection of the MLP, whose output is gated.
    UpProj,
    /// The down projection of the MLP.
    DownProj,
}

impl TargetModule {
    /// Every module, in the order of a block.
    pub const ALL: [Self; 7] =
        [Self::QProj, Self::KProj, Self::VProj, Self::OProj, Self::GateProj, Self::UpProj, Self::DownProj];

    /// The module's name in transformers, such as `q_proj`.
    pub fn name(self) -> &'static str {
        match self {
            Self::QProj => "q_proj",
            Self::KProj => "k_proj",
            Self::VProj => "v_proj",
            Self::OProj => "o_proj",
            Self::GateProj => "gate_proj",
            Self::UpProj => "up_proj",
            Self::DownProj => "down_proj",
        }
    }
}

impl FromStr for TargetModule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let module = Self::ALL.into_iter().find(|module| module.name() == text);
        module.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("must be `{ALL_LINEAR}` or a list of {names}")
        })
    }
}

/// The value that stands for every linear layer of the blocks, as in peft.
const ALL_LINEAR: &str = "all-linear";

/// The modules that get an adapter, each once and in the order of a block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TargetModules(Vec<TargetModule>);

impl Default for TargetModules {
    fn default() -> Self {
        Self(TargetModule::ALL.to_vec())
    }
}

impl TargetModules {
    /// Creates the list of these modules, each once and in the order of a block.
    pub fn new(modules: impl IntoIterator<Item = TargetModule>) -> Self {
        let mut modules: Vec<_> = modules.into_iter().collect();
        modules.sort_unstable();
        modules.dedup();
        Self(modules)
    }

    /// The modules.
    pub fn modules(&self) -> &[TargetModule] {
        &self.0
    }

    /// Whether this module gets an adapter.
    pub fn contains(&self, module: TargetModule) -> bool {
        self.0.contains(&module)
    }

    /// Checks the text of the key, or an item of its list.
    pub(crate) fn check(text: &str) -> Result<(), String> {
        if text == ALL_LINEAR { Ok(()) } else { TargetModule::from_str(text).map(drop) }
    }
}

impl<'de> Deserialize<'de> for TargetModules {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Text(String),
            List(Vec<String>),
        }
        let names = match Written::deserialize(deserializer)? {
            Written::Text(text) => vec![text],
            Written::List(names) => names,
        };
        if names.iter().any(|name| name == ALL_LINEAR) {
            return Ok(Self::default());
        }
        let modules: Result<Vec<_>, _> = names.iter().map(|name| TargetModule::from_str(name)).collect();
        modules.map(Self::new).map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for TargetModules {
    fn schema_name() -> Cow<'static, str> {
        "TargetModules".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let modules = TargetModule::ALL.map(TargetModule::name);
        json_schema!({
            "type": ["string", "array"],
            "format": "lora-modules",
            "items": { "type": "string", "enum": json!(modules) },
        })
    }
}
