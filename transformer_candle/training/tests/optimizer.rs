//! The optimizer against PyTorch's AdamW: `tests/golden/model_{tied,untied}.safetensors` of the repository, written by
//! `tests/oracles/make_models.py`.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use kernels::memory::{Arena, allocate};
use kernels::{Buffer, DType, Device, DeviceKind, adamw, cast, muon};
use model::hugging_face::{hf_tensors, shape_from_config_json};
use model::{ActivationRecompute, Decoder, DecoderSettings, ModelShape, Precision};
use run_config::{Algorithm, OptimizerConfig, RunConfig, RuntimeConfig};
use safetensors::SafeTensors;
use training::engine::{EngineSettings, Optimizer, StateTensor};
use training::ranks::RankInfo;

const MICRO_BATCHES: usize = 2;

struct Golden {
    bytes: Vec<u8>,
    shape: ModelShape,
}

impl Golden {
    fn load(name: &str) -> Self {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        let bytes = std::fs::read(golden.join(format!("{name}.safetensors"))).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let config = &header.metadata().as_ref().unwrap()["config"];
        let mut config: serde_json::Value = serde_json::from_str(config).unwrap();
        config["model_type"] = "llama".into();
        Self { shape: shape_from_config_json(&config).unwrap(), bytes }
    }

    fn values<const BYTES: usize, T>(&self, name: &str, decode: fn([u8; BYTES]) -> T) -> Vec<T> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        file.tensor(name).unwrap().data().as_chunks().0.iter().map(|bytes| decode(*bytes)).collect()
    }

    /// Returns the decoder with the file's weights, and an optimizer over it with the script's settings.
    fn start(&self, precision: Precision) -> (Decoder, Optimizer) {
        self.start_with(precision, &OptimizerConfig { weight_decay: 0.1, ..OptimizerConfig::default() })
    }

    fn start_with(&self, precision: Precision, config: &OptimizerConfig) -> (Decoder, Optimizer) {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let ids = file.tensor("training.input_ids").unwrap();
        let [batch, sequence_length] = *ids.shape().last_chunk::<2>().unwrap();
        let recompute = ActivationRecompute::None;
        let settings = DecoderSettings {
            batch,
            sequence_length,
            precision,
            fp8: None,
            recompute,
            training: true,
            z_loss: 0.0,
            device: DeviceKind::Cpu,
        };
        let runtime = RuntimeConfig { precision, ..RuntimeConfig::default() };
        let run = RunConfig { optimizer: config.clone(), runtime, ..RunConfig::default() };
        let (device, rank_info) = (DeviceKind::Cpu, RankInfo::default());
        let engine_settings = EngineSettings { micro_batch: batch, activation_recompute: recompute, device, rank_info };
        let new = |arena: &mut Arena| {
            let decoder = Decoder::new(&self.shape, &settings, arena)?;
            let optimizer = Optimizer::new(&decoder, &run, engine_settings, arena)?;
            training::Result::Ok((decoder, optimizer))
        };
        let (mut decoder, mut optimizer) = allocate(&Device::Cpu, new).unwrap();
        for tensor in hf_tensors(&self.shape) {
            let values = self.values(&format!("weights.{}", tensor.name), f32::from_le_bytes);
            let range = |buffer: &Buffer| buffer.view(tensor.offset, &[tensor.elements]).unwrap();
            let mut weights = range(&mut decoder.weights_mut().flat);
            match optimizer.low_bits_mut() {
                None => weights.write(&values).unwrap(),
                Some(low_bits) => {
                    let mut master = Buffer::zeros(&[values.len()], DType::F32, &Device::Cpu).unwrap();
                    master.write(&values).unwrap();
                    cast::split_master(&master, &mut weights, &mut range(low_bits)).unwrap();
                }
            }
        }
        (decoder, optimizer)
    }

    /// Trains as the script did and returns the largest relative errors of the losses and of the gradients' norms.
    fn train(&self, precision: Precision) -> (f64, f64) {
        let (mut decoder, mut optimizer) = self.start(precision);
        let ids: Vec<u32> = self.values("training.input_ids", |bytes| i64::from_le_bytes(bytes) as u32);
        let targets: Vec<i32> = self.values("training.targets", |bytes| i64::from_le_bytes(bytes) as i32);
        let rates = self.values("training.learning_rates", f64::from_le_bytes);
        let losses = self.values("training.losses", f64::from_le_bytes);
        let norms = self.values("training.grad_norms", f64::from_le_bytes);
        let tokens = ids.len() / rates.len() / MICRO_BATCHES;
        let mut device_ids = Buffer::zeros(&[tokens], DType::U32, &Device::Cpu).unwrap();
        let mut device_targets = Buffer::zeros(&[tokens], DType::I32, &Device::Cpu).unwrap();
        let (mut loss_error, mut norm_error) = (0_f64, 0_f64);
        for (step, rate) in rates.iter().enumerate() {
            let whole = step * MICRO_BATCHES * tokens..(step + 1) * MICRO_BATCHES * tokens;
            let count = targets[whole.clone()].iter().filter(|target| **target >= 0).count();
            decoder.begin_accumulation().unwrap();
            for start in whole.step_by(tokens) {
                device_ids.write(&ids[start..start + tokens]).unwrap();
                device_targets.write(&targets[start..start + tokens]).unwrap();
                decoder.forward_backward(&device_ids, None, &device_targets, 1.0 / count as f32).unwrap();
            }
            let accumulated = decoder.loss().read_f32().unwrap()[0];
            let update = optimizer.step(&mut decoder, step as u64 + 1, *rate).unwrap();
            assert!(update.applied && update.loss.to_bits() == accumulated.to_bits());
            let loss = f64::from(update.loss);
            loss_error = loss_error.max((loss - losses[step]).abs() / losses[step]);
            norm_error = norm_error.max((f64::from(update.grad_norm) - norms[step]).abs() / norms[step]);
        }
        (loss_error, norm_error)
    }
}

