//! The options of a plan.

use model::{ModelShape, ParameterLayout};
use run_config::ByteSize;

use super::{Interconnect, PlanGpu, StepOperations, speed::SpeedModel};
use crate::{
    engine::{StepOf, largest_shard},
    error::{Result, TrainerError},
    ranks::RankInfo,
};

/// The options of a plan, beside the run's config.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PlanRequest {
    /// The GPU to plan for; none for the device that the run would be trained on.
    pub gpu: Option<PlanGpu>,
    /// Memory to plan with, instead of the device's own and of `runtime.memory_limit`.
    pub memory: Option<ByteSize>,
    /// Watts that the machine draws, or with `ranks` each GPU; none for the GPU's board power.
    pub watts: Option<f64>,
    /// The price of a kilowatt-hour, in any currency.
    pub price_per_kwh: Option<f64>,
    /// The price per hour of the rented machine, or with `ranks` of each GPU, in any currency.
    pub price_per_hour: Option<f64>,
    /// Time operations of the run on this machine's CPU, where that is what it is planned for, for two to three seconds.
    /// Otherwise the speed there is known only if `bench` has measured it.
    pub times_operations: bool,
    /// List the operations of a step with the time of each.
    pub lists_operations: bool,
    /// The number of ranks; none for one.
    pub ranks: Option<usize>,
    /// The number of machines that these are on; none for one.
    pub nodes: Option<usize>,
    /// The network of each machine; of one machine the link between its GPUs, instead of the table's.
    pub interconnect: Option<Interconnect>,
}

impl PlanRequest {
    /// Returns the operations of a step by the model of a device, if they are to be listed.
    ///
    /// # Errors
    /// [`TrainerError::Request`] if the device's rates are not known.
    pub(super) fn operations(
        &self,
        step: StepOf<'_>,
        model: Option<&SpeedModel>,
        device: &str,
    ) -> Result<Option<StepOperations>> {
        if !self.lists_operations {
            return Ok(None);
        }
        let unknown = || {
            TrainerError::Request(format!(
                "--operations: no rates are known for {device} with this config, so no operation has a time. Name a \
                 GPU, as in `--gpu rtx5090`"
            ))
        };
        model.and_then(|model| model.operations(step)).map(Some).ok_or_else(unknown)
    }

    /// Returns the rank to plan for: the one with the most parameters to update.
    ///
    /// # Errors
    /// [`TrainerError::Request`] if ranks, machines and network do not go together.
    pub(super) fn rank_info(&self, shape: &ModelShape) -> Result<RankInfo> {
        let (world_size, nodes) = (self.ranks.unwrap_or(1), self.nodes.unwrap_or(1));
        let refuse = |message: String| Err(TrainerError::Request(message));
        if self.ranks.is_none() && (self.nodes.is_some() || self.interconnect.is_some()) {
            return refuse("--nodes and --interconnect are for several ranks: add `--ranks N`".to_owned());
        }
        if !world_size.is_multiple_of(nodes) {
            return refuse(format!("--ranks {world_size}: {nodes} machines cannot have equally many of them"));
        }
        if nodes > 1 && self.interconnect.is_none() {
            return refuse(format!(
                "--nodes {nodes}: say how fast the network of each machine is, as in `--interconnect 400Gb/s`"
            ));
        }
        let rank = largest_shard(&ParameterLayout::new(shape), world_size);
        let local_world_size = world_size / nodes;
        Ok(RankInfo { rank, world_size, local_rank: rank % local_world_size, local_world_size })
    }
}
