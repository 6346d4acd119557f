//! The rows: the operations of a training step, and the matmuls per generated token.
//!
//! Legend: N tokens, D hidden, I intermediate, V vocabulary, P packed QKV width, A = H * E attention width, C rows of
//! logits.

use kernels::attention::AttentionShape;
use kernels::{
    Buffer, DType, Device, DeviceKind, Result, WriteMode, adamw, add_rms_norm, attention, bias, cast, embedding,
    grad_norm, head_cross_entropy, linear, qk_norm, rope, swiglu,
};

use crate::meter::{Meter, Work};
use crate::sizes::{LinearMap, Recompute, Sizes};

/// Bytes of an f32: of gradients, moments and statistics, whatever the activations are.
const F32: usize = 4;
const EPSILON: f32 = 1e-5;
const ROPE_THETA: f64 = 10_000.0;

/// Measures every row.
pub fn all(sizes: &Sizes, meter: &Meter<'_>) -> Result<()> {
    for map in sizes.linear_maps() {
        linear_map(sizes, meter, &map)?;
    }
    decode(sizes, meter)?;
    attend(sizes, meter)?;
    norm(sizes, meter)?;
    bias_and_norm_heads(sizes, meter)?;
    rotate(sizes, meter)?;
    activate(sizes, meter)?;
    embed(sizes, meter)?;
    head(sizes, meter)?;
    optimize(sizes, meter)
}

/// The three matmuls of a linear map.
fn linear_map(sizes: &Sizes, meter: &Meter<'_>, map: &LinearMap) -> Result<()> {
    let &LinearMap { name, inputs: i, outputs: o } = map;
    let (n, size) = (sizes.n, meter.element_size());
    let mut workspace = workspace(linear::workspace_elements(n, i, o, DeviceKind::Cpu))?;
    let (mut x_NI, mut y_NO, w_OI) =
        (filled(&[n, i], meter.dtype)?, filled(&[n, o], meter.dtype)?, filled(&[o, i], meter.dtype)?);
    let mut dw_OI = Buffer::zeros(&[o, i], DType::F32, &Device::Cpu)?;
    let flops = 2 * n * i * o;
    let moved = Work { flops, bytes: size * (n * i + o * i + n * o) };
    let layers = sizes.layers;
    meter
        .row(&format!("{name}: forward"), layers, moved, || linear::forward(&x_NI, &w_OI, &mut y_NO, &mut workspace))?;
    let gradient = Work { flops, bytes: size * (n * i + n * o) + F32 * o * i };
    meter.row(&format!("{name}: weight's gradient"), layers, gradient, || {
        linear::backward_weight(&y_NO, &x_NI, &mut dw_OI, WriteMode::Overwrite, &mut workspace)
    })?;
    meter.row(&format!("{name}: input's gradient"), layers, moved, || {
        linear::backward_input(&y_NO, &w_OI, &mut x_NI, &mut workspace)
    })
}

/// All matmuls of one generated token, each weight read once: its cost without attention.
fn decode(sizes: &Sizes, meter: &Meter<'_>) -> Result<()> {
    let head = LinearMap { name: "head", inputs: sizes.d, outputs: sizes.v };
    let maps = (0..sizes.layers).flat_map(|_| sizes.linear_maps()).chain([head]);
    let mut gemvs = maps
        .map(|map| {
            let LinearMap { inputs: i, outputs: o, .. } = map;
            let workspace = workspace(linear::workspace_elements(1, i, o, DeviceKind::Cpu))?;
            Ok((filled(&[1, i], meter.dtype)?, filled(&[o, i], meter.dtype)?, zeros(&[1, o], meter.dtype)?, workspace))
        })
        .collect::<Result<Vec<_>>>()?;
    let weights = sizes.matmul_weights();
    let work = Work { flops: 2 * weights, bytes: meter.element_size() * weights };
    meter.row("decode: GEMVs per token", 0, work, || {
        gemvs.iter_mut().try_for_each(|(x, w, y, workspace)| linear::forward(x, w, y, workspace))
    })
}

