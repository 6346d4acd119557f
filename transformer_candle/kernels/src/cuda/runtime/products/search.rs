//! The library's algorithms for a product, timed where it will run.

use std::time::{Duration, Instant};

use super::super::Cuda;
use super::super::failure::Context as _;
use super::Choice;
use super::descriptors::Descriptors;
use crate::cuda::Product;
use crate::cuda::product_choice::{Algorithm, best, median};
use crate::cuda::product_shape::Shape;
use crate::{Accumulate, Error, Result};

/// Candidates asked for. The library orders them by its own model of the card; the best is seldom behind the first dozen.
const CANDIDATES: usize = 16;
/// No candidate is begun later than this after the first; a model has about a dozen shapes.
const SEARCH: Duration = Duration::from_millis(350);
const SAMPLES: usize = 3;
/// A sample of short products is several of them, so that the events' resolution of half a microsecond does not decide.
const SAMPLE_MILLISECONDS: f32 = 0.1;
const MOST_PRODUCTS_IN_A_SAMPLE: f32 = 5.0;
/// Candidates that once took so many times as long as the fastest are not timed again.
const HOPELESS: f32 = 1.5;

impl Cuda {
    /// The fastest algorithm for this product. Overwrites what the product overwrites. What it adds to is left as it is: sums are
    /// multiplied by the smallest normal number meanwhile, which no gradient above 1e-30 shows.
    pub(super) fn search(&self, shape: &Shape, product: &Product) -> Result<Choice> {
        let during = |call: &str| format!("{call} for {shape}");
        let descriptors = Descriptors::of(shape).during(self.ordinal(), during("cublasLtMatmulDescCreate"))?;
        let candidates = descriptors
            .candidates(self.library(), shape, CANDIDATES)
            .during(self.ordinal(), during("cublasLtMatmulAlgoGetHeuristic"))?;

        // What was asked of the card before takes none of the time for the search.
        self.synchronize()?;
        let begin = Instant::now();
        let mut choice = Choice { descriptors, algorithm: Algorithm::default() };
        let mut times: Vec<Option<f32>> = Vec::with_capacity(candidates.len());
        for algorithm in &candidates {
            if times.iter().any(Option::is_some) && begin.elapsed() > SEARCH {
                break;
            }
            choice.algorithm = *algorithm;
            times.push(self.time_candidate(product, &choice, &times)?);
        }
        let Some(best) = best(&times) else {
            let (ordinal, call) = (self.ordinal(), during("cublasLtMatmul"));
            let reason = format!("none of the {} algorithms that the library offers computes it", candidates.len());
            return Err(Error::Cuda { ordinal, call, reason });
        };
        choice.algorithm = candidates[best];
        Ok(choice)
    }

    /// Milliseconds of a candidate, beside what the others took; none if the library refuses it after all.
    fn time_candidate(&self, product: &Product, choice: &Choice, others: &[Option<f32>]) -> Result<Option<f32>> {
        let scale = match product.accumulate {
            Accumulate::Begin => 1.0,
            Accumulate::Continue => f32::MIN_POSITIVE,
        };
        // Loads the kernel, if it is there.
        if self.launch_product(product, choice, scale).is_err() {
            return Ok(None);
        }
        let once = self.time_product(product, choice, scale, 1, 1)?;
        let fastest = others.iter().flatten().copied().fold(f32::INFINITY, f32::min);
        if once > HOPELESS * fastest {
            return Ok(Some(once));
        }
        let products = (SAMPLE_MILLISECONDS / once).clamp(1.0, MOST_PRODUCTS_IN_A_SAMPLE) as usize;
        self.time_product(product, choice, scale, SAMPLES, products).map(Some)
    }

    /// Milliseconds that one product takes: the median of so many samples, each of so many products one after the other.
    pub(super) fn time_product(
        &self,
        product: &Product,
        choice: &Choice,
        scale: f32,
        samples: usize,
        products: usize,
    ) -> Result<f32> {
        let mut marks = vec![self.mark()?];
        for _ in 0..samples {
            for _ in 0..products {
                self.launch_product(product, choice, scale)
                    .during(self.ordinal(), "cublasLtMatmul while it is timed")?;
            }
            marks.push(self.mark()?);
        }
        let elapsed = marks.windows(2).map(|pair| Ok(pair[0].until(&pair[1])?.as_secs_f32() * 1e3));
        let mut times = elapsed.collect::<Result<Vec<f32>>>()?;
        Ok(median(&mut times).unwrap_or(f32::INFINITY) / products as f32)
    }
}
