//! Everything a run will hold in memory, computed from its config alone.
//!
//! The buffers listed here are the ones that the trainer allocates before its first step: it has no other list. So a
//! run that cannot fit is refused before it starts, with the settings that would fit.

mod allocate;
mod available_memory;
mod bar;
mod budget;
mod calibration;
mod cpu_speed;
mod display;
mod fit;
mod gpu_table;
mod interconnect;
mod launches;
mod measured;
mod operation;
mod operations_table;
mod options;
mod peak_rates;
mod planner;
#[cfg(test)]
mod preset_headers;
mod ranks;
mod request;
mod roofline;
mod speed;
mod stages;
mod step_part;
mod target;
#[cfg(test)]
mod tests;
mod this_machine;
mod training_time;
mod workload;

use kernels::{Device, DeviceKind};
use run_config::{ActivationRecompute, Precision, ResolvedRun, RunConfig};
use serde::Serialize;

pub use self::{
    allocate::allocate,
    budget::require_room,
    gpu_table::{Fp8Speedup, GPUS, GpuSpec, PlanGpu, SustainedFractions},
    interconnect::{ExchangeSpeed, Interconnect, Link},
    operations_table::{OperationRow, StepOperations},
    options::{Change, FitOption},
    ranks::check_sequences,
    request::PlanRequest,
    roofline::{BoundBy, OperationCost, operation_costs},
    speed::{Speed, SpeedSource},
    stages::StagePlan,
    step_part::StepPart,
    training_time::{Cost, TrainingTime},
};
pub(crate) use self::{
    allocate::allocate_stages,
    calibration::{Calibration, Calibrator},
    display::rates,
    peak_rates::{Bounds, PeakRates},
    roofline::Bound,
};
use self::{
    budget::Limit,
    cpu_speed::CpuSpeed,
    planner::Planner,
    speed::SpeedModel,
    target::PlanTarget,
    this_machine::{Machine, ThisMachine},
};
pub use crate::error::{Budget, MemoryRequirement, Shortage};
use crate::{
    engine::{EngineSettings, StepOf, model_shape},
    error::{Result, TrainerError},
    ranks::RankInfo,
};

/// The device that a plan is made for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedDevice {
    /// Its name.
    pub name: String,
    /// A GPU's memory as CUDA reports it; none for a CPU.
    pub memory_bytes: Option<u64>,
    /// Nominal bf16 FLOPs per second of a known GPU; none for a CPU.
    pub bf16_flops: Option<f64>,
    /// The numbers that its speed is predicted from, for a GPU of the table.
    pub gpu: Option<GpuSpec>,
    /// Whether it is assumed: the run needs a GPU, and there is none here.
    pub assumed: bool,
}

