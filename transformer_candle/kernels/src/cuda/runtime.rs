//! An opened card: context, streams, kernels, products.
//!
//! Everything that reads or writes a buffer is asked of one compute stream, in the order of the calls, whichever thread makes them; a
//! second stream carries copies between pinned host memory and landing buffers that no operation knows (`pinned.rs`).

mod failure;
mod library;
mod memory;
mod products;
mod turn;

use std::sync::{Arc, Mutex};

use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::cublaslt::sys as lt;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaStream};

use self::failure::Context as _;
use super::{Card, Value};
use crate::{Error, Result};

/// An opened card. Clones share it. May be used from any thread.
#[derive(Clone)]
pub struct Cuda(Arc<Opened>);

struct Opened {
    card: Card,
    /// Owns the memory of every tensor made here.
    candle: CudaDevice,
    context: Arc<CudaContext>,
    /// The compute stream; Candle's and cuBLAS's too.
    stream: Arc<CudaStream>,
    pool: memory::Pool,
    /// Bytes taken of the card when the context and the libraries were open and no tensor was there.
    memory_at_opening: u64,
    memory_limit: Mutex<Option<u64>>,
    library: library::Library,
    turn: turn::Turn,
    products: products::Products,
}

/// A kernel of a card.
pub(crate) struct Kernel<'a>(&'a Cuda);

impl Cuda {
    /// Opens a card: its context, a stream, the libraries.
    ///
    /// # Errors
    /// [`Error::NoCuda`] says in a sentence what is missing and the way out.
    pub fn open(ordinal: usize) -> Result<Self> {
        let candle = CudaDevice::new_with_stream(ordinal)?;
        // SAFETY: the events would order several streams' uses of a tensor. All tensors of this device are made, used and freed on
        // the compute stream alone. The copy stream touches only an `Upload`'s landing buffer, and orders that by events of its own.
        unsafe { candle.disable_event_tracking() };
        let stream = candle.cuda_stream();
        let context = Arc::clone(stream.context());
        let (major, minor) = context.compute_capability().during(ordinal, "cuDeviceGetAttribute")?;
        let card = Card {
            ordinal,
            name: context.name().during(ordinal, "cuDeviceGetName")?,
            total_bytes: context.total_mem().during(ordinal, "cuDeviceTotalMem")? as u64,
            compute_capability: (major as u32, minor as u32),
        };
        let library = library::Library::open(ordinal)?;
        let pool = memory::Pool::of(&candle).during(ordinal, "cuMemPoolSetAttribute")?;
        let (free, total) = context.mem_get_info().during(ordinal, "cuMemGetInfo")?;
        Ok(Self(Arc::new(Opened {
            card,
            candle,
            context,
            stream,
            pool,
            memory_at_opening: (total - free) as u64,
            memory_limit: Mutex::new(None),
            library,
            turn: turn::Turn::default(),
            products: products::Products::default(),
        })))
    }

    /// The card's number.
    pub fn ordinal(&self) -> usize {
        self.0.card.ordinal
    }

    /// As the driver calls it.
    pub fn name(&self) -> &str {
        &self.0.card.name
    }

    /// Major and minor.
    pub fn compute_capability(&self) -> (u32, u32) {
        self.0.card.compute_capability
    }

    /// See [`Card::nominal_bf16_flops`].
    pub fn nominal_bf16_flops(&self) -> Option<f64> {
        self.0.card.nominal_bf16_flops()
    }

    /// Waits for the stream.
    pub fn synchronize(&self) -> Result<()> {
        self.0.stream.synchronize().during(self.ordinal(), "cuStreamSynchronize")
    }

    /// Makes the card's context the calling thread's, which every bare call of the driver or of a library needs.
    fn enter(&self) -> Result<()> {
        self.0.context.bind_to_thread().during(self.ordinal(), "cuCtxSetCurrent")
    }

    /// The compute stream.
    fn stream(&self) -> &Arc<CudaStream> {
        &self.0.stream
    }

    /// cuBLASLt's handle; valid as long as `self`.
    fn library(&self) -> lt::cublasLtHandle_t {
        self.0.library.handle()
    }

    /// Whether what is asked of the stream is being recorded into a graph instead of done: nothing may wait, nothing be searched.
    fn is_recording(&self) -> bool {
        false
    }

    /// For what a graph cannot repeat.
    fn refuse_while_recording(&self, what: &str) -> Result<()> {
        if self.is_recording() {
            let (ordinal, call) = (self.ordinal(), "recording a graph".to_owned());
            return Err(Error::Cuda { ordinal, call, reason: format!("{what} cannot be part of it") });
        }
        Ok(())
    }

    pub(crate) fn timed<R>(&self, _operation: &'static str, body: impl FnOnce() -> Result<R>) -> Result<R> {
        body()
    }

    pub(crate) fn kernel(&self, name: &str) -> Result<Kernel<'_>> {
        Err(Error::Cuda { ordinal: self.ordinal(), call: name.to_owned(), reason: "no such kernel".to_owned() })
    }
}

impl Kernel<'_> {
    pub(crate) fn constant(&self, _name: &str) -> usize {
        0
    }

    pub(crate) fn launch(&self, _grid: [usize; 3], _values: &[Value]) -> Result<()> {
        Ok(())
    }
}
