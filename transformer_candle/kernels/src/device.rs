//! The devices that buffers are on and operations run on.

use std::fmt;

use crate::Result;
use crate::cuda::Cuda;

/// A device. Clones share its stream, loaded kernels and selected algorithms.
#[derive(Clone)]
pub enum Device {
    /// The CPU: the machine's memory and the current rayon pool.
    Cpu,
    /// One NVIDIA GPU.
    Cuda(Cuda),
}

/// The kind of a device, which determines the workspace of operations before a device is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// See [`Device::Cpu`].
    Cpu,
    /// See [`Device::Cuda`].
    Cuda,
}

impl Device {
    /// The kind of the device.
    pub fn kind(&self) -> DeviceKind {
        match self {
            #[cfg(test)]
            Self::Cpu if crate::cuda::recording::is_active() => DeviceKind::Cuda,
            Self::Cpu => DeviceKind::Cpu,
            Self::Cuda(_) => DeviceKind::Cuda,
        }
    }

    /// Opens the GPU of this number: context, stream, libraries.
    ///
    /// # Errors
    /// [`crate::Error::NoCuda`] names in a sentence what is missing: a build for CUDA, the driver, a library, the GPU.
    pub fn cuda(ordinal: usize) -> Result<Self> {
        Cuda::open(ordinal).map(Self::Cuda)
    }

    /// The GPU, if it is one.
    pub fn as_cuda(&self) -> Option<&Cuda> {
        match self {
            Self::Cpu => None,
            Self::Cuda(cuda) => Some(cuda),
        }
    }

    /// Waits for all operations launched so far.
    ///
    /// # Errors
    /// The first failure of an operation that was still under way.
    pub fn synchronize(&self) -> Result<()> {
        self.as_cuda().map_or(Ok(()), Cuda::synchronize)
    }

    /// Whether two handles mean the same device. A GPU opened twice is two devices: each has a stream of its own, and
    /// nothing orders what the two do with one buffer.
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Cpu, Self::Cpu) => true,
            (Self::Cuda(one), Self::Cuda(other)) => one.is_same(other),
            _ => false,
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => formatter.write_str("cpu"),
            Self::Cuda(cuda) => write!(formatter, "cuda:{}", cuda.ordinal()),
        }
    }
}
