//! An open GPU: context, streams, kernels, GEMMs.
//!
//! Everything that reads or writes a buffer runs on one compute stream, in the order of the calls of all threads. A
//! second stream copies from pinned host memory to staging buffers that no operation uses (`pinned.rs`).

mod event;
mod failure;
mod fastest;
mod graph;
mod kernels;
mod libraries;
mod library;
mod matmul;
mod memory;
mod module;
mod pinned;
mod pool;
mod probe;
mod stream_lock;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::cuda_backend::cudarc::cublaslt::sys as lt;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaStream};
use candle_core::{CudaDevice, Tensor};

pub(crate) use self::event::Event;
use self::failure::Context as _;
pub(crate) use self::graph::Graph;
pub(crate) use self::pinned::{DeviceToHost, HostToDevice};
pub use self::probe::probe;
use super::Gpu;
use crate::{Error, Result};

/// An open GPU. Clones share it; any thread may use it.
#[derive(Clone)]
pub struct Cuda(Arc<GpuContext>);

/// The state of an open GPU. Fields are dropped in this order: what belongs to the context before the last owner of the
/// context.
struct GpuContext {
    library: library::Library,
    kernels: kernels::Kernels,
    matmul_algorithms: matmul::MatmulAlgorithms,
    /// While a graph is captured: the tensors that it uses, by storage.
    captured: Mutex<Option<HashMap<usize, Tensor>>>,
    gpu: Gpu,
    /// Owns the memory of every tensor made here.
    candle: CudaDevice,
    context: Arc<CudaContext>,
    /// The compute stream; Candle's too.
    stream: Arc<CudaStream>,
    /// The stream of [`HostToDevice`]s.
    copies: Arc<CudaStream>,
    pool: pool::Pool,
    /// Bytes in use without tensors, after the context and the libraries were opened.
    memory_at_opening: u64,
    memory_limit: Mutex<Option<u64>>,
    is_deterministic: AtomicBool,
    stream_lock: stream_lock::StreamLock,
}

impl Cuda {
    /// Opens a GPU: its context, its streams, the libraries. No kernel is loaded yet.
    ///
    /// # Errors
    /// [`Error::NoCuda`] says in a sentence what is missing and the way out.
    pub fn open(ordinal: usize) -> Result<Self> {
        let refuse = |reason| Error::NoCuda { ordinal, reason };
        let gpu = choose(probe().map_err(refuse)?, ordinal).map_err(refuse)?;
        // Candle opens the same context, but reports less about a failure. Kept until then, as dropping the last owner
        // closes a context.
        let _first = CudaContext::new(ordinal)
            .map_err(|error| refuse(format!("it does not open: {}", failure::sentence(error))))?;
        let candle = CudaDevice::new_with_stream(ordinal);
        let candle = candle.map_err(|error| refuse(format!("its libraries do not start: {}", first_line(&error))))?;
        // SAFETY: the events would order the uses of a tensor on several streams. All tensors of this device are used
        // on the compute stream only, except the staging buffer of a `HostToDevice`, which orders its two streams with
        // its own events.
        unsafe { candle.disable_event_tracking() };
        let stream = candle.cuda_stream();
        let context = Arc::clone(stream.context());
        let pool = pool::Pool::default_of(&candle).during(ordinal, "cuMemPoolSetAttribute")?;
        let library = library::Library::open(ordinal)?;
        let copies = context.new_stream().during(ordinal, "cuStreamCreate")?;
        let kernels = kernels::Kernels::for_gpu(gpu.compute_capability).map_err(refuse)?;
        let (free, total) = context.mem_get_info().during(ordinal, "cuMemGetInfo")?;
        // The pool's memory belongs to tensors, of this handle or an earlier one.
        let (_, reserved) = pool.used_and_reserved().during(ordinal, "cuMemPoolGetAttribute")?;
        Ok(Self(Arc::new(GpuContext {
            library,
            kernels,
            matmul_algorithms: matmul::MatmulAlgorithms::default(),
            captured: Mutex::default(),
            gpu,
            candle,
            context,
            stream,
            copies,
            pool,
            memory_at_opening: ((total - free) as u64).saturating_sub(reserved),
            memory_limit: Mutex::default(),
            is_deterministic: AtomicBool::new(false),
            stream_lock: stream_lock::StreamLock::default(),
        })))
    }

    /// The GPU's number.
    pub fn ordinal(&self) -> usize {
        self.0.gpu.ordinal
    }

    /// The name that the driver reports.
    pub fn name(&self) -> &str {
        &self.0.gpu.name
    }

    /// The compute capability, major and minor.
    pub fn compute_capability(&self) -> (u32, u32) {
        self.0.gpu.compute_capability
    }

    /// The GPU as the driver lists it.
    pub fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    /// See [`Gpu::nominal_bf16_flops`].
    pub fn nominal_bf16_flops(&self) -> Option<f64> {
        self.0.gpu.nominal_bf16_flops()
    }

    /// GPU, driver and cuBLAS, with their versions: what bitwise equal results depend on beside this program.
    pub fn fingerprint(&self) -> String {
        let module = std::fs::read_to_string("/proc/driver/nvidia/version").ok();
        let module = module.as_deref().and_then(module_version).map_or(String::new(), |version| format!("{version}, "));
        let cuda = libraries::driver_version().map_or_else(|_| "?".to_owned(), libraries::dotted);
        // SAFETY: takes nothing and returns a number.
        let library = unsafe { lt::cublasLtGetVersion() };
        format!("{}, driver {module}CUDA {cuda}, cuBLASLt {library}", self.name())
    }

