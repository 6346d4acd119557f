//! Checkpoints whose state is altered, with a manifest that agrees.

use std::{fmt::Write as _, fs, path::Path};

use serde_json::Value;
use sha2::{Digest, Sha256};
use training::checkpoint::{FileRecord, Manifest};

/// Alters `trainer_state.json` of a checkpoint.
pub(super) fn alter_state(checkpoint: &Path, alter: impl FnOnce(&mut Value)) {
    let path = checkpoint.join("trainer_state.json");
    let mut state: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    alter(&mut state);
    let text = serde_json::to_vec(&state).unwrap();
    fs::write(&path, &text).unwrap();
    let Manifest { step, mut files, .. } = Manifest::load(checkpoint).unwrap();
    let mut sha256 = String::new();
    for byte in Sha256::digest(&text) {
        write!(sha256, "{byte:02x}").unwrap();
    }
    files.insert("trainer_state.json".to_owned(), FileRecord { bytes: text.len() as u64, sha256 });
    fs::write(checkpoint.join("MANIFEST.json"), Manifest::new(step, files).to_bytes()).unwrap();
}
