//! The crate's errors.

use std::fmt;

use candle_core::DType;

/// The result of every function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation refused its arguments. Nothing has been written when one of these is returned, except where a
/// variant says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument's shape is not the one that the other arguments imply.
    #[error("{operation}: `{argument}` has shape {actual:?}, expected {expected:?}")]
    Shape {
        /// The operation called, such as `linear::forward`.
        operation: &'static str,
        /// The argument's name in the operation's signature.
        argument: &'static str,
        /// The shape that fits the other arguments.
        expected: Vec<usize>,
        /// The shape given.
        actual: Vec<usize>,
    },
    /// An argument's element type is not one that the operation takes there.
    #[error("{operation}: `{argument}` holds {actual:?}, expected {expected}")]
    DType {
        /// The operation called.
        operation: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// The element types that fit.
        expected: &'static str,
        /// The element type given.
        actual: DType,
    },
    /// A size or a setting makes no sense for the operation.
    #[error("{operation}: {problem}")]
    Invalid {
        /// The operation called.
        operation: &'static str,
        /// What is wrong, with the values.
        problem: String,
    },
    /// An output shares memory with another argument.
    #[error("{operation}: output `{output}` overlaps `{other}` in memory; give it a buffer of its own")]
    Aliased {
        /// The operation called.
        operation: &'static str,
        /// The output's name.
        output: &'static str,
        /// The other argument's name.
        other: &'static str,
    },
    /// The scratch buffer is too small.
    #[error("{operation}: the workspace holds {actual} elements, {needed} are needed (see `workspace_elements`)")]
    Workspace {
        /// The operation called.
        operation: &'static str,
        /// Elements needed.
        needed: usize,
        /// Elements given.
        actual: usize,
    },
    /// An index points outside of its table.
    #[error("{operation}: {argument}[{position}] = {value} is not within 0..{limit}")]
    OutOfRange {
        /// The operation called.
        operation: &'static str,
        /// The argument that holds the index.
        argument: &'static str,
        /// Position of the index in that argument.
        position: usize,
        /// The index found there.
        value: i64,
        /// The first index that is too large.
        limit: usize,
    },
    /// The arguments are on a device that has no such operation, or on several devices.
    #[error("{operation}: `{argument}` is on {device}, where this operation does not run")]
    Unsupported {
        /// The operation called.
        operation: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// The device, as Candle prints it.
        device: String,
    },
    /// There is no such GPU for this program.
    #[error("cannot use cuda:{ordinal}: {reason}")]
    NoCuda {
        /// The GPU's number.
        ordinal: usize,
        /// What is missing, and the way out.
        reason: String,
    },
    /// The driver or one of its libraries refused or failed. What was under way may be lost.
    #[error("{call} failed on cuda:{ordinal}: {reason}")]
    Cuda {
        /// The GPU's number.
        ordinal: usize,
        /// The function called, and for what.
        call: String,
        /// What the library says.
        reason: String,
    },
    /// A GPU has less free memory than is needed. Nothing was allocated.
    #[error("out of memory on cuda:{ordinal}: {} are needed, {} are left{}", GB(*needed), GB(*available), Limit(*limit))]
    OutOfMemory {
        /// The GPU's number.
        ordinal: usize,
        /// Bytes needed.
        needed: u64,
        /// Bytes that could be had.
        available: u64,
        /// The limit that was set, in bytes, where it and not the GPU's memory is what ran out.
        limit: Option<u64>,
    },
    /// The system does not give a CPU's memory. Nothing was allocated.
    #[error("out of memory: {} are needed, and the system does not give them", GB(*needed))]
    HostMemory {
        /// Bytes needed.
        needed: u64,
    },
    /// A tensor's elements are not contiguous.
    #[error("a buffer needs a contiguous tensor, this one has shape {shape:?} and strides {strides:?}")]
    NotContiguous {
        /// The tensor's shape.
        shape: Vec<usize>,
        /// The tensor's strides, in elements.
        strides: Vec<usize>,
    },
    /// Candle refused.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// Formats bytes with a unit.
struct GB(u64);

impl fmt::Display for GB {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:.2} GB", self.0 as f64 / 1e9)
    }
}

struct Limit(Option<u64>);

impl fmt::Display for Limit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |limit| write!(formatter, " of the {} that this run may use", GB(limit)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_memory_names_the_bytes_needed_and_the_limit() {
        let error = |limit| Error::OutOfMemory { ordinal: 1, needed: 24_930_000_000, available: 1_000_000, limit };
        assert_eq!(error(None).to_string(), "out of memory on cuda:1: 24.93 GB are needed, 0.00 GB are left");
        assert!(
            error(Some(34_190_917_632)).to_string().ends_with("0.00 GB are left of the 34.19 GB that this run may use")
        );
    }
}
