//! Which versions of CUDA's libraries go with the driver and with each other.

use candle_core::cuda_backend::cudarc::cublas::sys as blas;
use candle_core::cuda_backend::cudarc::cublaslt::sys as lt;
use libloading::os::unix::Library;

use super::CudaLibrary;

/// A version: major, minor, patch.
type Version = [i32; 3];

/// The first cuRAND of CUDA 13. Its file is called libcurand.so.10 as that of CUDA 12 is.
const CURAND_OF_CUDA_13: Version = [10, 4, 0];

/// Why a library does not start on a driver that is for CUDA `driver`, if it does not: it is of a later major version.
pub(super) fn too_new(required: &CudaLibrary, library: &Library, driver: i32) -> Option<String> {
    let property = format!("{}GetProperty", required.name);
    // SAFETY: the functions of this name are of this type in all three libraries.
    let ask = unsafe { library.get::<unsafe extern "C" fn(i32, *mut i32) -> i32>(property.as_bytes()) }.ok()?;
    let version = [0, 1, 2].map(|part| {
        let mut number = 0;
        // SAFETY: writes one number, and needs neither a handle nor a GPU.
        unsafe { ask(part, &raw mut number) };
        number
    });
    needs_newer_driver(required.name, &version, driver)
}

/// [`too_new`] by the version in a file's name; None where the name does not tell.
pub(super) fn named_too_new(required: &CudaLibrary, version: &str, driver: i32) -> Option<String> {
    needs_newer_driver(required.name, &[version.parse().ok()?], driver)
}

/// Why a library of this version does not start on a driver that is for CUDA `driver`, if it does not. `version` may
/// have its first numbers only.
fn needs_newer_driver(name: &str, version: &[i32], driver: i32) -> Option<String> {
    let (software, cuda) = match name {
        "curand" => ("cuRAND", if *version >= CURAND_OF_CUDA_13[..] { 13 } else { 12 }),
        _ => ("cuBLAS", version[0]),
    };
    (cuda > driver / 1000).then(|| {
        format!(
            "{software} {} needs an NVIDIA driver of the line 580 or newer, this one is for CUDA {}: renew the driver, or `pip \
             install nvidia-cublas-cu12 nvidia-curand-cu12` and keep CUDA {cuda}'s folders out of LD_LIBRARY_PATH",
            text(version),
            dotted(driver)
        )
    })
}

/// Checks that cuBLAS and cuBLASLt are of one version: two halves of one library from two installations crash.
pub(super) fn check() -> Result<(), String> {
    use blas::libraryPropertyType_t as Part;
    let blas = [Part::MAJOR_VERSION, Part::MINOR_VERSION, Part::PATCH_LEVEL].map(|part| {
        let mut number = 0;
        // SAFETY: writes one number and needs no handle; the library is loaded.
        unsafe { blas::cublasGetProperty(part, &raw mut number) };
        number
    });
    refusal(cublas_version(), blas).map_or(Ok(()), Err)
}

/// The version of cuBLASLt, which computes the GEMMs.
pub(in super::super) fn cublas_version() -> Version {
    // SAFETY: takes nothing and returns a number; the library is loaded.
    let version = unsafe { lt::cublasLtGetVersion() } as i32;
    // 130100 is 13.1.0.
    [version / 10_000, version % 10_000 / 100, version % 100]
}

fn refusal(lt: Version, blas: Version) -> Option<String> {
    (lt != blas).then(|| {
        format!(
            "libcublas is of version {} and libcublasLt of {}: let LD_LIBRARY_PATH begin with the one folder that has both",
            text(&blas),
            text(&lt)
        )
    })
}

fn text(version: &[i32]) -> String {
    version.iter().map(i32::to_string).collect::<Vec<_>>().join(".")
}

/// Writes a version of CUDA with a dot: 12080 is 12.8.
pub(in super::super) fn dotted(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_of_two_libraries_are_refused() {
        assert_eq!(refusal([13, 1, 0], [13, 1, 0]), None);
        let mixed = refusal([12, 8, 4], [13, 1, 0]).unwrap();
        assert!(mixed.starts_with("libcublas is of version 13.1.0 and libcublasLt of 12.8.4"), "{mixed}");
    }

    #[test]
    fn libraries_of_a_later_cuda_need_a_newer_driver() {
        for (name, version) in [("cublasLt", [13, 1, 0]), ("cublas", [13, 1, 0]), ("curand", [10, 4, 1])] {
            assert_eq!(needs_newer_driver(name, &version, 13_000), None);
            let refused = needs_newer_driver(name, &version, 12_090).unwrap();
            assert!(refused.contains("needs an NVIDIA driver of the line 580 or newer, this one is for CUDA 12.9"));
        }
        assert!(needs_newer_driver("cublas", &[13, 1, 0], 12_080).unwrap().starts_with("cuBLAS 13.1.0 needs"));
        assert!(needs_newer_driver("cublas", &[13], 12_080).unwrap().starts_with("cuBLAS 13 needs"));
        assert_eq!(needs_newer_driver("curand", &[10], 12_080), None, "the name does not tell");
        for (name, version) in [("cublasLt", [12, 9, 1]), ("cublas", [12, 8, 4]), ("curand", [10, 3, 10])] {
            assert_eq!(needs_newer_driver(name, &version, 12_080), None);
            assert_eq!(needs_newer_driver(name, &version, 13_000), None);
        }
    }
}
