//! The sizes of a model and its batch, read from a training config.

use std::error::Error;
use std::fs;
use std::path::Path;

use kernels::HeadLayout;
use serde::Deserialize;

#[derive(Deserialize)]
struct Config {
    model: Model,
    data: Data,
    runtime: Runtime,
}

#[derive(Deserialize)]
struct Model {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
}

#[derive(Deserialize)]
struct Data {
    sequence_length: usize,
    batch_size: usize,
}

#[derive(Deserialize)]
struct Runtime {
    activation_recompute: Recompute,
}

/// The activation recompute policy: what the backward pass recomputes.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing.
    None,
    /// The norms' outputs and the `SwiGLU` output.
    Selective,
}

/// A linear map of a block, [outputs, inputs].
pub struct LinearMap {
    pub name: &'static str,
    pub inputs: usize,
    pub outputs: usize,
}

/// The sizes of a model and its batch. Legend: B sequences, T positions, N = B * T tokens, D hidden, I intermediate, V
/// vocabulary.
pub struct Sizes {
    pub batch: usize,
    pub length: usize,
    pub n: usize,
    pub d: usize,
    pub i: usize,
    pub v: usize,
    pub heads: HeadLayout,
    pub layers: usize,
    pub recompute: Recompute,
}

impl Sizes {
    /// Reads the sizes from a YAML config that has all of them.
    pub fn load(path: &Path) -> Result<Self, Box<dyn Error>> {
        let explain = |error: &dyn Error| format!("cannot read sizes from {}: {error}", path.display());
        let text = fs::read_to_string(path).map_err(|error| explain(&error))?;
        let Config { model, data, runtime } = serde_saphyr::from_str(&text).map_err(|error| explain(&error))?;
        Ok(Self {
            batch: data.batch_size,
            length: data.sequence_length,
            n: data.batch_size * data.sequence_length,
            d: model.hidden_size,
            i: model.intermediate_size,
            v: model.vocab_size,
            heads: HeadLayout {
                heads: model.num_attention_heads,
                kv_heads: model.num_key_value_heads,
                head_size: model.hidden_size / model.num_attention_heads,
            },
            layers: model.num_layers,
            recompute: runtime.activation_recompute,
        })
    }

    /// The linear maps of a block.
    pub fn linear_maps(&self) -> [LinearMap; 4] {
        let map = |name, inputs, outputs| LinearMap { name, inputs, outputs };
        [
            map("qkv", self.d, self.heads.packed_width()),
            map("attention output", self.heads.query_width(), self.d),
            map("gate and up", self.d, 2 * self.i),
            map("down", self.i, self.d),
        ]
    }

    /// Weights of all matmuls: the blocks' and the head's.
    pub fn matmul_weights(&self) -> usize {
        let block: usize = self.linear_maps().iter().map(|map| map.inputs * map.outputs).sum();
        self.layers * block + self.v * self.d
    }

    /// Parameters: the matmul weights, the embedding, two norms per block and the final norm.
    pub fn parameters(&self) -> usize {
        self.matmul_weights() + self.v * self.d + (2 * self.layers + 1) * self.d
    }
}
