//! A library that CUDA needs.

/// A library, as in `libNAME.so`, and a function that it has if it is what its name says.
pub(super) struct Wanted {
    pub(super) name: &'static str,
    pub(super) function: &'static str,
    /// The way out where it is missing or does not load.
    pub(super) remedy: &'static str,
}
