//! GEMMs by cuBLASLt.
//!
//! The library has several algorithms for a GEMM; the first time one of a [`Shape`] is asked for, they are timed on its
//! operands (`matmul/search.rs`) and the choice stays. Choices go into a checkpoint: a sum in another order rounds
//! differently, so a run is repeated bit by bit only with the same algorithms. What the library promises for that
//! (cuBLAS documentation, "Results reproducibility"): one version gives the same bits in every run on GPUs of one
//! architecture with equally many multiprocessors, where one stream or a workspace of the caller's own is used; both
//! are so here.

mod descriptors;
mod multiply;
mod peak;
mod search;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::descriptors::Descriptors;
use crate::cuda::matmul_algorithm::Algorithm;
use crate::cuda::matmul_shape::Shape;

/// The algorithms chosen so far.
#[derive(Default)]
pub(super) struct MatmulAlgorithms(Mutex<HashMap<Shape, Arc<Choice>>>);

/// How GEMMs of one shape are computed.
struct Choice {
    descriptors: Descriptors,
    algorithm: Algorithm,
    /// Whether it was found by timing, here or in another run. The library's first guess would be the same again.
    is_searched: bool,
}

impl MatmulAlgorithms {
    fn keep(&self, shape: Shape, choice: Choice) -> Arc<Choice> {
        let choice = Arc::new(choice);
        self.locked().insert(shape, Arc::clone(&choice));
        choice
    }

    /// Locks the choices. A panic elsewhere leaves no choice half made.
    fn locked(&self) -> MutexGuard<'_, HashMap<Shape, Arc<Choice>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
