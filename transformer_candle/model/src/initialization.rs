//! The weights before the first step: normal, the residual projections scaled down, norms one (GPT-2, section 2.3).
//!
//! Each value is a pure function of (seed, Hugging Face name, index in that tensor): the same whatever the precision,
//! the number of threads, the padding of the vocabulary or the order of filling.

use kernels::Buffer;
use kernels::counter_hash::mix;
use rayon::prelude::*;

use crate::layout::ParameterLayout;
use crate::parameters::{InitialValues, ParameterKind, ParameterSpec};
use crate::weights::{WeightWriter, Weights};
use crate::{ModelShape, Result};

/// Elements generated at a time.
const PIECE: usize = 1 << 20;

/// Fills weights, and beside bf16 weights the low bits of their f32 masters. What is no parameter becomes zero.
pub fn fill(shape: &ModelShape, seed: u64, weights: &mut Weights, mut low_bits: Option<&mut Buffer>) -> Result<()> {
    weights.flat.zero()?;
    if let Some(low_bits) = &mut low_bits {
        low_bits.zero()?;
    }
    fill_parameters(shape, seed, weights, low_bits.as_deref(), |_| true)
}

/// Fills the adapters of a model's weights, and beside bf16 weights the low bits of their masters: they add nothing to the
/// outputs yet.
pub fn fill_adapters(shape: &ModelShape, seed: u64, weights: &mut Weights, low_bits: Option<&Buffer>) -> Result<()> {
    fill_parameters(shape, seed, weights, low_bits, |spec| spec.kind == ParameterKind::Adapter)
}

fn fill_parameters(
    shape: &ModelShape,
    seed: u64,
    weights: &Weights,
    low_bits: Option<&Buffer>,
    is_filled: impl Fn(&ParameterSpec) -> bool,
) -> Result<()> {
    let mut writer = WeightWriter::new(weights, low_bits, PIECE)?;
    let layout = ParameterLayout::new(shape);
    let parameters = layout.parameters().iter().filter(|parameter| is_filled(&parameter.spec));
    let tensors = parameters.flat_map(|parameter| {
        let initial = parameter.spec.initial;
        parameter.hf_tensors().map(move |tensor| (initial, tensor))
    });
    for (initial, tensor) in tensors {
        let (end, key) = (tensor.offset + tensor.elements, key_of(seed, &tensor.name));
        for offset in (tensor.offset..end).step_by(PIECE) {
            let elements = PIECE.min(end - offset);
            let values = values(initial, key, offset - tensor.offset, elements);
            writer.write(offset, &values)?;
        }
    }
    Ok(())
}

/// Returns `elements` initial values of a tensor, from its element `first` on.
fn values(initial: InitialValues, key: u64, first: usize, elements: usize) -> Vec<f32> {
    let indices = (first..first + elements).into_par_iter();
    match initial {
        InitialValues::Zeros => vec![0.0; elements],
        InitialValues::Ones => vec![1.0; elements],
        InitialValues::Normal { std } => indices.map(|index| (std * normal(key, index as u64)) as f32).collect(),
        InitialValues::Uniform { bound } => indices.map(|index| (bound * uniform(key, index as u64)) as f32).collect(),
    }
}

/// Returns the key of a tensor: FNV-1a over its name, mixed with the seed.
fn key_of(seed: u64, name: &str) -> u64 {
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    mix(hash ^ mix(seed))
}

