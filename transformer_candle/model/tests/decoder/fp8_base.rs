//! Adapters beside frozen projections that are held in fp8, against the same projections in BF16.

use kernels::fp8::{ScaleBlock, reference};
use kernels::memory::{allocate, count};
use kernels::{Buffer, Device, bf16};
use model::hugging_face::{HfTensor, PretrainedWeights, adapter_tensors, hf_tensors, trainable_tensors};
use model::layout::Parameter;
use model::{
    ActivationRecompute, Decoder, DecoderSettings, Generator, LoraShape, ModelShape, ParameterKind, ParameterLayout,
    Precision, initialization,
};
use run_config::TargetModule;
use safetensors::Dtype;

use crate::models::{self, Batch, plain, variants, weights_by_name, with_adapters};
use crate::pretrained_weights::{sharded, single, tensors};

/// The same model with its projections in fp8.
fn in_fp8(shape: &ModelShape) -> ModelShape {
    let lora = shape.lora.clone().map(|lora| LoraShape { fp8_base: true, ..lora });
    shape.clone().with_lora(lora)
}

fn with_all_adapters() -> impl Iterator<Item = ModelShape> {
    variants().into_iter().map(|shape| with_adapters(shape, &TargetModule::ALL))
}

fn write(flat: &mut Buffer, tensor: &HfTensor, values: &[f32]) {
    let values: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
    flat.view(tensor.offset, &[tensor.elements]).unwrap().write(&values).unwrap();
}

/// A decoder of the weights of [`weights_by_name`], of which the model's are read from files.
fn decoder_of_files(shape: &ModelShape, settings: &DecoderSettings, in_shards: bool) -> Decoder {
    let stored = tensors(shape, Dtype::F32);
    let folder = if in_shards { sharded(&stored) } else { single(&stored) };
    let mut decoder = allocate(&Device::Cpu, |arena| Decoder::new(shape, settings, arena)).unwrap();
    let files = PretrainedWeights::open(folder.path(), shape).unwrap();
    files.read(decoder.weights_mut(), None, &|| false, None).unwrap();
    let by_name = weights_by_name(shape);
    for tensor in adapter_tensors(shape) {
        write(&mut decoder.weights_mut().flat, &tensor, &by_name[&tensor.name]);
    }
    decoder
}

/// A decoder in BF16 whose projections are what fp8 codes stand for.
fn decoder_of_rounded(shape: &ModelShape, settings: &DecoderSettings, block: ScaleBlock) -> Decoder {
    let mut decoder = models::decoder(shape, settings);
    let layout = ParameterLayout::new(shape);
    for Parameter { spec, offset } in layout.by_offset() {
        if spec.kind != ParameterKind::Projection {
            continue;
        }
        let mut view = decoder.weights_mut().flat.view(*offset, &spec.shape).unwrap();
        let exact = models::widened(&view.read_f32().unwrap());
        let rounded = reference::round(&exact, [spec.shape[0], spec.shape[1]], block);
        view.write(&rounded.into_iter().map(bf16::from_f64).collect::<Vec<_>>()).unwrap();
    }
    decoder
}

/// Gradients of the adapters by name, with the loss.
fn trained(mut decoder: Decoder, data: &Batch) -> (f32, Vec<(String, Vec<f32>)>) {
    data.train(&mut decoder, 1.0 / data.target_count() as f32);
    let read = |tensor: HfTensor| {
        let gradient = decoder.gradients().view(tensor.offset, &[tensor.elements]).unwrap();
        (tensor.name, gradient.read::<f32>().unwrap())
    };
    let gradients = trainable_tensors(decoder.shape()).into_iter().map(read).collect();
    (models::loss(&decoder), gradients)
}

#[test]
fn fp8_matmuls_read_a_base_in_fp8_as_one_in_bf16() {
    let (batch, t) = (2, 13);
    for shape in with_all_adapters() {
        let data = Batch::drawn(&shape, batch * t, 0.2, 11);
        for (block, recompute) in ScaleBlock::ALL.into_iter().zip([
            ActivationRecompute::None,
            ActivationRecompute::Selective,
            ActivationRecompute::Block,
        ]) {
            let settings =
                DecoderSettings { precision: Precision::Fp8, fp8: Some(block), recompute, ..plain(batch, t) };
            let expected = trained(models::decoder(&shape, &settings), &data);
            for in_shards in [false, true] {
                assert!(trained(decoder_of_files(&in_fp8(&shape), &settings, in_shards), &data) == expected);
            }
        }
    }
}

