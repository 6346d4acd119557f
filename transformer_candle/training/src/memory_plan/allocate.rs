//! Allocates the engine of a run whose plan fits.

use kernels::Device;
use model::ModelShape;
use run_config::RunConfig;

use super::{
    budget::{self, Limit},
    fit,
    target::PlanTarget,
    this_machine::ThisMachine,
};
use crate::{
    engine::{Engine, EngineSettings, Parts, StepOf},
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
    Engine::allocate(config, stages, device).map_err(|error| does_not_fit(error, config, stages, device))
}

/// Turns an allocation error into one with the settings that fit: the buffers fitted the plan, so something else took
/// the memory meanwhile.
fn does_not_fit(error: TrainerError, config: &RunConfig, stages: &[StepOf<'_>], device: &Device) -> TrainerError {
    if !error.is_out_of_memory() {
        return error;
    }
    let target = PlanTarget::open(device)
        .ok()
        .and_then(|target| budget::here(config, Limit::of_config(config), &target, &ThisMachine));
    target.map_or(error, |mut budget| {
        budget.bytes = budget.bytes.min(Parts::count(stages).1.bytes() - 1);
        TrainerError::OutOfMemory(Box::new(fit::shortage(stages, &budget)))
    })
}
