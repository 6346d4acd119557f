//! Dropout (Srivastava et al., 2014) whose mask is a pure function of a key, the row, the module and the column: no
//! mask is kept for the backward pass, and neither threads, the device nor the split of a batch into micro-batches
//! changes it.
//!
//! Legend: N tokens, I inputs. Rows are F32 or BF16.

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::cuda::{self, KernelArg};
pub use crate::dropout_mask::{Dropout, KEY_ELEMENTS, Key};
use crate::element::with_element;
use crate::{Buffer, Result, cpu};

/// `out_NI = mask x_NI / (1 - probability)`; `key` (U32) holds a [`Key`].
pub fn forward(x_NI: &Buffer, key: &Buffer, dropout: Dropout, out_NI: &mut Buffer) -> Result<()> {
    const OPERATION: &str = "dropout::forward";
    let (dtype, sizes) = (x_NI.dtype(), x_NI.sizes());
    let arguments = Arguments::new(OPERATION)
        .input("x_NI", x_NI, dtype, &sizes)
        .input("key", key, DType::U32, &[KEY_ELEMENTS])
        .output("out_NI", out_NI, dtype, &sizes);
    let on_gpu = [x_NI.into(), key.into(), KernelArg::from(&*out_NI)];
    let cpu = |access: &Access<'_>| {
        let key = Key::from_words(key.slice(access));
        with_element!(OPERATION, "x_NI", dtype, E => {
            cpu::dropout::forward::<E>(x_NI.slice(access), key, dropout, out_NI.slice_mut(access), sizes[1]);
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::dropout::forward(on_gpu, dropout, sizes))
}

/// `dx_NI += mask dout_NI / (1 - probability)` with the mask of [`forward`].
pub fn backward(dout_NI: &Buffer, key: &Buffer, dropout: Dropout, dx_NI: &mut Buffer) -> Result<()> {
    const OPERATION: &str = "dropout::backward";
    let (dtype, sizes) = (dout_NI.dtype(), dout_NI.sizes());
    let arguments = Arguments::new(OPERATION)
        .input("dout_NI", dout_NI, dtype, &sizes)
        .input("key", key, DType::U32, &[KEY_ELEMENTS])
        .output("dx_NI", dx_NI, dtype, &sizes);
    let on_gpu = [dout_NI.into(), key.into(), KernelArg::from(&*dx_NI)];
    let cpu = |access: &Access<'_>| {
        let key = Key::from_words(key.slice(access));
        with_element!(OPERATION, "dout_NI", dtype, E => {
            cpu::dropout::backward::<E>(dout_NI.slice(access), key, dropout, dx_NI.slice_mut(access), sizes[1]);
            Ok(())
        })
    };
    arguments.run(cpu, || cuda::dropout::backward(on_gpu, dropout, sizes))
}

/// Calls for checks, of sizes [N, I]. The mask and the rounded values must have exactly the CPU's bits.
pub mod cases {
    use super::{Dropout, KEY_ELEMENTS, Key, backward, forward};
    use crate::DType;
    use crate::cases::bounds::EXACT;
    use crate::cases::{BufferContents, Case, CaseList, Inputs, Size};

    const DROPOUT: Dropout = Dropout { probability: 0.1, module: 9 };

    pub(crate) fn add(size: Size, _dtype: DType, cases: &mut CaseList) {
        for sizes in size.wide() {
            cases.add(move |inputs| masked(inputs, sizes));
            cases.add(move |inputs| gradient(inputs, sizes));
        }
    }

    /// Returns a key with row numbers that cross 2^32.
    fn key() -> BufferContents {
        let key = Key { seed: 0xfedc_ba98_7654_3210, first_row: u64::from(u32::MAX) - 2, enabled: true };
        BufferContents { dtype: DType::U32, bits: key.to_words().to_vec() }
    }

    fn masked(inputs: &mut Inputs, [n, i]: [usize; 2]) -> Case {
        Case::new(inputs.name("dropout::forward"), format!("{n} x {i}"))
            .in_given_types()
            .input("x", &[n, i], inputs.numbers(&[n, i]))
            .input("key", &[KEY_ELEMENTS], key())
            .output("out", &[n, i], inputs.dtype, EXACT)
            .call(|[x, key, out]| forward(x, key, DROPOUT, out))
    }

