//! What the driver and its libraries say when they fail, as errors of this crate.

use candle_core::cuda_backend::cudarc::cublaslt::result::CublasError as LtError;
use candle_core::cuda_backend::cudarc::driver::DriverError;
use candle_core::cuda_backend::cudarc::driver::sys::CUresult;

use crate::{Error, Result};

/// `result.during(ordinal, "cuMemcpyDtoHAsync of 4 bytes")?`: the call, and what for where the name does not say it.
pub(super) trait Context<R> {
    fn during(self, ordinal: usize, call: impl Into<String>) -> Result<R>;
}

impl<R> Context<R> for std::result::Result<R, DriverError> {
    fn during(self, ordinal: usize, call: impl Into<String>) -> Result<R> {
        self.map_err(|error| Error::Cuda { ordinal, call: call.into(), reason: sentence(error) })
    }
}

impl<R> Context<R> for std::result::Result<R, LtError> {
    fn during(self, ordinal: usize, call: impl Into<String>) -> Result<R> {
        self.map_err(|LtError(status)| Error::Cuda { ordinal, call: call.into(), reason: format!("{status:?}") })
    }
}

/// The driver's name of an error and its text, such as `CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)`.
pub(super) fn sentence(error: DriverError) -> String {
    let name = format!("{:?}", error.0);
    match error.error_string() {
        Ok(text) => format!("{name} ({})", text.to_string_lossy()),
        Err(_) => name,
    }
}

/// Whether the card's memory did not suffice.
pub(super) fn is_out_of_memory(error: DriverError) -> bool {
    error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY
}