/// Attention: two matmuls over half of the scores forward, five backward.
fn attend(sizes: &Sizes, meter: &Meter<'_>) -> Result<()> {
    let &Sizes { batch, length, n, ref heads, layers, .. } = sizes;
    let (p, a, size) = (heads.packed_width(), heads.query_width(), meter.element_size());
    let shape = AttentionShape { heads: *heads, batch, sequence_length: length };
    let mut workspace = workspace(attention::workspace_elements(&shape, DeviceKind::Cpu))?;
    let (qkv_NP, dout_NA) = (filled(&[n, p], meter.dtype)?, filled(&[n, a], meter.dtype)?);
    let (mut out_NA, mut dqkv_NP) = (zeros(&[n, a], meter.dtype)?, zeros(&[n, p], meter.dtype)?);
    let mut lse_BHT = zeros(&[batch, heads.heads, length], DType::F32)?;
    let causal = n * length * a;
    let work = Work { flops: 2 * causal, bytes: size * n * (p + a) };
    meter.row("attention: forward", 0, work, || {
        attention::forward(&qkv_NP, None, &shape, &mut out_NA, &mut lse_BHT, &mut workspace)
    })?;
    let work = Work { flops: 7 * causal, bytes: size * n * (3 * p + 3 * a) };
    meter.row("attention: both", layers, work, || {
        attention::forward(&qkv_NP, None, &shape, &mut out_NA, &mut lse_BHT, &mut workspace)?;
        let saved = attention::Saved { qkv_NP: &qkv_NP, documents_N: None, out_NHE: &out_NA, lse_BHT: &lse_BHT };
        attention::backward(&saved, &dout_NA, &shape, &mut dqkv_NP, &mut workspace)
    })
}

/// Residual add and norm.
fn norm(sizes: &Sizes, meter: &Meter<'_>) -> Result<()> {
    let &Sizes { n, d, layers, recompute, .. } = sizes;
    let mut workspace = workspace(add_rms_norm::workspace_elements(n, d, DeviceKind::Cpu))?;
    let [x_ND, branch_ND, dnormed_ND] = [(); 3].map(|()| filled(&[n, d], meter.dtype));
    let (x_ND, branch_ND, dnormed_ND) = (x_ND?, branch_ND?, dnormed_ND?);
    let [sum_ND, normed_ND, dsum_ND] = [(); 3].map(|()| zeros(&[n, d], meter.dtype));
    let (mut sum_ND, mut normed_ND, mut dsum_ND) = (sum_ND?, normed_ND?, dsum_ND?);
    let (weight_D, mut dweight_D) = (filled(&[d], meter.dtype)?, zeros(&[d], DType::F32)?);
    let mut inv_rms_N = zeros(&[n], DType::F32)?;
    let row = meter.element_size() * n * d;
    meter.row("add, rms norm: both", 2 * layers + 1, Work { flops: 0, bytes: 8 * row }, || {
        let outputs = (&mut sum_ND, &mut normed_ND, &mut inv_rms_N);
        add_rms_norm::forward_add(&x_ND, &branch_ND, &weight_D, EPSILON, outputs.0, outputs.1, outputs.2)?;
        add_rms_norm::backward(
            &sum_ND,
            &weight_D,
            &inv_rms_N,
            &dnormed_ND,
            &mut dsum_ND,
            Some(&mut dweight_D),
            &mut workspace,
        )
    })?;
    let per_step = if recompute == Recompute::Selective { 2 * layers } else { 0 };
    meter.row("rms norm: again", per_step, Work { flops: 0, bytes: 2 * row }, || {
        add_rms_norm::normalize(&sum_ND, &weight_D, &inv_rms_N, &mut normed_ND)
    })
}

/// The bias of queries, keys and values and the norms of query and key heads, which other architectures than Llama
/// have.
fn bias_and_norm_heads(sizes: &Sizes, meter: &Meter<'_>) -> Result<()> {
    let &Sizes { n, ref heads, .. } = sizes;
    let (p, e) = (heads.packed_width(), heads.head_size);
    let bias_elements = bias::workspace_elements(n, p, DeviceKind::Cpu);
    let mut workspace = workspace(bias_elements.max(qk_norm::workspace_elements(n, e, DeviceKind::Cpu)))?;
    let (projected_NP, mut dqkv_NP) = (filled(&[n, p], meter.dtype)?, filled(&[n, p], meter.dtype)?);
    let (mut qkv_NP, bias_P, weight_2E) =
        (zeros(&[n, p], meter.dtype)?, filled(&[p], meter.dtype)?, filled(&[2 * e], meter.dtype)?);
    let (mut dbias_P, mut dweight_2E) = (zeros(&[p], DType::F32)?, zeros(&[2 * e], DType::F32)?);
    let row = meter.element_size() * n * p;
    meter.row("qkv bias: both", 0, Work { flops: 0, bytes: 3 * row }, || {
        bias::forward(&mut qkv_NP, &bias_P)?;
        bias::backward(&dqkv_NP, &mut dbias_P, &mut workspace)
    })?;
    let normed = meter.element_size() * n * (heads.query_width() + heads.key_width());
    meter.row("qk norm: both", 0, Work { flops: 0, bytes: 2 * row + 3 * normed }, || {
        qk_norm::forward(&projected_NP, &weight_2E, EPSILON, heads, &mut qkv_NP)?;
        qk_norm::backward(
            &projected_NP,
            &weight_2E,
            EPSILON,
            heads,
            &mut dqkv_NP,
            Some(&mut dweight_2E),
            &mut workspace,
        )
    })
}