    fn gradient(inputs: &mut Inputs, [n, i]: [usize; 2]) -> Case {
        Case::new(inputs.name("dropout::backward"), format!("{n} x {i}"))
            .in_given_types()
            .input("dout", &[n, i], inputs.numbers(&[n, i]))
            .input("key", &[KEY_ELEMENTS], key())
            .updated("dx", &[n, i], inputs.numbers(&[n, i]), EXACT)
            .call(|[dout, key, dx]| backward(dout, key, DROPOUT, dx))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::*;

    const I: usize = 300;

    fn key(seed: u64, first_row: u64, enabled: bool) -> Buffer {
        integers(&Key { seed, first_row, enabled }.to_words())
    }

    fn dropped(x: &[f64], key: &Buffer, dropout: Dropout, dtype: DType) -> Buffer {
        let sizes = [x.len() / I, I];
        let mut out = zeros(&sizes, dtype);
        forward(&buffer(x, &sizes, dtype), key, dropout, &mut out).unwrap();
        out
    }

    fn is_kept(buffer: &Buffer) -> Vec<bool> {
        buffer.read_f32().unwrap().into_iter().map(|value| value != 0.0).collect()
    }

    #[test]
    fn a_share_of_the_elements_is_zero_and_the_others_are_larger() {
        let ones = vec![1.0; 400 * I];
        for probability in [0.05, 0.3, 0.9] {
            let out = dropped(&ones, &key(7, 0, true), Dropout { probability, module: 3 }, DType::F32);
            let values = out.read::<f32>().unwrap();
            let share = values.iter().filter(|&&value| value == 0.0).count() as f64 / values.len() as f64;
            let deviation = (probability * (1.0 - probability) / values.len() as f64).sqrt();
            assert!((share - probability).abs() < 4.0 * deviation, "{share} of {probability}");
            let scale = (1.0 / (1.0 - probability)) as f32;
            assert!(values.iter().all(|&value| value == 0.0 || (value - scale).abs() < 1e-6));
        }
    }

    #[test]
    fn rows_columns_modules_and_seeds_are_independent() {
        let ones = vec![1.0; 64 * I];
        let of = |seed, module| {
            is_kept(&dropped(&ones, &key(seed, 0, true), Dropout { probability: 0.5, module }, DType::F32))
        };
        let one = of(1, 1);
        let rows: Vec<&[bool]> = one.chunks(I).collect();
        let shifted = one[1..].to_vec();
        for other in [of(2, 1), of(1, 2), rows[1..].concat(), shifted] {
            let agreeing = one.iter().zip(&other).filter(|(a, b)| a == b).count() as f64 / other.len() as f64;
            assert!((agreeing - 0.5).abs() < 0.03, "{agreeing}");
        }
    }

    #[test]
    fn a_row_s_mask_does_not_depend_on_the_micro_batch() {
        let x = numbers(3, 10 * I);
        let dropout = Dropout { probability: 0.4, module: 5 };
        let whole = dropped(&x, &key(9, 100, true), dropout, DType::F32).read::<f32>().unwrap();
        let part = dropped(&x[6 * I..], &key(9, 106, true), dropout, DType::F32).read::<f32>().unwrap();
        assert_eq!(part, whole[6 * I..]);
    }

    #[test]
    fn the_gradient_has_the_mask_of_the_values() {
        let (x, dout) = (vec![1.0; 20 * I], numbers(4, 20 * I));
        let dropout = Dropout { probability: 0.25, module: 1 };
        for dtype in [DType::F32, DType::BF16] {
            let key = key(11, 5, true);
            let factors = dropped(&x, &key, dropout, DType::F32).read::<f32>().unwrap();
            let start = numbers(6, 20 * I);
            let mut dx = buffer(&start, &[20, I], dtype);
            backward(&buffer(&dout, &[20, I], dtype), &key, dropout, &mut dx).unwrap();
            let expected = start.iter().zip(&dout).zip(&factors);
            assert_near(&dx, &expected.map(|((start, dout), &f)| start + dout * f64::from(f)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn disabled_nothing_is_dropped() {
        let x = numbers(3, 4 * I);
        let out = dropped(&x, &key(9, 0, false), Dropout { probability: 0.4, module: 5 }, DType::F32);
        assert_eq!(out.read::<f32>().unwrap(), to_f32(&x));
    }
}
