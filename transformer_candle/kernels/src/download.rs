//! Asynchronous copies from a device to the host.

use std::fmt;

use crate::buffer::as_scalars;
use crate::cuda::DeviceToHost;
use crate::{Buffer, Device, Error, Result, Scalar};

/// A copy of a buffer in stream order: [`Download::start`] enqueues it, [`Download::values`] waits for it and not for
/// operations launched afterwards.
///
/// ```
/// use kernels::{Buffer, DType, Device, Download};
///
/// let mut loss = Buffer::zeros(&[1], DType::F32, &Device::Cpu)?;
/// let mut download = Download::<f32>::new(loss.clone())?;
/// loss.write(&[2.5f32])?;
/// download.start()?;
/// loss.zero()?;
/// assert_eq!(download.values()?, [2.5]);
/// # Ok::<(), kernels::Error>(())
/// ```
pub struct Download<T: Scalar> {
    to: Destination<T>,
    source: Buffer,
    started: bool,
}

enum Destination<T> {
    Host(Vec<T>),
    Pinned(DeviceToHost),
}

impl<T: Scalar> fmt::Debug for Download<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Download").field("source", &self.source).finish_non_exhaustive()
    }
}

impl<T: Scalar> Download<T> {
    /// Prepares copies of a buffer of `T`.
    pub fn new(source: Buffer) -> Result<Self> {
        if source.dtype() != T::DTYPE {
            let (operation, argument) = ("Download::new", "source");
            let (expected, actual) = ("the download's type", source.dtype());
            return Err(Error::DType { operation, argument, expected, actual });
        }
        let to = match source.device() {
            Device::Cpu => Destination::Host(Vec::new()),
            Device::Cuda(cuda) => Destination::Pinned(DeviceToHost::new(cuda, source.elements() * size_of::<T>())?),
        };
        Ok(Self { to, source, started: false })
    }

    /// Enqueues the copy behind all operations launched so far.
    pub fn start(&mut self) -> Result<()> {
        match &mut self.to {
            Destination::Host(values) => *values = self.source.read()?,
            Destination::Pinned(arrival) => arrival.start(self.source.address())?,
        }
        self.started = true;
        Ok(())
    }

    /// Returns the values that were copied last, after waiting for them.
    ///
    /// # Errors
    /// If no copy was started, or an operation before it failed.
    pub fn values(&mut self) -> Result<&[T]> {
        if !self.started {
            return Err(Error::Invalid { operation: "Download", problem: "nothing was started".to_owned() });
        }
        match &mut self.to {
            Destination::Host(values) => Ok(values),
            Destination::Pinned(arrival) => arrival.bytes().map(as_scalars),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::testing::*;

    #[test]
    fn a_download_copies_the_buffer_as_of_its_start() {
        let mut source = integers(&[1u32, 2]);
        let mut download = Download::<u32>::new(source.clone()).unwrap();
        assert!(download.values().is_err());
        download.start().unwrap();
        source.write(&[3u32, 4]).unwrap();
        assert_eq!(download.values().unwrap(), [1, 2]);
        download.start().unwrap();
        assert_eq!(download.values().unwrap(), [3, 4]);
        assert!(Download::<f32>::new(zeros(&[1], DType::I16)).is_err());
    }
}
