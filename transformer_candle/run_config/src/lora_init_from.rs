//! `lora.init_from`: the keys of `lora` come from the `adapter_config.json` of the adapters that training starts from.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::error::{ConfigError, Problem};
use crate::format;
use crate::lora::{BasePrecision, LoraConfig, TargetModule, TargetModules};
use crate::peft_config;

/// The file of the settings of adapters in peft's format.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";

/// Most bytes of an `adapter_config.json`.
const LARGEST: u64 = 1 << 20;

/// Keys that may differ from the adapters': they change how training goes on, not what the adapters compute.
const ADJUSTABLE: [&str; 3] = ["base_precision", "dropout", "init_from"];

/// The keys that are read of an `adapter_config.json`, with peft's defaults; [`peft_config`] refuses others that would
/// make the adapters compute something else.
#[derive(Deserialize)]
struct PeftConfig {
    peft_type: String,
    base_model_name_or_path: Option<String>,
    #[serde(default = "default_rank")]
    r: usize,
    #[serde(default = "default_alpha")]
    lora_alpha: f64,
    #[serde(default)]
    lora_dropout: f64,
    target_modules: Value,
    #[serde(default)]
    use_rslora: bool,
}

/// The largest rank of adapters that are read: no matrix of a model has more rows.
const LARGEST_RANK: usize = 1 << 16;

fn default_rank() -> usize {
    8
}

fn default_alpha() -> f64 {
    8.0
}

/// Adapters in peft's format as their `adapter_config.json` describes them.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterDescription {
    /// Rank, scale and modules.
    pub lora: LoraConfig,
    /// The model that the adapters belong to, a name on the Hub or a folder, as the file names it.
    pub base_model: Option<String>,
}

impl AdapterDescription {
    /// Reads an `adapter_config.json`.
    ///
    /// # Errors
    /// A problem of the key that asks for what the decoder does not have.
    pub fn from_json(config: &Value) -> Result<Self, Problem> {
        let read = PeftConfig::deserialize(config);
        let read = read.map_err(|error| Problem::new("(whole file)", error.to_string()))?;
        read.check()?;
        peft_config::check(config)?;
        let PeftConfig { r, lora_alpha, lora_dropout, target_modules, use_rslora, base_model_name_or_path, .. } = read;
        let lora = LoraConfig {
            rank: Some(r),
            alpha: Some(lora_alpha),
            dropout: lora_dropout,
            target_modules: modules(&target_modules)?,
            rslora: use_rslora,
            base_precision: BasePrecision::default(),
            init_from: None,
        };
        Ok(Self { lora, base_model: base_model_name_or_path })
    }

    /// Like [`Self::from_json`], with the file named in the error.
    ///
    /// # Errors
    /// See [`Self::from_json`].
    pub fn of_file(file: &Path, config: &Value) -> Result<Self, ConfigError> {
        Self::from_json(config).map_err(|problem| ConfigError::one(file, problem))
    }
}

impl PeftConfig {
    fn check(&self) -> Result<(), Problem> {
        let refused = |key: &str, problem: String| Err(Problem::new(key, problem));
        if self.peft_type != "LORA" {
            return refused("peft_type", format!("is `{}`; only `LORA` runs here", self.peft_type));
        }
        if !(1..=LARGEST_RANK).contains(&self.r) {
            return refused("r", format!("is {}, but must be an integer from 1 to {LARGEST_RANK}", self.r));
        }
        if !(self.lora_alpha as f32).is_finite() {
            return refused("lora_alpha", format!("is {:e}, which is no finite number in f32", self.lora_alpha));
        }
        Ok(())
    }
}

fn modules(target_modules: &Value) -> Result<TargetModules, Problem> {
    let read: Result<TargetModules, _> = serde_json::from_value(target_modules.clone());
    let full_names = target_modules.as_array().map(|names| {
        // Peft also writes full names: model.layers.0.self_attn.q_proj.
        let last = |name: &Value| name.as_str().and_then(|name| name.rsplit('.').next()?.parse::<TargetModule>().ok());
        names.iter().map(last).collect::<Option<Vec<_>>>()
    });
    match (read, full_names) {
        (Ok(modules), _) => Ok(modules),
        (Err(_), Some(Some(modules))) => Ok(TargetModules::new(modules)),
        (Err(error), _) => Err(Problem::new("target_modules", format!("is {target_modules}: {error}"))),
    }
}

/// Fills in the keys of `lora` that the document leaves out, from the adapters that training starts from, and
/// `model.init_from` from their base; reports those that contradict the adapters.
pub(crate) fn apply(document: &mut Map<String, Value>, problems: &mut Vec<Problem>) {
    let Some(directory) = document.get("lora").and_then(|lora| lora.get("init_from")).and_then(Value::as_str) else {
        return;
    };
    let directory = Path::new(directory).to_owned();
    let is_complete = document["lora"].get("rank").is_some_and(|rank| !rank.is_null());
    let AdapterDescription { lora, base_model } = match read(&directory) {
        Ok(description) => description,
        // A run that was started before needs them no more; a start opens them and says what is wrong.
        Err(_) if is_complete => return,
        Err(problem) => return problems.push(problem),
    };
    let Some(Value::Object(section)) = document.get_mut("lora") else { return };
    let Ok(Value::Object(stored)) = serde_json::to_value(lora) else { return };
    for (key, value) in stored {
        match section.get(&key) {
            None | Some(Value::Null) if key != "init_from" => {
                section.insert(key, value);
            }
            Some(own) if !ADJUSTABLE.contains(&key.as_str()) && !same(&key, own, &value) => {
                let message = format!("is {own}, but the adapters in {} have {value}", directory.display());
                problems.push(Problem::new(format!("lora.{key}"), message).suggest("remove the key"));
                section.insert(key, value);
            }
            _ => {}
        }
    }
    let base = base_model.filter(|base| Path::new(base).join("config.json").exists());
    if let (Some(base), Value::Object(model)) =
        (base, document.entry("model").or_insert_with(|| Value::Object(Map::new())))
        && matches!(model.get("init_from"), None | Some(Value::Null))
    {
        model.insert("init_from".to_owned(), base.into());
    }
}

fn read(directory: &Path) -> Result<AdapterDescription, Problem> {
    let path = directory.join(ADAPTER_CONFIG);
    let refused = |problem: Problem| {
        let key = if problem.path.is_empty() { String::new() } else { format!("`{}` ", problem.path) };
        Problem::new("lora.init_from", format!("{}: {key}{}", path.display(), problem.message))
            .suggest("name a folder of LoRA adapters in peft's format")
    };
    let text = format::read_text(&path, LARGEST).map_err(refused)?;
    let config = serde_json::from_str(&text).map_err(|error| refused(Problem::of_file(error.to_string())))?;
    AdapterDescription::from_json(&config).map_err(refused)
}

/// Whether two values of a key mean the same, however a number or a list is written.
fn same(key: &str, one: &Value, other: &Value) -> bool {
    if key == "target_modules" {
        let read = |value: &Value| serde_json::from_value::<TargetModules>(value.clone()).ok();
        return read(one) == read(other);
    }
    one == other || one.as_f64().is_some_and(|number| other.as_f64() == Some(number))
}
