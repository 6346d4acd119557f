//! Finding CUDA's libraries before Candle asks for them: it panics where one is missing.

use std::error::Error as _;
use std::path::PathBuf;
use std::sync::OnceLock;

use candle_core::cuda_backend::cudarc::cublas::sys as blas;
use candle_core::cuda_backend::cudarc::cublaslt::sys as lt;
use candle_core::cuda_backend::cudarc::driver::sys as driver;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};

use crate::cuda::search_path::{VERSIONS, file_names, folders};

/// A library, as in `libNAME.so`, and a function that it has if it is what its name says.
struct Wanted {
    name: &'static str,
    function: &'static str,
}

const DRIVER: Wanted = Wanted { name: "cuda", function: "cuInit" };
/// What else Candle's device opens, or a product. cuBLAS is built on the one before it, so that comes first.
const LIBRARIES: [Wanted; 3] = [
    Wanted { name: "cublasLt", function: "cublasLtCreate" },
    Wanted { name: "cublas", function: "cublasCreate_v2" },
    Wanted { name: "curand", function: "curandCreateGenerator" },
];

/// The oldest driver: of CUDA 12.8, which is the line 570. Its functions are all that is called, and it takes the kernels' PTX.
const OLDEST_DRIVER: i32 = 12_080;

/// Loads the driver and the libraries, from wherever they are, so that whoever asks the loader for them finds them loaded; looks once
/// in a program's life.
///
/// # Errors
/// A sentence on what is missing or too old, and the way out.
pub(super) fn load() -> Result<(), String> {
    static OUTCOME: OnceLock<Result<(), String>> = OnceLock::new();
    OUTCOME.get_or_init(load_all).clone()
}

/// CUDA's version that the driver is for, as 1000 major + 10 minor.
pub(super) fn driver_version() -> Result<i32, driver::CUresult> {
    let mut version = 0;
    // SAFETY: writes one number; the driver is loaded, and this function needs no initialisation.
    match unsafe { driver::cuDriverGetVersion(&raw mut version) } {
        driver::CUresult::CUDA_SUCCESS => Ok(version),
        failure => Err(failure),
    }
}

fn load_all() -> Result<(), String> {
    let folders = folders(|name| std::env::var_os(name), std::env::current_exe().ok().as_deref());
    let no_driver = "no NVIDIA driver was found (libcuda.so.1): install one of the line 580 or newer";
    load_one(&DRIVER, &folders).map_err(|damage| damage.unwrap_or_else(|| no_driver.to_owned()))?;
    let version = driver_version().map_err(|failure| format!("the NVIDIA driver does not answer: {failure:?}"))?;
    if version < OLDEST_DRIVER {
        return Err(format!("the NVIDIA driver is for CUDA {}: install one of the line 580 or newer", dotted(version)));
    }
    for library in LIBRARIES {
        load_one(&library, &folders).map_err(|damage| {
            damage.unwrap_or_else(|| {
                format!(
                    "CUDA's lib{}.so was not found: `pip install 'transformer-candle[cuda]'` brings it, or add the folder of \
                     CUDA 13's libraries to LD_LIBRARY_PATH",
                    library.name
                )
            })
        })?;
    }
    check_versions(version)
}

/// Loads a library for the rest of the program's life: what the loader finds by name, or else a file in one of the folders.
///
/// # Errors
/// What is wrong with the file that is there; none if there is no file.
fn load_one(library: &Wanted, folders: &[PathBuf]) -> Result<(), Option<String>> {
    if let Some(found) = by_name(library) {
        return found.map_err(Some);
    }
    let mut damage = None;
    // By version before folder: a newer one far away goes before an older one at hand.
    for (version, folder) in VERSIONS.iter().flat_map(|version| folders.iter().map(move |folder| (version, folder))) {
        let path = folder.join(format!("lib{}.so.{version}", library.name));
        if !path.is_file() {
            continue;
        }
        // Loaded by its whole path, it is what the loader then takes for its name (the file's SONAME).
        match open(&path.to_string_lossy(), library.function) {
            Ok(()) if by_name(library).is_some_and(|found| found.is_ok()) => return Ok(()),
            Ok(()) => {}
            Err(reason) => damage = Some(format!("{} cannot be used: {reason}", path.display())),
        }
    }
    Err(damage)
}

