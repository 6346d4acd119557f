//! The fastest of several ways to do one piece of work, timed where it will run: algorithms of a GEMM, variants of a
//! kernel.

use std::time::Instant;

use super::Cuda;
use super::failure::Context as _;
use crate::Result;
use crate::cuda::fastest_candidate::{Elapsed, fastest_candidate, median};

impl Cuda {
    /// Returns the fastest of `count` candidates, of which those in front are preferred; the first that runs where the
    /// device is deterministic; None if none runs. `run` launches a candidate on the stream, and fails where that is
    /// refused.
    pub(super) fn fastest(&self, count: usize, run: impl Fn(usize) -> Result<()>) -> Result<Option<usize>> {
        if self.is_deterministic() {
            return Ok((0..count).find(|&candidate| run(candidate).is_ok()));
        }
        // What was launched before would count as time of the first candidate.
        self.stream().synchronize().during(self.ordinal(), "cuStreamSynchronize")?;
        fastest_candidate(count, |candidate, runs| self.time_candidate(runs, || run(candidate)))
    }

    /// The time of several runs behind one that is not timed; None if one is refused.
    fn time_candidate(&self, runs: usize, run: impl Fn() -> Result<()>) -> Result<Option<Elapsed>> {
        // Loads the kernel, if it is there. What the driver takes to compile it, often as long as all the timing of its
        // candidates, does not count.
        if run().is_err() {
            return Ok(None);
        }
        let launched = Instant::now();
        let start = self.mark()?;
        for _ in 0..runs {
            if run().is_err() {
                return Ok(None);
            }
        }
        let gpu = start.until(&self.mark()?)?.as_secs_f32() * 1e3;
        Ok(Some(Elapsed { gpu, host: launched.elapsed().as_secs_f32() * 1e3 }))
    }

    /// Milliseconds per run: the median over samples of several consecutive runs each.
    pub(super) fn time(&self, samples: usize, runs: usize, run: impl Fn() -> Result<()>) -> Result<f32> {
        let mut marks = vec![self.mark()?];
        for _ in 0..samples {
            (0..runs).try_for_each(|_| run())?;
            marks.push(self.mark()?);
        }
        let elapsed = marks.windows(2).map(|pair| Ok(pair[0].until(&pair[1])?.as_secs_f32() * 1e3));
        let mut times = elapsed.collect::<Result<Vec<f32>>>()?;
        Ok(median(&mut times).unwrap_or(f32::INFINITY) / runs as f32)
    }
}
