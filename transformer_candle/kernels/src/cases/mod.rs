//! Calls of every operation with random arguments: one list from which unit tests, the check of launches, the check that
//! nothing is allocated, `gpu-check` and the benchmark of operations are made.
//!
//! An operation describes its calls in its module `cases`, beside its reference. [`list`] has them all, at one of three
//! sizes.

mod case;
mod contents;
mod inputs;
mod random;
mod sizes;
#[cfg(test)]
mod tests;

pub use case::{Allocated, Argument, Case, GUARD, Role};
pub use contents::{BufferContents, relative_error};
pub use inputs::Inputs;
pub use random::Random;
pub use sizes::{Positions, Size};

use crate::{DType, Result, WriteMode};
use crate::{
    accumulate, adamw, add_rms_norm, add_rms_norm_fp8, attention, bias, cast, dropout, embedding, fp8, grad_norm,
    head_cross_entropy, linear, lora, muon, qk_norm, rope, swiglu, swiglu_fp8,
};

/// The bounds of cases, on ‖ours - exact‖ / ‖exact‖. They follow from where an operation rounds.
pub mod bounds {
    /// Copies and other operations without rounding.
    pub const EXACT: f64 = 0.0;
    /// F32 throughout: sums of thousands of terms in another order, exponentials of another library. 200 ULP.
    pub const F32: f64 = 2e-5;
    /// F32 element by element, without sums: a division and a square root, each off by a few ULP.
    pub const F32_POINTWISE: f64 = 1e-6;
    /// F32 sums of exact products of BF16 numbers. Tensor cores truncate where others round: 2e-5 for sums of 8192,
    /// times five.
    pub const F32_SUM: f64 = 1e-4;
    /// A result rounded once to BF16 is off by 2^-8 at most and by 1.7e-3 in the mean; two roundings in a row by 2.4e-3.
    pub const BF16: f64 = 4e-3;
    /// BF16 attention rounds probabilities and their gradients as well, each a factor in a sum.
    pub const BF16_ATTENTION: f64 = 6e-3;
}

/// Makes a case with the arguments that it draws.
pub type MakeCase = Box<dyn Fn(&mut Inputs) -> Result<Case>>;

/// The cases of operations, each made when it is asked for, since the largest take gigabytes.
#[derive(Default)]
pub struct CaseList(Vec<MakeCase>);

impl CaseList {
    /// Adds a case.
    pub(crate) fn add(&mut self, make: impl Fn(&mut Inputs) -> Case + 'static) {
        self.try_add(move |inputs| Ok(make(inputs)));
    }

    /// Adds a case that computes some of its arguments.
    pub(crate) fn try_add(&mut self, make: impl Fn(&mut Inputs) -> Result<Case> + 'static) {
        self.0.push(Box::new(make));
    }
}

impl IntoIterator for CaseList {
    type Item = MakeCase;
    type IntoIter = std::vec::IntoIter<MakeCase>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// Returns the cases of every operation whose activations and weights have elements of this type.
pub fn list(size: Size, dtype: DType) -> CaseList {
    let mut cases = CaseList::default();
    for add in [
        embedding::cases::add,
        add_rms_norm::cases::add,
        bias::cases::add,
        qk_norm::cases::add,
        rope::cases::add,
        swiglu::cases::add,
        dropout::cases::add,
        fp8::cases::add,
        linear::cases::add_fp8,
        add_rms_norm_fp8::cases::add,
        swiglu_fp8::cases::add,
        cast::cases::add,
        attention::cases::add,
        linear::cases::add,
        lora::cases::add,
        head_cross_entropy::cases::add,
        accumulate::cases::add,
        grad_norm::cases::add,
        adamw::cases::add,
        muon::cases::add,
    ] {
        add(size, dtype, &mut cases);
    }
    for shape in size.wide() {
        cases.add(move |inputs| copy_and_zero(inputs, shape));
    }
    cases
}

/// The end of a case's sizes: how it writes its result.
pub(crate) fn mode(write_mode: WriteMode) -> &'static str {
    match write_mode {
        WriteMode::Overwrite => "",
        WriteMode::Accumulate => ", accumulated",
    }
}

/// A copy, and a buffer set to zero.
fn copy_and_zero(inputs: &mut Inputs, shape: [usize; 2]) -> Case {
    Case::new(inputs.name("Buffer::copy_from, zero"), format!("{} x {}", shape[0], shape[1]))
        .input("source", &shape, inputs.numbers(&shape))
        .output("copy", &shape, inputs.dtype, bounds::EXACT)
        .output("zero", &shape, inputs.dtype, bounds::EXACT)
        .call(|[source, copy, zero]| {
            copy.copy_from(source)?;
            zero.zero()
        })
}