#[test]
fn twenty_steps_match_pytorch_losses_and_norms() {
    for name in ["model_tied", "model_untied"] {
        let (loss, norm) = Golden::load(name).train(Precision::Fp32);
        assert!(loss < 1e-5 && norm < 1e-4, "{name}: losses {loss:.1e}, norms {norm:.1e}");
    }
}

/// Weights, activations and their gradients have 8 significant bits: the losses differ by at most 2 %.
#[test]
fn twenty_bf16_steps_stay_close_to_pytorch() {
    for name in ["model_tied", "model_untied"] {
        let (loss, norm) = Golden::load(name).train(Precision::Bf16);
        assert!(loss < 2e-2 && norm < 1e-1, "{name}: losses {loss:.1e}, norms {norm:.1e}");
    }
}

/// Compares two steps of each algorithm: with Muon, each projection in its shape on disk with Muon's reference, all else
/// with `AdamW`'s.
#[test]
fn every_parameter_is_updated_by_its_rule_and_rate() {
    const DECAY: f32 = 0.1;
    let mut config =
        OptimizerConfig { weight_decay: f64::from(DECAY), max_grad_norm: None, ..OptimizerConfig::default() };
    let settings = muon::Muon { momentum: config.muon.momentum, polynomials: muon::Polynomials::Quintic };
    let adamw = adamw::AdamW { beta1: config.beta1, beta2: config.beta2, epsilon: config.epsilon };
    let cases = [
        (Algorithm::Muon, "model_tied", None, 1.0),
        (Algorithm::Muon, "model_untied", None, 10.0),
        (Algorithm::Muon, "model_untied", Some(16), 1.0),
        (Algorithm::AdamW, "model_untied", Some(16), 10.0),
    ];
    for (algorithm, name, base_hidden_size, embedding_scale) in cases {
        config.algorithm = algorithm;
        let mut golden = Golden::load(name);
        golden.shape.base_hidden_size = base_hidden_size;
        config.embedding_learning_rate_scale = embedding_scale;
        let ratio = golden.shape.width_ratio();
        let (mut decoder, mut optimizer) = golden.start_with(Precision::Fp32, &config);
        let tensors = hf_tensors(&golden.shape);
        let values = |buffer: &Buffer| -> Vec<f64> { buffer.read_f32().unwrap().into_iter().map(f64::from).collect() };
        let mut expected = values(&decoder.weights().flat);
        let [mut first, mut second] = [(); 2].map(|()| vec![0.0; expected.len()]);
        for step in 1..=2 {
            let gradients: Vec<f32> =
                (0..expected.len()).map(|index| ((index * step * 31) % 97) as f32 / 97.0 - 0.4).collect();
            decoder.gradients_mut().write(&gradients).unwrap();
            optimizer.step(&mut decoder, step as u64, 1e-2).unwrap();
            let correction = |beta: f64| 1.0 - beta.powi(step as i32);
            let scalars = |scale: f64| {
                [f64::from((1e-2 * scale) as f32), correction(adamw.beta1), correction(adamw.beta2), 1.0, 1.0]
            };
            for tensor in &tensors {
                let range = tensor.offset..tensor.offset + tensor.elements;
                let gradient: Vec<f64> = gradients[range.clone()].iter().map(|&value| f64::from(value)).collect();
                let is_projection = tensor.name.ends_with("_proj.weight");
                let scale = match tensor.name.as_str() {
                    _ if is_projection && algorithm == Algorithm::Muon => ratio.sqrt(),
                    _ if is_projection => ratio,
                    "lm_head.weight" => ratio,
                    "model.embed_tokens.weight" => embedding_scale,
                    _ => 1.0,
                };
                let (scalars, decay) = (scalars(scale), f64::from(DECAY) / scale);
                if is_projection && algorithm == Algorithm::Muon {
                    let shape = [tensor.shape[0], tensor.shape[1]];
                    let state = (&mut expected[range.clone()], &mut first[range]);
                    muon::reference::step(state, &gradient, shape, &scalars, &settings, decay);
                    continue;
                }
                let decay = if is_projection || tensor.name == "lm_head.weight" { decay } else { 0.0 };
                for (index, gradient) in range.zip(gradient) {
                    let state = [expected[index], first[index], second[index]];
                    [expected[index], first[index], second[index]] =
                        adamw::reference::step(state, gradient, &scalars, &adamw, decay);
                }
            }
        }
        let ours = values(&decoder.weights().flat);
        for tensor in &tensors {
            let range = tensor.offset..tensor.offset + tensor.elements;
            let worst = range.map(|index| (ours[index] - expected[index]).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-5, "{algorithm:?} {name} {}: {worst:e}", tensor.name);
        }
    }
}

