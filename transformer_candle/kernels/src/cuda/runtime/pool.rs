//! The GPU's stream-ordered memory pool.

use std::ffi::c_void;

use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::sys::{self, CUmemPool_attribute as Attribute};
use candle_core::cuda_backend::cudarc::driver::{DriverError, result};

/// The stream-ordered memory pool, if the driver has one.
pub(super) struct Pool(pub(super) Option<sys::CUmemoryPool>);

// SAFETY: the driver's functions on pools may be called from any thread, and a device's default pool lives as long as
// its context.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// The GPU's default pool, set to keep freed memory, so that another program cannot take it during a run.
    pub(super) fn default_of(candle: &CudaDevice) -> Result<Self, DriverError> {
        let stream = candle.cuda_stream();
        let context = stream.context();
        if !context.has_async_alloc() {
            return Ok(Self(None));
        }
        let mut threshold = u64::MAX;
        // SAFETY: the context is open, so its device is valid; the attribute is a 64-bit number that the driver copies.
        let pool = unsafe {
            let pool = result::device::get_default_mem_pool(context.cu_device())?;
            let value = std::ptr::from_mut(&mut threshold).cast::<c_void>();
            result::mem_pool::set_attribute(pool, Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, value)?;
            pool
        };
        Ok(Self(Some(pool)))
    }

    /// Bytes in use by tensors, and bytes reserved by the pool.
    pub(super) fn used_and_reserved(&self) -> Result<(u64, u64), DriverError> {
        let Some(pool) = self.0 else { return Ok((0, 0)) };
        let read = |attribute| {
            let mut bytes = 0u64;
            // SAFETY: the pool is the device's own; both attributes asked for are 64-bit numbers.
            unsafe { result::mem_pool::get_attribute(pool, attribute, std::ptr::from_mut(&mut bytes).cast())? };
            Ok(bytes)
        };
        let used = read(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        Ok((used, read(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?))
    }
}
