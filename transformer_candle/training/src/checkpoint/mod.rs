//! Checkpoints: directories that are Hugging Face models, that a kill at any instant cannot tear, and that know when
//! they are damaged.
//!
//! ```text
//! checkpoints/
//!   step-00001000/  config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json
//!                   optimizer.safetensors trainer_state.json MANIFEST.json (size and SHA-256 of every file)
//!   latest          "step-00001000": where a resume starts
//!   best            "step-00000800": the lowest held-out loss
//! ```
//!
//! [`save`] writes aside, fsyncs and renames ([`aside`]); [`newest_sound`] finds where to go on; [`restore`] and
//! [`load_weights`] prove every byte against the manifest while they read it.

mod aside;
mod best;
mod error;
mod list;
mod manifest;
mod optimizer_file;
mod restore;
mod save;
mod state;
mod tokenizer_files;

pub use best::keep_best_in;
pub use error::{CheckpointError, Damaged, Result};
pub use list::{Listed, NewestSound, Pruned, best, latest, list, mark_best, newest_sound, prune};
pub use manifest::{FILE_NAME as MANIFEST_FILE_NAME, FileRecord, Manifest};
pub use restore::{StoredModel, load_state, load_weights, restore, stored_model, verify};
pub use save::{CheckpointContents, save, step_name};
pub use state::{BestEvaluation, Execution, FORMAT_VERSION, Products, TrainerState};
pub use tokenizer_files::{TokenizerFiles, newest_tokenizer, tokenizer_in};

/// The weights, exactly as `transformers` reads them.
const MODEL_FILE: &str = "model.safetensors";
/// The optimizer's moments, and the remainders of bf16 master weights.
const OPTIMIZER_FILE: &str = "optimizer.safetensors";
const STATE_FILE: &str = "trainer_state.json";
const CONFIG_FILE: &str = "config.json";
const GENERATION_CONFIG_FILE: &str = "generation_config.json";

/// Indented JSON with a line's end.
fn pretty(value: &impl serde::Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(value).expect("plain values always serialise");
    bytes.push(b'\n');
    bytes
}

#[cfg(test)]
mod tests;
