//! The names of a checkpoint's files.

use serde::Serialize;

/// The weights, in the format of `transformers`.
pub(super) const MODEL: &str = "model.safetensors";
/// The optimizer's state tensors.
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";
pub(super) const STATE: &str = "trainer_state.json";
pub(super) const CONFIG: &str = "config.json";
pub(super) const GENERATION_CONFIG: &str = "generation_config.json";
pub(super) const TOKENIZER: &str = "tokenizer.json";
/// Size and SHA-256 of every other file.
pub const MANIFEST: &str = "MANIFEST.json";

/// Indented JSON with a final newline.
pub(super) fn pretty(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(value).expect("plain values always serialise");
    bytes.push(b'\n');
    bytes
}
