//! Small models and batches that the tests share.

use std::collections::BTreeMap;

use kernels::memory::allocate;
use kernels::{Buffer, DType, Device, DeviceKind, bf16};
use model::hugging_face::{HfTensor, adapter_tensors, hf_tensors};
use model::{
    ActivationRecompute, Decoder, DecoderSettings, LoraShape, ModelShape, ParameterLayout, Precision, Weights,
};
use run_config::{Architecture, ModelConfig, TargetModule, TargetModules};

/// Grouped heads, heads wider than the residual stream together, and sizes that are no multiple of anything.
pub fn tiny(tie_embeddings: bool) -> ModelShape {
    let config = ModelConfig {
        hidden_size: 20,
        intermediate_size: 36,
        num_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: Some(6),
        max_position_embeddings: 24,
        tie_embeddings,
        ..ModelConfig::default()
    };
    ModelShape::new(&config, 71)
}

/// Tied and untied, and the other layers that an architecture may have.
pub fn variants() -> [ModelShape; 4] {
    let of = |architecture, tied| ModelShape { architecture, ..tiny(tied) };
    [tiny(true), tiny(false), of(Architecture::Qwen2, false), of(Architecture::Qwen3, true)]
}

/// The same model with adapters beside these modules.
pub fn with_adapters(shape: ModelShape, modules: &[TargetModule]) -> ModelShape {
    let modules = TargetModules::new(modules.iter().copied());
    shape.with_lora(Some(LoraShape { rank: 3, alpha: 4.5, rslora: false, dropout: 0.0, modules, fp8_base: false }))
}

/// Every tensor of a model, its adapters included.
pub fn all_tensors(shape: &ModelShape) -> Vec<HfTensor> {
    hf_tensors(shape).into_iter().chain(adapter_tensors(shape)).collect()
}

/// F32, nothing recomputed.
pub fn plain(batch: usize, sequence_length: usize) -> DecoderSettings {
    let (precision, recompute) = (Precision::Fp32, ActivationRecompute::None);
    DecoderSettings {
        batch,
        sequence_length,
        precision,
        fp8: None,
        recompute,
        training: true,
        z_loss: 0.0,
        device: DeviceKind::Cpu,
    }
}

/// A repeatable stream of numbers in [-1, 1).
pub struct Noise(pub u64);

impl Noise {
    pub fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next().midpoint(1.0) * limit as f64) as usize
    }
}

/// Weights of every tensor by its Hugging Face name, norms and biases around one.
pub fn weights_by_name(shape: &ModelShape) -> BTreeMap<String, Vec<f32>> {
    let mut noise = Noise(7);
    let mut values = |norm: bool, elements: usize| -> Vec<f32> {
        let value = |noise: f64| if norm { 1.0 + 0.2 * noise } else { 0.3 * noise };
        (0..elements).map(|_| value(noise.next()) as f32).collect()
    };
    let tensors = all_tensors(shape).into_iter();
    tensors.map(|tensor| (tensor.name.clone(), values(tensor.shape.len() == 1, tensor.elements))).collect()
}

/// Puts weights by name into a flat buffer of either element type.
pub fn set_weights(shape: &ModelShape, flat: &mut Buffer, weights: &BTreeMap<String, Vec<f32>>) {
    flat.zero().unwrap();
    for tensor in all_tensors(shape) {
        let values = &weights[&tensor.name];
        let mut view = flat.view(tensor.offset, &[tensor.elements]).unwrap();
        if flat.dtype() == DType::BF16 {
            view.write(&values.iter().map(|&value| bf16::from_f32(value)).collect::<Vec<_>>()).unwrap();
        } else {
            view.write(values).unwrap();
        }
    }
}

/// A flat buffer's tensors by name.
pub fn by_name(shape: &ModelShape, flat: &Buffer) -> BTreeMap<String, Vec<f32>> {
    let read = |offset, elements| flat.view(offset, &[elements]).unwrap().read_f32().unwrap();
    hf_tensors(shape).into_iter().map(|tensor| (tensor.name, read(tensor.offset, tensor.elements))).collect()
}