#[test]
fn a_nan_gradient_skips_the_update() {
    let golden = Golden::load("model_tied");
    for precision in [Precision::Fp32, Precision::Bf16] {
        let (mut decoder, mut optimizer) = golden.start(precision);
        let elements = decoder.layout().elements();
        decoder.gradients_mut().write(&vec![0.5_f32; elements]).unwrap();
        assert!(optimizer.step(&mut decoder, 1, 1e-2).unwrap().applied);
        let state = |decoder: &Decoder, optimizer: &Optimizer| {
            let bits = |tensor: &StateTensor| match tensor.buffer.dtype() {
                DType::I16 => tensor.buffer.read::<i16>().unwrap().into_iter().map(i32::from).collect(),
                _ => tensor.buffer.read_f32().unwrap().into_iter().map(|value| value.to_bits().cast_signed()).collect(),
            };
            let state: Vec<Vec<i32>> = optimizer.state().iter().map(bits).collect();
            (decoder.weights().flat.read_f32().unwrap(), state)
        };
        let state_before = state(&decoder, &optimizer);
        for poison in [f32::NAN, f32::INFINITY] {
            let mut gradients = vec![0.1_f32; elements];
            gradients[elements / 2] = poison;
            decoder.gradients_mut().write(&gradients).unwrap();
            let update = optimizer.step(&mut decoder, 2, 1e-2).unwrap();
            assert!(!update.applied && !update.grad_norm.is_finite());
            assert!(state_before == state(&decoder, &optimizer));
        }
    }
}
