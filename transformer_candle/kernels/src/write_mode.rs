//! How an operation writes its output: over what the buffer holds, or added to it.

/// Whether a gradient overwrites its buffer or is added to it, as when the gradients of several micro-batches
/// accumulate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WriteMode {
    /// `C = A B` (beta 0): the buffer is not read, so that it does not have to be zeroed.
    Overwrite,
    /// `C = C + A B` (beta 1).
    Accumulate,
}
