//! Makes a plan: lists the buffers of a run, predicts its speed, and derives what both lead to.

use kernels::{DeviceKind, memory::Plan};
use model::dtype_of;
use run_config::{DataFormat, RunConfig};

use super::{
    Budget, CategoryBytes, Cost, MemoryPlan, PlanRequest, StagePlan, TrainingTime, fit, launches::processors, options,
    ranks::check_ranks, speed::SpeedModel, stages, target::PlanTarget, this_machine::Machine, workload::Workload,
};
use crate::{
    checkpoint,
    engine::{EngineSettings, Parts, StepOf, model_shape},
    error::Result,
    ranks::RankInfo,
    schedule::sequences_at,
};

/// Host memory that saving takes besides the buffers: a piece of 2^20 elements as numbers and as bytes.
const SAVING_BYTES: u64 = 8 << 20;

/// Bytes that the program itself takes on a CPU, measured: code, tokenizer, threads and what reading a file needs.
const PROGRAM_BYTES: u64 = 57_000_000;

/// Plans a run for one device, as a request asks.
pub(super) struct Planner<'a, M> {
    pub(super) config: &'a RunConfig,
    pub(super) request: &'a PlanRequest,
    pub(super) target: &'a PlanTarget,
    pub(super) machine: &'a M,
    pub(super) rank_info: RankInfo,
}

/// How fast a run is, and how long it takes.
struct Prediction {
    /// None where no speed is known.
    model: Option<SpeedModel>,
    stages: Vec<StagePlan>,
    total_tokens: Option<u64>,
    training_time: Option<TrainingTime>,
}

