//! The speed of a step's operations on a GPU, from their FLOPs and bytes as `docs/decisions` counts them for the
//! roofline. Printed without a verdict: a GPU may be busy, hot or slow.

use std::collections::BTreeMap;
use std::time::Duration;

use kernels::cuda::Cuda;
use model::ModelShape;

use super::report::SpeedRow;

/// FLOPs and bytes of one operation in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct OperationCost {
    /// FLOPs of GEMMs; attention's over the causal half, 2 GEMMs forward and 5 backward.
    pub(super) flops: f64,
    /// Bytes read and written, if caches keep nothing between launches.
    pub(super) bytes: f64,
}

impl OperationCost {
    fn bytes(bytes: f64) -> Self {
        Self { flops: 0.0, bytes }
    }

    /// `count` GEMMs of [m, k] and [k, n] in BF16 that move `bytes_of_result` bytes for each element of the result.
    fn gemm(count: f64, [m, n, k]: [f64; 3], bytes_of_result: f64) -> Self {
        Self { flops: count * 2.0 * m * n * k, bytes: count * (2.0 * (m * k + k * n) + bytes_of_result * m * n) }
    }

    fn and(self, other: Self) -> Self {
        Self { flops: self.flops + other.flops, bytes: self.bytes + other.bytes }
    }
}

/// The cost of each operation of a step in BF16 with selective recompute, by name.
pub(super) fn costs(
    shape: &ModelShape,
    tokens: usize,
    micro_batch_tokens: usize,
) -> BTreeMap<&'static str, OperationCost> {
    let heads = shape.heads();
    let [n, m, layers] = [tokens, micro_batch_tokens, shape.num_layers].map(|size| size as f64);
    let [d, i, p, a] =
        [shape.hidden_size, shape.intermediate_size, heads.packed_width(), heads.query_width()].map(|size| size as f64);
    let (v, weights) = (shape.padded_vocab_size as f64, shape.parameter_count() as f64);
    let passes = n / m;
    let (row, count) = (2.0 * n * d, layers * passes);
    let maps = [[d, p], [a, d], [d, 2.0 * i], [i, d]];
    let linear = |of: fn([f64; 2], f64) -> ([f64; 3], f64)| {
        let gemms = maps.iter().map(|&map| {
            let (sizes, result) = of(map, m);
            OperationCost::gemm(count, sizes, result)
        });
        gemms.fold(OperationCost::default(), OperationCost::and)
    };
    let causal = layers * n * shape.max_position_embeddings as f64 * a;
    let (wide, narrow) = (2.0 * n * p, 2.0 * n * a);
    let rotated = layers * 2.0 * 2.0 * n * (p - heads.key_width() as f64);
    let head = OperationCost::gemm(passes, [m, v, d], 4.0)
        .and(OperationCost::gemm(passes, [m, d, v], 2.0))
        .and(OperationCost::gemm(passes, [v, d, m], 8.0))
        .and(OperationCost::bytes(10.0 * n * v));
    BTreeMap::from([
        ("attention::forward", OperationCost { flops: 2.0 * causal, bytes: layers * (wide + narrow) }),
        ("attention::backward", OperationCost { flops: 5.0 * causal, bytes: layers * (2.0 * wide + 3.0 * narrow) }),
        ("linear::forward", linear(|[inputs, outputs], m| ([m, outputs, inputs], 2.0))),
        ("linear::backward_input", linear(|[inputs, outputs], m| ([m, inputs, outputs], 2.0))),
        ("linear::backward_weight", linear(|[inputs, outputs], m| ([outputs, inputs, m], 8.0))),
        ("head_cross_entropy::forward_backward", head),
        ("add_rms_norm::forward_add", OperationCost::bytes(2.0 * layers * 4.0 * row)),
        ("add_rms_norm::normalize", OperationCost::bytes(2.0 * layers * 2.0 * row)),
        ("add_rms_norm::backward", OperationCost::bytes((2.0 * layers + 1.0) * 4.0 * row)),
        ("rope::forward", OperationCost::bytes(rotated)),
        ("rope::backward", OperationCost::bytes(rotated)),
        ("swiglu::forward", OperationCost::bytes(layers * 6.0 * n * i)),
        ("swiglu::backward_recomputing", OperationCost::bytes(layers * 12.0 * n * i)),
        ("grad_norm::forward", OperationCost::bytes(4.0 * weights)),
        ("adamw::step", OperationCost::bytes(28.0 * weights)),
    ])
}

/// Returns one row per operation, the slowest first.
pub(super) fn rows(
    times: &BTreeMap<&'static str, Duration>,
    costs: &BTreeMap<&'static str, OperationCost>,
    gpu: &Cuda,
) -> Vec<SpeedRow> {
    let peak = gpu.nominal_bf16_flops();
    let row = |(&operation, time): (&&'static str, &Duration)| {
        let (seconds, cost) = (time.as_secs_f64(), costs.get(operation).copied().unwrap_or_default());
        let known = |amount: f64| (amount > 0.0 && seconds > 0.0).then(|| amount / seconds / 1e12);
        let teraflops = known(cost.flops);
        SpeedRow {
            operation,
            milliseconds: seconds * 1e3,
            teraflops_per_second: teraflops,
            share_of_peak: teraflops.zip(peak).map(|(reached, peak)| reached * 1e12 / peak),
            terabytes_per_second: known(cost.bytes),
        }
    };
    let mut rows: Vec<SpeedRow> = times.iter().map(row).collect();
    rows.sort_by(|one, other| other.milliseconds.total_cmp(&one.milliseconds));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> ModelShape {
        let preset = run_config::presets().iter().find(|preset| preset.name == "rtx5090_1b").unwrap();
        let config = run_config::RunConfig::parse(preset.text, run_config::Format::Yaml, &[]).unwrap();
        ModelShape::new(&config.model, config.model.vocab_size.unwrap())
    }

    #[test]
    fn gemm_flops_are_those_the_model_counts() {
        let (shape, tokens) = (shape(), 16_384);
        let costs = costs(&shape, tokens, 8192);
        let all: f64 = costs.values().map(|cost| cost.flops).sum();
        // Apart from padding, and from the scores that attention's backward pass recomputes: 5 GEMMs, of which the
        // model counts 4.
        let scores = costs["attention::backward"].flops / 5.0;
        let counted = shape.flops_per_token(2048) * tokens as f64;
        assert!(((all - scores) / counted - 1.0).abs() < 2e-4, "{all:e} {scores:e} {counted:e}");
    }

    #[test]
    fn bytes_are_those_of_the_roofline() {
        let costs = costs(&shape(), 8192, 8192);
        // As `benches/gpu/roofline.py` prints them: launches times MB per launch.
        for (operation, megabytes) in [
            ("attention::forward", 20.0 * 83.9),
            ("linear::backward_weight", 20.0 * (134.2 + 100.7 + 570.4 + 302.0)),
            ("add_rms_norm::forward_add", 40.0 * 134.2),
            ("rope::forward", 20.0 * 83.9),
            ("swiglu::backward_recomputing", 20.0 * 805.3),
        ] {
            let bytes = costs[operation].bytes / 1e6;
            assert!((bytes / megabytes - 1.0).abs() < 1e-3, "{operation}: {bytes}");
        }
    }
}
