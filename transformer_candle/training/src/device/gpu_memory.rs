//! A GPU's total and free memory and its nominal speed.

use kernels::{
    Device,
    cuda::{Cuda, Gpu, Memory},
};

/// A GPU's memory, and how fast it is.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuMemory {
    /// As the driver calls it.
    pub name: String,
    /// In bytes.
    pub total: u64,
    /// What is left beside the context of this program and whatever else runs there; none before the GPU is opened.
    pub free: Option<u64>,
    /// Nominal BF16 FLOPs per second.
    pub peak: Option<f64>,
}

impl GpuMemory {
    /// Of a GPU that could not be opened.
    pub fn unopened(gpu: &Gpu) -> Self {
        let peak = gpu.nominal_bf16_flops();
        Self { name: gpu.name.clone(), total: gpu.total_bytes, free: None, peak }
    }

    /// Of a GPU that is open.
    pub fn now(gpu: &Cuda) -> kernels::Result<Self> {
        let Memory { free, total } = gpu.memory()?;
        Ok(Self { name: gpu.name().to_owned(), total, free: Some(free), peak: gpu.nominal_bf16_flops() })
    }

    /// Of a GPU as it is now, or all that is known of it where it cannot be opened.
    pub(crate) fn measure(gpu: &Gpu) -> Self {
        let opened = Device::cuda(gpu.ordinal);
        let measured = opened.as_ref().ok().and_then(Device::as_cuda).and_then(|gpu| Self::now(gpu).ok());
        measured.unwrap_or_else(|| Self::unopened(gpu))
    }
}
