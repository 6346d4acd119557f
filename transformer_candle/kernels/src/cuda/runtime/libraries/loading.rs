//! Loads a library from wherever it is installed.

use std::error::Error as _;
use std::path::PathBuf;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};

use super::CudaLibrary;
use super::{driver, versions};
use crate::cuda::search_path::{VERSIONS, file_names};

/// Loads a library for the rest of the program's life: what the loader finds by name, or else the first file in one of
/// the folders that can be used with a driver for CUDA `driver`, which is None while the driver itself is loaded.
///
/// # Errors
/// Why the file that is there cannot be used; None if there is no file.
pub(super) fn load_one(library: &CudaLibrary, folders: &[PathBuf], driver: Option<i32>) -> Result<(), Option<String>> {
    let usable = |file: &str| {
        let opened = open(file, library.function).map_err(|reason| format!("{reason}; {}", library.remedy))?;
        let refusal =
            driver.map_or_else(|| driver::stub(&opened), |driver| versions::too_new(library, &opened, driver));
        refusal.map_or(Ok(opened), Err)
    };
    // cudarc will ask the loader by these names: what it finds first cannot be passed over.
    if let Some(name) = known_to_the_loader(library) {
        let cannot = |reason| Some(format!("{name}, which the loader finds first, cannot be used: {reason}"));
        return usable(&name).map(keep).map_err(cannot);
    }
    let mut unusable = None;
    // By version first, then by folder: the newest is preferred wherever it is.
    for (version, folder) in VERSIONS.iter().flat_map(|version| folders.iter().map(move |folder| (version, folder))) {
        let path = folder.join(format!("lib{}.so.{version}", library.name));
        if !path.is_file() {
            continue;
        }
        // A file of a version that is too new is not even opened: libcublas passes on what libcublasLt answers, which
        // may be another's, loaded before.
        let too_new = driver.and_then(|driver| versions::named_too_new(library, version, driver));
        match too_new.map_or_else(|| usable(&path.to_string_lossy()), Err) {
            // Loaded by its whole path, it is what the loader then takes for its name (the file's SONAME).
            Ok(opened) if known_to_the_loader(library).is_some_and(|name| usable(&name).is_ok()) => {
                keep(opened);
                return Ok(());
            }
            Ok(_) => {}
            Err(reason) => unusable = Some(format!("{} cannot be used: {reason}", path.display())),
        }
    }
    Err(unusable)
}

/// The name that cudarc will get a library by: the first that the loader knows a file for.
fn known_to_the_loader(library: &CudaLibrary) -> Option<String> {
    let exists = |name: &String| {
        // SAFETY: as in `open`.
        unsafe { Library::open(Some(name), RTLD_LAZY) }.is_ok()
    };
    file_names(library.name).into_iter().find(exists)
}

/// Opens a library that has a function of this name.
fn open(file: &str, function: &str) -> Result<Library, String> {
    // SAFETY: runs the initialisers of NVIDIA's own libraries, which the loader finds by NVIDIA's names for them.
    let library =
        unsafe { Library::open(Some(file), RTLD_LAZY | RTLD_GLOBAL) }.map_err(|error| loaders_words(&error))?;
    // SAFETY: the function is looked up, and not called by this type.
    unsafe { library.get::<unsafe extern "C" fn()>(function.as_bytes()) }.map_err(|error| loaders_words(&error))?;
    Ok(library)
}

/// Keeps a library loaded for good: others keep addresses of its functions.
fn keep(library: Library) {
    std::mem::forget(library);
}

fn loaders_words(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}