/// A decoder with the weights of [`weights_by_name`].
pub fn decoder(shape: &ModelShape, settings: &DecoderSettings) -> Decoder {
    let mut decoder = allocate(&Device::Cpu, |arena| Decoder::new(shape, settings, arena)).unwrap();
    set_weights(shape, &mut decoder.weights_mut().flat, &weights_by_name(shape));
    decoder
}

/// [`flat_weights`] as a model's.
pub fn weights(shape: &ModelShape, dtype: DType) -> Weights {
    flat_weights(shape, dtype).into()
}

/// Flat weights with the values of [`weights_by_name`].
pub fn flat_weights(shape: &ModelShape, dtype: DType) -> Buffer {
    let mut flat = Buffer::zeros(&[ParameterLayout::new(shape).elements()], dtype, &Device::Cpu).unwrap();
    set_weights(shape, &mut flat, &weights_by_name(shape));
    flat
}

/// Token ids and targets of some sequences, a fraction of the targets ignored.
#[derive(Clone)]
pub struct Batch {
    pub inputs: Vec<u32>,
    pub targets: Vec<i32>,
    /// The start of each token's document in its sequence; None where nothing keeps documents apart.
    pub documents: Option<Vec<i32>>,
}

impl Batch {
    pub fn drawn(shape: &ModelShape, tokens: usize, ignored: f64, seed: u64) -> Self {
        let mut noise = Noise(seed);
        let inputs = (0..tokens).map(|_| noise.below(shape.vocab_size) as u32).collect();
        let mut target = || {
            let id = noise.below(shape.vocab_size) as i32;
            if noise.next() < 2.0 * ignored - 1.0 { -100 } else { id }
        };
        Self { targets: (0..tokens).map(|_| target()).collect(), inputs, documents: None }
    }

    /// The same, every sequence cut into documents of these lengths, as many times as they fit.
    pub fn with_documents(self, sequence_length: usize, lengths: &[usize]) -> Self {
        let starts: Vec<i32> = lengths
            .iter()
            .cycle()
            .scan(0, |end, length| {
                let start = *end;
                *end += length;
                Some((start as i32, *length))
            })
            .flat_map(|(start, length)| vec![start; length])
            .take(sequence_length)
            .collect();
        let sequences = self.inputs.len() / sequence_length;
        Self { documents: Some(starts.repeat(sequences)), ..self }
    }

    pub fn target_count(&self) -> usize {
        self.targets.iter().filter(|&&target| target >= 0).count()
    }

    pub fn buffers(&self) -> (Buffer, Buffer) {
        let mut inputs = Buffer::zeros(&[self.inputs.len()], DType::U32, &Device::Cpu).unwrap();
        let mut targets = Buffer::zeros(&[self.targets.len()], DType::I32, &Device::Cpu).unwrap();
        inputs.write(&self.inputs).unwrap();
        targets.write(&self.targets).unwrap();
        (inputs, targets)
    }

    /// Adds this batch's loss and gradients.
    pub fn train(&self, decoder: &mut Decoder, scale: f32) {
        let (inputs, targets) = self.buffers();
        decoder.forward_backward(&inputs, self.documents_buffer().as_ref(), &targets, scale).unwrap();
    }

    /// The loss of each target.
    pub fn losses(&self, decoder: &mut Decoder) -> Vec<f32> {
        let (inputs, targets) = self.buffers();
        let losses = decoder.evaluate(&inputs, self.documents_buffer().as_ref(), &targets).unwrap();
        losses.read::<f32>().unwrap()
    }

    fn documents_buffer(&self) -> Option<Buffer> {
        self.documents.as_ref().map(|starts| {
            let mut documents = Buffer::zeros(&[starts.len()], DType::I32, &Device::Cpu).unwrap();
            documents.write(starts).unwrap();
            documents
        })
    }
}

pub fn loss(decoder: &Decoder) -> f32 {
    decoder.loss().read::<f32>().unwrap()[0]
}

/// `|ours - reference| / |reference|` in the Euclidean norm.
pub fn relative_error(ours: &[f32], reference: &[f64]) -> f64 {
    assert_eq!(ours.len(), reference.len());
    let difference: f64 = ours.iter().zip(reference).map(|(&a, &b)| (f64::from(a) - b).powi(2)).sum();
    (difference / reference.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

pub fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}