/// What cudarc will get: the first of its names that the loader knows a file for.
fn by_name(library: &Wanted) -> Option<Result<(), String>> {
    let exists = |name: &String| {
        // SAFETY: as in `open`.
        unsafe { Library::open(Some(name), RTLD_LAZY) }.is_ok()
    };
    let name = file_names(library.name).into_iter().find(exists)?;
    let cannot = |reason| format!("{name}, which the loader finds first, cannot be used: {reason}");
    Some(open(&name, library.function).map_err(cannot))
}

/// Loads a library that has a function of this name.
fn open(file: &str, function: &str) -> Result<(), String> {
    // SAFETY: runs the initialisers of NVIDIA's own libraries, which the loader finds by NVIDIA's names for them.
    let library =
        unsafe { Library::open(Some(file), RTLD_LAZY | RTLD_GLOBAL) }.map_err(|error| loaders_words(&error))?;
    // SAFETY: the function is looked up, and not called by this type.
    unsafe { library.get::<unsafe extern "C" fn()>(function.as_bytes()) }.map_err(|error| loaders_words(&error))?;
    // Never unloaded: others keep addresses of its functions.
    std::mem::forget(library);
    Ok(())
}

fn loaders_words(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// Two halves of one library from two installations crash; a library newer than the driver does not start.
fn check_versions(driver: i32) -> Result<(), String> {
    use blas::libraryPropertyType_t as Part;
    let blas = [Part::MAJOR_VERSION, Part::MINOR_VERSION, Part::PATCH_LEVEL].map(|part| {
        let mut number = 0;
        // SAFETY: writes one number and needs no handle; the library is loaded.
        unsafe { blas::cublasGetProperty(part, &raw mut number) };
        number
    });
    // SAFETY: takes nothing and returns a number; the library is loaded.
    let lt = unsafe { lt::cublasLtGetVersion() } as i32;
    refusal(driver, lt_version(lt), blas).map_or(Ok(()), Err)
}

/// 130100 is 13.1.0.
fn lt_version(version: i32) -> [i32; 3] {
    [version / 10_000, version % 10_000 / 100, version % 100]
}

fn refusal(driver: i32, lt: [i32; 3], blas: [i32; 3]) -> Option<String> {
    let text = |[major, minor, patch]: [i32; 3]| format!("{major}.{minor}.{patch}");
    if lt != blas {
        return Some(format!(
            "libcublas is of version {} and libcublasLt of {}: let LD_LIBRARY_PATH begin with the one folder that has both",
            text(blas),
            text(lt)
        ));
    }
    (lt[0] > driver / 1000).then(|| {
        format!(
            "cuBLAS {} needs an NVIDIA driver of the line 580 or newer, this one is for CUDA {}: renew the driver, or put CUDA \
             12's libraries first in LD_LIBRARY_PATH",
            text(lt),
            dotted(driver)
        )
    })
}

/// 12080 is 12.8.
pub(super) fn dotted(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_that_do_not_go_together_are_refused_in_a_sentence() {
        assert_eq!(refusal(13_000, lt_version(130_100), [13, 1, 0]), None);
        assert_eq!(refusal(12_080, [12, 8, 4], [12, 8, 4]), None);
        let mixed = refusal(13_000, [12, 8, 4], [13, 1, 0]).unwrap();
        assert!(mixed.starts_with("libcublas is of version 13.1.0 and libcublasLt of 12.8.4"), "{mixed}");
        let newer = refusal(12_080, [13, 1, 0], [13, 1, 0]).unwrap();
        assert!(
            newer.starts_with(
                "cuBLAS 13.1.0 needs an NVIDIA driver of the line 580 or newer, this one is for CUDA 12.8"
            )
        );
    }
}