/// A run's memory, disk and compute requirements. `Display` prints it for people, serde for programs.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryPlan {
    /// The device that the run is planned for.
    pub device: PlannedDevice,
    /// The stages of the run, in order; empty if it has none. What the plan says of a step, a micro-batch or a speed is
    /// then that of the stage that needs the most memory.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<StagePlan>,
    /// Parameters on disk, without adapters.
    pub parameters: u64,
    /// Parameters that train: all of them, or those of adapters.
    pub trainable_parameters: u64,
    /// Whether the frozen projections beside adapters are held in fp8.
    pub fp8_base: bool,
    /// Model FLOPs per token of a training step.
    pub flops_per_token: f64,
    /// The precision of matmuls and activations.
    pub precision: Precision,
    /// Which activations the backward pass recomputes.
    pub activation_recompute: ActivationRecompute,
    /// Tokens of a sequence.
    pub sequence_length: u64,
    /// Sequences of a micro-batch.
    pub micro_batch: u64,
    /// Micro-batches of an optimizer step, those of all ranks together.
    pub gradient_accumulation_steps: u64,
    /// The number of ranks, which share the micro-batches of a step and the optimizer's state; none for one. All bytes
    /// but those of a checkpoint are of the rank with the most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks: Option<u64>,
    /// The rank that the plan is for.
    #[serde(skip)]
    pub rank_info: RankInfo,
    /// Virtual shards of an optimizer step (`runtime.deterministic_reduction`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deterministic_reduction: Option<u64>,
    /// Whether the data are conversations, of whose positions only some are target tokens.
    #[serde(skip)]
    pub conversations: bool,
    /// Sequences of an optimizer step.
    pub sequences_per_step: u64,
    /// Positions of an optimizer step.
    pub tokens_per_step: u64,
    /// Sequences of the first optimizer step, and the steps over which they grow, if the batch size warms up.
    pub batch_warmup: Option<(u64, u64)>,
    /// Optimizer steps of the run, where the config says how many.
    pub total_steps: Option<u64>,
    /// Tokens of the run.
    pub total_tokens: Option<u64>,
    /// Bytes of all planned buffers.
    pub bytes: u64,
    /// Bytes of each category that has a buffer, in the order of [`kernels::memory::Category`].
    pub bytes_by_category: Vec<CategoryBytes>,
    /// Peak resident set of a training on a CPU, in bytes: the buffers, the program, the data stream's usual memory,
    /// and saving. None on a GPU, whose buffers are elsewhere.
    pub process_bytes: Option<u64>,
    /// The memory that is available, where that is known.
    pub budget: Option<Budget>,
    /// Size of a checkpoint directory: the weights, and what the optimizer keeps from step to step.
    pub checkpoint_bytes: u64,
    /// Checkpoints on disk at most: those kept, the best, and the one being written.
    pub checkpoints: u64,
    /// Host memory that saving takes besides the buffers.
    pub saving_bytes: u64,
    /// The part of a step's FLOPs that are the optimizer's GEMMs; none with `AdamW`, which has none.
    pub optimizer_share: Option<f64>,
    /// The speed of training on the device; none on a CPU where nothing was timed, and on a GPU of unknown speed.
    pub speed: Option<Speed>,
    /// The operations of a step with the time of each; none unless [`PlanRequest::lists_operations`] asks for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operations: Option<StepOperations>,
    /// How long the run trains, where the config says how many steps.
    pub training_time: Option<TrainingTime>,
    /// What the run costs; none where neither a power draw nor a price is known.
    pub cost: Option<Cost>,
    /// The largest micro-batch that fits for each recompute mode, fewest recomputed values first.
    pub largest_micro_batches: Vec<FittingMicroBatch>,
    /// Why the run does not fit and what would; none if it fits or the budget is unknown.
    pub shortage: Option<Shortage>,
    /// What could be changed in a run that does not fit; empty if it fits.
    pub options: Vec<FitOption>,
}

/// A micro-batch that fits, and how fast a step of such micro-batches is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FittingMicroBatch {
    /// The settings, and the memory that they need.
    #[serde(flatten)]
    pub requirement: MemoryRequirement,
    /// Target tokens per second, pessimistic and optimistic.
    pub tokens_per_second: Option<[f64; 2]>,
}

/// The bytes of one category of buffers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CategoryBytes {
    /// What the buffers are for.
    pub category: String,
    /// Their size.
    pub bytes: u64,
}

impl MemoryPlan {
    /// Plans a run for the device that it would be trained on: the GPU that `runtime.device` names or finds, within its
    /// free memory; else an RTX 5090 that is assumed, if the run is meant for a GPU or would take this machine months;
    /// else this machine's CPU. `runtime.memory_limit` holds everywhere. `batch_size: auto` becomes the largest
    /// micro-batch that fits and divides `sequences_per_step`, or one sequence if none does. A plan is made whether it
    /// fits or not: see [`MemoryPlan::check`].
    ///
    /// # Errors
    /// [`TrainerError::Request`] if the vocabulary's size is not known, or if the run is meant for a GPU that does not
    /// take it.
    pub fn new(run: &ResolvedRun) -> Result<Self> {
        Self::for_request(run, &PlanRequest::default())
    }

    /// Plans a run as [`MemoryPlan::new`] does, but for what the request names: a GPU, memory, ranks or prices.
    ///
    /// # Errors
    /// As [`MemoryPlan::new`].
    pub fn for_request(run: &ResolvedRun, request: &PlanRequest) -> Result<Self> {
        Self::on_machine(&run.config, request, &ThisMachine)
    }

    /// Plans a run for an open device, within the memory that it has free: what a trainer may allocate here.
    ///
    /// # Errors
    /// As [`MemoryPlan::new`], and when a GPU does not tell its memory.
    pub fn here(run: &ResolvedRun, device: &Device) -> Result<Self> {
        Self::of_rank(run, device, RankInfo::default())
    }

