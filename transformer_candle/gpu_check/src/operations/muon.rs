//! Muon: momentum, orthogonalisation of batches of either orientation, and the update of the weights.

use kernels::cast::reference::split;
use kernels::{DType, adamw, cast, muon};

use super::bounds::{EXACT, F32_POINTWISE, F32_SUM};
use super::input_generator::InputGenerator;
use crate::case::Case;
use crate::device_under_test::BufferContents;
use crate::part::Size;
use training::Result;

const SETTINGS: muon::Muon = muon::Muon { momentum: 0.95, polynomials: muon::Polynomials::Quintic };
const WEIGHT_DECAY: f32 = 0.1;
/// The bound in BF16: five iterations multiply rounding errors along small singular values by up to 3.4 each.
const BF16_ITERATIONS: f64 = 6e-2;

pub(super) fn visit(size: Size, inputs: &mut InputGenerator, visit: &mut dyn FnMut(&Case) -> Result<()>) -> Result<()> {
    let batches: &[[usize; 3]] = match size {
        Size::Small => &[[2, 32, 48], [1, 48, 32]],
        Size::Full => &[[2, 32, 48], [3, 1024, 512], [12, 512, 2048], [2, 2048, 2048], [2, 5632, 2048]],
    };
    for &sizes in batches {
        for polynomials in [muon::Polynomials::Quintic, muon::Polynomials::PolarExpress] {
            visit(&orthogonalize(inputs, sizes, polynomials))?;
        }
        for applied in [true, false] {
            visit(&accumulate_momentum(inputs, &sizes[1..], applied))?;
            visit(&step(inputs, &sizes[1..], applied))?;
        }
    }
    Ok(())
}

fn orthogonalize(inputs: &mut InputGenerator, sizes @ [b, m, n]: [usize; 3], polynomials: muon::Polynomials) -> Case {
    let (dtype, short) = (inputs.dtype, m.min(n));
    let bound = if dtype == DType::BF16 { BF16_ITERATIONS } else { F32_SUM };
    let update = inputs.numbers(&sizes);
    Case::new(inputs.name("muon::orthogonalize"), format!("{b} x {m} x {n}, {polynomials:?}"))
        .updated("update", &sizes, update, bound)
        .scratch("other", &sizes, dtype)
        .scratch("gram", &[b, short, short], dtype)
        .scratch("polynomial", &[b, short, short], dtype)
        .workspace(move |device| muon::workspace_elements(sizes, device))
        .call(move |[update, other, gram, polynomial, workspace]| {
            let scratch = muon::Scratch { other_BMN: other, gram_BSS: gram, polynomial_BSS: polynomial, workspace };
            muon::orthogonalize(update, scratch, polynomials)
        })
}

fn scalars(applied: bool) -> BufferContents {
    BufferContents::from_numbers([0.01, 1.0, 1.0, 0.5, if applied { 1.0 } else { 0.0 }], DType::F32)
}

fn described(shape: &[usize], applied: bool) -> String {
    format!("{} x {}{}", shape[0], shape[1], if applied { "" } else { ", not applied" })
}

fn accumulate_momentum(inputs: &mut InputGenerator, shape: &[usize], applied: bool) -> Case {
    let bound = if applied { F32_POINTWISE } else { EXACT };
    let (momentum, grad) = (inputs.f32(shape), inputs.f32(shape));
    Case::new(inputs.name("muon::accumulate_momentum"), described(shape, applied))
        .in_given_types()
        .updated("momentum", shape, momentum, bound)
        .input("grad", shape, grad)
        .output("update", shape, inputs.dtype, inputs.bound())
        .input("scalars", &[adamw::SCALARS], scalars(applied))
        .call(|[momentum, grad, update, scalars]| muon::accumulate_momentum(momentum, grad, update, scalars, &SETTINGS))
}

/// One step. With BF16 weights, the F32 master weights are compared, joined from weights and low bits.
fn step(inputs: &mut InputGenerator, shape: &[usize], applied: bool) -> Case {
    let bound = if applied { F32_POINTWISE } else { EXACT };
    let (update, master) = (inputs.numbers(shape), inputs.random.numbers(shape.iter().product()));
    let case = Case::new(inputs.name("muon::step"), described(shape, applied))
        .in_given_types()
        .input("update", shape, update)
        .input("scalars", &[adamw::SCALARS], scalars(applied));
    if inputs.dtype == DType::F32 {
        return case
            .updated("weight", shape, BufferContents::from_numbers(master, DType::F32), bound)
            .call(|[update, scalars, weight]| muon::step(weight, None, update, scalars, WEIGHT_DECAY));
    }
    let (weight, low_bits): (Vec<u32>, Vec<u32>) = master
        .iter()
        .map(|&value| split(value))
        .map(|(weight, low_bits)| (u32::from(weight.to_bits()), u32::from(low_bits.cast_unsigned())))
        .unzip();
    case.state("weight", shape, BufferContents { dtype: DType::BF16, bits: weight })
        .state("low_bits", shape, BufferContents { dtype: DType::I16, bits: low_bits })
        .output("master", shape, DType::F32, bound)
        .call(|[update, scalars, weight, low_bits, master]| {
            muon::step(weight, Some(&mut *low_bits), update, scalars, WEIGHT_DECAY)?;
            cast::join_master(weight, low_bits, master)
        })
}
