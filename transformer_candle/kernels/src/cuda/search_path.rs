//! Folders that may hold CUDA's libraries, beside those that the system's loader searches.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The file names of a library, in the order in which cudarc, below Candle, asks the loader: the one without a version,
/// which belongs to a toolkit, comes first.
pub(super) fn file_names(library: &str) -> Vec<String> {
    let versions = VERSIONS.iter().map(|version| format!("lib{library}.so.{version}"));
    std::iter::once(format!("lib{library}.so")).chain(versions).collect()
}

/// The versions in file names, the newest first: CUDA 13 and 12 (cuBLAS), 10 (cuRAND of either), 1 (the driver).
pub(super) const VERSIONS: [&str; 6] = ["13", "12", "11", "10", "9", "1"];

/// The existing folders to search, the most specific first: toolkits that the environment names, the wheels of virtual
/// environments and of the user, toolkits in the usual places, the driver's own folders.
///
/// `variable` reads the environment; `executable` is this program, which in a virtual environment has libraries of its
/// own; `root` is where the file system begins.
pub(super) fn folders(
    variable: impl Fn(&str) -> Option<OsString>,
    executable: Option<&Path>,
    root: &Path,
) -> Vec<PathBuf> {
    let path = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let mut folders = Vec::new();
    for toolkit in ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(path) {
        folders.extend(["lib64", "lib", "targets/x86_64-linux/lib"].map(|folder| toolkit.join(folder)));
    }
    // The Python package knows where its own wheels are, whatever kind of installation it is in.
    let wheels = variable("ORCHESTRATE_NVIDIA_WHEELS").unwrap_or_default();
    folders.extend(std::env::split_paths(&wheels).flat_map(|wheels| libraries_of(entries(&wheels))));
    for environment in executable.and_then(own_environment).into_iter().chain(path("VIRTUAL_ENV")) {
        folders.extend(wheel_folders(&environment));
    }
    folders.extend(path("CONDA_PREFIX").map(|prefix| prefix.join("lib")));
    // What `pip install --user` installs, for the program that is started without Python.
    folders.extend(path("HOME").into_iter().flat_map(|home| wheel_folders(&home.join(".local"))));
    let toolkits = entries(&root.join("usr/local")).into_iter().rev();
    folders.extend(toolkits.filter(|toolkit| name(toolkit).starts_with("cuda")).map(|toolkit| toolkit.join("lib64")));
    folders.extend(SYSTEM_FOLDERS.map(|folder| root.join(folder)));
    folders.retain(|folder| folder.is_dir());
    folders
}

/// Arch's toolkit, and the driver's own library under WSL2, on NixOS, and in containers whose host mounts it (Google's
/// Kubernetes).
const SYSTEM_FOLDERS: [&str; 5] =
    ["opt/cuda/lib64", "usr/lib/wsl/lib", "run/opengl-driver/lib", "usr/local/nvidia/lib64", "usr/local/nvidia/lib"];

/// The virtual environment that a program lies in, as `bin/program`.
fn own_environment(executable: &Path) -> Option<PathBuf> {
    let environment = executable.parent()?.parent()?;
    environment.join("pyvenv.cfg").is_file().then(|| environment.to_owned())
}

/// `lib/python3.*/site-packages/nvidia/*/lib`, where NVIDIA's wheels put their libraries: `cu13` has all of CUDA 13,
/// the wheels for CUDA 12 have a folder each.
fn wheel_folders(environment: &Path) -> Vec<PathBuf> {
    let pythons = entries(&environment.join("lib")).into_iter().filter(|folder| name(folder).starts_with("python"));
    libraries_of(pythons.flat_map(|python| entries(&python.join("site-packages").join("nvidia"))))
}

fn libraries_of(wheels: impl IntoIterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = wheels.into_iter().map(|wheel| wheel.join("lib")).collect();
    folders.sort_by_key(|folder| !folder.parent().is_some_and(|wheel| name(wheel).starts_with("cu1")));
    folders
}

/// The entries of a folder, sorted by name; none where there is no such folder.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let read = std::fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<PathBuf> = read.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}

fn name(path: &Path) -> std::borrow::Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_tried_in_the_order_of_those_who_load_them() {
        let names = file_names("cublasLt");
        assert_eq!(names[..3], ["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12"]);
        assert!(file_names("curand").contains(&"libcurand.so.10".to_owned()));
        assert!(file_names("cuda").contains(&"libcuda.so.1".to_owned()));
    }

    /// A temporary folder, and a way to make folders in it.
    fn scratch(name: &str) -> (PathBuf, impl Fn(&str)) {
        let root = std::env::temp_dir().join(format!("search-path-{name}-{}", std::process::id()));
        let below = root.clone();
        (root, move |folder| std::fs::create_dir_all(below.join(folder)).unwrap())
    }

    fn relative<'a>(folders: &'a [PathBuf], root: &Path) -> Vec<&'a Path> {
        folders.iter().filter_map(|folder| folder.strip_prefix(root).ok()).collect()
    }

    #[test]
    fn toolkits_named_by_the_environment_and_wheels_are_searched() {
        let (root, make) = scratch("environment");
        make("toolkit/lib64");
        make("user/nvidia/cu13/lib");
        make("venv/bin");
        make("venv/lib/python3.12/site-packages/nvidia/cublas/lib");
        make("venv/lib/python3.12/site-packages/nvidia/cu13/lib");
        make("other/lib/python3.11/site-packages/nvidia/curand/lib");
        make("home/.local/lib/python3.13/site-packages/nvidia/cu13/lib");
        std::fs::write(root.join("venv/pyvenv.cfg"), "").unwrap();

        let variable = |name: &str| match name {
            "CUDA_HOME" => Some(root.join("toolkit").into_os_string()),
            "CUDA_PATH" => Some(OsString::new()),
            "ORCHESTRATE_NVIDIA_WHEELS" => Some(root.join("user/nvidia").into_os_string()),
            "VIRTUAL_ENV" => Some(root.join("other").into_os_string()),
            "HOME" => Some(root.join("home").into_os_string()),
            _ => None,
        };
        let nowhere = root.join("nowhere");
        let search_folders = folders(variable, Some(&root.join("venv/bin/transformer-candle")), &nowhere);
        let expected = [
            "toolkit/lib64",
            "user/nvidia/cu13/lib",
            "venv/lib/python3.12/site-packages/nvidia/cu13/lib",
            "venv/lib/python3.12/site-packages/nvidia/cublas/lib",
            "other/lib/python3.11/site-packages/nvidia/curand/lib",
            "home/.local/lib/python3.13/site-packages/nvidia/cu13/lib",
        ];
        assert_eq!(relative(&search_folders, &root), expected.map(Path::new));
        assert_eq!(folders(|_| None, Some(&root.join("toolkit/lib64/program")), &nowhere), [] as [PathBuf; 0]);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn toolkits_and_drivers_of_the_system_are_searched() {
        let (root, make) = scratch("system");
        let expected = [
            "usr/local/cuda-13.0/lib64",
            "usr/local/cuda/lib64",
            "usr/lib/wsl/lib",
            "usr/local/nvidia/lib64",
            "usr/local/nvidia/lib",
        ];
        for folder in expected {
            make(folder);
        }
        let search_folders = folders(|_| None, None, &root);
        assert_eq!(relative(&search_folders, &root), expected.map(Path::new));
        std::fs::remove_dir_all(root).unwrap();
    }
}
