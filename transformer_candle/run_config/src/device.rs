//! The device of a run: `auto`, `cpu`, `cuda`, `cuda:1`.

use std::fmt;
use std::str::FromStr;

use crate::scalar::scalar;

/// The device that a run computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The first CUDA device if this build and machine have one, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The CUDA device with this number.
    Cuda(usize),
}

/// The highest device number a config may name.
const LAST_CUDA_DEVICE: usize = 255;

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let cuda_number = |number: &str| number.parse().ok().filter(|number| *number <= LAST_CUDA_DEVICE);
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => text
                .strip_prefix("cuda:")
                .and_then(cuda_number)
                .map(Self::Cuda)
                .ok_or_else(|| "must be `auto`, `cpu`, `cuda` or `cuda:N` with a device number N".to_owned()),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Auto => formatter.write_str("auto"),
            Self::Cpu => formatter.write_str("cpu"),
            Self::Cuda(number) => write!(formatter, "cuda:{number}"),
        }
    }
}

scalar!(Device as text, {
    "type": "string", "format": "device", "pattern": "^(auto|cpu|cuda(:[0-9]+)?)$"
});
