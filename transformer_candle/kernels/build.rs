//! Embeds the kernels that the manifest lists, in builds for CUDA.

fn main() {
    #[cfg(feature = "cuda")]
    embed();
}

/// Writes `ptx.rs`: the text of the manifest, and the text of every PTX file by its name.
#[cfg(feature = "cuda")]
fn embed() {
    use std::fmt::Write as _;
    use std::path::Path;

    let root = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let folder = Path::new(&root).join("triton").join("ptx");
    let manifest = folder.join("manifest.json");
    println!("cargo::rerun-if-changed={}", manifest.display());
    let text = std::fs::read_to_string(&manifest).expect("the manifest is checked in");
    let parsed: serde_json::Value = serde_json::from_str(&text).expect("the manifest is JSON");
    let kernels = parsed["kernels"].as_array().expect("the manifest lists kernels");

    let mut source = format!("pub(super) const MANIFEST: &str = include_str!({:?});\n", manifest.display().to_string());
    source += "pub(super) const PTX: &[(&str, &str)] = &[\n";
    for kernel in kernels {
        let file = kernel["file"].as_str().expect("a kernel has a file");
        let path = folder.join(file);
        println!("cargo::rerun-if-changed={}", path.display());
        writeln!(source, "    ({file:?}, include_str!({:?})),", path.display().to_string()).expect("a string grows");
    }
    source += "];\n";
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    std::fs::write(Path::new(&out).join("ptx.rs"), source).expect("cargo made its folder");
}
