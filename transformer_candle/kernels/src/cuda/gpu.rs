//! Properties of a GPU that are known without opening it.

use super::limits;
use crate::fp8::ScaleBlock;

/// A GPU that the driver lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The GPU's ordinal, as in `cuda:0`.
    pub ordinal: usize,
    /// The name that the driver reports, such as `NVIDIA GeForce RTX 5090`.
    pub name: String,
    /// The driver's identifier, by which NVML knows it as well: `GPU-` (`MIG-` for a slice of one) and 32 hexadecimal
    /// digits.
    pub uuid: String,
    /// Total memory in bytes.
    pub total_bytes: u64,
    /// The compute capability, major and minor, such as (12, 0).
    pub compute_capability: (u32, u32),
    /// Major and minor version of the cuBLAS that computes its matmuls.
    pub cublas: (u32, u32),
}

/// The first cuBLAS that knows GPUs of compute capability 10.0 and newer (Blackwell).
const CUBLAS_OF_BLACKWELL: (u32, u32) = (12, 8);

/// Bytes of a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Free bytes.
    pub free: u64,
    /// All bytes.
    pub total: u64,
}

/// The memory pool of this process: exact, and independent of other programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolMemory {
    /// Bytes in buffers.
    pub used: u64,
    /// Bytes that the pool has reserved, for these and later buffers.
    pub reserved: u64,
}

impl Gpu {
    /// Why the kernels do not run on this GPU; None if they do.
    pub fn refusal(&self) -> Option<String> {
        let ((major, minor), name) = (self.compute_capability, &self.name);
        if major < 8 {
            return Some(format!(
                "{name} has compute capability {major}.{minor}, 8.0 is needed (Ampere, such as A100 or RTX 3090, or newer)"
            ));
        }
        (major >= 10 && self.cublas < CUBLAS_OF_BLACKWELL).then(|| {
            let (cublas_major, cublas_minor) = self.cublas;
            format!(
                "{name} has compute capability {major}.{minor}, which cuBLAS {cublas_major}.{cublas_minor} does not know: \
                 `pip install 'nvidia-cublas~=13.0'`, or with a driver older than 580 `pip install --upgrade \
                 nvidia-cublas-cu12`, brings one that does"
            )
        })
    }

    /// See [`limits::fp8_blocks`].
    pub fn fp8_blocks(&self) -> &'static [ScaleBlock] {
        limits::fp8_blocks(self.compute_capability, self.cublas)
    }

    /// Nominal BF16 operations per second of dense GEMMs with F32 accumulation, without sparsity; None for a GPU not
    /// listed.
    pub fn nominal_bf16_flops(&self) -> Option<f64> {
        nominal_bf16_flops(&self.name)
    }
}

/// Nominal BF16 operations per second of dense GEMMs, by the name that the driver reports; None for a GPU not listed.
/// The first entry that the name contains as whole words counts, so that longer names come first; a laptop's GPU and a
/// MIG slice share their names with a faster one, and have no peak.
///
/// Sources, all NVIDIA's: the data sheets of the data centre and workstation GPUs (the dense number, half of the sparse
/// one), and the tables of the white papers on GA102, AD102 and the RTX Blackwell architecture ("Peak BF16 Tensor
/// TFLOPS with FP32 Accumulate", dense), which for `GeForce` is 512 x multiprocessors x boost clock.
pub fn nominal_bf16_flops(name: &str) -> Option<f64> {
    const TERAFLOPS: [(&str, f64); 34] = [
        ("RTX 5090 D", 209.5),
        ("RTX 5090", 209.5),
        ("RTX 5080", 112.6),
        ("RTX 5070 Ti", 87.9),
        ("RTX 5070", 61.7),
        ("RTX 4090 D", 147.1),
        ("RTX 4090", 165.2),
        ("RTX 4080 SUPER", 104.4),
        ("RTX 4080", 97.5),
        ("RTX 4070 Ti SUPER", 88.2),
        ("RTX 4070 Ti", 80.2),
        ("RTX 4070 SUPER", 71.0),
        ("RTX 4070", 58.3),
        ("RTX 3090 Ti", 80.0),
        ("RTX 3090", 71.0),
        ("RTX 3080 Ti", 68.2),
        ("RTX 6000 Ada", 364.2),
        ("RTX A6000", 154.8),
        ("GH200", 989.0),
        ("H200 NVL", 835.5),
        ("H200", 989.0),
        ("H100 NVL", 835.5),
        ("H100 PCIe", 756.5),
        ("H100", 989.0),
        ("H800 PCIe", 756.5),
        ("H800", 989.0),
        ("B200", 2250.0),
        ("A100", 312.0),
        ("A800", 312.0),
        ("A30", 165.0),
        ("A40", 149.7),
        ("L40S", 362.0),
        ("L40", 181.0),
        ("L4", 121.0),
    ];
    let entry = TERAFLOPS.iter().find(|(part, _)| contains_words(name, part));
    let is_less = ["Laptop", "MIG"].iter().any(|word| contains_words(name, word));
    entry.filter(|_| !is_less).map(|(_, teraflops)| teraflops * 1e12)
}

