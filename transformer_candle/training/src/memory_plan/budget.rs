//! How much memory a run may take.

use std::thread;

use kernels::{Device, DeviceKind};
use run_config::{ByteSize, RunConfig};

use super::{
    available_memory::{AvailableMemory, available_memory},
    target::PlanTarget,
    this_machine::Machine,
};
use crate::{
    device::GpuMemory,
    error::{Budget, Result, TrainerError},
    ranks::RankInfo,
    units::bytes,
};

/// Share of a GPU's memory that its driver and the page tables leave.
const USABLE_GPU_FRACTION: f64 = 0.98;
/// What a CUDA context with its libraries takes of a GPU, assumed; what is free on an open GPU is measured beside it.
const CUDA_CONTEXT_BYTES: u64 = 600_000_000;
/// Left free of what an open GPU has free: CUDA graphs, kernels loaded later, and a little for whatever else draws on
/// it.
const GPU_MARGIN_BYTES: u64 = 256 << 20;
/// What NCCL's buffers and PyTorch take of each GPU that exchanges with others, for plans; where ranks train, NCCL is
/// connected before what is free is measured. An estimate, not measured by us: 1.6 GB is what users report for one
/// communicator (NVIDIA/nccl issue 864). It grows with the number of channels, so that PCIe takes less than `NVLink`
/// (issue 986).
const NCCL_BYTES: u64 = 1_600_000_000;
/// What the program takes on a CPU besides its planned buffers: code, tokenizer, threads.
const HOST_BASE_BYTES: u64 = 256 << 20;

/// Host memory that inference takes besides its buffers: threads and what they reserve. Code and tokenizer are there
/// already.
const PROGRAM_BYTES: u64 = 64 << 20;

/// Threads that a program has besides those that compute and those that read.
const OTHER_THREADS: usize = 3;

fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Refuses what a CPU has no memory for, before it is allocated; GPUs refuse by themselves.
///
/// # Errors
/// [`TrainerError::NoRoom`] that names the purpose.
pub fn require_room(needed_bytes: u64, device: &Device, purpose: impl FnOnce() -> String) -> Result<()> {
    match Budget::for_inference() {
        Some(budget) if device.as_cuda().is_none() && budget.bytes < needed_bytes => {
            Err(TrainerError::NoRoom { purpose: purpose(), needed_bytes, budget })
        }
        _ => Ok(()),
    }
}

/// A memory limit that a person has set, and the name of the setting.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    bytes: ByteSize,
    name: &'static str,
}

impl Limit {
    /// The limit of `runtime.memory_limit`.
    pub(super) fn of_config(config: &RunConfig) -> Option<Self> {
        config.runtime.memory_limit.map(|bytes| Self { bytes, name: "runtime.memory_limit" })
    }

    /// The limit of `plan --memory`.
    pub(super) fn of_option(bytes: ByteSize) -> Self {
        Self { bytes, name: "--memory" }
    }
}

/// Returns the budget of a plan: the limit where there is one, and never more than a GPU that is there has; on a CPU
/// without a limit what this machine has free. With several ranks NCCL's buffers are taken off each GPU's. None where
/// the system does not tell.
pub(super) fn planned(
    config: &RunConfig,
    limit: Option<Limit>,
    target: &PlanTarget,
    machine: &impl Machine,
    rank_info: RankInfo,
) -> Option<Budget> {
    let budget = of_one_process(config, limit, target, machine)?;
    let is_connected = target.kind() == DeviceKind::Cuda && rank_info.world_size > 1;
    Some(if is_connected { budget.less_nccl() } else { budget })
}

fn of_one_process(
    config: &RunConfig,
    limit: Option<Limit>,
    target: &PlanTarget,
    machine: &impl Machine,
) -> Option<Budget> {
    match (limit, target) {
        (Some(limit), PlanTarget::Cpu(_)) => Some(Budget::from_limit(limit)),
        (Some(limit), PlanTarget::Named(_) | PlanTarget::Assumed(_)) => Some(Budget::from_gpu_limit(limit)),
        (None, PlanTarget::Named(gpu)) => {
            Some(Budget::less_context(gpu.memory(), &format!("{} of the {}", bytes(gpu.memory_bytes), gpu.name)))
        }
        (None, PlanTarget::Assumed(gpu)) => Some(Budget::less_context(
            gpu.memory(),
            &format!("{} of an {}, assumed as there is no GPU here", bytes(gpu.memory_bytes), gpu.name),
        )),
        (_, PlanTarget::Cpu(_) | PlanTarget::Gpu(_)) => here(config, limit, target, machine),
    }
}

