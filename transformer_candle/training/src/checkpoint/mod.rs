//! Checkpoints: Hugging Face model directories, written atomically and verified by checksums.
//!
//! ```text
//! checkpoints/
//!   step-00001000/  config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json
//!                   optimizer.safetensors trainer_state.json MANIFEST.json (size and SHA-256 of every file);
//!                   with N ranks optimizer-0000R-of-0000N.safetensors, one per rank;
//!                   for adapters adapter_config.json adapter_model.safetensors base_model.json in place of the model
//!   latest          "step-00001000": where a resume starts
//!   best            "step-00000800": the lowest held-out loss
//! ```
//!
//! [`save()`] writes into a staging directory, fsyncs and renames it ([`staging`]); [`newest_intact`] finds where to resume;
//! [`Checkpoint`] checks every byte that it reads against the manifest.

mod base_model;
mod best;
mod files;
mod list;
mod manifest;
mod optimizer_file;
mod reader;
mod save;
mod shared;
mod staging;
mod state;
#[cfg(test)]
mod tests;
mod tokenizer_files;

pub use crate::error::checkpoint::{CheckpointError, CorruptedCheckpoint, Result};
pub use base_model::BaseModel;
pub use best::keep_best_in;
pub use files::MANIFEST as MANIFEST_FILE_NAME;
pub use list::{
    CheckpointEntry, NewestCheckpoint, PruneResult, best, check_pointers, is_latest, is_removed, latest, list,
    mark_best, mark_latest, newest_intact, pointed_checkpoint, prune, removed,
};
pub use manifest::{FileRecord, Manifest};
pub use reader::{CheckedAdapters, Checkpoint, StoredModel};
pub use save::{CheckpointContents, check_room, expected_bytes, save, step_name};
pub use state::{
    BestEvaluation, Execution, FORMAT_VERSION, Improvement, MatmulAlgorithms, StageExecution, TrainerState,
};
pub use tokenizer_files::{TokenizerFiles, newest_tokenizer, restore_tokenizer, tokenizer_in};
