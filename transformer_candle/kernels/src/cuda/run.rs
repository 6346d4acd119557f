//! Runs the launches of an operation on a GPU.

use super::Cuda;
use super::launch::Launch;
use crate::Result;

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
