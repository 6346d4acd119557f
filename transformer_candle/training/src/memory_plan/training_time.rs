//! How long a run trains, until when, on how many of the tokens that its size asks for, and what that costs.

use std::time::{Duration, SystemTime};

use chrono::{DateTime, Utc};
use run_config::RunConfig;
use serde::Serialize;

use super::PlanRequest;

/// Tokens per parameter that use a budget of FLOPs best (Hoffmann et al. 2022, arXiv:2203.15556).
pub(super) const CHINCHILLA_TOKENS_PER_PARAMETER: u64 = 20;

/// The length of a run in tokens, and in time where its speed is known.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainingTime {
    /// Optimizer steps.
    pub steps: u64,
    /// Target tokens.
    pub tokens: u64,
    /// Chinchilla's 20 per parameter; none where training continues from a model's weights, which have seen tokens.
    pub chinchilla_tokens: Option<u64>,
    /// `tokens` over `chinchilla_tokens`.
    pub chinchilla_share: Option<f64>,
    /// Seconds of training steps, pessimistic and optimistic, without evaluations and checkpoints.
    pub seconds: Option<[f64; 2]>,
    /// The days (UTC) on which training ends if it starts now, pessimistic and optimistic, such as `2026-12-10`.
    pub end_dates: Option<[String; 2]>,
}

/// What a run costs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Cost {
    /// Power that is paid for, in watts, of all GPUs or machines.
    pub watts: Option<f64>,
    /// Kilowatt-hours, pessimistic and optimistic.
    pub kilowatt_hours: Option<[f64; 2]>,
    /// The price of this electricity at `--price-per-kwh`.
    pub electricity: Option<[f64; 2]>,
    /// The price of the hours of all GPUs or machines at `--price-per-hour`.
    pub rent: Option<[f64; 2]>,
    /// Whether electricity has a price but the power draw is not known.
    #[serde(skip)]
    pub power_is_unknown: bool,
}

impl TrainingTime {
    /// The training time of `tokens` tokens in `seconds` seconds; none where the run's steps or tokens are not known.
    pub(super) fn new(
        config: &RunConfig,
        tokens: Option<u64>,
        parameters: u64,
        seconds: Option<[f64; 2]>,
        now: SystemTime,
    ) -> Option<Self> {
        let (steps, tokens) = (config.scheduler.total_steps?, tokens?);
        let is_new = config.model.init_from.is_none() && config.lora.rank.is_none();
        let chinchilla_tokens = is_new.then_some(CHINCHILLA_TOKENS_PER_PARAMETER * parameters);
        let end = |seconds: f64| {
            let end = now.checked_add(Duration::try_from_secs_f64(seconds).ok()?)?;
            let since_1970 = end.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs();
            let date = DateTime::<Utc>::from_timestamp(i64::try_from(since_1970).ok()?, 0)?;
            Some(date.format("%Y-%m-%d").to_string())
        };
        let end_dates = seconds.and_then(|[slow, fast]| Some([end(slow)?, end(fast)?]));
        let chinchilla_share = chinchilla_tokens.map(|chinchilla| tokens as f64 / chinchilla as f64);
        Some(Self { steps, tokens, chinchilla_tokens, chinchilla_share, seconds, end_dates })
    }
}

impl Cost {
    /// The cost of a run of `seconds` seconds on `gpu_count` GPUs, or machines without GPUs; none where nothing is known
    /// that could be paid for.
    pub(super) fn new(
        seconds: [f64; 2],
        board_watts: Option<f64>,
        gpu_count: usize,
        request: &PlanRequest,
    ) -> Option<Self> {
        let hours = seconds.map(|seconds| seconds / 3600.0);
        let gpu_count = gpu_count as f64;
        let watts = request.watts.or(board_watts).map(|watts| watts * gpu_count);
        let kilowatt_hours = watts.map(|watts| hours.map(|hours| hours * watts / 1000.0));
        let electricity =
            kilowatt_hours.zip(request.price_per_kwh).map(|(energy, price)| energy.map(|kwh| kwh * price));
        let rent = request.price_per_hour.map(|price| hours.map(|hours| hours * price * gpu_count));
        let power_is_unknown = watts.is_none() && request.price_per_kwh.is_some();
        let is_known = watts.is_some() || rent.is_some() || power_is_unknown;
        is_known.then_some(Self { watts, kilowatt_hours, electricity, rent, power_is_unknown })
    }
}
