//! How fast a run trains: by a roofline of a GPU's rates, by operations timed on this machine's CPU, or as `bench` has
//! measured it.

use std::collections::BTreeMap;

use kernels::DeviceKind;
use model::{ParameterLayout, dtype_of};
use run_config::RunConfig;
use serde::Serialize;

use super::{
    calibration::Calibration,
    gpu_table::{GpuSpec, SustainedFractions},
    interconnect::{ExchangeSpeed, GRADIENT_BYTES, Network, bytes_per_rank},
    launches::processors,
    measured::MeasuredStep,
    operations_table::StepOperations,
    roofline::{LAUNCH_SECONDS, Rates, Roofline},
    step_part::StepPart,
};
use crate::{
    device::GpuMemory,
    engine::{EngineSettings, StepOf, share_after_backward},
    ranks::RankInfo,
};

/// Where a speed comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SpeedSource {
    /// From the rates that the GPU's kernels, or a CPU's matmuls, sustain, at worst and at best.
    Roofline,
    /// From the operations of a few steps, timed on this machine.
    Calibration,
    /// As `bench` measured the same config on this machine.
    Bench,
}

/// The speed of a config. Ranges are pessimistic first; both ends are one number where it was timed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Speed {
    /// Positions per second: target tokens where every position has one, as in text. Of conversations fewer have.
    pub tokens_per_second: [f64; 2],
    /// Seconds of an optimizer step.
    pub step_seconds: [f64; 2],
    /// Model FLOPs per second over the GPU's nominal ones; none on a CPU.
    pub mfu: Option<[f64; 2]>,
    /// The fraction of a step that each part takes; none where only whole steps were measured.
    pub parts: Option<BTreeMap<&'static str, f64>>,
    /// The exchange between the ranks in a step; none for one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exchange: Option<ExchangeSpeed>,
    /// Where it comes from.
    pub source: SpeedSource,
    /// The source in words, such as `by the roofline of an RTX 5090`.
    pub origin: String,
}

/// Predicts the time of a step of one config and of its variants on one device.
#[derive(Clone, Debug)]
pub(super) struct SpeedModel {
    /// Rates of the device, pessimistic and optimistic.
    rates: [Rates; 2],
    /// Factors of the roofline's seconds: 1, or those with which the config's own step takes what was timed.
    scale: [f64; 2],
    /// Seconds of each part of the config's own step, where they were timed.
    parts: Option<BTreeMap<StepPart, f64>>,
    peak: Option<f64>,
    /// The network between the ranks, if there are several.
    network: Option<Network>,
    source: SpeedSource,
    origin: String,
}

/// Fractions assumed for a CPU, to compare variants of one config: GEMMs reach the matmul speed, attention half of it.
const CPU_FRACTIONS: SustainedFractions =
    SustainedFractions { gemm: 1.0, attention_forward: 0.5, attention_backward: 0.5, memory: 1.0 };
/// Memory bandwidth assumed for a CPU, for the same comparison.
const CPU_BYTES_PER_SECOND: f64 = 20e9;

/// Seconds of a CPU's step that was not timed, over those of its roofline: steps that were measured reach 64 to 89% of
/// the roofline (docs/experiments/cpu-training.md).
const UNTIMED_STEP: [f64; 2] = [1.0 / 0.6, 1.0 / 0.9];

/// The backward pass as a share of a micro-batch: two of the three GEMMs of every matrix.
const BACKWARD_SHARE: f64 = 2.0 / 3.0;

