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

/// The weights of adapters, in the format of peft.
pub(super) const ADAPTERS: &str = model::hugging_face::ADAPTER_WEIGHTS;
/// The settings of adapters, in the format of peft.
pub(super) const ADAPTER_CONFIG: &str = run_config::ADAPTER_CONFIG;
/// The record of the model that the adapters belong to.
pub(super) const BASE_MODEL: &str = "base_model.json";

/// Indented JSON with a final newline.
pub(super) fn pretty(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(value).expect("plain values always serialise");
    bytes.push(b'\n');
    bytes
}
