//! A build without CUDA: no GPU can be opened, so nothing below runs.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use candle_core::{DType, Tensor};

use super::launch::KernelLaunch;
use super::{Gpu, KernelArg, Matmul, Memory, PoolMemory};
use crate::{Error, Result};

/// The answer to every request for a GPU.
const REASON: &str = "this program was built without CUDA, which `make cuda` adds";

/// A GPU. This build has none.
#[derive(Clone)]
pub struct Cuda(Infallible);

/// A kernel of a GPU.
pub(crate) struct Kernel<'a>(&'a Infallible);

/// A guard of the stream lock.
pub(crate) struct StreamGuard<'a>(&'a Infallible);

/// A captured graph.
pub(crate) struct Graph(&'static Infallible);

/// A timing event.
pub(crate) struct Event(Infallible);

/// A copy to the GPU.
pub(crate) struct HostToDevice(Infallible);

/// A copy from the GPU.
pub(crate) struct DeviceToHost(Infallible);

/// The GPUs of this machine.
///
/// # Errors
/// The sentence that this program was built without CUDA.
pub fn probe() -> Result<Vec<Gpu>, String> {
    Err(REASON.to_owned())
}

impl Cuda {
    /// Says that this program was built without CUDA.
    pub fn open(ordinal: usize) -> Result<Self> {
        Err(Error::NoCuda { ordinal, reason: REASON.to_owned() })
    }

    /// The GPU's number.
    pub fn ordinal(&self) -> usize {
        match self.0 {}
    }

    /// The name that the driver reports.
    pub fn name(&self) -> &str {
        match self.0 {}
    }

    /// The compute capability, major and minor.
    pub fn compute_capability(&self) -> (u32, u32) {
        match self.0 {}
    }

    /// The GPU as the driver lists it.
    pub fn gpu(&self) -> &Gpu {
        match self.0 {}
    }

    /// See [`Gpu::nominal_bf16_flops`].
    pub fn nominal_bf16_flops(&self) -> Option<f64> {
        match self.0 {}
    }

    /// GPU, driver and cuBLAS, with their versions, on which bitwise equal results depend.
    pub fn fingerprint(&self) -> String {
        match self.0 {}
    }

    /// The GPU's free and total memory.
    pub fn memory(&self) -> Result<Memory> {
        match self.0 {}
    }

    /// The memory that this process's buffers use and reserve.
    pub fn pool_memory(&self) -> Result<Option<PoolMemory>> {
        match self.0 {}
    }

    /// Disables timing: the declared kernel variant and the first GEMM algorithm offered are used.
    pub fn set_deterministic(&self, _is_deterministic: bool) {
        match self.0 {}
    }

    /// Limits the GPU memory of this program.
    pub fn set_memory_limit(&self, _bytes: u64) {
        match self.0 {}
    }

    /// Waits for the stream.
    pub fn synchronize(&self) -> Result<()> {
        match self.0 {}
    }

    /// The driver's handle of the compute stream (`CUstream`).
    pub fn stream_handle(&self) -> usize {
        match self.0 {}
    }

    /// Whether two handles mean the same opened GPU.
    pub fn is_same(&self, _other: &Self) -> bool {
        match self.0 {}
    }

    /// The results of timing so far: algorithms of GEMMs and variants of kernels.
    pub fn choices(&self) -> BTreeMap<String, String> {
        match self.0 {}
    }

    /// Restores another run's choices; returns those that this GPU, library or program does not have.
    pub fn recall_choices(&self, _choices: &BTreeMap<String, String>) -> Result<Vec<String>> {
        match self.0 {}
    }

    /// Measures the floating-point operations per second of a BF16 GEMM.
    pub fn measure_gemm_flops(&self, _size: usize) -> Result<f64> {
        match self.0 {}
    }

    pub(crate) fn enter_to_free(&self) {
        match self.0 {}
    }

    pub(crate) fn require_room(&self, _bytes: u64) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn tensor(&self, _shape: &[usize], _dtype: DType) -> Result<Tensor> {
        match self.0 {}
    }

    pub(crate) fn address_of(&self, _tensor: &Tensor) -> Result<usize> {
        match self.0 {}
    }

    pub(crate) fn zero(&self, _address: usize, _bytes: usize) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn copy(&self, _source: usize, _target: usize, _bytes: usize) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn write(&self, _address: usize, _bytes: &[u8]) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn read(&self, _address: usize, _bytes: &mut [u8]) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn kernel(&self, _launch: &KernelLaunch) -> Result<Kernel<'_>> {
        match self.0 {}
    }

    pub(crate) fn multiply(&self, _matmul: &Matmul) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn lock_stream(&self) -> StreamGuard<'_> {
        match self.0 {}
    }

    pub(crate) fn hold<'a>(&self, _tensors: impl Iterator<Item = (usize, &'a Tensor)>) {
        match self.0 {}
    }

    pub(crate) fn capture<E: From<Error>>(&self, _body: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        match self.0 {}
    }

    pub(crate) fn mark(&self) -> Result<Event> {
        match self.0 {}
    }
}

impl Kernel<'_> {
    pub(crate) fn constant(&self, _name: &str) -> usize {
        match *self.0 {}
    }

    pub(crate) fn launch(&self, _grid: [usize; 3], _values: &[KernelArg]) -> Result<()> {
        match *self.0 {}
    }
}

impl Graph {
    pub(crate) fn launch(&mut self) -> Result<()> {
        match *self.0 {}
    }
}

impl Event {
    pub(crate) fn until(&self, _later: &Self) -> Result<Duration> {
        match self.0 {}
    }
}

impl HostToDevice {
    pub(crate) fn new(cuda: &Cuda, _bytes: usize) -> Result<Self> {
        match cuda.0 {}
    }

    pub(crate) fn stage(&mut self) -> Result<&mut [u8]> {
        match self.0 {}
    }

    pub(crate) fn send(&mut self, _staging: usize) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn receive(&mut self, _staging: usize, _target: usize) -> Result<()> {
        match self.0 {}
    }
}

impl DeviceToHost {
    pub(crate) fn new(cuda: &Cuda, _bytes: usize) -> Result<Self> {
        match cuda.0 {}
    }

    pub(crate) fn start(&mut self, _source: usize) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn bytes(&mut self) -> Result<&[u8]> {
        match self.0 {}
    }
}
