//! The device under test.

use kernels::cases::{BufferContents, Case};
use kernels::{Buffer, Device};

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

    /// Whether it has the matmuls of a case.
    pub(super) fn computes(&self, case: &Case) -> bool {
        match (&self.device, case.fp8) {
            (Device::Cuda(gpu), Some(block)) => gpu.gpu().fp8_blocks().contains(&block),
            _ => true,
        }
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
