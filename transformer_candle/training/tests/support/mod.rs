//! A tiny run in a folder of its own: byte-level tokenizer, local text, a model of a few thousand parameters.

#![allow(clippy::unwrap_used, dead_code)]

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use run_config::{ResolvedRun, RunConfig};
use serde_json::{Value, json};
use tempfile::TempDir;

const CONFIG: &str = "
model: {hidden_size: 32, intermediate_size: 48, num_layers: 2, num_attention_heads: 4, num_key_value_heads: 2}
tokenizer: {tokenizer_json: TOKENIZER}
data: {train_shards: [TEXT], sequence_length: 32, batch_size: 4, sequences_per_step: 8, shuffle_buffer_size: 16,
       held_out_fraction: 0.1, num_workers: 2}
optimizer: {learning_rate: 5.0e-3}
scheduler: {strategy: cosine, warmup_steps: 2, total_steps: 10}
runtime:
  device: cpu
  seed: 7
  threads: 2
  log_every_n_steps: 1
  checkpoint: {every_n_steps: 5, max_keep: 3}
  evaluation: {every_n_steps: 5, max_batches: 2}
";

/// A temporary folder with the tokenizer and the text of runs, removed on drop.
pub struct Workshop {
    folder: TempDir,
}

impl Workshop {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("tokenizer.json"), tokenizer_json()).unwrap();
        fs::write(folder.path().join("text.jsonl"), documents(3000)).unwrap();
        Self { folder }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Creates the run directory of this name, with its config, and returns its path.
    pub fn run_directory(&self, name: &str) -> PathBuf {
        let directory = self.path().join(name);
        fs::create_dir_all(&directory).unwrap();
        let path = |name: &str| self.path().join(name).display().to_string();
        let config = CONFIG.replace("TOKENIZER", &path("tokenizer.json")).replace("TEXT", &path("text.jsonl"));
        fs::write(directory.join("training.yaml"), config).unwrap();
        directory
    }

    pub fn run(&self, name: &str, overrides: &[&str]) -> ResolvedRun {
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        RunConfig::load(&self.run_directory(name).join("training.yaml"), &overrides).unwrap()
    }

    /// Returns overrides for training on a mixture of the text, with weight 3, and a smaller text, with weight 1.
    pub fn mixture(&self) -> [String; 2] {
        self.weighed(3.0, 1.0)
    }

    /// Returns overrides for training on a mixture of the text and a smaller one, with these weights.
    pub fn weighed(&self, large: f64, small: f64) -> [String; 2] {
        let [text, few] = ["text.jsonl", "few.jsonl"].map(|name| self.path().join(name));
        fs::write(&few, documents(20)).unwrap();
        let (text, few) = (text.display(), few.display());
        let sources = format!("{{shards: [{text}], weight: {large}}}, {{shards: [{few}], weight: {small}}}");
        ["data.train_shards=[]".to_owned(), format!("data.mixture=[{sources}]")]
    }

    /// Returns the lines of one kind in a run's metrics.
    pub fn metrics(&self, name: &str, kind: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path().join(name).join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter(|line| line["kind"] == kind).collect()
    }

    /// Returns (step, loss) of each line of a kind, exactly as written.
    pub fn losses(&self, name: &str, kind: &str) -> Vec<(u64, String)> {
        let lines = self.metrics(name, kind);
        lines.iter().map(|line| (line["step"].as_u64().unwrap(), line["loss"].to_string())).collect()
    }

    /// Reads a file of a run's checkpoint.
    pub fn saved(&self, name: &str, step: u64, file: &str) -> Vec<u8> {
        fs::read(self.path().join(name).join(format!("checkpoints/step-{step:08}")).join(file)).unwrap()
    }

    /// Returns the names of a run's checkpoints.
    pub fn checkpoints(&self, name: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path().join(name).join("checkpoints")).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.retain(|name| name.starts_with("step-"));
        names.sort();
        names
    }
}

/// Generates documents whose sentences have a pattern to learn, with a small random number generator (MINSTD).
fn documents(count: u64) -> String {
    let (animals, verbs) = (["cat", "dog", "owl", "bee", "hen"], ["sees", "hears", "likes", "meets"]);
    let mut state = 1_u64;
    let mut pick = |below: usize| {
        state = state * 48_271 % 0x7fff_ffff;
        (state as usize / 16) % below
    };
    let mut lines = String::new();
    for _ in 0..count {
        let sentences: Vec<String> = (0..=pick(6))
            .map(|_| format!("the {} {} the {}.", animals[pick(5)], verbs[pick(4)], animals[pick(5)]))
            .collect();
        writeln!(lines, "{}", json!({ "text": sentences.join(" ") })).unwrap();
    }
    lines
}

/// Returns a byte-level BPE tokenizer: the 256 bytes, three merges and end-of-text.
fn tokenizer_json() -> String {
    let mut alphabet: Vec<char> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let merges = ["t h", "th e", "Ġ the"];
    let tokens = alphabet.iter().map(char::to_string).chain(merges.iter().map(|merge| merge.replace(' ', "")));
    let vocab: serde_json::Map<_, _> = tokens.enumerate().map(|(id, token)| (token, id.into())).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": vocab.len(), "content": "<|endoftext|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false}
    })
    .to_string()
}
