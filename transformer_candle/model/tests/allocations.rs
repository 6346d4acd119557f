//! A training step allocates nothing: all it reads and writes was listed by the memory plan and allocated before.

#![allow(clippy::unwrap_used)]

use allocation_counter::AllocationInfo;
use kernels::memory::Plan;
use kernels::{Buffer, DType, Device, DeviceKind};
use model::{ActivationRecompute, Decoder, DecoderSettings, ModelShape, Precision, initialization};
use run_config::ModelConfig;

/// Allocations of one step after another has gone before. With a single thread all of them are this thread's.
fn allocations(batch: usize, precision: Precision, recompute: ActivationRecompute) -> AllocationInfo {
    let config = ModelConfig {
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
        recompute,
        training: true,
        z_loss: 0.0,
        device: DeviceKind::Cpu,
    };
    let mut plan = Plan::new();
    let planned = Decoder::plan(&shape, &settings, &mut plan);
    let mut decoder = planned.bind(&plan.allocate(&Device::Cpu).unwrap()).unwrap();
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

/// What lists of arguments and rayon's queues may take for a moment.
const LISTS: u64 = 1 << 12;

#[test]
fn a_step_allocates_nothing() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        for recompute in [ActivationRecompute::None, ActivationRecompute::Selective, ActivationRecompute::Block] {
            for batch in [1, 8] {
                let during = allocations(batch, precision, recompute);
                assert_eq!(during.bytes_current, 0, "kept: {during:?}");
                assert!(during.bytes_max < LISTS, "{precision:?} {recompute:?} batch {batch}: {during:?}");
            }
        }
    }
}
