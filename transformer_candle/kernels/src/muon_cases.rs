//! Calls for checks: momentum, orthogonalisation of batches of either orientation, and the update of the weights.

use super::{Muon, Polynomials, SCALARS, Scratch, accumulate_momentum, orthogonalize, step, workspace_elements};
use crate::cases::bounds::{EXACT, F32_POINTWISE, F32_SUM};
use crate::cases::{BufferContents, Case, CaseList, Inputs, Size};
use crate::{DType, cast};

const SETTINGS: Muon = Muon { momentum: 0.95, polynomials: Polynomials::Quintic };
const WEIGHT_DECAY: f32 = 0.1;
/// The bound in BF16: five iterations multiply rounding errors along small singular values by up to 3.4 each.
const BF16_ITERATIONS: f64 = 6e-2;

pub(crate) fn add(size: Size, _dtype: DType, cases: &mut CaseList) {
    let batches: &[[usize; 3]] = match size {
        Size::Small => &[[2, 32, 48], [1, 48, 32]],
        Size::Medium => &[[2, 208, 304]],
        Size::Full => &[[2, 32, 48], [3, 1024, 512], [12, 512, 2048], [2, 2048, 2048], [2, 5632, 2048]],
    };
    for &sizes @ [_, m, n] in batches {
        for polynomials in [Polynomials::Quintic, Polynomials::PolarExpress] {
            cases.add(move |inputs| orthogonalization(inputs, sizes, polynomials));
        }
        for applied in [true, false] {
            cases.add(move |inputs| momentum(inputs, [m, n], applied));
            cases.add(move |inputs| update(inputs, [m, n], applied));
        }
    }
}

fn orthogonalization(inputs: &mut Inputs, sizes @ [b, m, n]: [usize; 3], polynomials: Polynomials) -> Case {
    let (dtype, short) = (inputs.dtype, m.min(n));
    let bound = if dtype == DType::BF16 { BF16_ITERATIONS } else { F32_SUM };
    Case::new(inputs.name("muon::orthogonalize"), format!("{b} x {m} x {n}, {polynomials:?}"))
        .updated("update", &sizes, inputs.numbers(&sizes), bound)
        .scratch("other", &sizes, dtype)
        .scratch("gram", &[b, short, short], dtype)
        .scratch("polynomial", &[b, short, short], dtype)
        .workspace(move |device| workspace_elements(sizes, device))
        .call(move |[update, other_BMN, gram_BSS, polynomial_BSS, workspace]| {
            orthogonalize(update, Scratch { other_BMN, gram_BSS, polynomial_BSS, workspace }, polynomials)
        })
}

fn scalars(applied: bool) -> BufferContents {
    BufferContents::from_numbers([0.01, 1.0, 1.0, 0.5, if applied { 1.0 } else { 0.0 }], DType::F32)
}

fn text([m, n]: [usize; 2], applied: bool) -> String {
    format!("{m} x {n}{}", if applied { "" } else { ", not applied" })
}

fn momentum(inputs: &mut Inputs, shape: [usize; 2], applied: bool) -> Case {
    let bound = if applied { F32_POINTWISE } else { EXACT };
    Case::new(inputs.name("muon::accumulate_momentum"), text(shape, applied))
        .in_given_types()
        .updated("momentum", &shape, inputs.f32(&shape), bound)
        .input("grad", &shape, inputs.f32(&shape))
        .output("update", &shape, inputs.dtype, inputs.bound())
        .input("scalars", &[SCALARS], scalars(applied))
        .call(|[momentum, grad, update, scalars]| accumulate_momentum(momentum, grad, update, scalars, &SETTINGS))
}

/// One step. With BF16 weights, the F32 master weights are compared, joined from weights and low bits.
fn update(inputs: &mut Inputs, shape: [usize; 2], applied: bool) -> Case {
    let bound = if applied { F32_POINTWISE } else { EXACT };
    let case = Case::new(inputs.name("muon::step"), text(shape, applied))
        .in_given_types()
        .input("update", &shape, inputs.numbers(&shape))
        .input("scalars", &[SCALARS], scalars(applied));
    if inputs.dtype == DType::F32 {
        return case
            .updated("weight", &shape, inputs.f32(&shape), bound)
            .call(|[update, scalars, weight]| step(weight, None, update, scalars, WEIGHT_DECAY));
    }
    case.master_weight(inputs, &shape, bound)
        .call(|[update, scalars, weight, low_bits, _]| step(weight, Some(low_bits), update, scalars, WEIGHT_DECAY))
        .observe(|[_, _, weight, low_bits, master]| cast::join_master(weight, low_bits, master))
}
