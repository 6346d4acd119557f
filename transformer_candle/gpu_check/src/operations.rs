//! Every operation of crate `kernels` against its CPU version in F32: forward and backward, F32 and BF16, at odd sizes
//! and those of real models.

mod attention;
mod bounds;
mod input_generator;
mod matmuls;
mod muon;
mod optimizer;
mod rows;

use kernels::DType;

use self::input_generator::InputGenerator;
use super::case::Case;
use super::device_under_test::Random;
use super::part::Size;
use training::Result;

/// Makes every case and passes it to `visit`, one at a time, since the largest take gigabytes.
pub(super) fn visit(size: Size, seed: u64, visit: &mut dyn FnMut(&Case) -> Result<()>) -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let mut inputs = InputGenerator { random: Random::new(seed ^ dtype.size_in_bytes() as u64), dtype };
        rows::visit(size, &mut inputs, visit)?;
        attention::visit(size, &mut inputs, visit)?;
        matmuls::visit(size, &mut inputs, visit)?;
        optimizer::visit(size, &mut inputs, visit)?;
        muon::visit(size, &mut inputs, visit)?;
    }
    Ok(())
}