/// Returns the budget of a trainer on an open device: the least of the limit, of its total and of its free memory.
pub(super) fn here(
    config: &RunConfig,
    limit: Option<Limit>,
    target: &PlanTarget,
    machine: &impl Machine,
) -> Option<Budget> {
    let bounds: Vec<Budget> = match target {
        PlanTarget::Cpu(_) | PlanTarget::Named(_) | PlanTarget::Assumed(_) => {
            limit.map(Budget::from_limit).into_iter().chain(Budget::from_machine(config, machine)).collect()
        }
        PlanTarget::Gpu(gpu) => {
            let limits = limit
                .into_iter()
                .flat_map(|limit| [Budget::from_gpu_limit(limit), Budget::remaining_limit(limit, gpu)]);
            limits.chain(Budget::from_gpu(gpu)).collect()
        }
    };
    bounds.into_iter().min_by_key(|budget| budget.bytes)
}

impl Budget {
    fn new(bytes: u64, origin: String) -> Self {
        Self { bytes, origin, data_stream: None }
    }

    /// The budget of each of several processes that share this one.
    pub(super) fn shared_by(self, processes: usize) -> Self {
        if processes == 1 {
            return self;
        }
        let bytes = self.bytes / processes as u64;
        Self { bytes, origin: format!("{}, shared by {processes} ranks", self.origin), ..self }
    }

    fn less_nccl(self) -> Self {
        let bytes = self.bytes.saturating_sub(NCCL_BYTES);
        Self { bytes, origin: format!("{}, less an estimate of NCCL's buffers", self.origin), ..self }
    }

    /// Returns the budgets by a GPU's total memory and, where it is known, by its free memory.
    fn from_gpu(gpu: &GpuMemory) -> Vec<Self> {
        let &GpuMemory { ref name, total, free, .. } = gpu;
        let whole = Self::less_context(ByteSize(total), &format!("{name} with {}", bytes(total)));
        let free = free.map(|free| {
            let origin = format!("{name} with {} free of {}, less a safety margin", bytes(free), bytes(total));
            Self::new(free.saturating_sub(GPU_MARGIN_BYTES), origin)
        });
        [whole].into_iter().chain(free).collect()
    }

    fn from_gpu_limit(Limit { bytes, name }: Limit) -> Self {
        Self::less_context(bytes, &format!("{name}: {bytes}"))
    }

    /// The limit less what is in use on the GPU: it holds for everything there, by others too.
    fn remaining_limit(Limit { bytes, name }: Limit, gpu: &GpuMemory) -> Self {
        let used_bytes = gpu.free.map_or(0, |free| gpu.total.saturating_sub(free));
        let remaining = bytes.bytes().saturating_sub(used_bytes);
        Self::new(remaining, format!("{name}: {bytes}, less what is in use on {}", gpu.name))
    }

    fn less_context(memory: ByteSize, origin: &str) -> Self {
        let usable = (memory.bytes() as f64 * USABLE_GPU_FRACTION) as u64;
        let bytes = usable.saturating_sub(CUDA_CONTEXT_BYTES);
        Self::new(bytes, format!("{origin}, less driver and CUDA context"))
    }

    fn from_limit(Limit { bytes, name }: Limit) -> Self {
        Self::new(bytes.bytes(), format!("{name}: {bytes}"))
    }

    fn from_machine(config: &RunConfig, machine: &impl Machine) -> Option<Self> {
        let threads = config.runtime.threads.unwrap_or_else(cores) + dataset::max_workers(&config.data) + OTHER_THREADS;
        let AvailableMemory { bytes, origin } = machine.available_memory(threads)?;
        Some(Self::minus_data_stream(bytes, origin, dataset::memory_bound(&config.data)))
    }

    /// Returns the budget that a data stream of `stream_bytes` bytes leaves of `free` bytes.
    pub(crate) fn minus_data_stream(free: u64, origin: &str, stream_bytes: u64) -> Self {
        let usable_bytes = free.saturating_sub(HOST_BASE_BYTES);
        let origin = format!("{origin}, less the data stream");
        Self {
            bytes: usable_bytes.saturating_sub(stream_bytes),
            origin,
            data_stream: Some((stream_bytes, usable_bytes)),
        }
    }

    /// Returns the budget of inference on this machine's CPU, where no data are streamed.
    fn for_inference() -> Option<Self> {
        let AvailableMemory { bytes, origin } = available_memory(cores() + OTHER_THREADS)?;
        let origin = format!("{origin}, less the program");
        Some(Self::new(bytes.saturating_sub(PROGRAM_BYTES), origin))
    }
}