/// A standard normal number (Box and Muller, 1958): elements 2i and 2i + 1 are the two of one pair.
fn normal(key: u64, index: u64) -> f64 {
    let bits = mix(key.wrapping_add((index / 2).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    let unit = 2f64.powi(-32);
    let radius = (-2.0 * ((f64::from((bits >> 32) as u32) + 0.5) * unit).ln()).sqrt();
    let angle = std::f64::consts::TAU * f64::from(bits as u32) * unit;
    radius * if index.is_multiple_of(2) { angle.cos() } else { angle.sin() }
}

/// A number from -1 to 1.
fn uniform(key: u64, index: u64) -> f64 {
    let bits = mix(key.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    ((bits >> 11) as f64 + 0.5) * 2f64.powi(-52) - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hugging_face::hf_tensors;
    use crate::shape::tests::tiny;
    use kernels::{DType, Device, bf16, cast};

    fn filled(shape: &ModelShape, seed: u64, dtype: DType) -> Buffer {
        let mut weights = Weights::zeros(shape, dtype, &Device::Cpu).unwrap();
        fill(shape, seed, &mut weights, None).unwrap();
        weights.flat
    }

    fn tensor(shape: &ModelShape, weights: &Buffer, name: &str) -> Vec<f32> {
        let tensor = hf_tensors(shape).into_iter().find(|tensor| tensor.name == name).unwrap();
        weights.view(tensor.offset, &[tensor.elements]).unwrap().read_f32().unwrap()
    }

    #[test]
    fn values_are_normal_with_residual_projections_scaled_down() {
        let shape = ModelShape { hidden_size: 128, intermediate_size: 256, num_layers: 8, ..tiny(true) };
        let weights = filled(&shape, 7, DType::F32);
        let moments = |name: &str| {
            let values = tensor(&shape, &weights, name);
            let count = values.len() as f64;
            let power = |p: i32| values.iter().map(|&v| f64::from(v).powi(p)).sum::<f64>() / count;
            (power(1), power(2).sqrt(), power(4) / power(2).powi(2))
        };
        for (name, deviation) in [("mlp.up_proj", 0.2), ("mlp.down_proj", 0.05), ("self_attn.o_proj", 0.05)] {
            let (mean, measured, kurtosis) = moments(&format!("model.layers.3.{name}.weight"));
            assert!((measured / deviation - 1.0).abs() < 0.05, "{name}: {measured}");
            assert!(mean.abs() < 0.05 * deviation && (kurtosis - 3.0).abs() < 0.3, "{name}: {mean} {kurtosis}");
        }
        assert!(tensor(&shape, &weights, "model.norm.weight").iter().all(|&value| value == 1.0));
    }

    #[test]
    fn matrices_shrink_with_the_width_from_the_base_on() {
        let wide = ModelShape { hidden_size: 128, ..tiny(false) };
        let deviations = |base_hidden_size| {
            let shape = ModelShape { base_hidden_size, ..wide.clone() };
            let weights = filled(&shape, 7, DType::F32);
            ["model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight", "lm_head.weight"].map(|name| {
                let values = tensor(&shape, &weights, name);
                (values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
            })
        };
        let (plain, transferred) = (deviations(None), deviations(Some(32)));
        for ((one, other), factor) in plain.into_iter().zip(transferred).zip([1.0, 0.5, 0.25]) {
            assert!((other / one - factor).abs() < 1e-6, "{one} {other}");
        }
    }

    #[test]
    fn values_depend_on_seed_and_name_and_on_nothing_else() {
        let (shape, untied) = (tiny(true), tiny(false));
        let larger = ModelShape { vocab_size: 150, padded_vocab_size: 192, ..tiny(true) };
        let one = filled(&shape, 1, DType::F32);
        let embedding = |shape: &ModelShape, weights: &Buffer| tensor(shape, weights, "model.embed_tokens.weight");
        let rows = embedding(&shape, &one);
        assert_eq!(embedding(&larger, &filled(&larger, 1, DType::F32))[..rows.len()], rows);
        assert_eq!(embedding(&untied, &filled(&untied, 1, DType::F32)), rows);
        assert_ne!(embedding(&shape, &filled(&shape, 2, DType::F32)), rows);
        assert_ne!(tensor(&untied, &filled(&untied, 1, DType::F32), "lm_head.weight"), rows);
        let halves: Vec<f32> = rows.iter().map(|&value| bf16::from_f32(value).to_f32()).collect();
        assert_eq!(embedding(&shape, &filled(&shape, 1, DType::BF16)), halves);
    }

    #[test]
    fn weight_and_low_bits_together_are_the_f32_values() {
        let shape = tiny(false);
        let full = filled(&shape, 3, DType::F32);
        let zeros = |dtype| Buffer::zeros(full.shape(), dtype, &Device::Cpu).unwrap();
        let (mut low_bits, mut master) = (zeros(DType::I16), zeros(DType::F32));
        let mut weights = Weights::from(zeros(DType::BF16));
        fill(&shape, 3, &mut weights, Some(&mut low_bits)).unwrap();
        cast::join_master(&weights.flat, &low_bits, &mut master).unwrap();
        assert_eq!(master.read_f32().unwrap(), full.read_f32().unwrap());
    }

    #[test]
    fn the_vocabulary_s_padding_is_zero() {
        let shape = tiny(true);
        let rows =
            ParameterLayout::new(&shape).get("embed_tokens").unwrap().offset + shape.vocab_size * shape.hidden_size;
        let padding = (shape.padded_vocab_size - shape.vocab_size) * shape.hidden_size;
        let values = filled(&shape, 1, DType::F32).view(rows, &[padding]).unwrap().read_f32().unwrap();
        assert!(values.iter().all(|&value| value == 0.0));
    }
}
