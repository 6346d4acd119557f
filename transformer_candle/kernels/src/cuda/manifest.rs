//! The manifest that `triton/build.py` writes of the kernels it compiled: which GPU takes which, and what each assumes
//! of its arguments.

use std::collections::HashMap;

use candle_core::DType;
use serde::Deserialize;

use super::KernelArg;

/// Threads of a warp, on every GPU.
const WARP: u32 = 32;
/// Maximum number of blocks of a launch along x, y and z (CUDA C++ programming guide, technical specifications per
/// compute capability).
const LARGEST_GRID: [usize; 3] = [i32::MAX as usize, 65_535, 65_535];
/// Pointers that Triton appends to a kernel's arguments, for scratch memory: `build.py` refuses kernels that need any.
const SCRATCH_POINTERS: usize = 2;

/// The contents of `ptx/manifest.json`.
#[derive(Debug, Deserialize)]
pub(super) struct Manifest {
    kernels: Vec<Entry>,
}

/// A compiled kernel.
#[derive(Debug, Deserialize)]
pub(super) struct Entry {
    /// `<operation>_<direction>.<dtype>[.<variant>]`.
    pub(super) name: String,
    family: String,
    /// The name of an alternative to the kernel of this name and family, to be chosen by timing; None for the declared
    /// one.
    #[serde(default)]
    candidate: Option<String>,
    /// Path of its PTX file, relative to the manifest.
    pub(super) file: String,
    /// Name of its entry function in the PTX.
    #[serde(rename = "entry")]
    pub(super) symbol: String,
    arguments: Vec<Argument>,
    constants: HashMap<String, serde_json::Value>,
    num_warps: u32,
    /// Dynamic shared memory of a block.
    pub(super) shared_bytes: u32,
}

#[derive(Debug, Deserialize)]
struct Argument {
    name: String,
    #[serde(rename = "type")]
    kind: Kind,
    /// Whether the kernel assumes a multiple of 16: bytes of an address, units of an integer.
    divisible_by_16: bool,
}

/// Triton's names of types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum Kind {
    #[serde(rename = "*fp32")]
    F32Pointer,
    #[serde(rename = "*bf16")]
    BF16Pointer,
    #[serde(rename = "*u32")]
    U32Pointer,
    #[serde(rename = "*i32")]
    I32Pointer,
    #[serde(rename = "*i16")]
    I16Pointer,
    #[serde(rename = "*u8")]
    U8Pointer,
    #[serde(rename = "i32")]
    I32,
    #[serde(rename = "fp32")]
    F32,
}

/// A launch whose grid and arguments have been checked against the manifest.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CheckedLaunch {
    pub(super) grid: [u32; 3],
    /// Threads of a block.
    pub(super) threads: u32,
    /// The arguments in their order, each in the low bytes of a word.
    pub(super) words: Vec<u64>,
}

/// The driver reads as many bytes of an argument as its type has, from the word's first on.
const _: () = assert!(cfg!(target_endian = "little"));

/// The families that run on a GPU, the best first.
///
/// `sm_90a` is for Hopper only; `sm_80_small` has tiles for the 99 KB of shared memory that the GPUs for desktops and
/// workstations let a block have; the driver translates `sm_80` for every later GPU.
fn families(compute_capability: (u32, u32)) -> &'static [&'static str] {
    match compute_capability {
        (9, 0) => &["sm_90a", "sm_80"],
        (8, 6 | 9) | (12.., _) => &["sm_80_small", "sm_80"],
        _ => &["sm_80"],
    }
}

impl Manifest {
    /// The kernels for a GPU, by name: the variants of its best family, the declared one first.
    pub(super) fn for_gpu(text: &str, compute_capability: (u32, u32)) -> Result<HashMap<String, Vec<Entry>>, String> {
        let manifest: Self = serde_json::from_str(text).map_err(|error| format!("the kernels' manifest: {error}"))?;
        let families = families(compute_capability);
        let rank = |entry: &Entry| families.iter().position(|family| *family == entry.family);
        let mut variants_by_name: HashMap<String, Vec<Entry>> = HashMap::new();
        for entry in manifest.kernels {
            let Some(own) = rank(&entry) else { continue };
            let variants = variants_by_name.entry(entry.name.clone()).or_default();
            match variants.first().and_then(rank) {
                Some(other) if own > other => continue,
                Some(other) if own < other => variants.clear(),
                _ => (),
            }
            variants.push(entry);
        }
        for (name, variants) in &mut variants_by_name {
            variants.sort_by(|one, other| one.candidate.cmp(&other.candidate));
            if variants[0].candidate.is_some() {
                return Err(format!("the kernels' manifest: `{name}` has candidates only in {}", variants[0].family));
            }
        }
        Ok(variants_by_name)
    }
}

impl Entry {
    /// The variant's name among the kernels of its name: that of the candidate, or `declared`.
    pub(super) fn variant(&self) -> &str {
        self.candidate.as_deref().unwrap_or("declared")
    }

