//! Casts between F32 and BF16, rounding to nearest even, and between f32 master weights and their two halves.
//!
//! A master weight is kept as the bf16 weight that the GEMMs read and its 16 low bits; together they are the f32
//! value, bit for bit: `high = (bits + 0x8000) >> 16`, `low_bits = bits - (high << 16)`. The bf16 half is the nearest
//! bf16 value, ties away from zero.

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::cuda::{self, KernelArg};
use crate::element::not_an_element;
use crate::{Buffer, Error, Result, cpu};

/// `target = source` elementwise, between F32 and BF16 either way, of one shape. Of one type it is a copy.
pub fn forward(source: &Buffer, target: &mut Buffer) -> Result<()> {
    let (from, to) = (source.dtype(), target.dtype());
    if from == to {
        return target.copy_from(source);
    }
    if !matches!((from, to), (DType::F32, DType::BF16) | (DType::BF16, DType::F32)) {
        return Err(not_castable(from, to));
    }
    let arguments = Arguments::new("cast::forward").input("source", source, from, source.shape()).output(
        "target",
        target,
        to,
        source.shape(),
    );
    let (input, output, elements) = (KernelArg::from(source), KernelArg::from(&*target), source.elements());
    let narrows = from == DType::F32;
    let cpu = |access: &Access<'_>| {
        if narrows {
            cpu::cast::narrow(source.slice(access), target.slice_mut(access));
        } else {
            cpu::cast::widen(source.slice(access), target.slice_mut(access));
        }
        Ok(())
    };
    let cast = if narrows { cuda::cast::narrow } else { cuda::cast::widen };
    arguments.run(cpu, || cast(input, output, elements))
}

/// Splits an F32 master into its BF16 weight and its I16 low bits, all of one shape.
pub fn split_master(master: &Buffer, weight: &mut Buffer, low_bits: &mut Buffer) -> Result<()> {
    let arguments = Arguments::new("cast::split_master")
        .input("master", master, DType::F32, master.shape())
        .output("weight", weight, DType::BF16, master.shape())
        .output("low_bits", low_bits, DType::I16, master.shape());
    let (values, elements) = ([master, &*weight, &*low_bits].map(KernelArg::from), master.elements());
    let cpu = |access: &Access<'_>| {
        cpu::cast::split(master.slice(access), weight.slice_mut(access), low_bits.slice_mut(access));
        Ok(())
    };
    arguments.run(cpu, || cuda::cast::split(values, elements))
}

/// Joins the two halves to the F32 master, bit for bit as it was split.
pub fn join_master(weight: &Buffer, low_bits: &Buffer, master: &mut Buffer) -> Result<()> {
    let arguments = Arguments::new("cast::join_master")
        .input("weight", weight, DType::BF16, master.shape())
        .input("low_bits", low_bits, DType::I16, master.shape())
        .output("master", master, DType::F32, master.shape());
    let (values, elements) = ([weight, low_bits, &*master].map(KernelArg::from), master.elements());
    let cpu = |access: &Access<'_>| {
        cpu::cast::join(weight.slice(access), low_bits.slice(access), master.slice_mut(access));
        Ok(())
    };
    arguments.run(cpu, || cuda::cast::join(values, elements))
}

fn not_castable(from: DType, to: DType) -> Error {
    match from {
        DType::F32 | DType::BF16 => not_an_element("cast::forward", "target", to),
        actual => not_an_element("cast::forward", "source", actual),
    }
}

/// The two halves of one master weight.
pub mod reference {
    use crate::bf16;

    /// Splits a master weight into its bf16 weight and low bits.
    #[inline(always)]
    pub fn split(master: f32) -> (bf16, i16) {
        let bits = master.to_bits();
        let high = (bits.wrapping_add(0x8000) >> 16) as u16;
        (bf16::from_bits(high), bits.wrapping_sub(u32::from(high) << 16) as i16)
    }

    /// Joins a bf16 weight and low bits to their master weight.
    #[inline(always)]
    pub fn join(weight: bf16, low_bits: i16) -> f32 {
        f32::from_bits((u32::from(weight.to_bits()) << 16).wrapping_add_signed(i32::from(low_bits)))
    }
}

/// Calls for checks, of sizes [N, I].
pub mod cases {
    use super::{forward, join_master, split_master};
    use crate::DType;
    use crate::cases::bounds::EXACT;
    use crate::cases::{Case, CaseList, Inputs, Size};

