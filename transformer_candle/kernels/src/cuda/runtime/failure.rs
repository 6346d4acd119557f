//! Converts failures of the driver and its libraries to errors of this crate.

use std::fmt::Display;

use candle_core::cuda_backend::cudarc::cublaslt::result::CublasError as LtError;
use candle_core::cuda_backend::cudarc::driver::DriverError;
use candle_core::cuda_backend::cudarc::driver::sys::CUresult;

use crate::{Error, Result};

/// Adds the call that failed: `result.during(ordinal, format_args!("cuMemcpyDtoHAsync of {bytes} bytes"))?` names it,
/// and what for where the name does not say it. Formatted only where the call failed: a launch takes microseconds.
pub(super) trait Context<R> {
    fn during(self, ordinal: usize, call: impl Display) -> Result<R>;
}

impl<R> Context<R> for std::result::Result<R, DriverError> {
    fn during(self, ordinal: usize, call: impl Display) -> Result<R> {
        self.map_err(|error| Error::Cuda { ordinal, call: call.to_string(), reason: sentence(error) })
    }
}

impl<R> Context<R> for std::result::Result<R, LtError> {
    fn during(self, ordinal: usize, call: impl Display) -> Result<R> {
        self.map_err(|LtError(status)| Error::Cuda { ordinal, call: call.to_string(), reason: format!("{status:?}") })
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

/// Whether the GPU's memory did not suffice.
pub(super) fn is_out_of_memory(error: DriverError) -> bool {
    error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fmt;

    use candle_core::cuda_backend::cudarc::cublaslt::sys::cublasStatus_t;

    use super::*;

    /// The name of a call that counts how often it is formatted.
    struct Counted<'a>(&'a Cell<usize>);

    impl Display for Counted<'_> {
        fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.set(self.0.get() + 1);
            formatter.write_str("cuLaunchKernel")
        }
    }

    #[test]
    fn a_call_is_named_only_when_it_failed() {
        let formatted = Cell::new(0);
        Ok::<(), DriverError>(()).during(0, Counted(&formatted)).unwrap();
        Ok::<(), LtError>(()).during(0, Counted(&formatted)).unwrap();
        assert_eq!(formatted.get(), 0);
        let failed = Err::<(), _>(LtError(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED));
        let error = failed.during(1, Counted(&formatted)).unwrap_err();
        assert_eq!(error.to_string(), "cuLaunchKernel failed on cuda:1: CUBLAS_STATUS_NOT_SUPPORTED");
        assert_eq!(formatted.get(), 1);
    }
}
