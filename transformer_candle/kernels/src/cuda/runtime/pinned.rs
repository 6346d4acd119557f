//! Host memory that the GPU copies from and to by itself.

use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, result};

use super::Cuda;
use super::failure::Context as _;
use crate::Result;

/// Page-locked memory, zero at first. Whoever has one sees to it that no copy is under way when it is dropped.
struct Pinned {
    cuda: Cuda,
    memory: *mut u8,
    bytes: usize,
}

// SAFETY: the memory belongs to this value alone and may be used from any thread.
unsafe impl Send for Pinned {}
// SAFETY: a shared reference gives out the address only.
unsafe impl Sync for Pinned {}

impl Pinned {
    fn new(cuda: &Cuda, bytes: usize) -> Result<Self> {
        let _turn = cuda.take_turn();
        cuda.refuse_while_capturing("pinned memory")?;
        cuda.enter()?;
        // The driver refuses to allocate nothing.
        let allocated = bytes.max(1);
        // SAFETY: the context is the thread's; the memory is initialised before anybody sees it.
        unsafe {
            let memory = result::malloc_host(allocated, 0);
            let memory = memory.during(cuda.ordinal(), format_args!("cuMemHostAlloc of {bytes} bytes"))?.cast::<u8>();
            memory.write_bytes(0, allocated);
            Ok(Self { cuda: cuda.clone(), memory, bytes })
        }
    }

    /// # Safety
    /// No copy from or to the memory is under way.
    unsafe fn slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: `memory` is followed by `bytes` initialised bytes of this value alone, and by the caller's word no copy uses them.
        unsafe { std::slice::from_raw_parts_mut(self.memory, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.cuda.enter().is_ok() {
            // SAFETY: it came from `malloc_host`, is freed only here, and no copy uses it. A failure here has nobody to tell.
            let _ = unsafe { result::free_host(self.memory.cast()) };
        }
    }
}

/// An event that streams wait for.
fn event(cuda: &Cuda) -> Result<CudaEvent> {
    cuda.0.context.new_event(None).during(cuda.ordinal(), "cuEventCreate")
}

/// An event that a thread of this program waits for asleep: for most of a step the host has nothing to do, and the data loader needs the
/// cores. The driver would poll for any other event. cudarc takes one flag, so that this one also records the time.
fn awaited_event(cuda: &Cuda) -> Result<CudaEvent> {
    let event = cuda.0.context.new_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC));
    event.during(cuda.ordinal(), "cuEventCreate")
}

/// A copy to the GPU beside the compute stream.
///
/// The order of things: the host fills the memory; the copy stream waits until the compute stream has taken what landed before, copies,
/// and marks `landed`; the compute stream waits for that mark, copies from the landing buffer to where it is wanted, and marks `taken`.
/// The host waits for `landed` before it fills the memory again. The landing buffer is nobody's but this one's.
pub(crate) struct Transfer {
    memory: Pinned,
    landed: CudaEvent,
    taken: CudaEvent,
}

impl Transfer {
    /// For so many bytes. What was asked of the compute stream before, such as zeroing the landing buffer, comes first.
    pub(crate) fn new(cuda: &Cuda, bytes: usize) -> Result<Self> {
        let _turn = cuda.take_turn();
        let transfer = Self { memory: Pinned::new(cuda, bytes)?, landed: awaited_event(cuda)?, taken: event(cuda)? };
        transfer.taken.record(cuda.stream()).during(cuda.ordinal(), "cuEventRecord")?;
        Ok(transfer)
    }

    /// The memory, once the last copy out of it is done.
    pub(crate) fn stage(&mut self) -> Result<&mut [u8]> {
        self.landed.synchronize().during(self.memory.cuda.ordinal(), "cuEventSynchronize")?;
        // SAFETY: `landed` was recorded behind the last copy, and is passed.
        Ok(unsafe { self.memory.slice_mut() })
    }

    /// Starts the copy to the landing buffer.
    pub(crate) fn send(&mut self, landing: usize) -> Result<()> {
        let Pinned { cuda, memory, bytes } = &self.memory;
        let (ordinal, copies) = (cuda.ordinal(), &cuda.0.copies);
        copies.wait(&self.taken).during(ordinal, "cuStreamWaitEvent")?;
        if *bytes > 0 {
            cuda.enter()?;
            // SAFETY: the memory is neither written nor freed before the copy is done: `stage` and `drop` wait for it. The landing
            // buffer is written only here, after the compute stream has taken what was there, and outlives this value.
            unsafe {
                let bytes = std::slice::from_raw_parts(*memory, *bytes);
                result::memcpy_htod_async(landing as u64, bytes, copies.cu_stream())
            }
            .during(ordinal, format_args!("cuMemcpyHtoDAsync of {bytes} bytes"))?;
        }
        self.landed.record(copies).during(ordinal, "cuEventRecord")
    }

    /// Lets the compute stream wait for the copy and take what landed.
    pub(crate) fn receive(&mut self, landing: usize, target: usize) -> Result<()> {
        let cuda = &self.memory.cuda;
        let _turn = cuda.take_turn();
        cuda.refuse_while_capturing("a copy from the host")?;
        let (ordinal, stream) = (cuda.ordinal(), cuda.stream());
        stream.wait(&self.landed).during(ordinal, "cuStreamWaitEvent")?;
        cuda.copy(landing, target, self.memory.bytes)?;
        self.taken.record(stream).during(ordinal, "cuEventRecord")
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // The copy reads the memory and writes the landing buffer, which both go next; the compute stream frees the latter behind its own
        // last use. Where waiting fails the GPU is lost, and copies nothing any more.
        let _ = self.landed.synchronize();
    }
}

/// A copy from the GPU, taken at one point of the compute stream and waited for later.
pub(crate) struct Arrival {
    memory: Pinned,
    arrived: CudaEvent,
}

impl Arrival {
    /// For so many bytes.
    pub(crate) fn new(cuda: &Cuda, bytes: usize) -> Result<Self> {
        Ok(Self { memory: Pinned::new(cuda, bytes)?, arrived: awaited_event(cuda)? })
    }

    /// Asks the compute stream for the copy.
    pub(crate) fn start(&mut self, source: usize) -> Result<()> {
        self.wait()?;
        let cuda = self.memory.cuda.clone();
        let _turn = cuda.take_turn();
        cuda.refuse_while_capturing("a copy to the host")?;
        cuda.enter()?;
        let (ordinal, stream) = (cuda.ordinal(), cuda.stream());
        // SAFETY: the last copy is done, waited for above.
        let memory = unsafe { self.memory.slice_mut() };
        if !memory.is_empty() {
            let bytes = memory.len();
            // SAFETY: the source is a buffer that the caller keeps and that is freed on this stream, so later; the memory is neither read
            // nor freed before the copy is done: `bytes`, `start` and `drop` wait for it.
            unsafe { result::memcpy_dtoh_async(memory, source as u64, stream.cu_stream()) }
                .during(ordinal, format_args!("cuMemcpyDtoHAsync of {bytes} bytes"))?;
        }
        self.arrived.record(stream).during(ordinal, "cuEventRecord")
    }

    /// What was copied last, once it is there.
    pub(crate) fn bytes(&mut self) -> Result<&[u8]> {
        self.wait()?;
        // SAFETY: `arrived` was recorded behind the last copy, and is passed.
        Ok(unsafe { self.memory.slice_mut() })
    }

    fn wait(&self) -> Result<()> {
        self.arrived.synchronize().during(self.memory.cuda.ordinal(), "cuEventSynchronize")
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        // As in `Transfer`.
        let _ = self.arrived.synchronize();
    }
}
