//! The speed of a step's operations on a GPU, from their FLOPs and bytes as the roofline counts them. Printed without a
//! verdict: a GPU may be busy, hot or slow.

use std::collections::BTreeMap;
use std::time::Duration;

use kernels::cuda::Cuda;
use training::memory_plan::OperationCost;

use super::report::SpeedRow;

/// Returns one row per operation, the slowest first.
pub(super) fn rows(
    times: &BTreeMap<&'static str, Duration>,
    costs: &BTreeMap<&'static str, OperationCost>,
    gpu: &Cuda,
) -> Vec<SpeedRow> {
    let peak = gpu.nominal_bf16_flops();
    let row = |(&operation, time): (&&'static str, &Duration)| {
        let (seconds, cost) = (time.as_secs_f64(), costs.get(operation).copied().unwrap_or_default());
        let tera_per_second = |amount: f64| (amount > 0.0 && seconds > 0.0).then(|| amount / seconds / 1e12);
        let teraflops = tera_per_second(cost.flops);
        SpeedRow {
            operation,
            milliseconds: seconds * 1e3,
            teraflops_per_second: teraflops,
            share_of_peak: teraflops.zip(peak).map(|(reached, peak)| reached * 1e12 / peak),
            terabytes_per_second: tera_per_second(cost.bytes),
        }
    };
    let mut rows: Vec<SpeedRow> = times.iter().map(row).collect();
    rows.sort_by(|one, other| other.milliseconds.total_cmp(&one.milliseconds));
    rows
}

#[cfg(test)]
mod tests {
    use kernels::DeviceKind;
    use model::ModelShape;
    use run_config::{ActivationRecompute, Format, RunConfig};
    use training::{engine::EngineSettings, memory_plan::operation_costs, ranks::RankInfo};

    use super::*;

    /// Shape and costs of the 1B preset, with steps of `sequences` of 2,048 tokens in micro-batches of 4.
    fn costs(sequences: usize) -> (ModelShape, BTreeMap<&'static str, OperationCost>) {
        let preset = run_config::presets().iter().find(|preset| preset.name == "rtx5090_1b").unwrap();
        let mut config = RunConfig::parse(preset.text, Format::Yaml, &[]).unwrap();
        config.data.sequences_per_step = sequences;
        let shape = ModelShape::new(&config.model, config.model.vocab_size.unwrap());
        let settings = EngineSettings {
            micro_batch: 4,
            activation_recompute: ActivationRecompute::Selective,
            device: DeviceKind::Cuda,
            rank_info: RankInfo::default(),
        };
        let costs = operation_costs(&config, &shape, settings);
        (shape, costs)
    }

    #[test]
    fn gemm_flops_are_those_the_model_counts() {
        let ((shape, costs), tokens) = (costs(8), 16_384);
        let all: f64 = costs.values().map(|cost| cost.flops).sum();
        // Apart from padding, and from the scores that attention's backward pass recomputes: 5 GEMMs, of which the
        // model counts 4.
        let scores = costs["attention::backward"].flops / 5.0;
        let flops = shape.flops_per_token(2048) * f64::from(tokens);
        assert!(((all - scores) / flops - 1.0).abs() < 2e-4, "{all:e} {scores:e} {flops:e}");
    }

    #[test]
    fn operations_move_the_bytes_that_their_sizes_need() {
        let (_, costs) = costs(4);
        // Launches times MB per launch, counted by hand.
        for (operation, megabytes) in [
            ("attention::forward", 20.0 * 83.9),
            ("linear::backward_weight", 20.0 * (134.2 + 100.7 + 570.4 + 302.0)),
            ("add_rms_norm::forward", 67.1),
            ("add_rms_norm::forward_add", 40.0 * 134.2),
            ("rope::forward", 20.0 * 83.9),
            ("swiglu::backward_recomputing", 20.0 * 805.3),
        ] {
            let bytes = costs[operation].bytes / 1e6;
            assert!((bytes / megabytes - 1.0).abs() < 1e-3, "{operation}: {bytes}");
        }
    }
}
