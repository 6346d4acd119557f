//! GPU memory: allocation, limits, zeroing, copies.

use candle_core::backend::BackendDevice as _;
use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr, ValidAsZeroBits, result};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, DType, Storage, Tensor};
use half::bf16;

use super::Cuda;
use super::failure::{Context as _, is_out_of_memory};
use crate::cuda::{Memory, PoolMemory};
use crate::element::BUFFER_TYPES;
use crate::{Error, Result};

impl Cuda {
    /// Free memory, including what this program has freed and still reserves, and total memory.
    pub fn memory(&self) -> Result<Memory> {
        let (free, total) = self.0.context.mem_get_info().during(self.ordinal(), "cuMemGetInfo")?;
        let (used, reserved) = self.pool()?;
        Ok(Memory { free: free as u64 + reserved.saturating_sub(used), total: total as u64 })
    }

    /// Exact memory of this process's buffers; none if the driver has no pool. Freed memory counts until the stream has
    /// reached the free.
    pub fn pool_memory(&self) -> Result<Option<PoolMemory>> {
        let has_pool = self.0.pool.0.is_some();
        let (used, reserved) = self.pool()?;
        Ok(has_pool.then_some(PoolMemory { used, reserved }))
    }

    /// Limits the memory of this program, context and libraries included: allocations beyond fail as if the GPU had no
    /// more.
    pub fn set_memory_limit(&self, bytes: u64) {
        *self.0.memory_limit.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(bytes);
    }

