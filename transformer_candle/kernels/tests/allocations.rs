//! A training step allocates nothing: the operations write into given buffers and take their scratch from the
//! workspace.

// A global allocator that counts needs `unsafe`.
#![allow(unsafe_code, non_snake_case)]
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use kernels::adamw::AdamWState;
use kernels::attention::AttentionShape;
use kernels::{
    Buffer, DType, Device, DeviceKind, HeadLayout, WriteMode, adamw, add_rms_norm, attention, bias, cast, embedding,
    grad_norm, head_cross_entropy, linear, muon, qk_norm, rope, swiglu,
};

/// The largest allocation since it was last set to zero.
static LARGEST: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps `dealloc`'s contract, and the pointer came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The largest allocation of a call, in bytes, once everything is warm.
fn largest(mut call: impl FnMut() -> kernels::Result<()>) -> usize {
    call().unwrap();
    LARGEST.store(0, Ordering::Relaxed);
    call().unwrap();
    LARGEST.load(Ordering::Relaxed)
}

fn zeros(shape: &[usize], dtype: DType) -> Buffer {
    Buffer::zeros(shape, dtype, &Device::Cpu).unwrap()
}

/// Fails if a call allocates anything beyond the list of its arguments (and rayon's queues).
fn assert_none(name: &str, call: impl FnMut() -> kernels::Result<()>) {
    let bytes = largest(call);
    assert!(bytes <= 4096, "{name} allocates {bytes} bytes");
}

#[test]
fn operations_allocate_nothing() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build();
    pool.unwrap().install(|| {
        optimizer();
        for dtype in [DType::F32, DType::BF16] {
            orthogonalization(dtype);
        }
        for dtype in [DType::F32, DType::BF16] {
            rows(dtype);
            heads(dtype);
            gemms(dtype);
        }
    });
}

fn optimizer() {
    const X: usize = 300_000;
    let [mut weight, grad, mut first, mut second] = [(); 4].map(|()| zeros(&[X], DType::F32));
    let (mut half, mut low_bits) = (zeros(&[X], DType::BF16), zeros(&[X], DType::I16));
    let (mut norm, mut scalars) = (zeros(&[1], DType::F32), zeros(&[adamw::SCALARS], DType::F32));
    let mut workspace = zeros(&[grad_norm::workspace_elements(X, DeviceKind::Cpu)], DType::F32);
    let settings = adamw::AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
    scalars.write(&[1e-3f32, 0.1, 0.05, 1.0, 1.0]).unwrap();
    assert_none("norm", || grad_norm::forward(&grad, &mut norm, &mut workspace));
    assert_none("clip", || grad_norm::clip(&norm, Some(1.0), &mut scalars));
    assert_none("adamw", || {
        let (first_moment, second_moment) = (&mut first, &mut second);
        let state = AdamWState { weight: &mut weight, low_bits: None, first_moment, second_moment };
        adamw::step(state, &grad, &scalars, &settings, 0.1)
    });
    assert_none("split adamw", || {
        let (first_moment, second_moment) = (&mut first, &mut second);
        let state = AdamWState { weight: &mut half, low_bits: Some(&mut low_bits), first_moment, second_moment };
        adamw::step(state, &grad, &scalars, &settings, 0.1)
    });
    assert_none("split", || cast::split_master(&weight, &mut half, &mut low_bits));
    assert_none("join", || cast::join_master(&half, &low_bits, &mut weight));
    assert_none("cast", || cast::forward(&weight, &mut half));
    assert_none("zero", || weight.zero());
    assert_none("copy", || weight.copy_from(&grad));
}

fn orthogonalization(dtype: DType) {
    const SIZES: [usize; 3] = [1, 120, 300];
    let [mut momentum, grad] = [(); 2].map(|()| zeros(&SIZES, DType::F32));
    let [mut update, mut other, mut weight] = [(); 3].map(|()| zeros(&SIZES, dtype));
    let [mut gram, mut polynomial] = [(); 2].map(|()| zeros(&[1, 120, 120], dtype));
    let mut low_bits = (dtype == DType::BF16).then(|| zeros(&SIZES, DType::I16));
    let mut scalars = zeros(&[adamw::SCALARS], DType::F32);
    scalars.write(&[1e-3f32, 0.1, 0.05, 1.0, 1.0]).unwrap();
    let mut workspace = zeros(&[muon::workspace_elements(SIZES, DeviceKind::Cpu)], DType::F32);
    let settings = muon::Muon { momentum: 0.95, polynomials: muon::Polynomials::Quintic };
    assert_none("momentum", || muon::accumulate_momentum(&mut momentum, &grad, &mut update, &scalars, &settings));
    assert_none("orthogonalization", || {
        let scratch = muon::Scratch {
            other_BMN: &mut other,
            gram_BSS: &mut gram,
            polynomial_BSS: &mut polynomial,
            workspace: &mut workspace,
        };
        muon::orthogonalize(&mut update, scratch, settings.polynomials)
    });
    assert_none("muon", || muon::step(&mut weight, low_bits.as_mut(), &update, &scalars, 0.1));
}