/// Whether a name contains these as whole words: `A100` is in `NVIDIA A100-SXM4-80GB`, and not in `NVIDIA RTX A1000`.
fn contains_words(name: &str, words: &str) -> bool {
    let ends = |rest: &str| !rest.starts_with(char::is_alphanumeric);
    let begins = |before: &str| !before.ends_with(char::is_alphanumeric);
    name.match_indices(words).any(|(at, _)| begins(&name[..at]) && ends(&name[at + words.len()..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(name: &str, compute_capability: (u32, u32)) -> Gpu {
        Gpu {
            ordinal: 0,
            name: name.to_owned(),
            uuid: String::new(),
            total_bytes: 1,
            compute_capability,
            cublas: (13, 0),
        }
    }

    #[test]
    fn the_longest_name_decides_the_peak() {
        let peak = |name| gpu(name, (9, 0)).nominal_bf16_flops();
        assert_eq!(peak("NVIDIA GeForce RTX 5090"), Some(209.5e12));
        assert_eq!(peak("NVIDIA H200"), Some(989e12));
        assert_eq!(peak("NVIDIA H200 NVL"), Some(835.5e12));
        assert_eq!(peak("NVIDIA H100 80GB HBM3"), Some(989e12));
        assert_eq!(peak("NVIDIA H100 NVL"), Some(835.5e12));
        assert_eq!(peak("NVIDIA H100 PCIe"), Some(756.5e12));
        assert_eq!(peak("NVIDIA H800 PCIe"), Some(756.5e12));
        assert_eq!(peak("NVIDIA A100-SXM4-80GB"), Some(312e12));
        assert_eq!(peak("NVIDIA L40S"), Some(362e12));
        assert_eq!(peak("NVIDIA L4"), Some(121e12));
        assert_eq!(peak("NVIDIA GeForce RTX 4070 Ti SUPER"), Some(88.2e12));
        assert_eq!(peak("an unknown GPU"), None);
    }

    #[test]
    fn similar_names_do_not_share_a_peak() {
        for name in [
            "NVIDIA RTX A1000",
            "NVIDIA RTX A4000",
            "NVIDIA RTX A3000 Laptop GPU",
            "NVIDIA GeForce RTX 5090 Laptop GPU",
            "NVIDIA GB200",
            "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
            "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        ] {
            assert_eq!(gpu(name, (8, 6)).nominal_bf16_flops(), None, "{name}");
        }
        assert_eq!(gpu("NVIDIA GH200 480GB", (9, 0)).nominal_bf16_flops(), Some(989e12));
    }

    #[test]
    fn gpus_before_ampere_are_refused_in_a_sentence() {
        let refusal = gpu("Tesla T4", (7, 5)).refusal().unwrap();
        assert!(refusal.starts_with("Tesla T4 has compute capability 7.5, 8.0 is needed"), "{refusal}");
        assert_eq!(gpu("NVIDIA A100", (8, 0)).refusal(), None);
        assert_eq!(gpu("NVIDIA GeForce RTX 5090", (12, 0)).refusal(), None);
    }
    #[test]
    fn blackwell_needs_a_cublas_that_knows_it() {
        let with = |compute_capability, cublas| Gpu { cublas, ..gpu("NVIDIA B200", compute_capability) }.refusal();
        for blackwell in [(10, 0), (12, 0)] {
            let refusal = with(blackwell, (12, 6)).unwrap();
            assert!(refusal.contains(".0, which cuBLAS 12.6 does not know: `pip install"), "{refusal}");
            assert_eq!(with(blackwell, (12, 8)), None);
            assert_eq!(with(blackwell, (13, 0)), None);
        }
        assert_eq!(with((9, 0), (12, 6)), None);
    }
}
