//! A training step allocates nothing: all it reads and writes was listed by the memory plan and allocated before.

#![allow(clippy::unwrap_used)]

use allocation_counter::AllocationInfo;
use kernels::fp8::ScaleBlock;
use kernels::memory::allocate;
use kernels::{Buffer, DType, Device, DeviceKind};
use model::{ActivationRecompute, Decoder, DecoderSettings, ModelShape, Precision, initialization};
use run_config::{Architecture, ModelConfig};

/// Allocations of one step after another has gone before. With a single thread all of them are this thread's.
fn allocations(
    architecture: Architecture,
    batch: usize,
    precision: Precision,
    recompute: ActivationRecompute,
) -> AllocationInfo {
    let config = ModelConfig {
        architecture,
        hidden_size: 128,
        intermediate_size: 256,
        num_layers: 4,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 128,
        ..ModelConfig::default()
    };
    let shape = ModelShape::new(&config, 1000);
    let settings = DecoderSettings {
        batch,
        sequence_length: 128,
        precision,
        fp8: (precision == Precision::Fp8).then_some(ScaleBlock::Square32),
        recompute,
        training: true,
        z_loss: 0.0,
        device: DeviceKind::Cpu,
    };
    let mut decoder = allocate(&Device::Cpu, |arena| Decoder::new(&shape, &settings, arena)).unwrap();
    initialization::fill(&shape, 1, decoder.weights_mut(), None).unwrap();
    let inputs = Buffer::zeros(&[batch * 128], DType::U32, &Device::Cpu).unwrap();
    let targets = Buffer::zeros(&[batch * 128], DType::I32, &Device::Cpu).unwrap();
    let mut step = || decoder.forward_backward(&inputs, None, &targets, 1.0).unwrap();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| {
        step();
        allocation_counter::measure(step)
    })
}

/// Bytes that lists of arguments and rayon's queues may take for a moment.
const LISTS: u64 = 1 << 12;

#[test]
fn a_step_allocates_nothing() {
    use ActivationRecompute::{Block, None, Selective};
    for (architecture, recompute) in [
        (Architecture::Llama, None),
        (Architecture::Llama, Selective),
        (Architecture::Llama, Block),
        (Architecture::Qwen2, None),
        (Architecture::Qwen3, None),
    ] {
        let cases = [Precision::Fp32, Precision::Bf16, Precision::Fp8].into_iter();
        for (precision, batch) in cases.flat_map(|precision| [1, 8].map(|batch| (precision, batch))) {
            let during = allocations(architecture, batch, precision, recompute);
            assert_eq!(during.bytes_current, 0, "kept: {during:?}");
            let what = format!("{architecture:?} {precision:?} {recompute:?} batch {batch}");
            assert!(during.bytes_max < LISTS, "{what}: {during:?}");
        }
    }
}
