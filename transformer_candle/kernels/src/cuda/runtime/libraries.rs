//! Finding CUDA's libraries before Candle asks for them: it panics where one is missing.

mod driver;
mod loading;
mod versions;

use std::path::PathBuf;
use std::sync::OnceLock;

pub(super) use self::driver::version as driver_version;
use self::loading::load_one;
pub(super) use self::versions::{cublas_version, dotted};
use crate::cuda::search_path::folders;

/// The packages of the extra `cuda`.
const EXTRA: &str = "`pip install 'nvidia-cublas~=13.0' 'nvidia-curand~=10.4' 'nvidia-cuda-runtime~=13.0'` brings it and \
                     what it needs";

/// A library, as in `libNAME.so`, and a function that it has if it is what its name says.
struct CudaLibrary {
    name: &'static str,
    function: &'static str,
    /// The way out where it is missing or does not load.
    remedy: &'static str,
}

/// The libraries that Candle's device or a GEMM needs beside the driver. cuBLAS is built on cuBLASLt, which comes
/// first.
const LIBRARIES: [CudaLibrary; 3] = [
    CudaLibrary { name: "cublasLt", function: "cublasLtCreate", remedy: EXTRA },
    CudaLibrary { name: "cublas", function: "cublasCreate_v2", remedy: EXTRA },
    CudaLibrary { name: "curand", function: "curandCreateGenerator", remedy: EXTRA },
];

/// The oldest driver that is supported: of CUDA 12.8, which is the line 570. It has all functions that are called, and
/// takes the kernels' PTX.
const OLDEST: i32 = 12_080;

/// Loads the driver and the libraries, from wherever they are installed, so that later requests to the loader find them
/// loaded; runs once in a program's life.
///
/// # Errors
/// A sentence on what is missing or too old, and the way out.
pub(super) fn load() -> Result<(), String> {
    static OUTCOME: OnceLock<Result<(), String>> = OnceLock::new();
    OUTCOME.get_or_init(load_all).clone()
}

fn load_all() -> Result<(), String> {
    let program = std::env::current_exe().ok();
    let folders = folders(|name| std::env::var_os(name), program.as_deref(), "/".as_ref());
    let driver = load_driver(&folders)?;
    for library in LIBRARIES {
        load_one(&library, &folders, Some(driver)).map_err(|unusable| {
            let CudaLibrary { name, remedy, .. } = library;
            let missing = "or add the folder of CUDA 13's libraries to LD_LIBRARY_PATH";
            unusable.unwrap_or_else(|| format!("CUDA's lib{name}.so was not found: {remedy}, {missing}"))
        })?;
    }
    versions::check()
}

/// Loads the driver, and returns the version of CUDA that it is for.
///
/// # Errors
/// A sentence on what is missing or too old, and the way out.
fn load_driver(folders: &[PathBuf]) -> Result<i32, String> {
    load_one(&driver::DRIVER, folders, None).map_err(|unusable| {
        unusable.unwrap_or_else(|| format!("no NVIDIA driver was found (libcuda.so.1): {}", driver::DRIVER.remedy))
    })?;
    let version = driver::version().map_err(|failure| format!("the NVIDIA driver does not answer: {failure:?}"))?;
    if version < OLDEST {
        return Err(format!("the NVIDIA driver is for CUDA {}: {}", dotted(version), driver::DRIVER.remedy));
    }
    Ok(version)
}
