//! From a plan that fits to the engine that holds it.

use kernels::Device;
use model::ModelShape;
use run_config::RunConfig;

use super::{
    budget::{self, Limit},
    fit,
    target::PlanTarget,
};
use crate::{
    engine::{Engine, EngineSettings, StagedBuffers, StepOf},
    error::{Result, TrainerError},
};

/// Allocates every buffer of a run without stages. All weights are zero: fill them, then [`Engine::warm_up`].
///
/// # Errors
/// [`TrainerError::OutOfMemory`] if the device has less left than the plan was made against.
pub fn allocate(config: &RunConfig, shape: &ModelShape, settings: EngineSettings, device: &Device) -> Result<Engine> {
    allocate_stages(config, &[StepOf { config, shape, settings }], device)
}

/// As [`allocate`], for the stages of a run. The engine begins with the first one.
pub(crate) fn allocate_stages(config: &RunConfig, stages: &[StepOf<'_>], device: &Device) -> Result<Engine> {
    let buffers = StagedBuffers::new(stages);
    let arena = buffers.plan.allocate(device).map_err(|error| does_not_fit(error, config, stages, device))?;
    Engine::bind(config, &buffers, &arena, device)
}

/// What to tell a run whose device refused the buffers although they fitted the plan: something else took the memory
/// meanwhile.
fn does_not_fit(error: kernels::Error, config: &RunConfig, stages: &[StepOf<'_>], device: &Device) -> TrainerError {
    let left = PlanTarget::open(device).ok().and_then(|target| budget::here(config, Limit::of_config(config), &target));
    match (error, left) {
        (kernels::Error::OutOfMemory { .. } | kernels::Error::HostMemory { .. }, Some(mut budget)) => {
            budget.bytes = budget.bytes.min(StagedBuffers::new(stages).plan.bytes() - 1);
            TrainerError::OutOfMemory(Box::new(fit::shortage(stages, &budget)))
        }
        (error, _) => error.into(),
    }
}
