//! How long a run takes, at a speed that is assumed and says so.

use run_config::{Device, RunConfig};
use serde::Serialize;

/// bf16 products with f32 sums on an RTX 5090, nominal.
const RTX_5090_FLOPS: f64 = 209.5e12;
/// The share of it that a well-tuned trainer reaches on models of this kind.
const RTX_5090_SHARE: f64 = 0.8;
/// What a core with 256-bit or wider vectors sustains over a whole step.
const FLOPS_PER_CPU_THREAD: f64 = 25e9;

/// How fast a run is assumed to be.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Speed {
    /// Measured, or guessed by the user.
    TokensPerSecond(f64),
    /// Model FLOPs a second, and why that many.
    ModelFlopsPerSecond(f64, String),
}

impl Speed {
    /// Without a measurement: four fifths of an RTX 5090 where the run is for a card, else a guess for this machine's CPU.
    pub(super) fn assumed(config: &RunConfig) -> Self {
        let for_card = match config.runtime.device {
            Device::Cuda(_) => true,
            Device::Auto => config.runtime.memory_limit.is_some(),
            Device::Cpu => false,
        };
        if for_card {
            let origin = "80 % of an RTX 5090's 209.5 TFLOP/s";
            return Self::ModelFlopsPerSecond(RTX_5090_FLOPS * RTX_5090_SHARE, origin.into());
        }
        let threads = config
            .runtime
            .threads
            .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
        let origin = format!("25 GFLOP/s a CPU thread, {threads} threads");
        Self::ModelFlopsPerSecond(FLOPS_PER_CPU_THREAD * threads as f64, origin)
    }
}

/// How long a run takes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Target tokens a second.
    pub tokens_per_second: f64,
    /// The whole run, where its length is known.
    pub seconds: Option<f64>,
    /// Where the speed comes from.
    pub assumption: String,
}

impl Estimate {
    /// The estimate for a speed.
    pub fn of(speed: Speed, flops_per_token: f64, total_tokens: Option<u64>) -> Self {
        let (tokens_per_second, assumption) = match speed {
            Speed::TokensPerSecond(tokens) => (tokens, "as given".to_owned()),
            Speed::ModelFlopsPerSecond(flops, origin) => (flops / flops_per_token, format!("assumed: {origin}")),
        };
        let seconds = total_tokens.map(|tokens| tokens as f64 / tokens_per_second);
        Self { tokens_per_second, seconds, assumption }
    }
}
