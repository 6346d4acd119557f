//! `environment.json`: the program version, hardware and start time of a run, for comparing runs later.

use std::env;
use std::fs;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use kernels::{Bf16Units, Device};
use serde::Serialize;

use crate::{Result, TrainerError, atomic_file};

/// This program's version, and the CUDA release that it was built with.
pub const VERSION: &str = env!("BUILT_VERSION");
/// The name of the environment file in a run directory.
pub const FILE_NAME: &str = "environment.json";

/// A run's software and hardware. Environment variables are left out: they may hold secrets.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Environment {
    /// This program's version.
    pub version: &'static str,
    /// The commit it was built from, if known.
    pub commit: Option<&'static str>,
    /// The CUDA compiler's release, or `stand-in` where nothing real was compiled; none in a build without CUDA.
    pub cuda: Option<&'static str>,
    /// `debug` or `release`.
    pub profile: &'static str,
    /// The version of `rustc`.
    pub rustc: &'static str,
    /// The target triple.
    pub target: &'static str,
    /// The libraries that decide what is computed, with their versions.
    pub libraries: Vec<&'static str>,
    /// The operating system's name and release.
    pub system: String,
    /// The machine's name.
    pub host: String,
    /// The machine of each rank; none where there is one process.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// The processor, as it calls itself.
    pub processor: Option<String>,
    /// The GPU that computes, if one does.
    #[serde(rename = "card")]
    pub gpu: Option<GpuInfo>,
    /// Vector instructions that change which code runs.
    pub instructions: Vec<&'static str>,
    /// The processor's units that multiply bf16 matrices, which decide bits of a run in bf16 on a CPU.
    pub bf16_units: &'static str,
    /// Cores this process may use.
    pub cores: usize,
    /// Threads the run uses.
    pub threads: usize,
    /// The machine's memory in bytes.
    pub memory_bytes: Option<u64>,
    /// The command line.
    pub arguments: Vec<String>,
    /// The folder it was started in.
    pub current_directory: Option<String>,
    /// The id of this process.
    pub process: u32,
    /// Start time in seconds since 1970.
    pub started: u64,
}

/// The GPU, driver and libraries, which determine a run's rounding and speed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GpuInfo {
    /// Its number, as in `cuda:0`.
    pub ordinal: usize,
    /// The name that the driver reports.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Its total memory in bytes, if the driver reports it.
    pub memory_bytes: Option<u64>,
    /// GPU, driver and libraries with their versions.
    pub fingerprint: String,
}

impl GpuInfo {
    fn new(device: &Device) -> Option<Self> {
        device.as_cuda().map(|gpu| Self {
            ordinal: gpu.ordinal(),
            name: gpu.name().to_owned(),
            compute_capability: gpu.compute_capability(),
            memory_bytes: gpu.memory().ok().map(|memory| memory.total),
            fingerprint: gpu.fingerprint(),
        })
    }
}

impl Environment {
    /// Records this process's environment, for a run on `threads` threads.
    pub fn capture(threads: usize) -> Self {
        let system = rustix::system::uname();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            commit: Some(env!("BUILT_FROM_COMMIT")).filter(|commit| !commit.is_empty()),
            cuda: Some(env!("BUILT_WITH_CUDA")).filter(|release| !release.is_empty()),
            profile: if cfg!(debug_assertions) { "debug" } else { "release" },
            rustc: env!("BUILT_WITH_RUSTC"),
            target: env!("BUILT_FOR"),
            libraries: env!("BUILT_WITH_LIBRARIES").split(", ").collect(),
            system: format!("{} {}", system.sysname().to_string_lossy(), system.release().to_string_lossy()),
            host: system.nodename().to_string_lossy().into_owned(),
            hosts: Vec::new(),
            processor: processor(),
            gpu: None,
            instructions: instructions(),
            bf16_units: Bf16Units::of_this_processor().name(),
            cores: thread::available_parallelism().map_or(1, usize::from),
            threads,
            memory_bytes: memory_bytes(),
            arguments: env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect(),
            current_directory: env::current_dir().ok().map(|folder| folder.display().to_string()),
            process: std::process::id(),
            started: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        }
    }

    /// Adds the device that a run is on.
    #[must_use]
    pub fn on(self, device: &Device) -> Self {
        Self { gpu: GpuInfo::new(device), ..self }
    }

    /// Writes the file into a run directory.
    pub fn save(&self, run_directory: &Path) -> Result<()> {
        let path = run_directory.join(FILE_NAME);
        let outcome = serde_json::to_string_pretty(self)
            .map_err(io::Error::from)
            .and_then(|text| atomic_file::replace(&path, (text + "\n").as_bytes()));
        outcome.map_err(TrainerError::io("write", &path))
    }
}

/// Returns the CPU's model name from `/proc/cpuinfo`.
pub(crate) fn processor() -> Option<String> {
    let information = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = information.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn instructions() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let features = [
            ("avx2", is_x86_feature_detected!("avx2")),
            ("fma", is_x86_feature_detected!("fma")),
            ("avx512f", is_x86_feature_detected!("avx512f")),
            ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
            ("sha", is_x86_feature_detected!("sha")),
        ];
        features.into_iter().filter_map(|(name, is_supported)| is_supported.then_some(name)).collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}

/// Reads the machine's memory in bytes from a line of `/proc/meminfo`: `MemTotal:  8123456 kB`.
fn memory_bytes() -> Option<u64> {
    let information = fs::read_to_string("/proc/meminfo").ok()?;
    let line = information.lines().find(|line| line.starts_with("MemTotal:"))?;
    let kibibytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_records_program_device_and_threads() {
        let run = tempfile::tempdir().unwrap();
        Environment::capture(3).on(&Device::Cpu).save(run.path()).unwrap();
        let text = fs::read_to_string(run.path().join(FILE_NAME)).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["threads"], 3);
        assert!(value["card"].is_null());
        assert_eq!(value["version"], env!("CARGO_PKG_VERSION"));
        assert!(value["rustc"].as_str().unwrap().starts_with("rustc "));
        assert!(value["libraries"].to_string().contains("candle-core 0."));
    }
}
