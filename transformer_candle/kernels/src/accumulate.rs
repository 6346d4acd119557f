//! Gradients of several micro-batches, added up in one buffer.

/// What becomes of what a gradient's buffer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulate {
    /// The first gradient of a sum is written over it: nobody has to make it zero before, or to read it.
    Begin,
    /// The gradient is added to it.
    Continue,
}