/// Rotary embedding of queries and keys, forward and backward.
fn rotate(sizes: &Sizes, meter: &Meter<'_>) -> Result<()> {
    let &Sizes { length, n, ref heads, layers, .. } = sizes;
    let tables = rope::tables(length, heads.head_size, &rope::Frequencies::of_base(ROPE_THETA), &Device::Cpu)?;
    let mut qkv_NP = filled(&[n, heads.packed_width()], meter.dtype)?;
    let turned = meter.element_size() * n * (heads.query_width() + heads.key_width());
    meter.row("rope: both", layers, Work { flops: 0, bytes: 4 * turned }, || {
        rope::forward(&mut qkv_NP, heads, &tables, length, 0)?;
        rope::backward(&mut qkv_NP, heads, &tables, length, 0)
    })
}

/// `SwiGLU`.
fn activate(sizes: &Sizes, meter: &Meter<'_>) -> Result<()> {
    let &Sizes { n, i, layers, recompute, .. } = sizes;
    let mut gate_up_N2I = filled(&[n, 2 * i], meter.dtype)?;
    let (mut out_NI, mut dout_NI) = (zeros(&[n, i], meter.dtype)?, filled(&[n, i], meter.dtype)?);
    let row = meter.element_size() * n * i;
    let passes = if recompute == Recompute::Selective { 3 + 6 } else { 3 + 5 };
    meter.row("swiglu: both", layers, Work { flops: 0, bytes: passes * row }, || {
        swiglu::forward(&gate_up_N2I, &mut out_NI)?;
        match recompute {
            Recompute::None => swiglu::backward(&mut gate_up_N2I, &dout_NI),
            Recompute::Selective => swiglu::backward_recomputing(&mut gate_up_N2I, &mut dout_NI),
        }
    })
}

/// Token embedding.
fn embed(sizes: &Sizes, meter: &Meter<'_>) -> Result<()> {
    let &Sizes { n, d, v, .. } = sizes;
    let (table_VD, mut dtable_VD) = (filled(&[v, d], meter.dtype)?, zeros(&[v, d], DType::F32)?);
    let (mut out_ND, dout_ND) = (zeros(&[n, d], meter.dtype)?, filled(&[n, d], meter.dtype)?);
    let mut ids_N = zeros(&[n], DType::U32)?;
    ids_N.write(&tokens(n, v).collect::<Vec<_>>())?;
    let mut workspace = workspace(embedding::workspace_elements(n, DeviceKind::Cpu))?;
    let bytes = n * d * (3 * meter.element_size() + 2 * F32);
    meter.row("embedding: both", 1, Work { flops: 0, bytes }, || {
        embedding::forward(&table_VD, &ids_N, &mut out_ND)?;
        embedding::backward(&ids_N, &dout_ND, &mut dtable_VD, &mut workspace)
    })
}

/// Rows of a chunk of logits, as many as the model has on a CPU.
const HEAD_ROWS: usize = 1024;

