//! An exchange that counts the time in which it keeps its rank from computing: the part of transfers that no
//! computation overlaps, and the wait for other ranks.

use std::{
    mem,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use kernels::{Device, timing::StreamSpan};

use super::{Exchange, Parcel, RankInfo};
use crate::error::Result;

/// An exchange that counts the time spent in it.
#[derive(Debug)]
pub(super) struct TimedExchange {
    exchange: Arc<dyn Exchange>,
    counted: Mutex<Counted>,
}

/// The time counted so far.
#[derive(Debug)]
struct Counted {
    device: Device,
    time: Duration,
    /// The waits of a GPU's stream for swaps, whose durations are known once the stream has passed them.
    stream_waits: Vec<StreamSpan>,
}

impl TimedExchange {
    pub(super) fn new(exchange: Arc<dyn Exchange>) -> Self {
        let counted = Counted { device: Device::Cpu, time: Duration::ZERO, stream_waits: Vec::new() };
        Self { exchange, counted: Mutex::new(counted) }
    }

    /// Returns the time spent in all calls so far. Waits for the swaps that a GPU's stream waits for.
    pub(super) fn time(&self) -> Result<Duration> {
        let mut counted = self.counted();
        for wait in mem::take(&mut counted.stream_waits) {
            counted.time += wait.duration()?;
        }
        Ok(counted.time)
    }

    fn counted(&self) -> std::sync::MutexGuard<'_, Counted> {
        // After a panic of another thread it is still a sum of times.
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn device(&self) -> Device {
        self.counted().device.clone()
    }

    /// Makes a call for which the host waits, and counts its time.
    fn timed<T>(&self, call: impl FnOnce(&dyn Exchange) -> T) -> T {
        let start = Instant::now();
        let outcome = call(&*self.exchange);
        self.counted().time += start.elapsed();
        outcome
    }
}

impl Exchange for TimedExchange {
    fn rank_info(&self) -> RankInfo {
        self.exchange.rank_info()
    }

    fn connect(&self, device: &Device) -> Result<()> {
        self.counted().device = device.clone();
        self.exchange.connect(device)
    }

    fn begin_swap(&self, outgoing: &[Parcel], incoming: &[Parcel]) -> Result<()> {
        if self.device().as_cuda().is_some() {
            // The GPU computes meanwhile.
            return self.exchange.begin_swap(outgoing, incoming);
        }
        self.timed(|exchange| exchange.begin_swap(outgoing, incoming))
    }

    fn end_swap(&self) -> Result<()> {
        let device = self.device();
        if device.as_cuda().is_none() {
            return self.timed(|exchange| exchange.end_swap());
        }
        let ((), wait) = StreamSpan::around(&device, || self.exchange.end_swap())?;
        self.counted().stream_waits.extend(wait);
        Ok(())
    }

    fn sum(&self, numbers: &mut [f64]) -> Result<()> {
        self.timed(|exchange| exchange.sum(numbers))
    }

    fn gather(&self, text: &str) -> Result<Vec<String>> {
        self.timed(|exchange| exchange.gather(text))
    }
}