    /// A constant that the kernel was compiled with.
    pub(super) fn constant(&self, name: &str) -> Option<usize> {
        usize::try_from(self.constants.get(name)?.as_u64()?).ok()
    }

    /// Compares a launch with what the kernel was compiled for. Returns None if the grid is empty, which means nothing
    /// to do.
    ///
    /// # Errors
    /// A sentence on the first argument or size that does not match.
    pub(super) fn check(&self, grid: [usize; 3], values: &[KernelArg]) -> Result<Option<CheckedLaunch>, String> {
        if values.len() != self.arguments.len() {
            return Err(format!("it takes {} arguments, {} were given", self.arguments.len(), values.len()));
        }
        let words = self.arguments.iter().zip(values).map(|(argument, value)| argument.word(*value));
        let mut words = words.collect::<Result<Vec<_>, _>>()?;
        words.extend([0; SCRATCH_POINTERS]);
        for ((axis, size), limit) in ["x", "y", "z"].iter().zip(grid).zip(LARGEST_GRID) {
            if size > limit {
                return Err(format!("{size} blocks along {axis} are more than the {limit} that a launch can have"));
            }
        }
        let launch = CheckedLaunch { grid: grid.map(|size| size as u32), threads: self.num_warps * WARP, words };
        Ok(grid.iter().all(|&size| size > 0).then_some(launch))
    }
}

impl Argument {
    /// The value in the low bytes of a word.
    fn word(&self, value: KernelArg) -> Result<u64, String> {
        let name = &self.name;
        if Kind::from_value(value) != Some(self.kind) {
            return Err(format!("`{name}` is {:?}, {value:?} was given", self.kind));
        }
        let word = match value {
            KernelArg::Pointer { address, .. } => address as u64,
            KernelArg::I32(number) => u64::from(number.cast_unsigned()),
            KernelArg::F32(number) => u64::from(number.to_bits()),
        };
        if self.divisible_by_16 && !word.is_multiple_of(16) {
            return Err(format!("`{name}` must be a multiple of 16, {value:?} was given"));
        }
        Ok(word)
    }
}

impl Kind {
    fn from_value(value: KernelArg) -> Option<Self> {
        match value {
            KernelArg::Pointer { dtype: DType::F32, .. } => Some(Self::F32Pointer),
            KernelArg::Pointer { dtype: DType::BF16, .. } => Some(Self::BF16Pointer),
            KernelArg::Pointer { dtype: DType::U32, .. } => Some(Self::U32Pointer),
            KernelArg::Pointer { dtype: DType::I32, .. } => Some(Self::I32Pointer),
            KernelArg::Pointer { dtype: DType::I16, .. } => Some(Self::I16Pointer),
            KernelArg::Pointer { dtype: DType::U8, .. } => Some(Self::U8Pointer),
            KernelArg::Pointer { .. } => None,
            KernelArg::I32(_) => Some(Self::I32),
            KernelArg::F32(_) => Some(Self::F32),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = r#"{"triton": "3.9.0", "families": {}, "kernels": [
        {"name": "scale.bf16", "family": "sm_80", "file": "sm_80/scale.bf16.ptx", "entry": "scale", "source": "scale.py",
         "function": "scale", "arguments": [
            {"name": "x", "type": "*bf16", "divisible_by_16": true},
            {"name": "y", "type": "*fp32", "divisible_by_16": false},
            {"name": "n", "type": "i32", "divisible_by_16": true},
            {"name": "by", "type": "fp32", "divisible_by_16": false}],
         "constants": {"BLOCK": 1024, "EXACT": true}, "num_warps": 4, "shared_bytes": 512},
        {"name": "scale.bf16", "family": "sm_90a", "file": "sm_90a/scale.bf16.ptx", "entry": "scale", "arguments": [],
         "constants": {}, "num_warps": 8, "shared_bytes": 0},
        {"name": "scale.bf16", "family": "sm_80_small", "file": "sm_80_small/scale.bf16.ptx", "entry": "scale",
         "arguments": [], "constants": {}, "num_warps": 8, "shared_bytes": 0},
        {"name": "scale.bf16", "family": "sm_80_small", "candidate": "w4", "file": "sm_80_small/scale.bf16.w4.ptx",
         "entry": "scale", "arguments": [], "constants": {}, "num_warps": 4, "shared_bytes": 0},
        {"name": "hopper", "family": "sm_90a", "file": "sm_90a/hopper.ptx", "entry": "hopper", "arguments": [],
         "constants": {}, "num_warps": 8, "shared_bytes": 0}]}"#;

    fn scale() -> Entry {
        Manifest::for_gpu(SAMPLE, (8, 0)).unwrap().remove("scale.bf16").unwrap().remove(0)
    }

    fn pointer(address: usize, dtype: DType) -> KernelArg {
        KernelArg::Pointer { address, dtype }
    }