impl<M: Machine> Planner<'_, M> {
    /// Plans the run within a budget, whether it fits or not.
    pub(super) fn plan(&self, budget: Option<Budget>) -> Result<MemoryPlan> {
        let &Self { config, target, rank_info, .. } = self;
        let shape = model_shape(config)?;
        let budget = match target.kind() {
            DeviceKind::Cpu => budget.map(|budget| budget.shared_by(rank_info.local_world_size)),
            DeviceKind::Cuda => budget,
        };
        let activation_recompute = config.runtime.activation_recompute;
        let settings =
            |micro_batch| EngineSettings { micro_batch, activation_recompute, device: target.kind(), rank_info };
        let configs = config.stage_configs();
        let micro_batches = fit::micro_batches(&configs, &shape, budget.as_ref(), target.kind(), rank_info);
        let steps = configs.iter().zip(micro_batches);
        let steps = steps.map(|(config, sequences)| StepOf { config, shape: &shape, settings: settings(sequences) });
        let steps: Vec<_> = steps.collect();
        steps.iter().try_for_each(check_ranks)?;
        self.plan_steps(&steps, budget)
    }

    /// Plans the run whose stages have these steps.
    fn plan_steps(&self, steps: &[StepOf<'_>], budget: Option<Budget>) -> Result<MemoryPlan> {
        let &Self { config, request, target, rank_info, .. } = self;
        let step = steps[fit::largest_stage(steps)];
        let StepOf { config: RunConfig { data, .. }, shape, settings } = step;
        let (parts, buffers) = Parts::count(steps);
        let lacking = budget.as_ref().filter(|budget| budget.bytes < buffers.bytes());
        let work = Workload::new(step.config)?;
        let Prediction { model, stages, total_tokens, training_time } =
            self.predict(steps, work.total_tokens, lacking.is_none())?;
        let model = model.as_ref();
        let operations = request.operations(step, model, &target.name(self.machine))?;
        let seconds = training_time.as_ref().and_then(|time| time.seconds);
        let cost = |seconds| Cost::new(seconds, target.spec().map(|gpu| gpu.watts), processors(settings), request);
        let state = parts.optimizer.state().iter().map(|tensor| &tensor.layout);
        let has_stages = config.stages.is_some();
        Ok(MemoryPlan {
            device: target.described(self.machine),
            parameters: shape.parameter_count(),
            trainable_parameters: shape.trainable_parameter_count(),
            fp8_base: shape.has_fp8_base(),
            flops_per_token: work.flops_per_token,
            precision: config.runtime.precision,
            activation_recompute: config.runtime.activation_recompute,
            sequence_length: data.sequence_length as u64,
            micro_batch: settings.micro_batch as u64,
            gradient_accumulation_steps: (data.sequences_per_step / settings.micro_batch) as u64,
            ranks: (rank_info.world_size > 1).then_some(rank_info.world_size as u64),
            rank_info,
            deterministic_reduction: config.runtime.deterministic_reduction.map(|shards| shards as u64),
            conversations: data.format == DataFormat::Chat,
            sequences_per_step: data.sequences_per_step as u64,
            tokens_per_step: data.tokens_per_step() as u64,
            batch_warmup: (config.scheduler.batch_warmup_steps > 0)
                .then(|| (sequences_at(config, 1) as u64, config.scheduler.batch_warmup_steps)),
            total_steps: config.scheduler.total_steps,
            total_tokens,
            bytes: buffers.bytes(),
            process_bytes: (target.kind() == DeviceKind::Cpu)
                .then(|| buffers.bytes() + PROGRAM_BYTES + SAVING_BYTES + dataset::expected_memory(data)),
            bytes_by_category: bytes_by_category(&buffers),
            checkpoint_bytes: checkpoint::expected_bytes(shape, dtype_of(config.runtime.precision), state),
            checkpoints: (config.runtime.checkpoint.max_keep + config.runtime.evaluation.best.max_keep + 1) as u64,
            saving_bytes: SAVING_BYTES,
            optimizer_share: work.optimizer_share(),
            training_time,
            cost: seconds.and_then(cost),
            largest_micro_batches: if has_stages {
                Vec::new()
            } else {
                fit::largest_micro_batches(step, budget.as_ref(), model)
            },
            shortage: lacking.map(|budget| fit::shortage(steps, budget)),
            options: lacking.filter(|_| !has_stages).map_or_else(Vec::new, |budget| options::list(step, budget, model)),
            stages,
            speed: model.map(|model| model.speed(step)),
            budget,
            operations,
        })
    }

    /// Predicts how fast the run is. Only the steps of its largest stage are timed.
    fn predict(&self, steps: &[StepOf<'_>], run_tokens: Option<u64>, has_room: bool) -> Result<Prediction> {
        let &Self { config, request, target, machine, rank_info } = self;
        let step = steps[fit::largest_stage(steps)];
        // There is no room to time operations in, and nothing to compare.
        let is_timed = request.times_operations && has_room;
        // A rank that trains has no use for a prediction.
        let is_predicted = rank_info.world_size == 1 || request.ranks.is_some();
        let model = if is_predicted { target.speed_model(step, machine, is_timed)? } else { None };
        let model = model.map(|model| target.connect(model, rank_info, request.interconnect));
        let has_stages = config.stages.is_some();
        let stages = if has_stages { stages::plan(config, steps, model.as_ref()) } else { Vec::new() };
        let total_tokens = if has_stages { Some(stages::tokens(&stages)) } else { run_tokens };
        let seconds = match (&model, total_tokens) {
            (Some(model), Some(tokens)) if !has_stages => {
                Some(model.speed(step).tokens_per_second.map(|rate| tokens as f64 / rate))
            }
            _ => stages::seconds(&stages),
        };
        let training_time =
            TrainingTime::new(config, total_tokens, step.shape.parameter_count(), seconds, machine.now());
        Ok(Prediction { model, stages, total_tokens, training_time })
    }
}

fn bytes_by_category(buffers: &Plan) -> Vec<CategoryBytes> {
    let categories = buffers.by_category().into_iter();
    categories.map(|(category, bytes)| CategoryBytes { category: category.to_string(), bytes }).collect()
}
