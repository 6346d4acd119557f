//! Zeroing, copying, writing and reading the elements of a buffer.

use candle_core::DType;
use rayon::prelude::*;

use super::{Buffer, PIECE, as_bytes, as_bytes_mut};
use crate::access::{Access, Arguments};
use crate::element::{BUFFER_TYPES, Scalar};
use crate::{Element, Error, Result, bf16};

impl Buffer {
    /// Sets every element to zero.
    pub fn zero(&mut self) -> Result<()> {
        let arguments = Arguments::new("Buffer::zero").output("buffer", self, self.dtype(), self.shape());
        let (address, bytes) = (self.address, self.bytes());
        let cpu = |access: &Access<'_>| {
            match self.dtype() {
                DType::F32 => fill(self.slice_mut(access), 0f32),
                DType::BF16 => fill(self.slice_mut(access), bf16::ZERO),
                DType::U32 => fill(self.slice_mut(access), 0u32),
                DType::I32 => fill(self.slice_mut(access), 0i32),
                DType::I16 => fill(self.slice_mut(access), 0i16),
                DType::U8 => fill(self.slice_mut(access), 0u8),
                actual => return Err(unknown("Buffer::zero", actual)),
            }
            Ok(())
        };
        arguments.dispatch(cpu, |cuda| cuda.zero(address, bytes))
    }

    /// Copies a buffer of the same element type and shape.
    pub fn copy_from(&mut self, source: &Self) -> Result<()> {
        let arguments = Arguments::new("Buffer::copy_from").output("buffer", self, self.dtype(), self.shape()).input(
            "source",
            source,
            self.dtype(),
            self.shape(),
        );
        let (target, bytes) = (self.address, self.bytes());
        let cpu = |access: &Access<'_>| {
            match self.dtype() {
                DType::F32 => copy::<f32>(source.slice(access), self.slice_mut(access)),
                DType::BF16 => copy::<bf16>(source.slice(access), self.slice_mut(access)),
                DType::U32 => copy::<u32>(source.slice(access), self.slice_mut(access)),
                DType::I32 => copy::<i32>(source.slice(access), self.slice_mut(access)),
                DType::I16 => copy::<i16>(source.slice(access), self.slice_mut(access)),
                DType::U8 => copy::<u8>(source.slice(access), self.slice_mut(access)),
                actual => return Err(unknown("Buffer::copy_from", actual)),
            }
            Ok(())
        };
        arguments.dispatch(cpu, |cuda| cuda.copy(source.address, target, bytes))
    }

    /// Writes host values, as many as there are elements and of the same type.
    pub fn write<T: Scalar>(&mut self, values: &[T]) -> Result<()> {
        if values.len() != self.elements() {
            return Err(Error::Shape {
                operation: "Buffer::write",
                argument: "values",
                expected: self.shape().to_vec(),
                actual: vec![values.len()],
            });
        }
        let arguments = Arguments::new("Buffer::write").output("buffer", self, T::DTYPE, self.shape());
        let address = self.address;
        let cpu = |access: &Access<'_>| {
            copy(values, self.slice_mut(access));
            Ok(())
        };
        arguments.dispatch(cpu, |cuda| cuda.write(address, as_bytes(values)))
    }

    /// The elements, copied to the host.
    pub fn read<T: Scalar>(&self) -> Result<Vec<T>> {
        let arguments = Arguments::new("Buffer::read").input("buffer", self, T::DTYPE, self.shape());
        arguments.dispatch(
            |access| Ok(self.slice(access).to_vec()),
            |cuda| {
                let mut values = vec![T::zero(); self.elements()];
                cuda.read(self.address, as_bytes_mut(&mut values))?;
                Ok(values)
            },
        )
    }

    /// The elements of an F32 or BF16 buffer, widened to f32 on the host.
    pub fn read_f32(&self) -> Result<Vec<f32>> {
        match self.dtype() {
            DType::BF16 => Ok(self.read::<bf16>()?.into_iter().map(Element::widen).collect()),
            _ => self.read(),
        }
    }
}

fn fill<T: Scalar>(target: &mut [T], value: T) {
    target.par_chunks_mut(PIECE).for_each(|piece| piece.fill(value));
}

fn copy<T: Scalar>(source: &[T], target: &mut [T]) {
    let pieces = target.par_chunks_mut(PIECE).zip(source.par_chunks(PIECE));
    pieces.for_each(|(target, source)| target.copy_from_slice(source));
}

fn unknown(operation: &'static str, actual: DType) -> Error {
    Error::DType { operation, argument: "buffer", expected: BUFFER_TYPES, actual }
}
