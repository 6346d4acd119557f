//! `model.init_from`: the model's keys come from the `config.json` of the model that training starts from.

use std::path::Path;

use serde_json::{Map, Value};

use crate::ModelConfig;
use crate::error::Problem;
use crate::hugging_face::ContextLimit;
use crate::model_file::model_file_problem;
use crate::run_folder::RESOLVED_CONFIG;
use crate::{format, regular_file};

/// The path of the key in a config.
pub(crate) const KEY: &str = "model.init_from";

/// Most bytes of a `config.json`.
const LARGEST_CONFIG_JSON: u64 = 16 << 20;

const CONTEXT: &str = "max_position_embeddings";

/// Keys that may differ from the pretrained model's: they change what it computes, not the shape of its weights.
const ADJUSTABLE: [&str; 4] = [CONTEXT, "rope_theta", "rope_scaling", "norm_epsilon"];

/// Keys of `model` that a pretrained model says nothing about.
const OWN: [&str; 3] = ["init_from", "init_std", "base_hidden_size"];

/// Fills in the keys of `model` that the document leaves out, from the pretrained model, and reports those that
/// contradict it. If that model is gone, the run's own [`RESOLVED_CONFIG`] takes its place.
pub(crate) fn apply(document: &mut Map<String, Value>, run_directory: Option<&Path>, problems: &mut Vec<Problem>) {
    let Some(Value::Object(section)) = document.get_mut("model") else { return };
    let Some(directory) = section.get("init_from").and_then(Value::as_str).map(|path| Path::new(path).to_owned())
    else {
        return;
    };
    let (pretrained, limit) = match read(&directory) {
        Ok(model) => model,
        Err(problem) => match run_directory.and_then(former_model) {
            Some(model) => (model, None),
            None => return problems.push(problem),
        },
    };
    for (key, value) in pretrained {
        match section.get(&key) {
            _ if OWN.contains(&key.as_str()) => {}
            None | Some(Value::Null) => {
                section.insert(key, value);
            }
            Some(own) if key == CONTEXT && own.as_u64() > value.as_u64() && limit.is_some() => {
                let limited = limit.map_or("", |limit| limit.key);
                let message = format!("is {own}, but `{limited}` of the model in {} is {value}", directory.display());
                problems.push(Problem::new(format!("model.{key}"), message).suggest(format!("give at most {value}")));
            }
            Some(own) if ADJUSTABLE.contains(&key.as_str()) || equal(own, &value) => {}
            Some(own) => {
                let message = format!("is {own}, but the model in {} has {value}", directory.display());
                problems.push(Problem::new(format!("model.{key}"), message).suggest("remove the key"));
                section.insert(key, value);
            }
        }
    }
}

fn read(directory: &Path) -> Result<(Map<String, Value>, Option<ContextLimit>), Problem> {
    if let Some(problem) = model_file_problem(directory) {
        return Err(Problem::new(KEY, problem));
    }
    let path = directory.join("config.json");
    let refused = |problem: Problem| Problem::new(KEY, format!("{}: {}", path.display(), problem.sentence()));
    let unreadable = |problem| {
        refused(problem).suggest("name the folder of a Llama, Mistral, Qwen2 or Qwen3 model in Hugging Face's format")
    };
    let text = format::read_text(&path, LARGEST_CONFIG_JSON).map_err(unreadable)?;
    let config = serde_json::from_str(&text).map_err(|error| refused(Problem::of_file(error.to_string())))?;
    let (model, limit) = ModelConfig::with_context_limit(&config).map_err(refused)?;
    Ok((as_map(serde_json::to_value(model).unwrap_or_default()), limit))
}

/// Reads `model` of the run's own [`RESOLVED_CONFIG`]; `None` if the run was not started before.
fn former_model(run_directory: &Path) -> Option<Map<String, Value>> {
    let text = regular_file::read(&run_directory.join(RESOLVED_CONFIG)).ok()?;
    let mut config: Value = serde_json::from_slice(&text).ok()?;
    Some(as_map(config.get_mut("model")?.take())).filter(|model| model.contains_key("hidden_size"))
}

fn as_map(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// Whether two values are equal, however a number is written.
fn equal(one: &Value, other: &Value) -> bool {
    one == other || one.as_f64().is_some_and(|number| other.as_f64() == Some(number))
}
