//! The fastest of several ways to do one piece of work, timed where it will run: algorithms of a GEMM, variants of a
//! kernel.

use super::Cuda;
use crate::Result;
use crate::cuda::matmul_algorithm::{best, median};

/// GPU time after which no other candidate is timed; a model has about a dozen shapes. What the driver takes to compile
/// a kernel when it is loaded, often as long, does not count: the first candidate would use up the time of the others.
const SEARCH_MILLISECONDS: f32 = 350.0;
const SAMPLES: usize = 3;
/// A sample of short work is several runs of it, so that the events' resolution of half a microsecond does not decide.
const SAMPLE_MILLISECONDS: f32 = 0.1;
const MOST_RUNS_IN_A_SAMPLE: f32 = 5.0;
/// A candidate that is slower than the fastest by this factor is not timed again.
const HOPELESS: f32 = 1.5;

/// The times of a candidate, in milliseconds of the GPU.
#[derive(Clone, Copy)]
struct Timed {
    /// Time of one run.
    milliseconds: f32,
    /// Time of all its runs together.
    spent: f32,
}

impl Cuda {
    /// Returns the fastest of `count` candidates, of which those in front are preferred; the first that runs where the
    /// device is deterministic; None if none runs. `run` launches a candidate on the stream, and fails where that is
    /// refused.
    pub(super) fn fastest(&self, count: usize, run: impl Fn(usize) -> Result<()>) -> Result<Option<usize>> {
        if self.is_deterministic() {
            return Ok((0..count).find(|&candidate| run(candidate).is_ok()));
        }
        let mut times: Vec<Option<f32>> = Vec::with_capacity(count);
        let (mut fastest, mut spent) = (f32::INFINITY, 0.0);
        for candidate in 0..count {
            if spent > SEARCH_MILLISECONDS {
                break;
            }
            let timed = self.time_candidate(fastest, || run(candidate))?;
            times.push(timed.map(|timed| timed.milliseconds));
            if let Some(timed) = timed {
                fastest = fastest.min(timed.milliseconds);
                spent += timed.spent;
            }
        }
        Ok(best(&times))
    }

    /// Times a candidate, briefly if it is far slower than the fastest so far; none if it is refused.
    fn time_candidate(&self, fastest: f32, run: impl Fn() -> Result<()>) -> Result<Option<Timed>> {
        // Loads the kernel, if it is there.
        if run().is_err() {
            return Ok(None);
        }
        let once = self.time(1, 1, &run)?;
        if once > HOPELESS * fastest {
            return Ok(Some(Timed { milliseconds: once, spent: 2.0 * once }));
        }
        let runs = (SAMPLE_MILLISECONDS / once).clamp(1.0, MOST_RUNS_IN_A_SAMPLE) as usize;
        let milliseconds = self.time(SAMPLES, runs, run)?;
        Ok(Some(Timed { milliseconds, spent: 2.0 * once + (SAMPLES * runs) as f32 * milliseconds }))
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