#[test]
fn bf16_matmuls_read_what_the_codes_stand_for() {
    let (batch, t) = (2, 13);
    let block = ScaleBlock::Square32;
    for shape in with_all_adapters() {
        let data = Batch::drawn(&shape, batch * t, 0.2, 11);
        for recompute in [ActivationRecompute::None, ActivationRecompute::Selective, ActivationRecompute::Block] {
            let settings = DecoderSettings { precision: Precision::Bf16, recompute, ..plain(batch, t) };
            let expected = trained(decoder_of_rounded(&shape, &settings, block), &data);
            assert!(trained(decoder_of_files(&in_fp8(&shape), &settings, true), &data) == expected);
        }
    }
}

#[test]
fn evaluation_and_generation_read_a_base_in_fp8() {
    let settings = DecoderSettings { precision: Precision::Bf16, ..plain(2, 12) };
    for shape in with_all_adapters() {
        let data = Batch::drawn(&shape, 24, 0.0, 4);
        let mut in_bf16 = decoder_of_rounded(&shape, &settings, ScaleBlock::Square32);
        let mut ours = decoder_of_files(&in_fp8(&shape), &settings, false);
        assert_eq!(data.losses(&mut ours), data.losses(&mut in_bf16));
        let logits = |decoder: &Decoder| {
            let mut generator = Generator::new(decoder.shape(), decoder.weights(), 24).unwrap();
            let mut logits = generator.prefill(&data.inputs[..9]).unwrap();
            logits.extend(generator.step(data.inputs[9]).unwrap());
            logits
        };
        assert_eq!(logits(&ours), logits(&in_bf16));
    }
}

#[test]
fn random_weights_are_rounded_like_those_of_files() {
    let shape = with_all_adapters().next().unwrap();
    let settings = DecoderSettings { precision: Precision::Fp8, fp8: Some(ScaleBlock::Square32), ..plain(2, 13) };
    let data = Batch::drawn(&shape, 2 * 13, 0.2, 11);
    let filled = |shape: &ModelShape| {
        let mut decoder = allocate(&Device::Cpu, |arena| Decoder::new(shape, &settings, arena)).unwrap();
        initialization::fill(shape, 5, decoder.weights_mut(), None).unwrap();
        trained(decoder, &data)
    };
    assert!(filled(&in_fp8(&shape)) == filled(&shape));
}

#[test]
fn projections_take_a_byte_and_nothing_else_moves() {
    let shape = with_all_adapters().next().unwrap();
    let bytes = |shape: &ModelShape, precision, fp8| {
        let settings = DecoderSettings { precision, fp8, ..plain(1, 8) };
        count(|arena| Decoder::new(shape, &settings, arena)).unwrap().1.bytes_of(kernels::memory::Category::Weights)
    };
    let layout = ParameterLayout::new(&shape);
    let of_projections =
        layout.parameters().iter().filter(|parameter| parameter.spec.kind == ParameterKind::Projection);
    let scales = |spec: &model::ParameterSpec| ScaleBlock::Square32.scales([spec.shape[0], spec.shape[1]]).1;
    let codes: usize = of_projections
        .clone()
        .map(|Parameter { spec, .. }| spec.elements() + scales(spec).iter().product::<usize>())
        .sum();
    let aligned: usize = of_projections.map(|parameter| parameter.spec.elements().next_multiple_of(64)).sum();
    let whole = bytes(&shape, Precision::Bf16, None);
    let held = bytes(&in_fp8(&shape), Precision::Bf16, None);
    // Buffers begin at multiples of 256 bytes.
    let padding = held - (whole - 2 * aligned as u64 + codes as u64);
    assert!(padding <= 256 * 2 * 4 * shape.num_layers as u64, "{padding}");
    assert_eq!(held, bytes(&in_fp8(&shape), Precision::Fp8, Some(ScaleBlock::Square32)));

    let offsets = |tensors: Vec<HfTensor>| tensors.into_iter().map(|tensor| (tensor.name, tensor.offset));
    assert!(offsets(adapter_tensors(&shape)).eq(offsets(adapter_tensors(&in_fp8(&shape)))));
    assert!(offsets(hf_tensors(&shape)).ne(offsets(hf_tensors(&in_fp8(&shape)))));
}
