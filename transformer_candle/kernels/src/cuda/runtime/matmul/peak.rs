//! Measures how fast this GPU multiplies, for comparing with what a model reaches.

use candle_core::DType;

use super::super::Cuda;
use super::super::failure::Context as _;
use crate::cuda::matmul_shape::Shape;
use crate::cuda::{Matmul, Operand, WORKSPACE_ELEMENTS, Workspace};
use crate::{Buffer, Device, Result, bf16};

/// GEMMs of 8192^3 in a sample take some 50 ms on a fast GPU: long enough for its clocks to settle.
const GEMMS_PER_SAMPLE: usize = 10;
const SAMPLES: usize = 5;

impl Cuda {
    /// Floating-point operations per second of the BF16 GEMM y = x W^T of square matrices, accumulated in f32, in this
    /// moment. A size of 8192 shows a GPU's best. Takes 6 bytes times the square of the size, and 32 MiB, while it
    /// runs.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] where that is not free; [`crate::Error::Cuda`].
    pub fn measure_gemm_flops(&self, size: usize) -> Result<f64> {
        let device = Device::Cuda(self.clone());
        let square = |dtype| Buffer::zeros(&[size, size], dtype, &device);
        let (mut x, mut w, y) = (square(DType::BF16)?, square(DType::BF16)?, square(DType::BF16)?);
        let workspace = Buffer::zeros(&[WORKSPACE_ELEMENTS], DType::F32, &device)?;
        fill(&mut x, 1)?;
        fill(&mut w, 2)?;

        let _guard = self.lock_stream();
        let space = Workspace::from_buffer(&workspace);
        let matmul =
            Matmul::set(Operand::from(&y), [size; 3], Operand::from(&x), Operand::from(&w).transposed(), space);
        self.multiply(&matmul)?;
        let choice = self.choice(Shape::new(&matmul), &matmul)?;
        let milliseconds = self.time(SAMPLES, GEMMS_PER_SAMPLE, || {
            let launched = self.launch_matmul(&matmul, &choice.descriptors, &choice.algorithm, 1.0);
            launched.during(self.ordinal(), "cublasLtMatmul while it is timed")
        })?;
        Ok(2.0 * (size as f64).powi(3) / (f64::from(milliseconds) * 1e-3))
    }
}

/// Numbers evenly spread over [-1, 1), the same 2^20 over and over: zeros would take less power, and so let a GPU clock
/// higher.
fn fill(buffer: &mut Buffer, seed: u64) -> Result<()> {
    let total = buffer.elements();
    let mut state = seed;
    let values: Vec<bf16> = (0..total.min(1 << 20)).map(|_| bf16::from_f32(next(&mut state))).collect();
    for offset in (0..total).step_by(values.len().max(1)) {
        let part = &values[..values.len().min(total - offset)];
        buffer.view(offset, &[part.len()])?.write(part)?;
    }
    Ok(())
}

/// A step of `SplitMix64` (Steele, Lea, Flood 2014), its upper bits as a number in [-1, 1).
fn next(state: &mut u64) -> f32 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut bits = *state;
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (bits >> 40) as f32 / (1u32 << 23) as f32 - 1.0
}