    /// Refuses an allocation that exceeds the limit or the free memory. Waits for the stream before refusing, as memory
    /// freed in stream order is in use until then.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn require_room(&self, needed: u64) -> Result<()> {
        self.room_for(needed).or_else(|lack| match lack {
            Error::OutOfMemory { .. } => {
                self.synchronize()?;
                self.room_for(needed)
            }
            other => Err(other),
        })
    }

    fn room_for(&self, needed: u64) -> Result<()> {
        let ordinal = self.ordinal();
        let limit = *self.0.memory_limit.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(limit) = limit {
            let available = limit.saturating_sub(self.bytes_in_use()?);
            if needed > available {
                return Err(Error::OutOfMemory { ordinal, needed, available, limit: Some(limit) });
            }
        }
        let available = self.memory()?.free;
        if needed > available { Err(Error::OutOfMemory { ordinal, needed, available, limit: None }) } else { Ok(()) }
    }

    /// Bytes in use by this program; by all programs if the driver has no pool.
    fn bytes_in_use(&self) -> Result<u64> {
        if self.0.pool.0.is_some() {
            return Ok(self.0.memory_at_opening + self.pool()?.0);
        }
        self.memory().map(|memory| memory.total - memory.free)
    }

    fn pool(&self) -> Result<(u64, u64)> {
        self.0.pool.used_and_reserved().during(self.ordinal(), "cuMemPoolGetAttribute")
    }

    /// A zeroed tensor, set by the driver, so that none of Candle's kernels is loaded.
    pub(crate) fn tensor(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        match dtype {
            DType::F32 => self.zeros::<f32>(shape),
            DType::BF16 => self.zeros::<bf16>(shape),
            DType::U32 => self.zeros::<u32>(shape),
            DType::I32 => self.zeros::<i32>(shape),
            DType::I16 => self.zeros::<i16>(shape),
            DType::U8 => self.zeros::<u8>(shape),
            actual => Err(not_a_scalar("Buffer::zeros", actual)),
        }
    }

    fn zeros<T: CudaDType + DeviceRepr + ValidAsZeroBits>(&self, shape: &[usize]) -> Result<Tensor> {
        let ordinal = self.ordinal();
        let _guard = self.lock_stream();
        self.refuse_while_capturing("an allocation")?;
        let elements: usize = shape.iter().product();
        // The driver refuses to allocate 0 bytes; Candle never accesses the memory of an empty tensor.
        let allocated = elements.max(1);
        let needed = (allocated * size_of::<T>()) as u64;
        self.require_room(needed)?;
        let slice = self.stream().alloc_zeros::<T>(allocated).or_else(|error| {
            if is_out_of_memory(error) {
                let available = self.memory()?.free;
                return Err(Error::OutOfMemory { ordinal, needed, available, limit: None });
            }
            Err(error).during(ordinal, format_args!("cuMemAllocAsync of {needed} bytes"))
        })?;
        let storage = CudaStorage::wrap_cuda_slice(slice, self.0.candle.clone());
        Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false))
    }

    /// The address of a tensor's first element.
    ///
    /// # Errors
    /// If the tensor is not on this GPU's stream.
    pub(crate) fn address_of(&self, tensor: &Tensor) -> Result<usize> {
        let (storage, layout) = tensor.storage_and_layout();
        let storage = match &*storage {
            Storage::Cuda(storage) if storage.device.same_device(&self.0.candle) => storage,
            _ => {
                let device = format!("{:?}", tensor.device());
                return Err(Error::Unsupported { operation: "Buffer::from_tensor", argument: "tensor", device });
            }
        };
        let first = match tensor.dtype() {
            DType::F32 => self.first::<f32>(storage),
            DType::BF16 => self.first::<bf16>(storage),
            DType::U32 => self.first::<u32>(storage),
            DType::I32 => self.first::<i32>(storage),
            DType::I16 => self.first::<i16>(storage),
            DType::U8 => self.first::<u8>(storage),
            actual => Err(not_a_scalar("Buffer::from_tensor", actual)),
        }?;
        Ok(first + layout.start_offset() * tensor.dtype().size_in_bytes())
    }

    fn first<T: CudaDType + DeviceRepr>(&self, storage: &CudaStorage) -> Result<usize> {
        // Nothing is recorded when the guard is dropped: this device's tensors carry no events.
        let (address, _guard) = storage.as_cuda_slice::<T>()?.device_ptr(self.stream());
        Ok(address as usize)
    }

    /// Sets bytes of a buffer to zero, in the stream's order.
    pub(crate) fn zero(&self, address: usize, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the bytes are those of a buffer of this device, which the caller keeps; it is freed on this stream,
        // so later.
        unsafe { result::memset_d8_async(address as u64, 0, bytes, self.stream().cu_stream()) }
            .during(self.ordinal(), format_args!("cuMemsetD8Async of {bytes} bytes"))
    }

    /// Copies bytes of one buffer to another that does not overlap it, in the stream's order.
    pub(crate) fn copy(&self, source: usize, target: usize, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: as in `zero`, for both buffers.
        unsafe { result::memcpy_dtod_async(target as u64, source as u64, bytes, self.stream().cu_stream()) }
            .during(self.ordinal(), format_args!("cuMemcpyDtoDAsync of {bytes} bytes"))
    }

    /// Copies host bytes to a buffer in stream order, and waits: the bytes may change or be freed when this returns.
    pub(crate) fn write(&self, address: usize, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.refuse_while_capturing("a copy from the host")?;
        self.enter()?;
        // SAFETY: the target as in `zero`. The source is borrowed until the stream has been waited for below, also
        // where the driver reads pageable memory by itself and returns before it has done so.
        unsafe { result::memcpy_htod_async(address as u64, bytes, self.stream().cu_stream()) }
            .during(self.ordinal(), format_args!("cuMemcpyHtoDAsync of {} bytes", bytes.len()))?;
        self.synchronize()
    }

    /// Copies a buffer to the host after everything launched so far.
    pub(crate) fn read(&self, address: usize, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.refuse_while_capturing("a copy to the host")?;
        self.enter()?;
        // SAFETY: the source as in `zero`; the target is borrowed until the stream has been waited for below.
        unsafe { result::memcpy_dtoh_async(bytes, address as u64, self.stream().cu_stream()) }
            .during(self.ordinal(), format_args!("cuMemcpyDtoHAsync of {} bytes", bytes.len()))?;
        self.synchronize()
    }
}

fn not_a_scalar(operation: &'static str, actual: DType) -> Error {
    Error::DType { operation, argument: "buffer", expected: BUFFER_TYPES, actual }
}
