//! Tells the program what it was built with, for `environment.json`.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The libraries whose versions decide what a run computes.
const NAMED: [&str; 4] = ["candle-core", "pulp", "safetensors", "tokenizers"];

fn main() {
    let folder = env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let lock = Path::new(&folder).join("../../Cargo.lock");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={}", lock.display());
    println!("cargo::rerun-if-env-changed=TRANSFORMER_CANDLE_COMMIT");
    println!("cargo::rerun-if-env-changed=TRANSFORMER_CANDLE_NVCC");
    println!("cargo::rustc-env=BUILT_WITH_CUDA={}", cuda());
    println!("cargo::rustc-env=BUILT_VERSION={}", version(&cuda()));
    println!("cargo::rustc-env=BUILT_WITH_LIBRARIES={}", libraries(&fs::read_to_string(lock).unwrap_or_default()));
    println!("cargo::rustc-env=BUILT_WITH_RUSTC={}", compiler());
    println!("cargo::rustc-env=BUILT_FOR={}", env::var("TARGET").expect("cargo sets it"));
    println!("cargo::rustc-env=BUILT_FROM_COMMIT={}", env::var("TRANSFORMER_CANDLE_COMMIT").unwrap_or_default());
}

/// Returns `candle-core 0.11.1, pulp 0.22.3, ...`, from the lines `name = "..."` and `version = "..."` of Cargo.lock.
fn libraries(lock: &str) -> String {
    let value = |line: &str| line.split('"').nth(1).unwrap_or_default().to_owned();
    let lines: Vec<&str> = lock.lines().collect();
    let pairs =
        lines.windows(2).filter(|pair| pair[0].starts_with("name = ") && NAMED.contains(&value(pair[0]).as_str()));
    pairs.map(|pair| format!("{} {}", value(pair[0]), value(pair[1]))).collect::<Vec<_>>().join(", ")
}

/// Returns the CUDA compiler's release, or `stand-in` for one that compiled nothing; empty for a build without CUDA.
fn cuda() -> String {
    let compiler = || env::var("TRANSFORMER_CANDLE_NVCC").unwrap_or_else(|_| "of unknown release".to_owned());
    env::var_os("CARGO_FEATURE_CUDA").map(|_| compiler()).unwrap_or_default()
}

/// Returns the version that the program reports: `0.1.0`, or `0.1.0 (CUDA 13.0)`.
fn version(cuda: &str) -> String {
    let version = env::var("CARGO_PKG_VERSION").expect("cargo sets it");
    if cuda.is_empty() { version } else { format!("{version} (CUDA {cuda})") }
}

fn compiler() -> String {
    let rustc = env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let output = Command::new(rustc).arg("--version").output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
}
