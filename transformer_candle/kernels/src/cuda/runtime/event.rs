//! Timing events of the compute stream.

use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;

use super::Cuda;
use super::failure::Context as _;
use crate::Result;

/// A recorded timing event.
pub(crate) struct Event(CudaEvent);

impl Cuda {
    /// Records an event after everything launched so far.
    pub(crate) fn mark(&self) -> Result<Event> {
        let event = self.stream().record_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        event.during(self.ordinal(), "cuEventRecord").map(Event)
    }
}

impl Event {
    /// The time from this event to a later one; waits for both.
    pub(crate) fn until(&self, later: &Self) -> Result<Duration> {
        let milliseconds = self.0.elapsed_ms(&later.0).during(self.0.context().ordinal(), "cuEventElapsedTime")?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds).max(0.0) / 1e3))
    }
}
