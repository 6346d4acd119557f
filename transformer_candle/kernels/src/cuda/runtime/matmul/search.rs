//! The library's algorithms for a GEMM, timed where it will run.

use super::super::Cuda;
use super::super::failure::Context as _;
use super::Choice;
use super::descriptors::Descriptors;
use crate::cuda::Matmul;
use crate::cuda::matmul_algorithm::Algorithm;
use crate::cuda::matmul_shape::Shape;
use crate::{Error, Result, WriteMode};

/// Candidates asked for. The library orders them by its own model of the GPU, which knows nothing of its power limit.
const CANDIDATES: usize = 64;

impl Cuda {
    /// The fastest algorithm for this GEMM, or for few rows the first that the library offers. Overwrites what the GEMM
    /// overwrites. What it adds to is left as it is: sums are multiplied by the smallest normal number meanwhile, which
    /// no gradient above 1e-30 shows.
    pub(super) fn search(&self, shape: &Shape, matmul: &Matmul) -> Result<Choice> {
        let during = |call: &str| format!("{call} for {shape}");
        let descriptors =
            Descriptors::new(shape, matmul.scales).during(self.ordinal(), during("cublasLtMatmulDescCreate"))?;
        let candidates = descriptors
            .candidates(self.library(), shape, CANDIDATES)
            .during(self.ordinal(), during("cublasLtMatmulAlgoGetHeuristic"))?;
        let scale = match matmul.write_mode {
            WriteMode::Overwrite => 1.0,
            WriteMode::Accumulate => f32::MIN_POSITIVE,
        };
        let run = |candidate: usize| {
            let launched = self.launch_matmul(matmul, &descriptors, &candidates[candidate], scale);
            launched.during(self.ordinal(), "cublasLtMatmul while it is timed")
        };
        let is_searched = !shape.is_linear_of_few_rows();
        let best = if is_searched {
            self.fastest(candidates.len(), run)?
        } else {
            (0..candidates.len()).find(|&candidate| run(candidate).is_ok())
        };
        let Some(best) = best else {
            let (ordinal, call) = (self.ordinal(), during("cublasLtMatmul"));
            let reason = format!("none of the {} algorithms that the library offers computes it", candidates.len());
            return Err(Error::Cuda { ordinal, call, reason });
        };
        let algorithm: Algorithm = candidates[best];
        Ok(Choice { descriptors, algorithm, is_searched })
    }
}
