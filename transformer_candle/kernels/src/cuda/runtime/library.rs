//! cuBLASLt's handle.

use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};

use super::failure::Context as _;
use crate::Result;

/// Owns a handle of cuBLASLt, made in the context that was current.
pub(super) struct Library(sys::cublasLtHandle_t);

// SAFETY: cuBLASLt's functions may be called from several threads with one handle ("the cuBLASLt library is
// thread-safe", cuBLAS documentation, 3.1.1), and the handle is destroyed only when the last owner drops it.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    pub(super) fn open(ordinal: usize) -> Result<Self> {
        result::create_handle().during(ordinal, "cublasLtCreate").map(Self)
    }

    pub(super) fn handle(&self) -> sys::cublasLtHandle_t {
        self.0
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: the handle came from `create_handle` and is destroyed here only. A failure while closing has nobody
        // to tell.
        let _ = unsafe { result::destroy_handle(self.0) };
    }
}
