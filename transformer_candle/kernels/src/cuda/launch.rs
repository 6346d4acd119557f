//! The launches of an operation: a list that depends on sizes and addresses only, so that a graph can replay it and a
//! test can check it against the kernels' manifest without a GPU.

use candle_core::DType;

use super::{Cuda, KernelArg, Matmul};
use crate::Result;

/// One launch on the compute stream.
#[derive(Clone, Debug)]
pub(crate) enum Launch {
    /// A kernel of ours.
    Kernel(KernelLaunch),
    /// A GEMM of cuBLASLt.
    Gemm(Matmul),
}

/// A kernel by its name in the manifest, its grid and its arguments.
#[derive(Clone, Debug)]
pub(crate) struct KernelLaunch {
    pub(crate) kernel: String,
    pub(crate) grid: [Axis; 3],
    pub(crate) values: Vec<KernelArg>,
}

/// The size of the grid along one axis.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Axis {
    /// A number of blocks.
    Blocks(usize),
    /// Blocks for a number of elements, with the kernel's constant of this name as elements per block.
    Elements(usize, &'static str),
}

impl Launch {
    /// The kernel `<function>.<variant>`.
    pub(crate) fn kernel(function: &str, variant: &str, grid: [Axis; 3], values: impl Into<Vec<KernelArg>>) -> Self {
        Self::Kernel(KernelLaunch { kernel: format!("{function}.{variant}"), grid, values: values.into() })
    }
}

impl Axis {
    /// One block, along an unused axis.
    pub(crate) const ONE: Self = Self::Blocks(1);

    fn count(self, constant: impl Fn(&str) -> usize) -> usize {
        match self {
            Self::Blocks(count) => count,
            Self::Elements(things, name) => things.div_ceil(constant(name)),
        }
    }
}

impl KernelLaunch {
    /// The key of the choice among a kernel's variants: its name, what the grid covers, and its integers, such as
    /// `attention_forward.bf16.e64 256x2048x1 2048 32 8 8`.
    pub(crate) fn shape(&self) -> String {
        let covered = self.grid.map(|blocks| match blocks {
            Axis::Blocks(things) | Axis::Elements(things, _) => things.to_string(),
        });
        let mut text = format!("{} {}", self.kernel, covered.join("x"));
        for value in &self.values {
            if let KernelArg::I32(number) = value {
                text.push(' ');
                text.push_str(&number.to_string());
            }
        }
        text
    }

    /// The blocks along x, y and z, for a kernel with these constants.
    pub(crate) fn blocks(&self, constant: impl Fn(&str) -> usize) -> [usize; 3] {
        self.grid.map(|blocks| blocks.count(&constant))
    }
}

/// The name of an element type in kernel names.
pub(crate) fn variant(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        other => other.as_str(),
    }
}

/// Head sizes with variants of their own of the kernels that work head by head.
const EXACT_HEAD_SIZES: [usize; 3] = [32, 64, 128];
/// Largest head size of the masked variant, which takes all other sizes in groups of eight elements.
const MASKED_HEAD_SIZE: usize = 128;

/// The name of an element type and a head size in the names of kernels that work head by head.
pub(crate) fn of_head_size(dtype: DType, head_size: usize) -> String {
    let is_masked =
        !EXACT_HEAD_SIZES.contains(&head_size) && head_size < MASKED_HEAD_SIZE && head_size.is_multiple_of(8);
    let size = if is_masked { format!("{MASKED_HEAD_SIZE}m") } else { head_size.to_string() };
    format!("{}.e{size}", variant(dtype))
}

/// The most elements of a flat buffer per launch: kernels index with 32 bits.
const RANGE: usize = 1 << 30;

/// The ranges of a flat buffer that are launched separately: first element and number of elements.
pub(crate) fn ranges(elements: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..elements).step_by(RANGE).map(move |start| (start, RANGE.min(elements - start)))
}

/// Runs launches in order on the compute stream.
pub(crate) fn run(cuda: &Cuda, launches: &[Launch]) -> Result<()> {
    for launch in launches {
        match launch {
            Launch::Gemm(matmul) => cuda.multiply(matmul)?,
            Launch::Kernel(kernel_launch) => {
                let kernel = cuda.kernel(kernel_launch)?;
                kernel.launch(kernel_launch.blocks(|name| kernel.constant(name)), &kernel_launch.values)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_a_buffer_of_any_length() {
        let lengths = |elements: usize| ranges(elements).collect::<Vec<_>>();
        assert_eq!(lengths(0), []);
        assert_eq!(lengths(5), [(0, 5)]);
        assert_eq!(lengths(RANGE), [(0, RANGE)]);
        assert_eq!(lengths(2 * RANGE + 3), [(0, RANGE), (RANGE, RANGE), (2 * RANGE, 3)]);
    }

    #[test]
    fn a_launch_is_named_by_kernel_grid_and_integers() {
        let grid = [Axis::Blocks(7), Axis::Elements(1025, "BLOCK"), Axis::ONE];
        let pointer = KernelArg::Pointer { address: 16, dtype: DType::F32 };
        let launch = KernelLaunch {
            kernel: "scale.bf16".to_owned(),
            grid,
            values: vec![KernelArg::I32(1025), pointer, KernelArg::F32(0.5), KernelArg::I32(8)],
        };
        assert_eq!(launch.shape(), "scale.bf16 7x1025x1 1025 8");
    }

    #[test]
    fn the_grid_follows_the_kernels_constants() {
        let grid = [Axis::Blocks(7), Axis::Elements(1025, "BLOCK"), Axis::Elements(0, "BLOCK")];
        let launch = KernelLaunch { kernel: String::new(), grid, values: Vec::new() };
        assert_eq!(launch.blocks(|name| if name == "BLOCK" { 1024 } else { 0 }), [7, 2, 0]);
    }
}