/// The same step taken by one process.
fn alone(step: StepOf<'_>) -> StepOf<'_> {
    StepOf { settings: EngineSettings { rank_info: RankInfo::default(), ..step.settings }, ..step }
}

/// Bytes that each rank sends and receives in a step.
fn exchanged(StepOf { config, shape, settings }: StepOf<'_>) -> f64 {
    let weight = dtype_of(config.runtime.precision).size_in_bytes();
    bytes_per_rank(ParameterLayout::new(shape).trainable_elements(), weight, settings.rank_info)
}

impl SpeedModel {
    /// The model of a GPU of the table.
    pub(super) fn of_spec(gpu: &GpuSpec, config: &RunConfig) -> Self {
        Self {
            rates: Rates::of_gpu(gpu, config),
            scale: [1.0; 2],
            parts: None,
            peak: Some(gpu.bf16_flops()),
            network: None,
            source: SpeedSource::Roofline,
            origin: format!("by the roofline of the {}", gpu.name),
        }
    }

    /// The model of a GPU of this machine; none where its nominal speed is not known. One that is not in the table is
    /// taken for an RTX 5090 whose rates are scaled by the nominal FLOPs.
    pub(super) fn of_gpu(gpu: &GpuMemory, config: &RunConfig) -> Option<Self> {
        if let Some(spec) = GpuSpec::find(&gpu.name, gpu.total) {
            return Some(Self::of_spec(spec, config));
        }
        let (peak, reference) = (gpu.peak?, GpuSpec::rtx_5090());
        let mut model = Self::of_spec(reference, config);
        for rates in &mut model.rates {
            rates.flops *= peak / reference.bf16_flops();
            rates.bytes_per_second *= peak / reference.bf16_flops();
        }
        let (name, teraflops) = (&gpu.name, peak / 1e12);
        model.origin = format!("for the {teraflops:.1} TFLOP/s of {name}, by the roofline of an RTX 5090 so fast");
        Some(Self { peak: Some(peak), ..model })
    }

    /// The model of a GPU of unknown speed, to be scaled to a measured step.
    pub(super) fn of_unknown_gpu(config: &RunConfig) -> Self {
        Self { peak: None, ..Self::of_spec(GpuSpec::rtx_5090(), config) }
    }

    /// The model of a CPU whose matmuls run at `flops`, and on which operations of the config were timed.
    pub(super) fn of_cpu(flops: f64, calibration: Calibration, step: StepOf<'_>) -> Self {
        let model = Self { parts: Some(calibration.parts), ..Self::unscaled_cpu(flops) };
        model.scaled_to(calibration.seconds, step)
    }

    /// The model of a CPU whose matmuls run at `flops`, and for which a step of the config is too large to be timed.
    pub(super) fn of_untimed_cpu(flops: f64) -> Self {
        let origin = "by the speed of matmuls on this CPU; a step of this model is too large to be timed".to_owned();
        Self { scale: UNTIMED_STEP, source: SpeedSource::Roofline, origin, ..Self::unscaled_cpu(flops) }
    }

    /// The model of a CPU whose matmuls run at `flops`, before anything else is known.
    pub(super) fn unscaled_cpu(flops: f64) -> Self {
        let rates = Rates {
            flops,
            fp8_speedup: 1.0,
            bytes_per_second: CPU_BYTES_PER_SECOND,
            fractions: CPU_FRACTIONS,
            launch_seconds: LAUNCH_SECONDS,
        };
        let (source, origin) =
            (SpeedSource::Calibration, "from operations of this config timed on this CPU".to_owned());
        Self { rates: [rates; 2], scale: [1.0; 2], parts: None, peak: None, network: None, source, origin }
    }

    /// The same model, whose origin says if other programs slowed down what was timed.
    pub(super) fn under_load(mut self, load: Option<f64>) -> Self {
        let busy = load.map(|load| format!(" while other programs kept it busy (load average {load:.1})"));
        self.origin += &busy.unwrap_or_default();
        self
    }

    /// The model, scaled to a step of the config that `bench` measured.
    pub(super) fn measured(self, measured: &MeasuredStep, step: StepOf<'_>) -> Self {
        let origin = format!("as `bench` measured it here on {}", measured.date());
        Self { source: SpeedSource::Bench, origin, ..self.scaled_to(measured.step_seconds, step) }
    }

    /// The model for ranks that this network connects.
    pub(super) fn connected_by(self, network: Network) -> Self {
        Self { network: Some(network), ..self }
    }

    /// The model, scaled so that one process takes these seconds for a step.
    fn scaled_to(mut self, seconds: f64, step: StepOf<'_>) -> Self {
        self.scale = [1.0; 2];
        self.scale = self.computing_seconds(alone(step)).map(|predicted| seconds / predicted);
        self
    }

    /// Seconds of a step without the exchange between ranks, pessimistic and optimistic.
    fn computing_seconds(&self, step: StepOf<'_>) -> [f64; 2] {
        let roofline = Roofline::new(step);
        [0, 1].map(|end| self.scale[end] * roofline.seconds(&self.rates[end]))
    }

    /// Seconds of a step, pessimistic and optimistic.
    pub(super) fn step_seconds(&self, step: StepOf<'_>) -> [f64; 2] {
        let (computing, exposed) = (self.computing_seconds(step), self.exposed_seconds(step));
        [0, 1].map(|end| computing[end] + exposed[end])
    }

    /// Seconds of the exchange between ranks in which nothing is computed.
    fn exposed_seconds(&self, step: StepOf<'_>) -> [f64; 2] {
        let StepOf { config, shape, settings } = step;
        let Some(network) = &self.network else { return [0.0; 2] };
        // Processes on one CPU exchange with the cores that compute, and virtual shards are summed before.
        if settings.device == DeviceKind::Cpu || config.runtime.deterministic_reduction.is_some() {
            return network.seconds(exchanged(step));
        }
        let world_size = settings.rank_info.world_size;
        let weight = dtype_of(config.runtime.precision).size_in_bytes();
        let share_of_gradients = GRADIENT_BYTES as f64 / (GRADIENT_BYTES + weight) as f64;
        let share_beside = share_of_gradients * (1.0 - share_after_backward(&ParameterLayout::new(shape), world_size));
        let micro_batches = (config.data.sequences_per_step / settings.micro_batch) as f64;
        let (seconds, computing) = (network.seconds(exchanged(step)), self.computing_seconds(step));
        [0, 1].map(|end| {
            let backward = BACKWARD_SHARE * computing[end] * world_size as f64 / micro_batches;
            seconds[end] - (share_beside * seconds[end]).min(backward)
        })
    }

    /// The speed of the config that the model was made for, or of a variant of it.
    pub(super) fn speed(&self, step: StepOf<'_>) -> Speed {
        let step_seconds = self.step_seconds(step);
        let tokens_per_second = step_seconds.map(|seconds| step.config.data.tokens_per_step() as f64 / seconds);
        let flops = step.shape.flops_per_token(step.config.data.sequence_length);
        let peak = self.peak.map(|peak| peak * step.settings.rank_info.world_size as f64);
        let mfu = peak.map(|peak| tokens_per_second.map(|tokens| tokens * flops / peak));
        let exchange = self.network.as_ref().map(|network| self.exchange(step, network));
        let (source, origin) = (self.source, self.origin.clone());
        Speed { tokens_per_second, step_seconds, mfu, parts: self.shares(step), exchange, source, origin }
    }

    /// The operations of a step, at the optimistic end of its speed; none for a GPU of unknown rates.
    pub(super) fn operations(&self, step: StepOf<'_>) -> Option<StepOperations> {
        if step.settings.device == DeviceKind::Cuda && self.peak.is_none() {
            return None;
        }
        let roofline = Roofline::new(step);
        Some(StepOperations::new(&roofline, &self.rates[1], self.scale[1], &self.speed(step)))
    }

    fn exchange(&self, step: StepOf<'_>, network: &Network) -> ExchangeSpeed {
        let (alone, seconds) = (self.computing_seconds(alone(step)), self.step_seconds(step));
        let efficiency = |end: usize| alone[end] / processors(step.settings) as f64 / seconds[end];
        ExchangeSpeed {
            link: network.name.clone(),
            bytes_per_rank: exchanged(step),
            seconds: network.seconds(exchanged(step)),
            exposed_seconds: self.exposed_seconds(step),
            efficiency: [0, 1].map(efficiency),
        }
    }

    /// Returns the fraction of a step that each part takes; none where only whole steps were measured.
    fn shares(&self, step: StepOf<'_>) -> Option<BTreeMap<&'static str, f64>> {
        let parts = match self.source {
            SpeedSource::Roofline => Roofline::new(step).seconds_by_part(&self.rates[1]),
            SpeedSource::Calibration => self.parts.clone()?,
            SpeedSource::Bench => return None,
        };
        let sum: f64 = parts.values().sum();
        let exchange = self.exposed_seconds(step)[1] / self.step_seconds(step)[1];
        let of_step = (1.0 - exchange) / sum;
        let parts = parts.into_iter().map(|(part, seconds)| (part.name(), seconds * of_step));
        Some(parts.chain(self.network.is_some().then_some(("exchange", exchange))).collect())
    }
}