fn rows(dtype: DType) {
    const N: usize = 600;
    const D: usize = 192;
    const V: usize = 1000;
    let (table, ids, mut dtable) = (zeros(&[V, D], dtype), zeros(&[N], DType::U32), zeros(&[V, D], DType::F32));
    let [x, output, dy, mut out, mut sum] = [(); 5].map(|()| zeros(&[N, D], dtype));
    let (weight, mut inv_rms, mut dweight) = (zeros(&[D], dtype), zeros(&[N], DType::F32), zeros(&[D], DType::F32));
    let mut workspace = zeros(&[add_rms_norm::workspace_elements(N, D, DeviceKind::Cpu)], DType::F32);
    assert_none("embedding", || embedding::forward(&table, &ids, &mut out));
    assert_none("embedding's gradient", || embedding::backward(&ids, &dy, &mut dtable, &mut workspace));
    assert_none("norm", || add_rms_norm::forward_add(&x, &output, &weight, 1e-5, &mut sum, &mut out, &mut inv_rms));
    assert_none("norm's gradient", || {
        add_rms_norm::backward(&x, &weight, &inv_rms, &dy, &mut out, &mut dweight, &mut workspace)
    });
    let mut gate_up = zeros(&[N, 2 * D], dtype);
    assert_none("swiglu", || swiglu::forward(&gate_up, &mut out));
    assert_none("swiglu's gradient", || swiglu::backward(&mut gate_up, &dy));
}

fn gemms(dtype: DType) {
    const N: usize = 300;
    const D: usize = 96;
    const V: usize = 1100;
    let [x, mut y, mut dx] = [(); 3].map(|()| zeros(&[N, D], dtype));
    let (w, mut dw) = (zeros(&[D, D], dtype), zeros(&[D, D], DType::F32));
    let mut workspace = zeros(&[linear::workspace_elements(N, D, D, DeviceKind::Cpu)], DType::F32);
    assert_none("matmul", || linear::forward(&x, &w, &mut y, &mut workspace));
    assert_none("matmul's input gradient", || linear::backward_input(&y, &w, &mut dx, &mut workspace));
    for write_mode in [WriteMode::Overwrite, WriteMode::Accumulate] {
        assert_none("matmul's weight gradient", || {
            linear::backward_weight(&y, &x, &mut dw, write_mode, &mut workspace)
        });
    }

    let (weight, mut dweight, targets) = (zeros(&[V, D], dtype), zeros(&[V, D], DType::F32), zeros(&[N], DType::I32));
    let (mut logits, mut losses) = (zeros(&[64, V], DType::F32), zeros(&[N], DType::F32));
    let (scale, mut loss) = (zeros(&[1], DType::F32), zeros(&[1], DType::F32));
    let mut workspace = zeros(&[head_cross_entropy::workspace_elements(64, D, V, DeviceKind::Cpu)], DType::F32);
    let inputs = head_cross_entropy::Inputs { hidden_ND: &x, weight_VD: &weight, targets_N: &targets, vocab_size: V };
    assert_none("head", || head_cross_entropy::forward(&inputs, &mut losses, &mut logits, &mut workspace));
    assert_none("head's gradient", || {
        let gradients = head_cross_entropy::Gradients {
            dhidden_ND: &mut dx,
            dweight_VD: &mut dweight,
            write_mode: WriteMode::Overwrite,
            z_loss: 0.0,
        };
        head_cross_entropy::forward_backward(&inputs, &scale, &mut loss, gradients, &mut logits, &mut workspace)
    });
}

fn heads(dtype: DType) {
    const B: usize = 2;
    const T: usize = 100;
    let layout = HeadLayout { heads: 4, kv_heads: 2, head_size: 32 };
    let [mut qkv, mut dqkv] = [(); 2].map(|()| zeros(&[B * T, layout.packed_width()], dtype));
    let [mut out, dout] = [(); 2].map(|()| zeros(&[B * T, 128], dtype));
    let mut lse = zeros(&[B, 4, T], DType::F32);
    let shape = AttentionShape { heads: layout, batch: B, sequence_length: T };
    let mut workspace = zeros(&[attention::workspace_elements(&shape, DeviceKind::Cpu)], DType::F32);
    let tables = rope::tables(T, 32, &rope::Frequencies::of_base(1e4), &Device::Cpu).unwrap();
    let projected = zeros(&[B * T, layout.packed_width()], dtype);
    let [(bias, mut dbias), (norm, mut dnorm)] =
        [layout.packed_width(), 64].map(|size| (zeros(&[size], dtype), zeros(&[size], DType::F32)));
    assert_none("bias", || bias::forward(&mut qkv, &bias));
    assert_none("bias's gradient", || bias::backward(&dqkv, &mut dbias, &mut workspace));
    assert_none("QK-norm", || qk_norm::forward(&projected, &norm, 1e-6, &layout, &mut qkv));
    assert_none("QK-norm's gradient", || {
        qk_norm::backward(&projected, &norm, 1e-6, &layout, &mut dqkv, &mut dnorm, &mut workspace)
    });
    assert_none("rope", || rope::forward(&mut qkv, &layout, &tables, T, 0));
    assert_none("rope's gradient", || rope::backward(&mut dqkv, &layout, &tables, T, 0));
    assert_none("attention", || attention::forward(&qkv, None, &shape, &mut out, &mut lse, &mut workspace));
    assert_none("attention's gradient", || {
        let saved = attention::Saved { qkv_NP: &qkv, documents_N: None, out_NHE: &out, lse_BHT: &lse };
        attention::backward(&saved, &dout, &shape, &mut dqkv, &mut workspace)
    });
}
