//! Asynchronous copies between pinned host memory and the GPU.

use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, result};

use super::Cuda;
use super::failure::Context as _;
use crate::Result;

/// Page-locked host memory, initially zero. Its owner must not drop it while a copy uses it.
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
        let _guard = cuda.lock_stream();
        cuda.refuse_while_capturing("pinned memory")?;
        cuda.enter()?;
        // The driver refuses to allocate 0 bytes.
        let allocated = bytes.max(1);
        // SAFETY: the context is the thread's; the memory is initialised before it is handed out.
        unsafe {
            let memory = result::malloc_host(allocated, 0);
            let memory = memory.during(cuda.ordinal(), format_args!("cuMemHostAlloc of {bytes} bytes"))?.cast::<u8>();
            memory.write_bytes(0, allocated);
            Ok(Self { cuda: cuda.clone(), memory, bytes })
        }
    }

    /// # Safety
    /// No copy from or to the memory is in progress.
    unsafe fn slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: `memory` is followed by `bytes` initialised bytes owned by this value, and the caller guarantees that
        // no copy uses them.
        unsafe { std::slice::from_raw_parts_mut(self.memory, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.cuda.enter().is_ok() {
            // SAFETY: it came from `malloc_host`, is freed only here, and no copy uses it. Drop cannot report a
            // failure.
            let _ = unsafe { result::free_host(self.memory.cast()) };
        }
    }
}

/// An event that streams wait for.
fn event(cuda: &Cuda) -> Result<CudaEvent> {
    cuda.0.context.new_event(None).during(cuda.ordinal(), "cuEventCreate")
}

/// An event that host threads wait for without polling, as the data loader needs the cores. cudarc accepts one flag
/// only, so that it also records the time.
fn blocking_event(cuda: &Cuda) -> Result<CudaEvent> {
    let event = cuda.0.context.new_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC));
    event.during(cuda.ordinal(), "cuEventCreate")
}

/// A copy to the GPU that overlaps with the compute stream.
///
/// The host fills the pinned memory. The copy stream waits for the event `consumed`, copies to the staging buffer and
/// records `copied`. The compute stream waits for `copied`, copies from the staging buffer to the target and records
/// `consumed`. The host waits for `copied` before it fills the memory again. Nothing else uses the staging buffer.
pub(crate) struct HostToDevice {
    memory: Pinned,
    copied: CudaEvent,
    consumed: CudaEvent,
}

impl HostToDevice {
    /// A copy of `bytes` bytes, ordered after everything launched so far, such as zeroing the staging buffer.
    pub(crate) fn new(cuda: &Cuda, bytes: usize) -> Result<Self> {
        let _guard = cuda.lock_stream();
        let transfer =
            Self { memory: Pinned::new(cuda, bytes)?, copied: blocking_event(cuda)?, consumed: event(cuda)? };
        transfer.consumed.record(cuda.stream()).during(cuda.ordinal(), "cuEventRecord")?;
        Ok(transfer)
    }

    /// The pinned memory, after the last copy out of it has finished.
    pub(crate) fn stage(&mut self) -> Result<&mut [u8]> {
        self.copied.synchronize().during(self.memory.cuda.ordinal(), "cuEventSynchronize")?;
        // SAFETY: `copied` was recorded after the last copy, and has completed.
        Ok(unsafe { self.memory.slice_mut() })
    }

    /// Starts the copy to the staging buffer.
    pub(crate) fn send(&mut self, staging: usize) -> Result<()> {
        let Pinned { cuda, memory, bytes } = &self.memory;
        let (ordinal, copies) = (cuda.ordinal(), &cuda.0.copies);
        copies.wait(&self.consumed).during(ordinal, "cuStreamWaitEvent")?;
        if *bytes > 0 {
            cuda.enter()?;
            // SAFETY: `stage` and `drop` wait for the copy before the memory is written or freed. The staging buffer is
            // written only here, after the compute stream has consumed its content, and outlives this value.
            unsafe {
                let bytes = std::slice::from_raw_parts(*memory, *bytes);
                result::memcpy_htod_async(staging as u64, bytes, copies.cu_stream())
            }
            .during(ordinal, format_args!("cuMemcpyHtoDAsync of {bytes} bytes"))?;
        }
        self.copied.record(copies).during(ordinal, "cuEventRecord")
    }

    /// Makes the compute stream wait for the copy and move it to the target.
    pub(crate) fn receive(&mut self, staging: usize, target: usize) -> Result<()> {
        let cuda = &self.memory.cuda;
        let _guard = cuda.lock_stream();
        cuda.refuse_while_capturing("a copy from the host")?;
        let (ordinal, stream) = (cuda.ordinal(), cuda.stream());
        stream.wait(&self.copied).during(ordinal, "cuStreamWaitEvent")?;
        cuda.copy(staging, target, self.memory.bytes)?;
        self.consumed.record(stream).during(ordinal, "cuEventRecord")
    }
}

impl Drop for HostToDevice {
    fn drop(&mut self) {
        // The copy uses the pinned memory and the staging buffer, which are freed next. If waiting fails the context is
        // lost, and nothing is copied any more.
        let _ = self.copied.synchronize();
    }
}

/// A copy from the GPU, enqueued on the compute stream and waited for later.
pub(crate) struct DeviceToHost {
    memory: Pinned,
    copied: CudaEvent,
}

impl DeviceToHost {
    /// A copy of `bytes` bytes.
    pub(crate) fn new(cuda: &Cuda, bytes: usize) -> Result<Self> {
        Ok(Self { memory: Pinned::new(cuda, bytes)?, copied: blocking_event(cuda)? })
    }

    /// Enqueues the copy on the compute stream.
    pub(crate) fn start(&mut self, source: usize) -> Result<()> {
        self.wait()?;
        let cuda = self.memory.cuda.clone();
        let _guard = cuda.lock_stream();
        cuda.refuse_while_capturing("a copy to the host")?;
        cuda.enter()?;
        let (ordinal, stream) = (cuda.ordinal(), cuda.stream());
        // SAFETY: the last copy has finished, see `wait` above.
        let memory = unsafe { self.memory.slice_mut() };
        if !memory.is_empty() {
            let bytes = memory.len();
            // SAFETY: the source is a live buffer that is freed on this stream, hence after the copy; `bytes`, `start`
            // and `drop` wait for the copy before the memory is read or freed.
            unsafe { result::memcpy_dtoh_async(memory, source as u64, stream.cu_stream()) }
                .during(ordinal, format_args!("cuMemcpyDtoHAsync of {bytes} bytes"))?;
        }
        self.copied.record(stream).during(ordinal, "cuEventRecord")
    }

    /// The content of the last copy, after waiting for it.
    pub(crate) fn bytes(&mut self) -> Result<&[u8]> {
        self.wait()?;
        // SAFETY: `copied` was recorded after the last copy, and has completed.
        Ok(unsafe { self.memory.slice_mut() })
    }

    fn wait(&self) -> Result<()> {
        self.copied.synchronize().during(self.memory.cuda.ordinal(), "cuEventSynchronize")
    }
}

impl Drop for DeviceToHost {
    fn drop(&mut self) {
        // As in `HostToDevice`.
        let _ = self.copied.synchronize();
    }
}