    /// Disables timing: the declared kernel variant and the first GEMM algorithm offered are used, so that fresh runs
    /// have equal bits. Earlier or recalled choices stay.
    pub fn set_deterministic(&self, is_deterministic: bool) {
        self.0.is_deterministic.store(is_deterministic, Ordering::Relaxed);
    }

    fn is_deterministic(&self) -> bool {
        self.0.is_deterministic.load(Ordering::Relaxed)
    }

    /// Waits for everything launched on the compute stream.
    pub fn synchronize(&self) -> Result<()> {
        let _guard = self.lock_stream();
        self.refuse_while_capturing("waiting")?;
        self.0.stream.synchronize().during(self.ordinal(), "cuStreamSynchronize")
    }

    /// Whether two handles share one open GPU, and so one stream.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The driver's handle of the compute stream (`CUstream`), for libraries that order their work by it. Valid as long
    /// as `self`.
    pub fn stream_handle(&self) -> usize {
        self.0.stream.cu_stream().addr()
    }

    /// Locks the compute stream for this thread until the guard is dropped.
    pub(crate) fn lock_stream(&self) -> stream_lock::StreamGuard<'_> {
        self.0.stream_lock.acquire()
    }

    /// Makes the GPU's context current in this thread, as direct calls of the driver and the libraries require.
    fn enter(&self) -> Result<()> {
        self.0.context.bind_to_thread().during(self.ordinal(), "cuCtxSetCurrent")
    }

    /// [`Self::enter`] before memory is freed: cudarc frees in the current context. A failure is stored in the context,
    /// for the next call that can report it.
    pub(crate) fn enter_to_free(&self) {
        self.0.context.record_err(self.0.context.bind_to_thread());
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.0.stream
    }

    /// cuBLASLt's handle; valid as long as `self`.
    fn library(&self) -> lt::cublasLtHandle_t {
        self.0.library.handle()
    }

    /// Fails during a capture, for what a graph cannot contain.
    fn refuse_while_capturing(&self, what: &str) -> Result<()> {
        if self.is_capturing() {
            let (ordinal, call) = (self.ordinal(), "capturing a graph".to_owned());
            return Err(Error::Cuda { ordinal, call, reason: format!("{what} cannot be part of it") });
        }
        Ok(())
    }
}

impl Drop for GpuContext {
    fn drop(&mut self) {
        // Candle panics if closing cuBLAS or cuRAND fails, as it does after a lost context: leak them instead.
        if self.stream.synchronize().is_err() {
            std::mem::forget(self.candle.clone());
        }
    }
}

/// The GPU of this number, or why it cannot be used.
fn choose(gpus: Vec<Gpu>, ordinal: usize) -> Result<Gpu, String> {
    let count = gpus.len();
    let Some(gpu) = gpus.into_iter().nth(ordinal) else {
        let gpus = if count == 1 { "one GPU, cuda:0".to_owned() } else { format!("{count} GPUs, from cuda:0 on") };
        return Err(format!("the NVIDIA driver lists {gpus}"));
    };
    gpu.refusal().map_or(Ok(gpu), Err)
}

/// An error's message without the backtrace that Candle may append.
fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// The driver version, such as `580.95.05`, from the description of its kernel module.
fn module_version(text: &str) -> Option<&str> {
    let is_version = |word: &&str| word.contains('.') && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    text.lines().next()?.split_whitespace().find(is_version)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(ordinal: usize, compute_capability: (u32, u32)) -> Gpu {
        Gpu {
            ordinal,
            name: "a GPU".to_owned(),
            uuid: String::new(),
            total_bytes: 1,
            compute_capability,
            cublas: (13, 0),
        }
    }

    #[test]
    fn a_missing_or_old_gpu_is_refused_in_a_sentence() {
        assert_eq!(choose(vec![gpu(0, (8, 0)), gpu(1, (9, 0))], 1).unwrap().ordinal, 1);
        assert_eq!(choose(vec![gpu(0, (9, 0))], 1).unwrap_err(), "the NVIDIA driver lists one GPU, cuda:0");
        let two = vec![gpu(0, (9, 0)), gpu(1, (9, 0))];
        assert_eq!(choose(two, 2).unwrap_err(), "the NVIDIA driver lists 2 GPUs, from cuda:0 on");
        assert!(choose(vec![gpu(0, (7, 0))], 0).unwrap_err().contains("compute capability 7.0"));
    }

    #[test]
    fn the_driver_version_is_parsed_for_both_kernel_modules() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12.3.0";
        let open =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)";
        assert_eq!(module_version(closed), Some("550.54.15"));
        assert_eq!(module_version(open), Some("580.95.05"));
        assert_eq!(module_version(""), None);
    }

    #[test]
    fn without_a_driver_every_call_gives_the_same_sentence() {
        // Where there is a GPU, this has nothing to say.
        let Err(sentence) = probe() else { return };
        assert!(!sentence.is_empty() && !sentence.contains('\n'), "{sentence}");
        let error = Cuda::open(0).map(|_| ()).unwrap_err();
        assert_eq!(error.to_string(), format!("cannot use cuda:0: {sentence}"));
    }
}
