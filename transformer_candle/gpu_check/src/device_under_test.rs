//! The device under test, and the contents of its buffers as bits, for exact comparison.

use std::time::{SystemTime, UNIX_EPOCH};

use kernels::{Buffer, DType, Device, Element, bf16};

use training::Result;

/// Changes contents after they were read, given their name and the number of the run (from 1), to test that checks
/// fail.
type Tamper = dyn Fn(&str, usize, &mut [u32]) + Send + Sync;

/// The device that is compared with the CPU.
pub(super) struct DeviceUnderTest {
    pub(super) device: Device,
    tamper: Option<Box<Tamper>>,
}

impl DeviceUnderTest {
    pub(super) fn new(device: Device) -> Self {
        Self { device, tamper: None }
    }

    #[cfg(test)]
    pub(super) fn tampered(device: Device, tamper: impl Fn(&str, usize, &mut [u32]) + Send + Sync + 'static) -> Self {
        Self { device, tamper: Some(Box::new(tamper)) }
    }

    /// Reads the contents of a buffer after a run.
    pub(super) fn read(&self, what: &str, run: usize, buffer: &Buffer) -> Result<BufferContents> {
        let mut content = BufferContents::read(buffer)?;
        if let Some(tamper) = &self.tamper {
            tamper(what, run, &mut content.bits);
        }
        Ok(content)
    }

    /// Tampers in the same way with numbers that were read from the device otherwise.
    pub(super) fn numbers(&self, what: &str, run: usize, values: Vec<f32>) -> Vec<f32> {
        let Some(tamper) = &self.tamper else { return values };
        let mut bits: Vec<u32> = values.into_iter().map(f32::to_bits).collect();
        tamper(what, run, &mut bits);
        bits.into_iter().map(f32::from_bits).collect()
    }
}

/// The elements of a buffer, each in the low bits of a `u32`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BufferContents {
    pub(super) dtype: DType,
    pub(super) bits: Vec<u32>,
}

impl BufferContents {
    pub(super) fn read(buffer: &Buffer) -> Result<Self> {
        let dtype = buffer.dtype();
        let bits = match dtype {
            DType::F32 => buffer.read::<f32>()?.into_iter().map(f32::to_bits).collect(),
            DType::BF16 => buffer.read::<bf16>()?.into_iter().map(|value| u32::from(value.to_bits())).collect(),
            DType::I32 => buffer.read::<i32>()?.into_iter().map(i32::cast_unsigned).collect(),
            DType::I16 => buffer.read::<i16>()?.into_iter().map(|value| u32::from(value.cast_unsigned())).collect(),
            _ => buffer.read::<u32>()?,
        };
        Ok(Self { dtype, bits })
    }

    /// Fills a buffer of the same length and type.
    pub(super) fn write_to(&self, buffer: &mut Buffer) -> Result<()> {
        let bits = || self.bits.iter().copied();
        match self.dtype {
            DType::F32 => buffer.write(&bits().map(f32::from_bits).collect::<Vec<_>>())?,
            DType::BF16 => buffer.write(&bits().map(|bits| bf16::from_bits(bits as u16)).collect::<Vec<_>>())?,
            DType::I32 => buffer.write(&bits().map(u32::cast_signed).collect::<Vec<_>>())?,
            DType::I16 => buffer.write(&bits().map(|bits| (bits as u16).cast_signed()).collect::<Vec<_>>())?,
            _ => buffer.write(&self.bits)?,
        }
        Ok(())
    }

    /// Creates contents from numbers, rounded to F32 or BF16.
    pub(super) fn from_numbers(values: impl IntoIterator<Item = f32>, dtype: DType) -> Self {
        let bits = values.into_iter().map(|value| match dtype {
            DType::BF16 => u32::from(<bf16 as Element>::narrow(value).to_bits()),
            _ => value.to_bits(),
        });
        Self { dtype, bits: bits.collect() }
    }

    /// Returns BF16 contents widened to F32, exactly; other types unchanged.
    pub(super) fn widened(&self) -> Self {
        match self.dtype {
            DType::BF16 => Self { dtype: DType::F32, bits: self.bits.iter().map(|bits| bits << 16).collect() },
            _ => self.clone(),
        }
    }

    /// Returns the elements as numbers; integers by their value.
    pub(super) fn numbers(&self) -> Vec<f32> {
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
pub(super) fn relative_error(ours: &[f32], exact: &[f32]) -> f64 {
    let square = |value: f64| value * value;
    let difference: f64 = ours.iter().zip(exact).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    let size: f64 = exact.iter().map(|&value| square(f64::from(value))).sum();
    if size == 0.0 { difference.sqrt() } else { (difference / size).sqrt() }
}

/// A random number generator (`SplitMix64`: Steele, Lea and Flood, 2014).
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a seed made of the time and the process id.
    pub(super) fn seed_from_now() -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::new(now.as_nanos() as u64 ^ u64::from(std::process::id()).rotate_left(40)).bits()
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Draws an integer from `0..limit`.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    /// Draws `count` roughly normal numbers in -1..1.
    pub(super) fn numbers(&mut self, count: usize) -> Vec<f32> {
        let mut uniform = || (self.bits() >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
        (0..count).map(|_| uniform() + uniform()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn random_numbers_depend_on_the_seed() {
        assert_ne!(Random::new(1).numbers(4), Random::new(2).numbers(4));
        let numbers = Random::new(3).numbers(10_000);
        assert!(numbers.iter().all(|value| (-1.0..1.0).contains(value)));
        assert!((numbers.iter().sum::<f32>() / 10_000.0).abs() < 0.02);
    }
}
