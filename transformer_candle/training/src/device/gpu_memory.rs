//! A GPU's total and free memory, its nominal speed, and what its matmuls depend on.

use kernels::{
    Device,
    cuda::{Cuda, Gpu, Memory},
};

use super::GpuVersions;

/// A GPU's memory, and how fast it is.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuMemory {
    /// The driver's name of the GPU.
    pub name: String,
    /// Total memory in bytes.
    pub total: u64,
    /// Free memory in bytes, with this program's context and other programs in use; none before the GPU is opened.
    pub free: Option<u64>,
    /// Nominal BF16 FLOPs per second.
    pub peak: Option<f64>,
    /// What decides which fp8 matmuls it has.
    pub versions: GpuVersions,
}

impl GpuMemory {
    /// The memory of a GPU that could not be opened: its free memory is unknown.
    pub fn unopened(gpu: &Gpu) -> Self {
        let peak = gpu.nominal_bf16_flops();
        Self { name: gpu.name.clone(), total: gpu.total_bytes, free: None, peak, versions: gpu.into() }
    }

    /// Reads the memory of an open GPU.
    pub fn now(gpu: &Cuda) -> kernels::Result<Self> {
        let Memory { free, total } = gpu.memory()?;
        Ok(Self { total, free: Some(free), ..Self::unopened(gpu.gpu()) })
    }

    /// Opens a GPU and reads its memory; where it cannot be opened, its free memory is unknown.
    pub(crate) fn measure(gpu: &Gpu) -> Self {
        let device = Device::cuda(gpu.ordinal);
        let measured = device.as_ref().ok().and_then(Device::as_cuda).and_then(|gpu| Self::now(gpu).ok());
        measured.unwrap_or_else(|| Self::unopened(gpu))
    }
}