    #[test]
    fn a_gpu_takes_the_first_family_that_has_a_kernel() {
        let file = |capability| Manifest::for_gpu(SAMPLE, capability).unwrap()["scale.bf16"][0].file.clone();
        assert_eq!(file((8, 0)), "sm_80/scale.bf16.ptx");
        assert_eq!(file((9, 0)), "sm_90a/scale.bf16.ptx");
        assert_eq!(file((10, 0)), "sm_80/scale.bf16.ptx");
        for small in [(8, 6), (8, 9), (12, 0), (12, 1)] {
            assert_eq!(file(small), "sm_80_small/scale.bf16.ptx");
        }
        assert!(Manifest::for_gpu(SAMPLE, (9, 0)).unwrap().contains_key("hopper"));
        assert!(!Manifest::for_gpu(SAMPLE, (12, 0)).unwrap().contains_key("hopper"));
    }

    #[test]
    fn candidates_stand_behind_the_kernel_taken_unmeasured() {
        let variants = |capability, text: &str| -> Result<Vec<String>, String> {
            let kernels = Manifest::for_gpu(text, capability)?;
            Ok(kernels["scale.bf16"].iter().map(|entry| entry.variant().to_owned()).collect())
        };
        assert_eq!(variants((12, 0), SAMPLE).unwrap(), ["declared", "w4"]);
        assert_eq!(variants((9, 0), SAMPLE).unwrap(), ["declared"]);
        let declared = r#""family": "sm_80_small", "file""#;
        let alone = SAMPLE.replace(declared, r#""family": "sm_90a", "file""#);
        assert!(variants((12, 0), &alone).unwrap_err().ends_with("has candidates only in sm_80_small"));
    }

    #[test]
    fn a_launch_is_put_into_words_with_the_scratch_pointers_behind() {
        let values =
            [pointer(0x1230, DType::BF16), pointer(0x11, DType::F32), KernelArg::I32(-16), KernelArg::F32(1.0)];
        let launch = scale().check([5, 1, 2], &values).unwrap().unwrap();
        let words = vec![0x1230, 0x11, 0xffff_fff0, 0x3f80_0000, 0, 0];
        assert_eq!(launch, CheckedLaunch { grid: [5, 1, 2], threads: 128, words });
        assert_eq!(scale().check([5, 0, 1], &values), Ok(None), "nothing to do");
    }

    #[test]
    fn constants_are_whole_numbers_known_by_name() {
        assert_eq!(scale().constant("BLOCK"), Some(1024));
        assert_eq!(scale().constant("EXACT"), None);
        assert_eq!(scale().constant("block"), None);
    }

    #[test]
    fn a_broken_promise_is_refused_in_a_sentence() {
        let good = [pointer(0x1230, DType::BF16), pointer(0x11, DType::F32), KernelArg::I32(16), KernelArg::F32(1.0)];
        let refusal = |change: &dyn Fn(&mut Vec<KernelArg>), grid| {
            let mut values = good.to_vec();
            change(&mut values);
            scale().check(grid, &values).unwrap_err()
        };
        let one = [1, 1, 1];
        assert_eq!(refusal(&|values| values.truncate(3), one), "it takes 4 arguments, 3 were given");
        let swapped = refusal(&|values| values.swap(0, 1), one);
        assert_eq!(swapped, "`x` is BF16Pointer, Pointer { address: 17, dtype: F32 } was given");
        let odd = refusal(&|values| values[0] = pointer(0x1238, DType::BF16), one);
        assert!(odd.starts_with("`x` must be a multiple of 16, "), "{odd}");
        assert_eq!(
            refusal(&|values| values[2] = KernelArg::I32(17), one),
            "`n` must be a multiple of 16, I32(17) was given"
        );
        assert!(refusal(&|values| values[3] = KernelArg::I32(16), one).starts_with("`by` is F32"));
        assert!(refusal(&|values| values[0] = pointer(16, DType::F64), one).starts_with("`x` is BF16Pointer"));
        assert!(refusal(&|_| (), [1, 65_536, 1]).starts_with("65536 blocks along y"));
        assert!(refusal(&|_| (), [1 << 31, 1, 1]).starts_with("2147483648 blocks along x"));
    }

    #[test]
    fn a_manifest_of_another_form_is_refused() {
        let unknown = SAMPLE.replace("*bf16", "*fp8");
        assert!(Manifest::for_gpu(&unknown, (8, 0)).unwrap_err().contains("*fp8"));
    }

    #[test]
    fn the_manifest_at_hand_is_read_and_its_files_are_there() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/triton/ptx");
        let text = std::fs::read_to_string(format!("{folder}/manifest.json")).unwrap();
        for capability in [(8, 0), (8, 6), (9, 0), (12, 0)] {
            let kernels = Manifest::for_gpu(&text, capability).unwrap();
            assert!(!kernels.is_empty());
            for entry in kernels.values().flatten() {
                let ptx = std::fs::read_to_string(format!("{folder}/{}", entry.file)).unwrap();
                assert!(ptx.contains(&format!(".entry {}(", entry.symbol)), "{}", entry.file);
            }
        }
    }
}
