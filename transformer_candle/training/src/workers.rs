//! `data.num_workers: auto`: chooses the number of threads that tokenise, by the speeds of encoder and training.

use kernels::Device;
use run_config::{NumWorkers, RunConfig};

/// Windows of text are prepared in bursts, and the encoder shares cores with training: it should be faster than training
/// by this factor.
const HEADROOM: f64 = 2.0;
/// Minimum of `auto` where there are cores for it: they prepare the first window sooner and cost nothing later.
const LEAST_AUTOMATIC: usize = 2;
/// Maximum FLOPs per second of a CPU core, reached by matmuls with bf16 instructions. Training on a CPU hardly ever
/// needs more than one worker, so that its speed need not be measured for this.
const MOST_CPU_FLOPS: f64 = 200e9;
/// Maximum fraction of a GPU's peak that training reaches.
const MOST_GPU_UTILIZATION: f64 = 0.8;
/// Assumed peak FLOPs per second of a GPU whose peak is not known, near that of an RTX 5090.
const UNKNOWN_GPU_FLOPS: f64 = 200e12;

/// The speeds of tokenising and of training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TokenSpeeds {
    /// Tokens per second of one worker.
    pub(crate) encoder: f64,
    /// Upper bound of the tokens per second of training, as predicted.
    pub(crate) training: f64,
}

impl TokenSpeeds {
    /// Predicts the speed of training on a device; on a CPU with `threads` threads.
    pub(crate) fn new(encoder: f64, flops_per_token: f64, device: &Device, threads: usize) -> Self {
        let flops = match device.as_cuda() {
            Some(gpu) => MOST_GPU_UTILIZATION * gpu.nominal_bf16_flops().unwrap_or(UNKNOWN_GPU_FLOPS),
            None => threads as f64 * MOST_CPU_FLOPS,
        };
        Self { encoder, training: flops / flops_per_token }
    }

    /// Returns the number of workers that stay ahead of training.
    pub(crate) fn needed(self) -> usize {
        (HEADROOM * self.training / self.encoder.max(f64::MIN_POSITIVE)).ceil().max(1.0) as usize
    }

    /// Returns the number of workers of a run; for `auto` at most `most`.
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
