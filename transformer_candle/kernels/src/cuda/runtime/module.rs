//! Modules: PTX that the driver has compiled for the GPU.

use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::sys::{self, CUfunction_attribute, CUjit_option};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError, result};

use super::failure::{Context as _, sentence};
use crate::{Error, Result};

/// Bytes for the log of the driver's compiler about a text that it refuses; it cuts off what is longer.
const LOG_BYTES: usize = 4096;

const NO_COMPILER: &str = "the driver's PTX compiler (libnvidia-ptxjitcompiler.so.1) was not found: it is a part of the NVIDIA driver, and has to be \
     of the same version; install it, or in a container let NVIDIA_DRIVER_CAPABILITIES be `compute,utility`";

/// A module, loaded into a context that it keeps open.
pub(super) struct Module {
    handle: sys::CUmodule,
    context: Arc<CudaContext>,
}

// SAFETY: the driver's functions on modules may be called from any thread, and the module is unloaded only once nobody
// has it any more.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A function of a module, which it keeps loaded.
pub(super) struct Function {
    handle: sys::CUfunction,
    /// Unloading it would take the function along.
    _module: Module,
}

// SAFETY: as for `Module`; launching changes nothing in a function, and its attributes are set before anybody shares
// it.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module {
    /// Has the driver compile a PTX text for the GPU, or take what it compiled before from its cache on disk. The
    /// context is the calling thread's.
    ///
    /// # Errors
    /// [`Error::Cuda`] with what the driver's compiler says about the text; [`Error::NoCuda`] where that compiler is
    /// missing.
    pub(super) fn load(context: &Arc<CudaContext>, file: &str, text: &str) -> Result<Self> {
        let ordinal = context.ordinal();
        let image = CString::new(text).expect("PTX is text, which has no zero bytes");
        match load_data(&image) {
            Ok(handle) => Ok(Self { handle, context: Arc::clone(context) }),
            Err((DriverError(sys::CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND), _)) => {
                Err(Error::NoCuda { ordinal, reason: NO_COMPILER.to_owned() })
            }
            Err((error, log)) => {
                let reason = if log.is_empty() { sentence(error) } else { format!("{}: {log}", sentence(error)) };
                Err(Error::Cuda { ordinal, call: format!("cuModuleLoadDataEx of `{file}`"), reason })
            }
        }
    }

    /// The function of this name.
    pub(super) fn function(self, symbol: &str) -> Result<Function> {
        let ordinal = self.context.ordinal();
        let name = CString::new(symbol).expect("a symbol of PTX has no zero bytes");
        // SAFETY: the module is loaded, and stays so as long as the function.
        let handle = unsafe { result::module::get_function(self.handle, name) };
        let handle = handle.during(ordinal, format_args!("cuModuleGetFunction of `{symbol}`"))?;
        Ok(Function { handle, _module: self })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        self.context.record_err(self.context.bind_to_thread());
        // SAFETY: it was loaded by `load`, is unloaded only here, and its functions are gone.
        self.context.record_err(unsafe { result::module::unload(self.handle) });
    }
}

impl Function {
    pub(super) fn handle(&self) -> sys::CUfunction {
        self.handle
    }

    pub(super) fn set_attribute(&self, attribute: CUfunction_attribute, value: i32) -> Result<(), DriverError> {
        // SAFETY: the function's module is loaded.
        unsafe { result::function::set_function_attribute(self.handle, attribute, value) }
    }
}

/// Loads a PTX text; the second value of an error is what the driver's compiler wrote about it, on one line.
fn load_data(image: &CStr) -> Result<sys::CUmodule, (DriverError, String)> {
    let mut log = vec![0u8; LOG_BYTES];
    let mut options = [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    // The driver takes a number in the place of a pointer, and writes there how much of the buffer it filled.
    let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut::<c_void>(LOG_BYTES)];
    let mut handle = ptr::null_mut();
    // SAFETY: the context is the thread's. The text ends with a zero. There are as many values as options, each of its
    // option's type; the driver writes the log during the call, and not beyond its size.
    let status = unsafe {
        let count = options.len() as u32;
        sys::cuModuleLoadDataEx(
            &raw mut handle,
            image.as_ptr().cast(),
            count,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    status.result().map(|()| handle).map_err(|error| (error, on_one_line(&log)))
}

/// The text in front of the first zero byte, its lines joined.
fn on_one_line(log: &[u8]) -> String {
    let text = log.split(|byte| *byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(text);
    let lines: Vec<String> = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    lines.iter().filter(|line| !line.is_empty()).map(String::as_str).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compilers_log_becomes_one_line() {
        let log =
            b"ptxas application ptx input, line 9; error   : Unknown opcode\n\nptxas fatal   : aborted\n\0\0stale";
        let line = "ptxas application ptx input, line 9; error : Unknown opcode; ptxas fatal : aborted";
        assert_eq!(on_one_line(log), line);
        assert_eq!(on_one_line(&[0; 8]), "");
        assert_eq!(on_one_line(b"cut off"), "cut off");
    }
}
