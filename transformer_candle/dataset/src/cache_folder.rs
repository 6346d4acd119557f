//! The folder for files that can be downloaded or made again.

use std::path::PathBuf;

/// Returns the folder `ORCHESTRATE_CACHE_ROOT`, or `transformer_candle` in the user's cache folder.
pub fn cache_root() -> PathBuf {
    folder_variable("ORCHESTRATE_CACHE_ROOT").unwrap_or_else(|| user_cache_folder().join("transformer_candle"))
}

/// Returns `XDG_CACHE_HOME`, or `.cache` in the home folder, or the folder for temporary files if there is no home.
pub(crate) fn user_cache_folder() -> PathBuf {
    folder_variable("XDG_CACHE_HOME")
        .or_else(|| folder_variable("HOME").map(|home| home.join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
}

fn folder_variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}
