//! Adds one buffer to another, element by element: each is rounded once, so that every device gives the same bits.

use candle_core::DType;

use crate::access::{Access, Arguments};
use crate::cuda::{self, KernelArg};
use crate::{Buffer, Result, cpu};

/// `sum += addend`, both F32 of one shape.
pub fn forward(sum: &mut Buffer, addend: &Buffer) -> Result<()> {
    let arguments = Arguments::new("accumulate::forward").input("addend", addend, DType::F32, sum.shape()).output(
        "sum",
        sum,
        DType::F32,
        sum.shape(),
    );
    let (on_gpu, elements) = ([KernelArg::from(&*sum), addend.into()], sum.elements());
    let cpu = |access: &Access<'_>| {
        cpu::accumulate::forward(sum.slice_mut(access), addend.slice(access));
        Ok(())
    };
    arguments.run(cpu, || cuda::accumulate::forward(on_gpu, elements))
}

/// Calls for checks, of flat buffers.
pub mod cases {
    use super::forward;
    use crate::DType;
    use crate::cases::bounds::EXACT;
    use crate::cases::{Case, CaseList, Inputs, Size};

    pub(crate) fn add(size: Size, dtype: DType, cases: &mut CaseList) {
        if dtype == DType::F32 {
            size.elements().into_iter().for_each(|elements| cases.add(move |inputs| sum(inputs, elements)));
        }
    }

    fn sum(inputs: &mut Inputs, elements: usize) -> Case {
        let shape = [elements];
        Case::new(inputs.name("accumulate::forward"), elements.to_string())
            .input("addend", &shape, inputs.f32(&shape))
            .updated("sum", &shape, inputs.f32(&shape), EXACT)
            .call(|[addend, sum]| forward(sum, addend))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::testing::*;

    #[test]
    fn every_element_is_added_once() {
        for length in [0, 1, 15, 32_769, 100_003] {
            let (one, other) = (numbers(1, length), numbers(2, length));
            let mut sum = buffer(&one, &[length], DType::F32);
            forward(&mut sum, &buffer(&other, &[length], DType::F32)).unwrap();
            let expected: Vec<f32> = one.iter().zip(&other).map(|(one, other)| *one as f32 + *other as f32).collect();
            assert_eq!(sum.read::<f32>().unwrap(), expected);
        }
    }

    #[test]
    fn a_buffer_is_not_added_to_itself() {
        let mut sum = zeros(&[3], DType::F32);
        let error = forward(&mut sum.view(0, &[3]).unwrap(), &sum).unwrap_err();
        assert!(matches!(error, Error::Aliased { .. }), "{error}");
        assert!(forward(&mut sum, &zeros(&[2], DType::F32)).is_err());
    }
}
