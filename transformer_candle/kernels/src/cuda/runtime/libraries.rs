//! Finding CUDA's libraries before Candle asks for them: it panics where one is missing.

mod driver;
mod versions;

use std::error::Error as _;
use std::path::PathBuf;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};

pub(super) use self::driver::version as driver_version;
pub(super) use self::versions::{cublas_version, dotted};
use crate::cuda::search_path::{VERSIONS, file_names, folders};

/// A library, as in `libNAME.so`, and a function that it has if it is what its name says.
struct Wanted {
    name: &'static str,
    function: &'static str,
    /// The way out where it is missing or does not load.
    remedy: &'static str,
}

const EXTRA: &str = "`pip install 'transformer-candle[cuda]'` brings it and what it needs";

/// What Candle's device opens beside the driver, or a GEMM. cuBLAS is built on the one before it, so that comes first.
const LIBRARIES: [Wanted; 3] = [
    Wanted { name: "cublasLt", function: "cublasLtCreate", remedy: EXTRA },
    Wanted { name: "cublas", function: "cublasCreate_v2", remedy: EXTRA },
    Wanted { name: "curand", function: "curandCreateGenerator", remedy: EXTRA },
];

/// Loads the driver and the libraries, from wherever they are installed, so that later launches to the loader find them
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
    let driver = driver::load(&folders)?;
    for library in LIBRARIES {
        load_one(&library, &folders, Some(driver)).map_err(|unusable| {
            let Wanted { name, remedy, .. } = library;
            let missing = "or add the folder of CUDA 13's libraries to LD_LIBRARY_PATH";
            unusable.unwrap_or_else(|| format!("CUDA's lib{name}.so was not found: {remedy}, {missing}"))
        })?;
    }
    versions::check()
}

/// Loads a library for the rest of the program's life: what the loader finds by name, or else the first file in one of
/// the folders that can be used with a driver for CUDA `driver`; none while that is looked for.
///
/// # Errors
/// What is wrong with the file that is there; none if there is no file.
fn load_one(library: &Wanted, folders: &[PathBuf], driver: Option<i32>) -> Result<(), Option<String>> {
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
    // By version before folder: a newer one far away goes before an older one at hand.
    for (version, folder) in VERSIONS.iter().flat_map(|version| folders.iter().map(move |folder| (version, folder))) {
        let path = folder.join(format!("lib{}.so.{version}", library.name));
        if !path.is_file() {
            continue;
        }
        // Such a one is not even opened: libcublas passes on what libcublasLt answers, which may be another's, loaded
        // before.
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

/// What cudarc will get: the first of its names that the loader knows a file for.
fn known_to_the_loader(library: &Wanted) -> Option<String> {
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

/// Never unloads it: others keep addresses of its functions.
fn keep(library: Library) {
    std::mem::forget(library);
}

fn loaders_words(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}
