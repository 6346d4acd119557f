//! The optimizer's part of a step: sums of gradients, their norm, clipping, `AdamW`.

use kernels::adamw::AdamWState;
use kernels::cast::reference::split;
use kernels::{DType, accumulate, adamw, cast, grad_norm};

use super::bounds::{EXACT, F32, F32_POINTWISE};
use super::input_generator::InputGenerator;
use crate::case::Case;
use crate::device_under_test::BufferContents;
use crate::part::Size;
use training::Result;

const SETTINGS: adamw::AdamW = adamw::AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
const WEIGHT_DECAY: f32 = 0.1;

pub(super) fn visit(size: Size, inputs: &mut InputGenerator, visit: &mut dyn FnMut(&Case) -> Result<()>) -> Result<()> {
    let elements = match size {
        Size::Small => vec![1003],
        Size::Full => vec![1003, 1 << 16, 5_000_003],
    };
    for elements in elements {
        for applied in [true, false] {
            visit(&step(inputs, elements, applied))?;
        }
        if inputs.dtype == DType::F32 {
            visit(&sum(inputs, elements))?;
            visit(&norm(inputs, elements))?;
        }
    }
    if inputs.dtype == DType::F32 {
        for norm in [0.0, 0.5, 8.0, f32::INFINITY, f32::NAN] {
            visit(&clip(norm))?;
        }
    }
    Ok(())
}

fn sum(inputs: &mut InputGenerator, elements: usize) -> Case {
    let shape = [elements];
    let (sum, addend) = (inputs.f32(&shape), inputs.f32(&shape));
    Case::new("accumulate::forward f32", elements.to_string())
        .input("addend", &shape, addend)
        .updated("sum", &shape, sum, EXACT)
        .call(|[addend, sum]| accumulate::forward(sum, addend))
}

fn norm(inputs: &mut InputGenerator, elements: usize) -> Case {
    Case::new("grad_norm::forward f32", elements.to_string())
        .input("grads", &[elements], inputs.f32(&[elements]))
        .output("norm", &[1], DType::F32, F32)
        .workspace(move |device| grad_norm::workspace_elements(elements, device))
        .call(|[grads, norm, workspace]| grad_norm::forward(grads, norm, workspace))
}

fn clip(norm: f32) -> Case {
    // No limit if the norm is not finite: the scale is then 1, and not a NaN, which equals nothing.
    let limit = norm.is_finite().then_some(1.0);
    let scalars = BufferContents::from_numbers([1e-3, 0.1, 0.05, 7.0, 7.0], DType::F32);
    Case::new("grad_norm::clip f32", format!("norm {norm}"))
        .input("norm", &[1], BufferContents::from_numbers([norm], DType::F32))
        .updated("scalars", &[adamw::SCALARS], scalars, F32_POINTWISE)
        .call(move |[norm, scalars]| grad_norm::clip(norm, limit, scalars))
}

/// One step. With BF16 weights, the F32 master weights are compared, joined from weights and low bits.
fn step(inputs: &mut InputGenerator, elements: usize, applied: bool) -> Case {
    let shape = [elements];
    let scalars = [0.01, 0.19, 0.0975, 0.5, if applied { 1.0 } else { 0.0 }];
    let bound = if applied { F32_POINTWISE } else { EXACT };
    let squares = inputs.random.numbers(elements).into_iter().map(|value| 0.1 * value * value);
    let second = BufferContents::from_numbers(squares.collect::<Vec<_>>(), DType::F32);
    let (grad, first, master) = (inputs.f32(&shape), inputs.f32(&shape), inputs.random.numbers(elements));
    let sizes = if applied { elements.to_string() } else { format!("{elements}, not applied") };
    let case = Case::new(inputs.name("adamw::step"), sizes)
        .in_given_types()
        .input("grad", &shape, grad)
        .updated("first_moment", &shape, first, bound)
        .updated("second_moment", &shape, second, bound)
        .input("scalars", &[adamw::SCALARS], BufferContents::from_numbers(scalars, DType::F32));
    if inputs.dtype == DType::F32 {
        return case.updated("weight", &shape, BufferContents::from_numbers(master, DType::F32), bound).call(
            |[grad, first, second, scalars, weight]| {
                let state = AdamWState { weight, low_bits: None, first_moment: first, second_moment: second };
                adamw::step(state, grad, scalars, &SETTINGS, WEIGHT_DECAY)
            },
        );
    }
    let halves = || master.iter().map(|&value| split(value));
    let weight = halves().map(|(weight, _)| u32::from(weight.to_bits())).collect();
    let low_bits = halves().map(|(_, low_bits)| u32::from(low_bits.cast_unsigned())).collect();
    case.state("weight", &shape, BufferContents { dtype: DType::BF16, bits: weight })
        .state("low_bits", &shape, BufferContents { dtype: DType::I16, bits: low_bits })
        .output("master", &shape, DType::F32, bound)
        .call(|[grad, first, second, scalars, weight, low_bits, master]| {
            let state =
                AdamWState { weight, low_bits: Some(&mut *low_bits), first_moment: first, second_moment: second };
            adamw::step(state, grad, scalars, &SETTINGS, WEIGHT_DECAY)?;
            cast::join_master(weight, low_bits, master)
        })
}
