//! The fastest of several ways to do one piece of work, timed where it will run: algorithms of a product, variants of a kernel.

use std::time::{Duration, Instant};

use super::Cuda;
use crate::Result;
use crate::cuda::product_choice::{best, median};

/// No candidate is begun later than this after the first; a model has about a dozen shapes.
const SEARCH: Duration = Duration::from_millis(350);
const SAMPLES: usize = 3;
/// A sample of short work is several runs of it, so that the events' resolution of half a microsecond does not decide.
const SAMPLE_MILLISECONDS: f32 = 0.1;
const MOST_RUNS_IN_A_SAMPLE: f32 = 5.0;
/// Candidates that once took so many times as long as the fastest are not timed again.
const HOPELESS: f32 = 1.5;

impl Cuda {
    /// The fastest of `count` candidates, of which those in front are preferred; the first that runs where the device is
    /// deterministic; none if none runs. `run` asks the stream for a candidate, and fails where that is refused.
    pub(super) fn fastest(&self, count: usize, run: impl Fn(usize) -> Result<()>) -> Result<Option<usize>> {
        if self.is_deterministic() {
            return Ok((0..count).find(|&candidate| run(candidate).is_ok()));
        }
        // What was asked of the GPU before takes none of the time for the search.
        self.synchronize()?;
        let begin = Instant::now();
        let mut times: Vec<Option<f32>> = Vec::with_capacity(count);
        for candidate in 0..count {
            if times.iter().any(Option::is_some) && begin.elapsed() > SEARCH {
                break;
            }
            let fastest = times.iter().flatten().copied().fold(f32::INFINITY, f32::min);
            times.push(self.time_candidate(fastest, || run(candidate))?);
        }
        Ok(best(&times))
    }

    /// Milliseconds of a candidate, beside what the fastest took; none if it is refused.
    fn time_candidate(&self, fastest: f32, run: impl Fn() -> Result<()>) -> Result<Option<f32>> {
        // Loads the kernel, if it is there.
        if run().is_err() {
            return Ok(None);
        }
        let once = self.time(1, 1, &run)?;
        if once > HOPELESS * fastest {
            return Ok(Some(once));
        }
        let runs = (SAMPLE_MILLISECONDS / once).clamp(1.0, MOST_RUNS_IN_A_SAMPLE) as usize;
        self.time(SAMPLES, runs, run).map(Some)
    }

    /// Milliseconds that a run takes: the median of so many samples, each of so many runs one after the other.
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
