//! `data.num_workers: auto`: how many threads tokenise, from what the encoder does and what training needs.

use run_config::{NumWorkers, RunConfig};

use crate::memory_plan::MemoryPlan;

/// Windows of text are prepared in bursts, and the encoder shares cores with training: it should be faster than training
/// by this factor.
const HEADROOM: f64 = 2.0;
/// `auto` takes no fewer where there are cores for them: they prepare the first window sooner and cost nothing later.
const LEAST_AUTOMATIC: usize = 2;
/// FLOPs per second of a CPU's core at most, that of matmuls with bf16 instructions. Training on a CPU needs hardly ever
/// more than one worker, so that its speed need not be measured for this.
const MOST_CPU_FLOPS: f64 = 200e9;

/// How fast text is tokenised, and how fast it must be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TokenSpeeds {
    /// Tokens per second of one worker.
    pub(crate) encoder: f64,
    /// Tokens per second of training, as predicted.
    pub(crate) training: f64,
}

impl TokenSpeeds {
    /// Of a plan, with so many threads that compute on a CPU.
    pub(crate) fn new(encoder: f64, plan: &MemoryPlan, threads: usize) -> Self {
        let on_cpu = threads as f64 * MOST_CPU_FLOPS / plan.flops_per_token;
        Self { encoder, training: plan.estimate.as_ref().map_or(on_cpu, |estimate| estimate.tokens_per_second) }
    }

    /// Workers that stay ahead of training.
    pub(crate) fn needed(self) -> usize {
        (HEADROOM * self.training / self.encoder.max(f64::MIN_POSITIVE)).ceil().max(1.0) as usize
    }

    /// The workers of a run, `most` at most where it leaves their number open.
    pub(crate) fn workers(self, config: &RunConfig, most: usize) -> usize {
        match config.data.num_workers {
            NumWorkers::Fixed(workers) => workers,
            NumWorkers::Auto => self.needed().max(LEAST_AUTOMATIC).min(most),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_stays_ahead_of_training_within_its_bounds() {
        let mut config = RunConfig::default();
        let workers = |training: f64, most: usize, config: &RunConfig| {
            TokenSpeeds { encoder: 1e6, training }.workers(config, most)
        };
        assert_eq!([1e4, 1.2e6, 2.4e6, 1e9].map(|need| workers(need, 8, &config)), [2, 3, 5, 8]);
        assert_eq!(workers(1e9, 1, &config), 1);
        config.data.num_workers = NumWorkers::Fixed(3);
        assert_eq!(workers(1e9, 8, &config), 3);
    }
}
