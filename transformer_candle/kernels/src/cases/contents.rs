//! The contents of buffers as bits, for exact comparison.

use crate::{Buffer, DType, Element, Result, bf16};

/// The elements of a buffer, each in the low bits of a `u32`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferContents {
    /// The element type.
    pub dtype: DType,
    /// The bits of each element.
    pub bits: Vec<u32>,
}

impl BufferContents {
    /// Reads a buffer.
    pub fn read(buffer: &Buffer) -> Result<Self> {
        let dtype = buffer.dtype();
        let bits = match dtype {
            DType::F32 => buffer.read::<f32>()?.into_iter().map(f32::to_bits).collect(),
            DType::BF16 => buffer.read::<bf16>()?.into_iter().map(|value| u32::from(value.to_bits())).collect(),
            DType::I32 => buffer.read::<i32>()?.into_iter().map(i32::cast_unsigned).collect(),
            DType::I16 => buffer.read::<i16>()?.into_iter().map(|value| u32::from(value.cast_unsigned())).collect(),
            DType::U8 => buffer.read::<u8>()?.into_iter().map(u32::from).collect(),
            _ => buffer.read::<u32>()?,
        };
        Ok(Self { dtype, bits })
    }

    /// Fills a buffer of the same length and type.
    pub fn write_to(&self, buffer: &mut Buffer) -> Result<()> {
        let bits = || self.bits.iter().copied();
        match self.dtype {
            DType::F32 => buffer.write(&bits().map(f32::from_bits).collect::<Vec<_>>())?,
            DType::BF16 => buffer.write(&bits().map(|bits| bf16::from_bits(bits as u16)).collect::<Vec<_>>())?,
            DType::I32 => buffer.write(&bits().map(u32::cast_signed).collect::<Vec<_>>())?,
            DType::I16 => buffer.write(&bits().map(|bits| (bits as u16).cast_signed()).collect::<Vec<_>>())?,
            DType::U8 => buffer.write(&bits().map(|bits| bits as u8).collect::<Vec<_>>())?,
            _ => buffer.write(&self.bits)?,
        }
        Ok(())
    }

    /// Creates contents from numbers, rounded to F32 or BF16.
    pub fn from_numbers(values: impl IntoIterator<Item = f32>, dtype: DType) -> Self {
        let bits = values.into_iter().map(|value| match dtype {
            DType::BF16 => u32::from(<bf16 as Element>::narrow(value).to_bits()),
            _ => value.to_bits(),
        });
        Self { dtype, bits: bits.collect() }
    }

    /// Returns BF16 contents widened to F32, exactly; other types unchanged.
    #[must_use]
    pub fn widened(&self) -> Self {
        match self.dtype {
            DType::BF16 => Self { dtype: DType::F32, bits: self.bits.iter().map(|bits| bits << 16).collect() },
            _ => self.clone(),
        }
    }

    /// Returns the elements as numbers; integers by their value.
    pub fn numbers(&self) -> Vec<f32> {
        let number = |&bits: &u32| match self.dtype {
            DType::F32 => f32::from_bits(bits),
            DType::BF16 => f32::from_bits(bits << 16),
            DType::I16 => f32::from((bits as u16).cast_signed()),
            _ => bits.cast_signed() as f32,
        };
        self.bits.iter().map(number).collect()
    }
}

/// Computes ‖ours - exact‖ / ‖exact‖, or ‖ours‖ if the exact values are all zero. NaN if either has one.
pub fn relative_error(ours: &[f32], exact: &[f32]) -> f64 {
    let square = |value: f64| value * value;
    let difference: f64 = ours.iter().zip(exact).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    let size: f64 = exact.iter().map(|&value| square(f64::from(value))).sum();
    if size == 0.0 { difference.sqrt() } else { (difference / size).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn every_type_is_written_and_read_back_bitwise() {
        for dtype in [DType::F32, DType::BF16, DType::U32, DType::I32, DType::I16] {
            let content = BufferContents { dtype, bits: vec![0, 1, 0x7fad, 0xbfff] };
            let mut buffer = Buffer::zeros(&[4], dtype, &Device::Cpu).unwrap();
            content.write_to(&mut buffer).unwrap();
            assert_eq!(BufferContents::read(&buffer).unwrap(), content);
        }
    }

    #[test]
    fn numbers_of_both_float_types_are_equal() {
        let narrow = BufferContents::from_numbers([1.5, -0.25], DType::BF16);
        assert_eq!(narrow.numbers(), [1.5, -0.25]);
        assert_eq!(narrow.widened(), BufferContents::from_numbers([1.5, -0.25], DType::F32));
        assert_eq!(BufferContents { dtype: DType::I16, bits: vec![0xffff] }.numbers(), [-1.0]);
    }

    #[test]
    fn the_error_is_relative_and_nan_stays_nan() {
        assert!((relative_error(&[3.0, 4.5], &[3.0, 4.0]) - 0.1).abs() < 1e-12);
        assert!((relative_error(&[0.5], &[0.0]) - 0.5).abs() < 1e-12);
        assert!(relative_error(&[f32::NAN], &[1.0]).is_nan());
    }
}
