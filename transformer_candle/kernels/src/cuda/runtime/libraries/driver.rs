//! The driver's library. A CUDA toolkit has a stub of it for linking programs on machines without a driver; it is
//! recognised and refused.

use std::path::{Path, PathBuf};

use candle_core::cuda_backend::cudarc::driver::sys::{self, CUresult};
use libloading::os::unix::Library;

use super::CudaLibrary;

pub(super) const DRIVER: CudaLibrary =
    CudaLibrary { name: "cuda", function: "cuInit", remedy: "install a driver of the line 580 or newer" };

/// The version of CUDA that the driver is for, as 1000 major + 10 minor.
pub(in super::super) fn version() -> Result<i32, CUresult> {
    let mut version = 0;
    // SAFETY: writes one number; the driver is loaded, and this function needs no initialisation.
    match unsafe { sys::cuDriverGetVersion(&raw mut version) } {
        CUresult::CUDA_SUCCESS => Ok(version),
        failure => Err(failure),
    }
}

/// Why a library that is called libcuda is not the driver, if it is a stub. cudarc asks for `libcuda.so` before
/// `libcuda.so.1`, and a toolkit's `lib64/stubs` in `LD_LIBRARY_PATH` has the former.
pub(super) fn stub(library: &Library) -> Option<String> {
    // SAFETY: the type is that of `cuInit` in libcuda and in its stub alike.
    let initialise = unsafe { library.get::<unsafe extern "C" fn(u32) -> i32>(b"cuInit") }.ok()?;
    let file = file_of(*initialise as usize);
    let in_stubs = file.as_deref().and_then(Path::parent).is_some_and(|folder| folder.ends_with("stubs"));
    // SAFETY: may be called at any time and any number of times. What else it may say is asked for when the GPUs are
    // listed.
    let is_stub = in_stubs || unsafe { initialise(0) } == CUresult::CUDA_ERROR_STUB_LIBRARY as i32;
    is_stub.then(|| {
        let file = file.map_or_else(String::new, |file| format!(" ({})", file.display()));
        format!(
            "it is a CUDA toolkit's stub{file}, which programs are only linked with, and not the NVIDIA driver: take its folder \
             out of LD_LIBRARY_PATH, or where there is no driver {}",
            DRIVER.remedy
        )
    })
}

/// The file that is mapped at an address, with links followed; None if the system does not tell.
fn file_of(address: usize) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    file_at(&maps, address)
}

/// The file that is mapped at an address, of lines such as
/// `7f1200000000-7f1200001000 r-xp 00000000 08:01 42    /usr/lib/libcuda.so.580.95`.
fn file_at(maps: &str, address: usize) -> Option<PathBuf> {
    let hexadecimal = |text| usize::from_str_radix(text, 16).ok();
    let line = maps.lines().find(|line| {
        let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
        let range = range.and_then(|(from, to)| Some(hexadecimal(from)?..hexadecimal(to)?));
        range.is_some_and(|range| range.contains(&address))
    })?;
    line.find('/').map(|from| PathBuf::from(&line[from..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_at_an_address_is_found_in_the_maps() {
        let maps = "55d0-55e0 r--p 00000000 08:01 7      /usr/bin/program\n\
                    7f00-7f10 r-xp 00001000 08:01 42     /opt/my cuda/stubs/libcuda.so\n\
                    7f10-7f20 rw-p 00000000 00:00 0 \n";
        assert_eq!(file_at(maps, 0x7f08), Some(PathBuf::from("/opt/my cuda/stubs/libcuda.so")));
        assert_eq!(file_at(maps, 0x7f10), None, "memory without a file");
        assert_eq!(file_at(maps, 0x55e0), None);
        let here = file_of(file_at as *const () as usize).unwrap();
        assert_eq!(here, std::env::current_exe().unwrap().canonicalize().unwrap());
    }
}
