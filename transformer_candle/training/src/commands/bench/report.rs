//! What `bench` has measured.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::memory_plan::{Calibration, Calibrator, Speed};
use crate::units::{bytes, counted, flops, grouped, step_time};

/// The result of `bench`: means over the steps.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BenchReport {
    /// The device: `cpu`, or the GPU with its driver and library.
    pub device: String,
    /// Optimizer steps measured, as many as were asked for or as the budget allowed.
    pub steps: u32,
    /// Target tokens per second.
    pub tokens_per_second: f64,
    /// Model FLOPs per token: 6 per weight in a matmul, plus 6 L A T for causal attention, regardless of what is
    /// recomputed ([`model::ModelShape::flops_per_token`]).
    pub model_flops_per_token: f64,
    /// Model FLOPs per second.
    pub model_flops_per_second: f64,
    /// `model_flops_per_second` over `nominal_flops_per_second`.
    pub mfu: Option<f64>,
    /// The GPU's nominal BF16 peak, dense; none where it is not known, as on a CPU or a MIG slice.
    pub nominal_flops_per_second: Option<f64>,
    /// `model_flops_per_second` over `product_flops_per_second`; none on a CPU.
    pub mfu_measured: Option<f64>,
    /// FLOPs per second of a large BF16 GEMM measured in the same run; none on a CPU.
    pub product_flops_per_second: Option<f64>,
    /// Bytes of the planned buffers.
    pub memory_bytes: u64,
    /// Bytes of the GPU's memory that were taken between its opening and the last step's end; none on a CPU.
    pub memory_used_bytes: Option<u64>,
    /// Sequences of a micro-batch.
    pub micro_batch: u64,
    /// Tokens of an optimizer step.
    pub tokens_per_step: u64,
    /// Milliseconds of an optimizer step, and of its parts ([`crate::memory_plan::StepPart`]). The step is measured as
    /// it is trained; the parts in a pass of their own, one operation after the other, and left out where the budget has
    /// no step left for it. `other` is the rest of the step: negative where operations overlap in it.
    pub milliseconds: BTreeMap<&'static str, f64>,
    /// Milliseconds of the median step, which `plan` shows from then on.
    pub median_step_milliseconds: f64,
    /// What `plan` would have predicted without this measurement; none where it cannot predict, or has no time for it.
    pub prediction: Option<StepPrediction>,
}

/// A step's predicted time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepPrediction {
    /// Milliseconds, pessimistic and optimistic; one number on a CPU, whose operations are timed.
    pub step_milliseconds: [f64; 2],
    /// `step_milliseconds` over the median step's.
    pub over_measured: [f64; 2],
    /// The fraction of a step that each part takes.
    pub parts: Option<BTreeMap<&'static str, f64>>,
    /// What the prediction is based on.
    pub origin: String,
}

impl StepPrediction {
    pub(super) fn new(calibrator: Option<&Calibrator<'_>>, roofline: Option<Speed>, measured: f64) -> Option<Self> {
        let of_range = |seconds: [f64; 2], parts, origin| Self {
            step_milliseconds: seconds.map(|seconds| seconds * 1e3),
            over_measured: seconds.map(|seconds| seconds / measured),
            parts,
            origin,
        };
        let by_roofline = roofline.map(|speed| of_range(speed.step_seconds, speed.parts, speed.origin));
        by_roofline.or_else(|| {
            let Calibration { seconds, parts } = calibrator?.predict();
            let sum: f64 = parts.values().sum();
            let shares = parts.into_iter().map(|(part, seconds)| (part.name(), seconds / sum)).collect();
            let origin = "from operations of this config, timed in turns with the steps".to_owned();
            Some(of_range([seconds; 2], Some(shares), origin))
        })
    }
}

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = self.milliseconds.get("step").map_or(self.median_step_milliseconds, |step| *step);
        let mut rows = vec![
            ("device", self.device.clone()),
            ("speed", format!("{} tokens/s", grouped(self.tokens_per_second.round() as u64))),
            (
                "step",
                format!(
                    "{} for {} tokens in micro-batches of {}, the mean of {}; the median is {}",
                    milliseconds(step),
                    grouped(self.tokens_per_step),
                    counted(self.micro_batch, "sequence"),
                    counted(self.steps.into(), "step"),
                    milliseconds(self.median_step_milliseconds),
                ),
            ),
        ];
        rows.extend(self.parts().map(|parts| ("", parts)));
        rows.push(("work", self.work()));
        let gpu_loss = self.memory_used_bytes.map(|gpu_loss| format!("; the GPU's memory lost {}", bytes(gpu_loss)));
        rows.push(("memory", format!("{} of buffers{}", bytes(self.memory_bytes), gpu_loss.unwrap_or_default())));
        rows.extend(self.prediction.as_ref().map(|prediction| ("predicted", prediction.to_string())));
        rows.push(("", "`plan` shows the measured speed of this config from now on".to_owned()));
        let lines: Vec<String> = rows.iter().map(|(name, text)| format!("{name:<11}{text}")).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl BenchReport {
    /// `gemm 5.6 ms, attention 2.9 ms`, the longest first; none where parts were not timed.
    fn parts(&self) -> Option<String> {
        let mut parts: Vec<_> = self.milliseconds.iter().filter(|(name, _)| **name != "step").collect();
        parts.sort_by(|a, b| b.1.total_cmp(a.1));
        let part_times: Vec<String> =
            parts.iter().map(|(name, time)| format!("{} {}", name.replace('_', " "), milliseconds(**time))).collect();
        (!part_times.is_empty()).then(|| format!("{}, each timed alone", part_times.join(", ")))
    }

    /// `0.62 MFLOP per token, 43.47 GFLOP/s, MFU 54.6 %`
    fn work(&self) -> String {
        let rate = format!("{} per token, {}/s", flops(self.model_flops_per_token), flops(self.model_flops_per_second));
        let share = |mfu: Option<f64>, peak: Option<f64>, of: &str| {
            mfu.zip(peak).map(|(mfu, peak)| format!(", {:.1} % of {}/s, {of}", 100.0 * mfu, flops(peak)))
        };
        let nominal = share(self.mfu, self.nominal_flops_per_second, "the nominal peak (MFU)");
        let product = share(self.mfu_measured, self.product_flops_per_second, "which a large GEMM takes here");
        [Some(rate), nominal, product].into_iter().flatten().collect()
    }
}

impl fmt::Display for StepPrediction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [slow, fast] = self.step_milliseconds.map(milliseconds);
        let [most, least] = self.over_measured;
        let times = if slow == fast { slow } else { format!("{fast} to {slow}") };
        let [most, least] = [most, least].map(|ratio| format!("{ratio:.2}"));
        let over = if most == least { most } else { format!("{least} to {most}") };
        write!(f, "{times} per step, {over} times the median, {}", self.origin)
    }
}

fn milliseconds(time: f64) -> String {
    if time < 0.0 { format!("-{}", step_time(-time / 1e3)) } else { step_time(time / 1e3) }
}
