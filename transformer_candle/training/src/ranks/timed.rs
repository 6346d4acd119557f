//! An exchange that counts the time spent in it: the transfer itself and the wait for other ranks.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use kernels::Device;

use super::{Exchange, Parcel, RankInfo};
use crate::error::Result;

/// An exchange and the time spent in its methods.
#[derive(Debug)]
pub(super) struct TimedExchange {
    exchange: Arc<dyn Exchange>,
    nanoseconds: AtomicU64,
}

impl TimedExchange {
    pub(super) fn new(exchange: Arc<dyn Exchange>) -> Self {
        Self { exchange, nanoseconds: AtomicU64::new(0) }
    }

    /// Time spent in all calls so far.
    pub(super) fn time(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds.load(Ordering::Relaxed))
    }

    fn timed<T>(&self, call: impl FnOnce(&dyn Exchange) -> T) -> T {
        let began = Instant::now();
        let returned = call(&*self.exchange);
        self.nanoseconds.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        returned
    }
}

impl Exchange for TimedExchange {
    fn rank_info(&self) -> RankInfo {
        self.exchange.rank_info()
    }

    fn connect(&self, device: &Device) -> Result<()> {
        self.exchange.connect(device)
    }

    fn swap(&self, sent: &[Parcel], received: &[Parcel]) -> Result<()> {
        self.timed(|exchange| exchange.swap(sent, received))
    }

    fn sum(&self, numbers: &mut [f64]) -> Result<()> {
        self.timed(|exchange| exchange.sum(numbers))
    }

    fn gather(&self, text: &str) -> Result<Vec<String>> {
        self.timed(|exchange| exchange.gather(text))
    }
}
