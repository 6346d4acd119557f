//! The parts of a check, and its sizes.

use std::fmt;

use clap::ValueEnum;
use kernels::cases;
use serde::Serialize;

/// How large the checks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Size {
    /// Sizes of a few dozen, for an emulated driver and for compute-sanitizer.
    Small,
    /// The sizes of a model of a billion parameters beside odd ones: minutes, and 31 GB of the GPU.
    Full,
}

impl Size {
    /// The size of the operations' cases.
    pub(super) fn of_cases(self) -> cases::Size {
        match self {
            Self::Small => cases::Size::Small,
            Self::Full => cases::Size::Full,
        }
    }
}

/// A part that can be checked by itself, in the order of running: the most important first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// Optimizer steps.
    Training,
    /// A block, and the gradients of the whole model.
    Gradients,
    /// Every operation by itself.
    Operations,
    /// Planned against measured memory; at full size also the speed of each operation.
    Memory,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.to_possible_value().expect("no part is hidden from the command line");
        f.write_str(name.get_name())
    }
}
