//! What an operation launches: a list that depends on sizes and addresses only. A graph can replay it, and a test can compare it with the
//! kernels' manifest on a machine without a GPU.

use candle_core::DType;

use super::{Cuda, Matmul, Value};
use crate::Result;

/// One launch on the compute stream.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    /// A kernel of ours.
    Launch(Launch),
    /// A GEMM of cuBLASLt.
    Multiply(Matmul),
}

/// A kernel by its name in the manifest, over a grid.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    pub(crate) kernel: String,
    pub(crate) grid: [Blocks; 3],
    pub(crate) values: Vec<Value>,
}

/// Blocks along an axis of the grid.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Blocks {
    /// This number.
    Count(usize),
    /// As many as these elements need, at as many elements per block as the kernel's constant of this name.
    Of(usize, &'static str),
}

impl Request {
    /// The kernel `<function>.<variant>`.
    pub(crate) fn launch(function: &str, variant: &str, grid: [Blocks; 3], values: impl Into<Vec<Value>>) -> Self {
        Self::Launch(Launch { kernel: format!("{function}.{variant}"), grid, values: values.into() })
    }
}

impl Blocks {
    /// One block, along an unused axis.
    pub(crate) const ONE: Self = Self::Count(1);

    fn count(self, constant: impl Fn(&str) -> usize) -> usize {
        match self {
            Self::Count(count) => count,
            Self::Of(things, name) => things.div_ceil(constant(name)),
        }
    }
}

impl Launch {
    /// The key of the choice among a kernel's variants: its name, what the grid covers, and its integers, such as
    /// `attention_forward.bf16.e64 256x2048x1 2048 32 8 8`.
    pub(crate) fn shape(&self) -> String {
        let covered = self.grid.map(|blocks| match blocks {
            Blocks::Count(things) | Blocks::Of(things, _) => things.to_string(),
        });
        let mut text = format!("{} {}", self.kernel, covered.join("x"));
        for value in &self.values {
            if let Value::I32(number) = value {
                text.push(' ');
                text.push_str(&number.to_string());
            }
        }
        text
    }

    /// The grid, for a kernel with these constants.
    pub(crate) fn blocks(&self, constant: impl Fn(&str) -> usize) -> [usize; 3] {
        self.grid.map(|blocks| blocks.count(&constant))
    }
}

/// Launches everything in a list, in order.
pub(crate) fn perform(cuda: &Cuda, requests: &[Request]) -> Result<()> {
    for request in requests {
        match request {
            Request::Multiply(matmul) => cuda.multiply(matmul)?,
            Request::Launch(launch) => {
                let kernel = cuda.kernel(launch)?;
                kernel.launch(launch.blocks(|name| kernel.constant(name)), &launch.values)?;
            }
        }
    }
    Ok(())
}

/// An element type in the names of kernels.
pub(crate) fn variant(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        other => other.as_str(),
    }
}

/// Elements of a flat buffer per launch: kernels count in 32 bits.
const RANGE: usize = 1 << 30;

/// The ranges of a flat buffer that are launched separately: first element and number of elements.
pub(crate) fn ranges(elements: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..elements).step_by(RANGE).map(move |start| (start, RANGE.min(elements - start)))
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
    fn a_launch_is_known_by_its_name_grid_and_integers() {
        let grid = [Blocks::Count(7), Blocks::Of(1025, "BLOCK"), Blocks::ONE];
        let pointer = Value::Pointer { address: 16, dtype: DType::F32 };
        let launch = Launch {
            kernel: "scale.bf16".to_owned(),
            grid,
            values: vec![Value::I32(1025), pointer, Value::F32(0.5), Value::I32(8)],
        };
        assert_eq!(launch.shape(), "scale.bf16 7x1025x1 1025 8");
    }

    #[test]
    fn blocks_are_counted_in_the_kernels_constants() {
        let grid = [Blocks::Count(7), Blocks::Of(1025, "BLOCK"), Blocks::Of(0, "BLOCK")];
        let launch = Launch { kernel: String::new(), grid, values: Vec::new() };
        assert_eq!(launch.blocks(|name| if name == "BLOCK" { 1024 } else { 0 }), [7, 2, 0]);
    }
}
