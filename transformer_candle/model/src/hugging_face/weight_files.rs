//! Which files of a model directory hold its weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use run_config::regular_file;
use serde::Deserialize;

use crate::error::failed;
use crate::{Error, Result};

const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The part of `model.safetensors.index.json` that is read.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The files of a model directory that hold its weights, by name.
///
/// # Errors
/// [`Error::NoWeights`] where one is missing, [`Error::Index`] for an index that is not one.
pub fn weight_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let (single, index) = (directory.join(SINGLE), directory.join(INDEX));
    let no_weights = |problem: String| Error::NoWeights { directory: directory.to_owned(), problem };
    if single.exists() {
        return Ok(vec![single]);
    }
    if !index.exists() {
        return Err(no_weights(format!("there is neither {SINGLE} nor {INDEX}; other formats are not read")));
    }
    let malformed = |problem: String| Error::Index { path: index.clone(), problem };
    let text = regular_file::read(&index).map_err(failed("read", &index))?;
    let Index { weight_map } = serde_json::from_slice(&text).map_err(|error| malformed(error.to_string()))?;
    let mut names: Vec<String> = weight_map.into_values().collect();
    names.sort_unstable();
    names.dedup();
    if let Some(name) = names.iter().find(|name| Path::new(name).file_name().is_none_or(|file| file != name.as_str())) {
        return Err(malformed(format!("it names the file {name:?}, which is not in the directory")));
    }
    if let Some(name) = names.iter().find(|name| !directory.join(name).exists()) {
        return Err(no_weights(format!("{name} is missing, which {INDEX} names")));
    }
    Ok(names.into_iter().map(|name| directory.join(name)).collect())
}
