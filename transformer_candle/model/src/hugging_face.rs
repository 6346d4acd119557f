//! The format of a model on disk: a directory that `transformers` loads, for example as `LlamaForCausalLM`.
//!
//! Each tensor of `model.safetensors` is a contiguous range of the flat buffers, so that optimizer state can be stored
//! under the same names: the query, key and value projections are rows of `qkv`, gate and up are rows of `gate_up`, and
//! the vocabulary's padding is simply not stored.

mod config_json;
mod pretrained;
mod weight_files;
mod weights;

pub use crate::layout::HfTensor;
pub use config_json::{adapter_config_json, config_json, generation_config_json, shape_from_config_json};
pub use pretrained::{ADAPTER_WEIGHTS, ByteObserver, PretrainedWeights};
pub use weight_files::weight_files;
pub use weights::{read_adapters, read_weights, write_adapters, write_weights};

use crate::layout::{Parameter, ParameterLayout};
use crate::{ModelShape, ParameterKind};

/// Every tensor of a model on disk but its adapters, in the order of `transformers`' `named_parameters`.
pub fn hf_tensors(shape: &ModelShape) -> Vec<HfTensor> {
    tensors_of(shape, |kind| kind != ParameterKind::Adapter)
}

/// Every tensor of a model's adapters on disk, under peft's names.
pub fn adapter_tensors(shape: &ModelShape) -> Vec<HfTensor> {
    tensors_of(shape, |kind| kind == ParameterKind::Adapter)
}

/// Every tensor on disk that trains.
pub fn trainable_tensors(shape: &ModelShape) -> Vec<HfTensor> {
    tensors_of(shape, |kind| shape.trains(kind))
}

fn tensors_of(shape: &ModelShape, is_included: impl Fn(ParameterKind) -> bool) -> Vec<HfTensor> {
    let layout = ParameterLayout::new(shape);
    let parameters = layout.parameters().iter().filter(|parameter| is_included(parameter.spec.kind));
    parameters.flat_map(Parameter::hf_tensors).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::tests::{one_billion, tiny};

    #[test]
    fn the_tensors_on_disk_hold_every_parameter_once() {
        for shape in [one_billion(), tiny(true), tiny(false)] {
            let tensors = hf_tensors(&shape);
            let total: usize = tensors.iter().map(|tensor| tensor.elements).sum();
            assert_eq!(total as u64, shape.parameter_count());
            let mut ranges: Vec<_> = tensors.iter().map(|t| (t.offset, t.offset + t.elements)).collect();
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "ranges overlap");
        }
    }

    #[test]
    fn keys_and_values_follow_the_queries_in_the_packed_matrix() {
        let tensors = hf_tensors(&tiny(true));
        let find = |name: &str| tensors.iter().find(|t| t.name == format!("model.layers.1.{name}.weight")).unwrap();
        let (q, k, v) = (find("self_attn.q_proj"), find("self_attn.k_proj"), find("self_attn.v_proj"));
        assert_eq!((q.shape.as_slice(), k.shape.as_slice()), ([24, 20].as_slice(), [12, 20].as_slice()));
        assert_eq!((k.offset, v.offset), (q.offset + 24 * 20, q.offset + 36 * 20));
        let (gate, up) = (find("mlp.gate_proj"), find("mlp.up_proj"));
        assert_eq!(up.offset, gate.offset + 36 * 20);
    }
}