    /// Plans a run as [`MemoryPlan::here`] does, for one of several ranks.
    ///
    /// # Errors
    /// As [`MemoryPlan::here`], and if the ranks cannot share the run.
    pub fn of_rank(run: &ResolvedRun, device: &Device, rank_info: RankInfo) -> Result<Self> {
        let target = PlanTarget::open(device)?;
        let budget = budget::here(&run.config, Limit::of_config(&run.config), &target, &ThisMachine);
        let request = PlanRequest::default();
        let planner =
            Planner { config: &run.config, request: &request, target: &target, machine: &ThisMachine, rank_info };
        planner.plan(budget)
    }

    fn on_machine(config: &RunConfig, request: &PlanRequest, machine: &impl Machine) -> Result<Self> {
        let target = PlanTarget::choose(config, request.gpu, machine)?;
        let config = &target.resolve(config);
        let limit = request.memory.map(Limit::of_option).or_else(|| Limit::of_config(config));
        let rank_info = request.rank_info(&model_shape(config)?)?;
        let budget = budget::planned(config, limit, &target, machine, rank_info);
        Planner { config, request, target: &target, machine, rank_info }.plan(budget)
    }

    /// Refuses a plan that is larger than what there is.
    ///
    /// # Errors
    /// [`TrainerError::OutOfMemory`] with the largest settings that would fit.
    pub fn check(&self) -> Result<()> {
        match &self.shortage {
            None => Ok(()),
            Some(shortage) => Err(TrainerError::OutOfMemory(Box::new(shortage.clone()))),
        }
    }

    /// Predicts the speed on an open GPU by its roofline; none on a CPU, for which see [`MemoryPlan::calibrator`].
    pub(crate) fn roofline(step: StepOf<'_>, device: &Device) -> Result<Option<Speed>> {
        let PlanTarget::Gpu(gpu) = PlanTarget::open(device)? else { return Ok(None) };
        Ok(SpeedModel::of_gpu(&gpu, step.config).map(|model| model.speed(step)))
    }

    /// Returns a calibrator of a step on this machine's CPU; none where memory or time are too short, and on a GPU.
    ///
    /// # Errors
    /// If an operation fails.
    pub(crate) fn calibrator<'a>(step: StepOf<'a>, device: &Device) -> Result<Option<Calibrator<'a>>> {
        if device.as_cuda().is_some() {
            return Ok(None);
        }
        Calibrator::new(step, CpuSpeed::measure(step.config)?)
    }

    /// Saves the measured time of a step on an open device, for later plans of the same config.
    pub(crate) fn keep_measurement(step: StepOf<'_>, device: &Device, step_seconds: f64) {
        if let Ok(name) = this_machine::device_name(step.config, device) {
            measured::keep(step, &name, step_seconds);
        }
    }

    /// The changes of a run's config with which it fits, those first that change the result least; empty if it fits.
    ///
    /// # Errors
    /// [`TrainerError::OutOfMemory`] if no change is enough.
    pub fn fitting_changes(&self, run: &ResolvedRun, request: &PlanRequest) -> Result<Vec<Change>> {
        self.changes_on(run, request, &ThisMachine)
    }

    fn changes_on(&self, run: &ResolvedRun, request: &PlanRequest, machine: &impl Machine) -> Result<Vec<Change>> {
        let Some(shortage) = &self.shortage else { return Ok(Vec::new()) };
        if run.config.stages.is_some() {
            return Err(TrainerError::OutOfMemory(Box::new(shortage.clone())));
        }
        let target = PlanTarget::choose(&run.config, request.gpu, machine)?;
        let (config, shape) = (target.resolve(&run.config), model_shape(&run.config)?);
        let step = StepOf { config: &config, shape: &shape, settings: self.engine_settings(target.kind()) };
        let model = if target.kind() == DeviceKind::Cpu { None } else { target.speed_model(step, machine, false)? };
        let model = model.map(|model| target.connect(model, self.rank_info, request.interconnect));
        let changes = options::fitting_changes(step, &shortage.budget, model.as_ref());
        changes.ok_or_else(|| TrainerError::OutOfMemory(Box::new(shortage.clone())))
    }

    /// Returns the settings that the plan's buffers are made for; with stages, those of the largest stage.
    pub fn engine_settings(&self, device: DeviceKind) -> EngineSettings {
        let &Self { micro_batch, activation_recompute, rank_info, .. } = self;
        EngineSettings { micro_batch: micro_batch as usize, activation_recompute, device, rank_info }
    }
}
