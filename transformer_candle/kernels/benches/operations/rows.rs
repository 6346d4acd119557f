//! The rows: the operations of a training step, and the matmuls per generated token, as [`kernels::cases`] has them.
//!
//! Legend: N tokens, D hidden, I intermediate, V vocabulary, P packed QKV width, C rows of logits.

use kernels::attention::{self, AttentionShape};
use kernels::cases::{BufferContents, Case, Inputs, Positions, Random, bounds};
use kernels::{
    DType, DeviceKind, Result, WriteMode, adamw, add_rms_norm, bias, embedding, grad_norm, head_cross_entropy, linear,
    qk_norm, rope, swiglu,
};

use crate::meter::Meter;
use crate::sizes::{LinearMap, Recompute, Sizes};

/// Rows of a chunk of logits, as many as the model has on a CPU.
const HEAD_ROWS: usize = 1024;

/// Measures every row.
pub fn all(sizes: &Sizes, meter: &Meter<'_>) -> Result<()> {
    let inputs = &mut Inputs { random: Random::new(1), dtype: meter.dtype };
    matmuls(sizes, inputs, meter)?;
    attend(sizes, inputs, meter)?;
    rows(sizes, inputs, meter)?;
    head(sizes, inputs, meter)?;
    optimize(sizes, inputs, meter)
}

/// The three matmuls of each linear map; and all matmuls of one generated token, each weight read once: its cost without
/// attention.
fn matmuls(sizes: &Sizes, inputs: &mut Inputs, meter: &Meter<'_>) -> Result<()> {
    for LinearMap { name, inputs: i, outputs: o } in sizes.linear_maps() {
        let map = [sizes.n, i, o];
        let forward = linear::cases::output(inputs, map);
        meter.row(&format!("{name}: forward"), sizes.layers, &[forward])?;
        let weight = linear::cases::weight_gradient(inputs, map, WriteMode::Overwrite);
        meter.row(&format!("{name}: weight's gradient"), sizes.layers, &[weight])?;
        let input = linear::cases::input_gradient(inputs, map);
        meter.row(&format!("{name}: input's gradient"), sizes.layers, &[input])?;
    }
    let head = LinearMap { name: "head", inputs: sizes.d, outputs: sizes.v };
    let maps = (0..sizes.layers).flat_map(|_| sizes.linear_maps()).chain([head]);
    let gemvs: Vec<Case> = maps.map(|map| linear::cases::output(inputs, [1, map.inputs, map.outputs])).collect();
    meter.row("decode: GEMVs per token", 0, &gemvs)
}

/// Attention.
fn attend(sizes: &Sizes, inputs: &mut Inputs, meter: &Meter<'_>) -> Result<()> {
    let shape = AttentionShape { heads: sizes.heads, batch: sizes.batch, sequence_length: sizes.length };
    let of = attention::cases::Sizes { shape, packed: false };
    let cases = [attention::cases::outputs(inputs, of), attention::cases::gradient(inputs, of)?];
    meter.row("attention: forward", 0, &cases[..1])?;
    meter.row("attention: both", sizes.layers, &cases)
}

/// What is computed row by row.
fn rows(sizes: &Sizes, inputs: &mut Inputs, meter: &Meter<'_>) -> Result<()> {
    let &Sizes { batch, length, n, d, i, v, heads, layers, recompute } = sizes;
    let cases = [add_rms_norm::cases::norm_of_sum(inputs, [n, d]), add_rms_norm::cases::gradient(inputs, [n, d], true)];
    meter.row("add, rms norm: both", 2 * layers + 1, &cases)?;
    let recomputes = recompute == Recompute::Selective;
    let recomputation = add_rms_norm::cases::norm_again(inputs, [n, d]);
    meter.row("rms norm: again", if recomputes { 2 * layers } else { 0 }, &[recomputation])?;

    // What other architectures than Llama have.
    let packed = [n, heads.packed_width()];
    let cases = [bias::cases::sum(inputs, packed), bias::cases::gradient(inputs, packed)];
    meter.row("qkv bias: both", 0, &cases)?;
    let cases = [qk_norm::cases::norm(inputs, n, heads), qk_norm::cases::gradient(inputs, n, heads)];
    meter.row("qk norm: both", 0, &cases)?;

    let positions = Positions { layout: heads, batch, length, first: 0 };
    let cases = [true, false].map(|forward| rope::cases::rotation(inputs, positions, forward));
    meter.row("rope: both", layers, &cases.into_iter().collect::<Result<Vec<_>>>()?)?;
    let gradient = if recomputes { swiglu::cases::gradient_recomputing } else { swiglu::cases::gradient };
    let cases = [swiglu::cases::activation(inputs, [n, i]), gradient(inputs, [n, i])];
    meter.row("swiglu: both", layers, &cases)?;
    let cases = [embedding::cases::lookup(inputs, [n, v, d]), embedding::cases::gradient(inputs, [n, v, d])];
    meter.row("embedding: both", 1, &cases)
}

/// Head and loss: three matmuls per chunk of rows; the logits, which a cache could keep, are not counted.
fn head(sizes: &Sizes, inputs: &mut Inputs, meter: &Meter<'_>) -> Result<()> {
    let &Sizes { n, d, v, .. } = sizes;
    let (c, w) = (HEAD_ROWS.min(n), head_cross_entropy::logits_width(v, DeviceKind::Cpu));
    let of = head_cross_entropy::cases::Sizes { n, d, v, vocab_size: v, c, w, ignores: false };
    let cases = head_cross_entropy::cases::loss_and_gradients(inputs, of, WriteMode::Overwrite);
    meter.row("head, cross-entropy: both", 1, &[cases])
}

/// Gradient norm, clipping and `AdamW`; then zeroing the gradients.
fn optimize(sizes: &Sizes, inputs: &mut Inputs, meter: &Meter<'_>) -> Result<()> {
    let parameters = sizes.parameters();
    let update = adamw::cases::update(inputs, parameters, true);
    meter.row(
        "clip, AdamW",
        1,
        &[grad_norm::cases::norm(inputs, parameters), grad_norm::cases::clipping(0.5), update],
    )?;
    // Only the gradients of the embedding and of norms are accumulated from zero.
    let added = [parameters - sizes.matmul_weights()];
    let zeros = BufferContents::from_numbers(vec![0.0; added[0]], DType::F32);
    let zero = Case::new("Buffer::zero f32", added[0].to_string())
        .updated("grad", &added, zeros, bounds::EXACT)
        .bytes(DType::F32.size_in_bytes() * added[0])
        .call(|[grad]| grad.zero());
    meter.row("gradients to zero", 1, &[zero])
}