/// Head and loss: three matmuls per chunk of rows; the logits, which a cache could keep, are not counted.
fn head(sizes: &Sizes, meter: &Meter<'_>) -> Result<()> {
    let &Sizes { n, d, v, .. } = sizes;
    let (hidden_ND, weight_VD) = (filled(&[n, d], meter.dtype)?, filled(&[v, d], meter.dtype)?);
    let (mut dhidden_ND, mut dweight_VD) = (zeros(&[n, d], meter.dtype)?, zeros(&[v, d], DType::F32)?);
    let (mut loss_1, mut scale_1) = (zeros(&[1], DType::F32)?, zeros(&[1], DType::F32)?);
    scale_1.write(&[1.0 / n as f32])?;
    let mut targets_N = zeros(&[n], DType::I32)?;
    targets_N.write(&tokens(n, v).map(u32::cast_signed).collect::<Vec<_>>())?;
    let c = HEAD_ROWS.min(n);
    let mut logits_CW = zeros(&[c, head_cross_entropy::logits_width(v, DeviceKind::Cpu)], DType::F32)?;
    let mut workspace = workspace(head_cross_entropy::workspace_elements(c, d, v, DeviceKind::Cpu))?;
    let work = Work { flops: 6 * n * d * v, bytes: meter.element_size() * (2 * n * d + v * d) + F32 * v * d };
    meter.row("head, cross-entropy: both", 1, work, || {
        let (hidden_ND, weight_VD, targets_N) = (&hidden_ND, &weight_VD, &targets_N);
        let inputs = head_cross_entropy::Inputs { hidden_ND, weight_VD, targets_N, vocab_size: v };
        let (dhidden_ND, dweight_VD, write_mode) = (&mut dhidden_ND, Some(&mut dweight_VD), WriteMode::Overwrite);
        let gradients = head_cross_entropy::Gradients { dhidden_ND, dweight_VD, write_mode, z_loss: 0.0 };
        head_cross_entropy::forward_backward(&inputs, &scale_1, &mut loss_1, gradients, &mut logits_CW, &mut workspace)
    })
}

/// Gradient norm, clipping and `AdamW`; then zeroing the gradients.
fn optimize(sizes: &Sizes, meter: &Meter<'_>) -> Result<()> {
    let parameters = sizes.parameters();
    let mut weight = zeros(&[parameters], meter.dtype)?;
    let mut low_bits = (meter.dtype == DType::BF16).then(|| zeros(&[parameters], DType::I16)).transpose()?;
    let grad = filled(&[parameters], DType::F32)?;
    let (mut first, mut second) = (zeros(&[parameters], DType::F32)?, zeros(&[parameters], DType::F32)?);
    let (mut norm_1, mut scalars) = (zeros(&[1], DType::F32)?, zeros(&[adamw::SCALARS], DType::F32)?);
    let mut values = [1.0_f32; adamw::SCALARS];
    values[adamw::LEARNING_RATE] = 3e-4;
    scalars.write(&values)?;
    let settings = adamw::AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
    let mut workspace = workspace(grad_norm::workspace_elements(parameters, DeviceKind::Cpu))?;
    // The norm reads the gradients; the update reads them, and reads and writes master weights and moments.
    let work = Work { flops: 0, bytes: F32 * parameters * (1 + 1 + 2 * 3) };
    meter.row("clip, AdamW", 1, work, || {
        grad_norm::forward(&grad, &mut norm_1, &mut workspace)?;
        grad_norm::clip(&norm_1, Some(1.0), &mut scalars)?;
        let (low_bits, first_moment, second_moment) = (low_bits.as_mut(), &mut first, &mut second);
        let state = adamw::AdamWState { weight: &mut weight, low_bits, first_moment, second_moment };
        adamw::step(state, &grad, &scalars, &settings, 0.1)
    })?;
    // Only the gradients of the embedding and of norms are accumulated from zero.
    let added = parameters - sizes.matmul_weights();
    let mut added_grad = grad.view(0, &[added])?;
    meter.row("gradients to zero", 1, Work { flops: 0, bytes: F32 * added }, || added_grad.zero())
}

fn zeros(shape: &[usize], dtype: DType) -> Result<Buffer> {
    Buffer::zeros(shape, dtype, &Device::Cpu)
}

fn workspace(elements: usize) -> Result<Buffer> {
    zeros(&[elements], DType::F32)
}

/// Pseudorandom numbers between -1 and 1.
fn filled(shape: &[usize], dtype: DType) -> Result<Buffer> {
    let (mut numbers, mut buffer) = (zeros(shape, DType::F32)?, zeros(shape, dtype)?);
    let values = random().map(|number| number as f32 / (1 << 30) as f32 - 1.0);
    numbers.write(&values.take(numbers.elements()).collect::<Vec<_>>())?;
    cast::forward(&numbers, &mut buffer)?;
    Ok(buffer)
}

/// Ids below the vocabulary's size.
fn tokens(n: usize, v: usize) -> impl Iterator<Item = u32> {
    random().map(move |number| number % v as u32).take(n)
}

/// Lehmer's generator, MINSTD: numbers below 2^31.
fn random() -> impl Iterator<Item = u32> {
    std::iter::successors(Some(1_u64), |state| Some(state * 48_271 % 0x7fff_ffff)).map(|state| state as u32)
}