    pub(crate) fn add(size: Size, dtype: DType, cases: &mut CaseList) {
        for shape in size.wide() {
            cases.add(move |inputs| cast(inputs, shape));
            if dtype == DType::F32 {
                cases.add(move |inputs| split_and_join(inputs, shape));
            }
        }
    }

    /// Casts to the other float type.
    fn cast(inputs: &mut Inputs, shape: [usize; 2]) -> Case {
        let target = if inputs.dtype == DType::BF16 { DType::F32 } else { DType::BF16 };
        Case::new(inputs.name("cast::forward"), format!("{} x {}", shape[0], shape[1]))
            .in_given_types()
            .input("source", &shape, inputs.numbers(&shape))
            .output("target", &shape, target, EXACT)
            .call(|[source, target]| forward(source, target))
    }

    /// Splits master weights into halves and joins them again.
    fn split_and_join(inputs: &mut Inputs, shape: [usize; 2]) -> Case {
        Case::new(inputs.name("cast::split_master, join_master"), format!("{} x {}", shape[0], shape[1]))
            .in_given_types()
            .input("source", &shape, inputs.numbers(&shape))
            .output("weight", &shape, DType::BF16, EXACT)
            .output("low_bits", &shape, DType::I16, EXACT)
            .output("master", &shape, DType::F32, EXACT)
            .call(|[source, weight, low_bits, master]| {
                split_master(source, weight, low_bits)?;
                join_master(weight, low_bits, master)
            })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::bf16;
    use crate::testing::*;

    fn f32_buffer(values: &[f32]) -> Buffer {
        integers(values)
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    /// Every pattern of the high half, with the low halves where rounding changes.
    fn patterns() -> Vec<f32> {
        let low = [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        (0..=u16::MAX).flat_map(|high| low.map(|low| f32::from_bits(u32::from(high) << 16 | low))).collect()
    }

    fn split_and_joined(master: &[f32]) -> Vec<f32> {
        let shape = [master.len()];
        let (mut weight, mut low_bits) = (zeros(&shape, DType::BF16), zeros(&shape, DType::I16));
        let mut joined = zeros(&shape, DType::F32);
        split_master(&f32_buffer(master), &mut weight, &mut low_bits).unwrap();
        join_master(&weight, &low_bits, &mut joined).unwrap();
        joined.read().unwrap()
    }

    #[test]
    fn a_master_weight_of_any_kind_comes_back_bit_for_bit() {
        let master = patterns();
        assert_eq!(bits(&split_and_joined(&master)), bits(&master));
    }

    proptest! {
        #[test]
        fn a_master_weight_of_any_bits_comes_back_bit_for_bit(master in prop::collection::vec(any::<u32>(), 1..500)) {
            let master: Vec<f32> = master.into_iter().map(f32::from_bits).collect();
            prop_assert_eq!(bits(&split_and_joined(&master)), bits(&master));
        }
    }

    #[test]
    fn the_high_half_of_a_master_weight_is_the_nearest_bf16() {
        for value in numbers(5, 1000).into_iter().map(|value| value as f32 * 1.001) {
            let (weight, _) = reference::split(value);
            let [below, above] = [-1, 1].map(|step: i16| bf16::from_bits(weight.to_bits().wrapping_add_signed(step)));
            let distance = |other: bf16| (other.to_f32() - value).abs();
            assert!(distance(weight) <= distance(below) && distance(weight) <= distance(above));
        }
    }

    #[test]
    fn casts_round_to_nearest_even_and_back_exactly() {
        let source = patterns();
        let (mut narrow, mut wide) = (zeros(&[source.len()], DType::BF16), zeros(&[source.len()], DType::F32));
        forward(&f32_buffer(&source), &mut narrow).unwrap();
        let narrow_values = narrow.read::<bf16>().unwrap();
        assert!(narrow_values.iter().zip(&source).all(|(a, b)| a.to_bits() == bf16::from_f32(*b).to_bits()));
        forward(&narrow, &mut wide).unwrap();
        let widened: Vec<f32> =
            narrow_values.into_iter().map(|value| f32::from_bits(u32::from(value.to_bits()) << 16)).collect();
        assert_eq!(bits(&wide.read::<f32>().unwrap()), bits(&widened));
    }

    #[test]
    fn integers_are_not_cast() {
        let error = forward(&integers(&[1i32]), &mut zeros(&[1], DType::F32)).unwrap_err();
        assert_eq!(error.to_string(), "cast::forward: `source` holds I32, expected F32 or BF16");
    }
}
