//! Which GPU a rank trains on: `cuda:R` for rank R of a machine.

use super::{AvailableGpus, Decision};
use crate::{
    error::{Result, TrainerError},
    ranks::RankInfo,
};

/// The environment variable that selects and numbers the GPUs that a process sees.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

impl AvailableGpus {
    /// Returns the device of one of several ranks on this machine: `cuda:R` where `cuda:0` was decided for all of them.
    ///
    /// # Errors
    /// [`TrainerError::Request`] if each cannot have a GPU of its own.
    pub(super) fn of_rank(&self, decision: Decision, rank_info: RankInfo) -> Result<Decision> {
        self.of_rank_seeing(decision, rank_info, std::env::var(VISIBLE).ok().as_deref())
    }

    fn of_rank_seeing(&self, decision: Decision, rank_info: RankInfo, visible: Option<&str>) -> Result<Decision> {
        let RankInfo { local_rank, local_world_size: ranks, .. } = rank_info;
        let run_config::Device::Cuda(ordinal) = decision.device else { return Ok(decision) };
        if ranks == 1 {
            return Ok(decision);
        }
        if ordinal != 0 {
            return Err(TrainerError::Request(format!(
                "the device asked for is cuda:{ordinal}, one GPU for the {ranks} ranks of this machine: `--device cuda` \
                 gives rank R cuda:R, and {VISIBLE} chooses which GPUs these are"
            )));
        }
        let gpus = self.gpus.as_deref().unwrap_or_default();
        let Some(gpu) = gpus.iter().find(|gpu| gpu.ordinal == local_rank && ranks <= gpus.len()) else {
            let names: Vec<String> = gpus.iter().map(|gpu| format!("cuda:{} ({})", gpu.ordinal, gpu.name)).collect();
            let names = names.join(", ");
            let why = visible
                .map_or(String::new(), |text| format!(" with {VISIBLE}={text}, which every rank must see alike"));
            return Err(TrainerError::Request(format!(
                "{ranks} ranks on this machine need a GPU each, and this process sees {names}{why}: start as many ranks \
                 as there are GPUs (--nproc), or train on the CPU with --device cpu"
            )));
        };
        match gpu.refusal() {
            Some(refusal) => {
                Err(TrainerError::Request(format!("rank {} trains on cuda:{local_rank}: {refusal}", rank_info.rank)))
            }
            None => Ok(Decision { device: run_config::Device::Cuda(local_rank), ..decision }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::tests::{machine, old};
    use run_config::Device::{Cpu, Cuda};

    fn rank_info(local_rank: usize, local_world_size: usize) -> RankInfo {
        RankInfo { rank: 4 + local_rank, world_size: 8, local_rank, local_world_size }
    }

    fn device(
        gpus: &AvailableGpus,
        requested_device: run_config::Device,
        rank_info: RankInfo,
    ) -> Result<run_config::Device> {
        let decision = Decision { device: requested_device, note: None };
        gpus.of_rank_seeing(decision, rank_info, Some("3,5")).map(|decision| decision.device)
    }

    fn refused(gpus: &AvailableGpus, requested_device: run_config::Device, rank_info: RankInfo) -> String {
        let error = device(gpus, requested_device, rank_info).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    }

    #[test]
    fn every_rank_of_a_machine_gets_a_gpu() {
        let two = machine(&["RTX 5090", "RTX 5090"]);
        for rank in [0, 1] {
            assert_eq!(device(&two, Cuda(0), rank_info(rank, 2)).unwrap(), Cuda(rank));
            assert_eq!(device(&two, Cpu, rank_info(rank, 2)).unwrap(), Cpu);
        }
        assert_eq!(device(&two, Cuda(1), rank_info(0, 1)).unwrap(), Cuda(1), "the only rank of its machine");
    }

    #[test]
    fn ranks_without_a_gpu_are_refused() {
        let one = machine(&["RTX 5090"]);
        for rank in [0, 1] {
            let message = refused(&one, Cuda(0), rank_info(rank, 2));
            assert!(message.starts_with("2 ranks on this machine need a GPU each"), "{message}");
            assert!(message.contains("sees cuda:0 (RTX 5090) with CUDA_VISIBLE_DEVICES=3,5, which"), "{message}");
        }
        let two = machine(&["RTX 5090", "RTX 5090"]);
        assert!(
            refused(&two, Cuda(1), rank_info(0, 2))
                .starts_with("the device asked for is cuda:1, one GPU for the 2 ranks")
        );
        let mut mixed = machine(&["RTX 5090", "Tesla T4"]);
        mixed.gpus.as_mut().unwrap()[1].compute_capability = old().gpus.unwrap()[0].compute_capability;
        assert!(
            refused(&mixed, Cuda(0), rank_info(1, 2))
                .starts_with("rank 5 trains on cuda:1: Tesla T4 has compute capability")
        );
    }
}
