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
    engine::{Engine, EngineSettings, RunBuffers},
    error::{Result, TrainerError},
};

/// Allocates every buffer of a run. All weights are zero: fill them, then [`Engine::warm_up`].
///
/// # Errors
/// [`TrainerError::OutOfMemory`] if the device has less left than the plan was made against.
pub fn allocate(config: &RunConfig, shape: &ModelShape, settings: EngineSettings, device: &Device) -> Result<Engine> {
    let buffers = RunBuffers::new(config, shape, settings);
    let arena = buffers.plan.allocate(device).map_err(|error| does_not_fit(error, config, shape, settings, device))?;
    Engine::bind(config, settings, &buffers, &arena, device)
}

/// What to tell a run whose device refused the buffers although they fitted the plan: something else took the memory
/// meanwhile.
fn does_not_fit(
    error: kernels::Error,
    config: &RunConfig,
    shape: &ModelShape,
    settings: EngineSettings,
    device: &Device,
) -> TrainerError {
    let left = PlanTarget::open(device).ok().and_then(|target| budget::here(config, Limit::of_config(config), &target));
    match (error, left) {
        (kernels::Error::OutOfMemory { .. } | kernels::Error::HostMemory { .. }, Some(mut budget)) => {
            let needed = RunBuffers::new(config, shape, settings).plan.bytes();
            budget.bytes = budget.bytes.min(needed - 1);
            TrainerError::OutOfMemory(Box::new(fit::shortage(config, shape, settings, &budget)))
        }
        (error, _) => error.into(),
    }
}
